// safetensors: any bytes are refused with InputError, or give tensors that lie in the file and hold what their shapes
// say.
#include <span>

#include "configs/error.h"
#include "tests/fuzz/fuzz.h"
#include "worker/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace oomb;
  const auto file = std::as_bytes(std::span(data, size));
  try {
    checkpoint::Metadata metadata;
    const checkpoint::TensorMap tensors = checkpoint::parse_safetensors(file, "fuzz.safetensors", &metadata);
    std::size_t bytes = 0;
    for (const auto& [name, tensor] : tensors) {
      bytes += tensor.bytes.size();
      std::int64_t elements = 1;
      for (const std::int64_t extent : tensor.shape) elements *= extent;
      fuzz::require(elements == tensor.num_elements(), "a tensor has as many elements as its shape");
      if (tensor.bytes.empty()) continue;
      fuzz::require(
          tensor.bytes.data() >= file.data() && tensor.bytes.data() + tensor.bytes.size() <= file.data() + file.size(),
          "a tensor lies in the file");
    }
    fuzz::require(bytes <= size, "tensors do not overlap");
  } catch (const InputError&) {
  }
  return 0;
}
