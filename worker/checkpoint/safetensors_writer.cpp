#include "worker/checkpoint/safetensors_writer.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string_view>

namespace oomb::checkpoint {
namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// Falling element size, otherwise as given: every tensor then begins on a multiple of its own element size.
std::vector<size_t> file_order(const std::vector<TensorSpec>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size_of(tensors[a].dtype) > size_of(tensors[b].dtype); });
  return order;
}

/// Length prefix and padded header.
std::string header_text(const std::vector<TensorSpec>& tensors, const std::vector<size_t>& order, Metadata metadata) {
  metadata.insert({"format", "pt"});
  std::string json = "{\"__metadata__\":{";
  const char* comma = "";
  for (const auto& [key, value] : metadata) {
    json += comma;
    json += quoted(key) + ':' + quoted(value);
    comma = ",";
  }
  json += '}';
  std::set<std::string_view> names;
  int64_t offset = 0;
  for (const size_t i : order) {
    const TensorSpec& tensor = tensors[i];
    if (!names.insert(tensor.name).second || tensor.name == "__metadata__") {
      throw std::logic_error("write_safetensors: tensor name \"" + tensor.name + "\" twice or reserved");
    }
    json += ',' + quoted(tensor.name) + ":{\"dtype\":\"" + name_of(tensor.dtype) + "\",\"shape\":[";
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      if (d > 0) json += ',';
      json += std::to_string(tensor.shape[d]);
    }
    json += "],\"data_offsets\":[" + std::to_string(offset);
    offset += tensor.num_bytes();
    json += ',' + std::to_string(offset) + "]}";
  }
  json += '}';
  constexpr size_t kAlign = 64;
  json.append((kAlign - (json.size() + 8) % kAlign) % kAlign, ' ');
  if (static_cast<int64_t>(json.size()) > kMaxHeaderBytes)
    throw std::logic_error("write_safetensors: header too large");
  std::string prefix(8, '\0');
  for (size_t b = 0; b < 8; ++b) prefix[b] = static_cast<char>((static_cast<uint64_t>(json.size()) >> (8 * b)) & 0xFF);
  return prefix + json;
}

std::string shard_name(size_t shard, size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, count);
  return name;
}

}  // namespace

int64_t TensorSpec::num_bytes() const {
  int64_t bytes = size_of(dtype);
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) {
      throw std::logic_error("tensor \"" + name + "\": impossible shape");
    }
  }
  return bytes;
}

void write_safetensors(OutputFolder& folder, const std::string& name, const std::vector<TensorSpec>& tensors,
                       const TensorSource& source, Metadata metadata) {
  const auto order = file_order(tensors);
  const std::string header = header_text(tensors, order, std::move(metadata));
  const auto file = folder.create(name);
  file->append(std::as_bytes(std::span(header)));
  for (const size_t i : order) {
    const auto bytes = source(tensors[i]);
    if (static_cast<int64_t>(bytes.size()) != tensors[i].num_bytes()) {
      throw std::logic_error("write_safetensors: tensor \"" + tensors[i].name + "\" got " +
                             std::to_string(bytes.size()) + " bytes, its shape needs " +
                             std::to_string(tensors[i].num_bytes()));
    }
    file->append(bytes);
  }
  file->close();
}

void write_hf_weights(OutputFolder& folder, const std::vector<TensorSpec>& tensors, const TensorSource& source,
                      int64_t max_shard_bytes) {
  std::vector<std::vector<TensorSpec>> shards(1);
  int64_t shard_bytes = 0;
  int64_t total_bytes = 0;
  for (const TensorSpec& tensor : tensors) {
    const int64_t bytes = tensor.num_bytes();
    if (!shards.back().empty() && bytes > max_shard_bytes - shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(tensor);
    shard_bytes += bytes;
    total_bytes += bytes;
  }
  if (shards.size() == 1) return write_safetensors(folder, "model.safetensors", tensors, source);

  std::string index = "{\n  \"metadata\": {\"total_size\": " + std::to_string(total_bytes) + "},\n  \"weight_map\": {";
  const char* comma = "";
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shard_name(s, shards.size());
    write_safetensors(folder, name, shards[s], source);
    for (const TensorSpec& tensor : shards[s]) {
      index += comma;
      index += "\n    " + quoted(tensor.name) + ": " + quoted(name);
      comma = ",";
    }
  }
  write_text(folder, "model.safetensors.index.json", index + "\n  }\n}\n");
}

int64_t safetensors_bytes(const std::vector<TensorSpec>& tensors, const Metadata& metadata) {
  auto bytes = static_cast<int64_t>(header_text(tensors, file_order(tensors), metadata).size());
  for (const TensorSpec& tensor : tensors) bytes += tensor.num_bytes();
  return bytes;
}

}  // namespace oomb::checkpoint
