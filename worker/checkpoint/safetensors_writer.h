// Writes safetensors files and Hugging Face weight folders, one tensor at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "worker/checkpoint/output.h"
#include "worker/checkpoint/safetensors.h"

namespace oomb::checkpoint {

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  int64_t num_bytes() const;
};

/// Called once per tensor, in the order of the file, which need not be that of the specs. Returns the tensor's bytes
/// (row-major, little-endian); they must stay valid until the next call. A wrong size is a std::logic_error.
using TensorSource = std::function<std::span<const std::byte>(const TensorSpec&)>;

/// Writes `name` into `folder`. The buffer starts on a multiple of 64 bytes and tensors are ordered by falling element
/// size, otherwise as given, so that every tensor is aligned to its own element. `metadata` gets {"format": "pt"}
/// added, without which transformers refuses a file. Names must be distinct (std::logic_error).
void write_safetensors(OutputFolder& folder, const std::string& name, const std::vector<TensorSpec>& tensors,
                       const TensorSource& source, Metadata metadata = {});

/// Writes the weights of a model as transformers expects them: model.safetensors when everything fits into
/// `max_shard_bytes`, else model-00001-of-0000n.safetensors … and model.safetensors.index.json. A tensor larger than
/// the limit gets a shard of its own. Tensors keep their order across shards.
void write_hf_weights(OutputFolder& folder, const std::vector<TensorSpec>& tensors, const TensorSource& source,
                      int64_t max_shard_bytes = int64_t{5'000'000'000});

/// Exact bytes that write_safetensors would write.
int64_t safetensors_bytes(const std::vector<TensorSpec>& tensors, const Metadata& metadata = {});

}  // namespace oomb::checkpoint
