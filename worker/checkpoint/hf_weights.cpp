#include "worker/checkpoint/hf_weights.h"

#include <sys/stat.h>

#include <set>
#include <utility>

#include "configs/error.h"
#include "worker/checkpoint/output.h"
#include "worker/checkpoint/strict_json.h"

namespace oomb::checkpoint {
namespace {

constexpr std::string_view kPrefix = "model.";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_folder(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool exists(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0;
}

}  // namespace

HfWeights::HfWeights(const std::string& path) : path_(path) {
  if (!is_folder(path)) {
    add_file(SafetensorsFile(path));
    return;
  }
  const std::string single = path + '/' + kSingle;
  const std::string index = path + '/' + kIndex;
  if (exists(single)) {
    add_file(SafetensorsFile(single));
  } else if (exists(index)) {
    read_index(index, path);
  } else {
    const bool pickled = exists(path + "/pytorch_model.bin") || exists(path + "/pytorch_model.bin.index.json");
    throw InputError(path + ": has neither " + kSingle + " nor " + kIndex +
                     (pickled ? "; its pytorch_model.bin must be converted to safetensors first" : ""));
  }
}

void HfWeights::add_file(SafetensorsFile file) {
  files_.push_back(std::move(file));
  const size_t number = files_.size() - 1;
  for (const auto& [name, view] : files_.back().tensors()) {
    const auto [it, added] = entries_.insert({name, Entry{&view, number}});
    if (!added) {
      throw InputError(files_.back().path() + ": tensor \"" + printable(name) + "\" is in " +
                       files_[it->second.file].path() + " too");
    }
  }
}

void HfWeights::read_index(const std::string& index_path, const std::string& folder) {
  const data::MappedFile file(index_path);
  const auto bytes = file.bytes();
  const auto root = parse_strict_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, index_path);
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object() ||
      root["weight_map"].empty()) {
    throw InputError(index_path + ": weight_map is missing or empty");
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : root["weight_map"].items()) {
    // A path in an index could name any file of the machine.
    if (!shard.is_string() || !is_plain_name(shard.get_ref<const std::string&>())) {
      throw InputError(index_path + ": the shard of tensor \"" + printable(name) + "\" must be a plain file name");
    }
    shards.insert(shard.get<std::string>());
  }
  for (const std::string& shard : shards) {
    const std::string shard_path = folder + '/' + shard;
    if (!exists(shard_path)) throw InputError(shard_path + ": missing, but " + index_path + " names it");
    add_file(SafetensorsFile(shard_path));
  }
  for (const auto& [name, shard] : root["weight_map"].items()) {
    const auto it = entries_.find(name);
    const std::string wanted = folder + '/' + shard.get<std::string>();
    if (it == entries_.end() || files_[it->second.file].path() != wanted) {
      throw InputError(wanted + ": has no tensor \"" + printable(name) + "\", but " + index_path + " says so");
    }
  }
}

const HfWeights::Entry* HfWeights::find_entry(std::string_view name) const {
  auto it = entries_.find(name);
  if (it == entries_.end() && name.starts_with(kPrefix)) it = entries_.find(name.substr(kPrefix.size()));
  if (it == entries_.end()) it = entries_.find(std::string(kPrefix) + std::string(name));
  return it == entries_.end() ? nullptr : &it->second;
}

const TensorView* HfWeights::find(std::string_view name) const {
  const Entry* entry = find_entry(name);
  return entry == nullptr ? nullptr : entry->view;
}

const TensorView& HfWeights::at(std::string_view name) const {
  const TensorView* view = find(name);
  if (view == nullptr) throw InputError(path_ + ": tensor \"" + printable(name) + "\" is missing");
  return *view;
}

std::vector<std::string> HfWeights::names() const {
  std::vector<std::string> result;
  for (const auto& item : entries_) result.push_back(item.first);
  return result;
}

std::string HfWeights::file_of(std::string_view name) const {
  const Entry* entry = find_entry(name);
  return entry == nullptr ? std::string() : files_[entry->file].path();
}

}  // namespace oomb::checkpoint
