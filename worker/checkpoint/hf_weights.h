// The weights of a Hugging Face model folder.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "worker/checkpoint/safetensors.h"

namespace oomb::checkpoint {

/// All tensors of a folder, mapped and checked at construction, before anything is allocated elsewhere. Reads
/// model.safetensors if it is there, else the shards of model.safetensors.index.json, or a single .safetensors file
/// given by its path. Const members may be used from any thread; views live as long as the object.
class HfWeights {
 public:
  /// Throws InputError naming the file: none found, a shard missing or damaged, a tensor that is not where the index
  /// says, a tensor in two shards.
  explicit HfWeights(const std::string& path);

  /// Looks `name` up as written, then without a leading "model.", then with one more: models are published as
  /// model.layers…, layers… and model.model.layers…. nullptr when there is none.
  const TensorView* find(std::string_view name) const;
  /// The same, but InputError naming the folder and the tensor when it is missing.
  const TensorView& at(std::string_view name) const;

  /// Names as stored, sorted.
  std::vector<std::string> names() const;
  /// The file that holds `name` (as find() resolves it), for messages; empty when there is none.
  std::string file_of(std::string_view name) const;
  const std::string& path() const { return path_; }

 private:
  struct Entry {
    const TensorView* view = nullptr;
    size_t file = 0;
  };
  const Entry* find_entry(std::string_view name) const;
  void add_file(SafetensorsFile file);
  void read_index(const std::string& index_path, const std::string& folder);

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace oomb::checkpoint
