#include "worker/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "configs/error.h"
#include "worker/checkpoint/strict_json.h"

namespace oomb::checkpoint {
namespace {

using Json = nlohmann::json;

struct TypeInfo {
  DType dtype;
  int64_t size;
  const char* name;
};
// In the order of the enum.
constexpr std::array<TypeInfo, 15> kTypes{{{DType::kBool, 1, "BOOL"},
                                           {DType::kU8, 1, "U8"},
                                           {DType::kI8, 1, "I8"},
                                           {DType::kU16, 2, "U16"},
                                           {DType::kI16, 2, "I16"},
                                           {DType::kU32, 4, "U32"},
                                           {DType::kI32, 4, "I32"},
                                           {DType::kU64, 8, "U64"},
                                           {DType::kI64, 8, "I64"},
                                           {DType::kF8E4M3, 1, "F8_E4M3"},
                                           {DType::kF8E5M2, 1, "F8_E5M2"},
                                           {DType::kF16, 2, "F16"},
                                           {DType::kBF16, 2, "BF16"},
                                           {DType::kF32, 4, "F32"},
                                           {DType::kF64, 8, "F64"}}};

DType parse_dtype(const Json& value, const std::string& where) {
  if (!value.is_string()) throw InputError(where + ": dtype must be a string");
  const auto& text = value.get_ref<const std::string&>();
  for (const TypeInfo& type : kTypes) {
    if (text == type.name) return type.dtype;
  }
  throw InputError(where + ": dtype \"" + printable(text) + "\" is not known");
}

int64_t count_of(const Json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{1} << 62) {
    throw InputError(where + ": " + what + " must hold integers from 0 to 2^62");
  }
  return value.get<int64_t>();
}

struct Extent {
  int64_t begin;
  int64_t end;
  const std::string* name;
};

TensorView parse_tensor(const Json& entry, std::span<const std::byte> buffer, const std::string& where, int64_t* begin,
                        int64_t* end) {
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets")) {
    throw InputError(where + ": an entry must have dtype, shape and data_offsets, nothing else");
  }
  TensorView view;
  view.dtype = parse_dtype(entry["dtype"], where);
  const Json& shape = entry["shape"];
  const Json& offsets = entry["data_offsets"];
  if (!shape.is_array()) throw InputError(where + ": shape must be a list");
  if (!offsets.is_array() || offsets.size() != 2) throw InputError(where + ": data_offsets must be a pair");
  int64_t expected = size_of(view.dtype);
  bool overflow = false;
  for (const Json& dim : shape) {
    view.shape.push_back(count_of(dim, where, "shape"));
    overflow = __builtin_mul_overflow(expected, view.shape.back(), &expected) || overflow;
  }
  *begin = count_of(offsets[0], where, "data_offsets");
  *end = count_of(offsets[1], where, "data_offsets");
  if (overflow || *end < *begin || *end - *begin != expected) {
    throw InputError(where + ": data_offsets " + offsets.dump() + " do not fit shape " + shape.dump() + " of " +
                     name_of(view.dtype));
  }
  if (*end > static_cast<int64_t>(buffer.size())) {
    throw InputError(where + ": ends at byte " + std::to_string(*end) + " of the data, which has " +
                     std::to_string(buffer.size()) + ": the file is truncated");
  }
  view.bytes = buffer.subspan(static_cast<size_t>(*begin), static_cast<size_t>(expected));
  return view;
}

void parse_metadata(const Json& section, const std::string& name, Metadata* metadata) {
  if (!section.is_object()) throw InputError(name + ": __metadata__ must be an object");
  for (const auto& [key, value] : section.items()) {
    if (!value.is_string()) throw InputError(name + ": __metadata__ must map strings to strings");
    if (metadata != nullptr) (*metadata)[key] = value.get<std::string>();
  }
}

/// The tensors must tile the buffer: no byte belongs to two of them or to none.
void check_extents(std::vector<Extent> extents, int64_t buffer_bytes, const std::string& name) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t at = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != at) {
      throw InputError(name + ": tensor \"" + printable(*extent.name) + "\" begins at byte " +
                       std::to_string(extent.begin) + " of the data, expected " + std::to_string(at) +
                       (extent.begin > at ? ": there is a hole" : ": tensors overlap"));
    }
    at = extent.end;
  }
  if (at != buffer_bytes) {
    throw InputError(name + ": " + std::to_string(buffer_bytes - at) + " bytes left over after the last tensor");
  }
}

}  // namespace

int64_t size_of(DType dtype) { return kTypes[static_cast<size_t>(dtype)].size; }
const char* name_of(DType dtype) { return kTypes[static_cast<size_t>(dtype)].name; }

TensorMap parse_safetensors(std::span<const std::byte> file, const std::string& name, Metadata* metadata) {
  constexpr size_t kPrefix = 8;
  if (file.size() < kPrefix) {
    throw InputError(name + ": " + std::to_string(file.size()) + " bytes are too few for a safetensors file");
  }
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    throw InputError(name + ": header of " + std::to_string(length) + " bytes is above the limit of " +
                     std::to_string(kMaxHeaderBytes) + ": not a safetensors file, or damaged");
  }
  if (length > file.size() - kPrefix) {
    throw InputError(name + ": truncated inside its header of " + std::to_string(length) + " bytes");
  }
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + kPrefix, static_cast<size_t>(length));
  if (header.empty() || header.front() != '{') throw InputError(name + ": header must begin with '{'");
  const auto buffer = file.subspan(kPrefix + static_cast<size_t>(length));
  const Json root = parse_strict_json(header, name);

  TensorMap tensors;
  std::vector<Extent> extents;
  for (const auto& [key, entry] : root.items()) {
    if (key == "__metadata__") {
      parse_metadata(entry, name, metadata);
      continue;
    }
    Extent extent{};
    TensorView view =
        parse_tensor(entry, buffer, name + ": tensor \"" + printable(key) + "\"", &extent.begin, &extent.end);
    extent.name = &tensors.emplace(key, std::move(view)).first->first;
    extents.push_back(extent);
  }
  check_extents(std::move(extents), static_cast<int64_t>(buffer.size()), name);
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), tensors_(parse_safetensors(file_.bytes(), path, &metadata_)) {}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace oomb::checkpoint
