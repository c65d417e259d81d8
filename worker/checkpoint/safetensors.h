// safetensors files: u64 header length, JSON header, one buffer of row-major little-endian tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "worker/data/mapped_file.h"

namespace oomb::checkpoint {

enum class DType { kBool, kU8, kI8, kU16, kI16, kU32, kI32, kU64, kI64, kF8E4M3, kF8E5M2, kF16, kBF16, kF32, kF64 };

/// Bytes of one element.
int64_t size_of(DType dtype);
/// The format's own name: "BF16", "F8_E4M3", …
const char* name_of(DType dtype);

/// A tensor in a file. `bytes` holds product(shape)·size_of(dtype) bytes, may be empty, and may start at any address:
/// copy elements out with memcpy, or copy the whole. Valid as long as the object it came from.
struct TensorView {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;

  int64_t num_elements() const { return static_cast<int64_t>(bytes.size()) / size_of(dtype); }
};

using TensorMap = std::map<std::string, TensorView, std::less<>>;
using Metadata = std::map<std::string, std::string, std::less<>>;

/// Headers above this are refused, as the reference implementation does.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

/// Tensors of a whole file in memory; the views point into `file`. Throws InputError that begins with `name` and says
/// what is wrong: header length, JSON, duplicate key, type, shape against bytes, holes or overlap, bytes missing or
/// left over. `metadata` may be null.
TensorMap parse_safetensors(std::span<const std::byte> file, const std::string& name, Metadata* metadata);

/// A mapped file. Movable; const members may be used from any thread.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const TensorMap& tensors() const { return tensors_; }
  const Metadata& metadata() const { return metadata_; }
  const std::string& path() const { return file_.path(); }
  /// nullptr when there is no such tensor.
  const TensorView* find(std::string_view name) const;

 private:
  data::MappedFile file_;
  Metadata metadata_;
  TensorMap tensors_;
};

}  // namespace oomb::checkpoint
