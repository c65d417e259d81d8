#include "worker/model/hf_folder.h"

#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "configs/error.h"
#include "worker/checkpoint/hf_weights.h"
#include "worker/checkpoint/safetensors_writer.h"

namespace oomb::model {

namespace {

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

checkpoint::DType file_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return checkpoint::DType::kF64;
    case at::kFloat:
      return checkpoint::DType::kF32;
    case at::kBFloat16:
      return checkpoint::DType::kBF16;
    case at::kByte:
      return checkpoint::DType::kU8;
    default:
      throw std::logic_error("no safetensors type");
  }
}

const char* config_dtype(at::ScalarType type) {
  return type == at::kDouble ? "float64" : type == at::kFloat ? "float32" : "bfloat16";
}

at::ScalarType tensor_type(checkpoint::DType type, const std::string& where) {
  switch (type) {
    case checkpoint::DType::kF64:
      return at::kDouble;
    case checkpoint::DType::kF32:
      return at::kFloat;
    case checkpoint::DType::kF16:
      return at::kHalf;
    case checkpoint::DType::kBF16:
      return at::kBFloat16;
    default:
      throw InputError(where + " has type " + checkpoint::name_of(type) + "; weights must be F64, F32, F16 or BF16");
  }
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void check_shape(const checkpoint::TensorView& view, const std::string& where, const at::Tensor& destination) {
  if (destination.sizes().equals(view.shape)) return;
  throw InputError(where + " has shape " + shape_text(view.shape) + "; the model's config asks for " +
                   shape_text(destination.sizes()));
}

// Bytes in a file may start at any address: they are copied into an aligned tensor.
at::Tensor host_copy(const checkpoint::TensorView& view, at::ScalarType type) {
  at::Tensor host = at::empty(view.shape, at::TensorOptions().dtype(type));
  if (!view.bytes.empty()) std::memcpy(host.data_ptr(), view.bytes.data(), view.bytes.size());
  return host;
}

// Copies a tensor of a file into `destination` after checking shape and values.
void read_tensor(const checkpoint::TensorView& view, const std::string& where, at::Tensor& destination) {
  check_shape(view, where, destination);
  const at::Tensor host = host_copy(view, tensor_type(view.dtype, where));
  if (!at::isfinite(host).all().item<bool>())
    throw InputError(where + " holds NaN or infinite values; the file is damaged");
  destination.copy_(host);
}

// The same for state that is no number to convert: the file's type must be the tensor's own.
void read_state(const checkpoint::TensorView& view, const std::string& where, at::Tensor& destination) {
  const checkpoint::DType type = file_type(destination.scalar_type());
  if (view.dtype != type) {
    throw InputError(where + " has type " + checkpoint::name_of(view.dtype) + " and must be " +
                     checkpoint::name_of(type) + "; the file is damaged");
  }
  if (type != checkpoint::DType::kU8) return read_tensor(view, where, destination);
  check_shape(view, where, destination);
  destination.copy_(host_copy(view, destination.scalar_type()));
}

// The name under which a tied embedding and head are stored: either may be missing. Both are fine if they are equal, as
// older tools write them; if not, transformers would not tie them, and the model is not what its config says.
const char* tied_name(const checkpoint::HfWeights& weights) {
  const checkpoint::TensorView *embedding = weights.find(kEmbedding), *head = weights.find(kHead);
  if (embedding == nullptr && head != nullptr) return kHead;
  if (embedding == nullptr || head == nullptr) return kEmbedding;
  if (embedding->dtype != head->dtype || embedding->shape != head->shape ||
      std::memcmp(embedding->bytes.data(), head->bytes.data(), head->bytes.size()) != 0) {
    throw InputError(weights.file_of(kHead) + ": tensor " + kHead + " differs from " + kEmbedding +
                     ", but the model's config ties them; remove it, or set tie_word_embeddings to false there");
  }
  return kEmbedding;
}

struct Entry {
  checkpoint::TensorSpec spec;
  at::Tensor rows;  // view of a parameter
};

void add_entries(std::vector<Entry>& entries, const Parameter& p, const at::Tensor& tensor, const std::string& prefix) {
  for (const ParameterPart& part : p.parts) {
    const at::Tensor rows = tensor.narrow(0, part.row, part.rows);
    entries.push_back({{prefix + part.hf_name, file_type(rows.scalar_type()), rows.sizes().vec()}, rows});
  }
}

std::vector<Entry> weight_entries(const Parameters& parameters) {
  std::vector<Entry> entries;
  for (const Parameter& p : parameters.all()) add_entries(entries, p, p.weight, "");
  return entries;
}

std::vector<Entry> optimizer_entries(const Parameters& parameters) {
  std::vector<Entry> entries;
  for (const Parameter& p : parameters.all()) {
    if (p.m_scale.defined()) {
      // Blocks do not end with the rows of a part, so codes and scales go by the whole parameter.
      for (const auto& [kind, tensor] : {std::pair<const char*, at::Tensor>{"m_code.", p.m},
                                         {"m_scale.", p.m_scale},
                                         {"v_code.", p.v},
                                         {"v_scale.", p.v_scale}}) {
        entries.push_back({{kind + p.name, file_type(tensor.scalar_type()), tensor.sizes().vec()}, tensor});
      }
    } else {
      add_entries(entries, p, p.m, "m.");
      add_entries(entries, p, p.v, "v.");
    }
    if (p.master.defined() && !p.master.is_same(p.weight)) add_entries(entries, p, p.master, "master.");
  }
  return entries;
}

std::vector<checkpoint::TensorSpec> specs_of(const std::vector<Entry>& entries) {
  std::vector<checkpoint::TensorSpec> specs;
  for (const Entry& entry : entries) specs.push_back(entry.spec);
  return specs;
}

// The bytes of one entry at a time; only that one is on the host.
checkpoint::TensorSource source_of(const std::vector<Entry>& entries) {
  std::map<std::string, at::Tensor> by_name;
  for (const Entry& entry : entries) by_name[entry.spec.name] = entry.rows;
  return [by_name, host = at::Tensor()](const checkpoint::TensorSpec& spec) mutable {
    host = by_name.at(spec.name).contiguous().cpu();
    return std::span<const std::byte>(static_cast<const std::byte*>(host.data_ptr()),
                                      static_cast<size_t>(host.nbytes()));
  };
}

}  // namespace

void load_hf_weights(Parameters& parameters, const std::string& path, const WarnLine& warn) {
  const checkpoint::HfWeights weights(path);
  const bool tied = parameters.config().tie_word_embeddings;
  const std::string embedding = tied ? tied_name(weights) : kEmbedding;
  std::set<const checkpoint::TensorView*> used;
  if (tied) used.insert(weights.find(kHead));
  parameters.load([&](const std::string& hf_name, at::Tensor& destination) {
    const std::string& name = hf_name == kEmbedding ? embedding : hf_name;
    const checkpoint::TensorView& view = weights.at(name);
    used.insert(&view);
    read_tensor(view, weights.file_of(name) + ": tensor " + name, destination);
  });
  std::string unused;
  int64_t num_unused = 0;
  for (const std::string& name : weights.names()) {
    if (used.count(weights.find(name)) != 0) continue;
    if (unused.empty()) unused = name;
    ++num_unused;
  }
  if (num_unused > 0) {
    warn(path + ": " + std::to_string(num_unused) + " tensor(s) not used by this model, the first is " + unused);
  }
}

void save_hf_folder(const Parameters& parameters, checkpoint::OutputFolder& folder) {
  checkpoint::write_text(folder, "config.json",
                         hf_config_text(parameters.config(), config_dtype(parameters.types().compute)));
  const std::vector<Entry> entries = weight_entries(parameters);
  checkpoint::write_hf_weights(folder, specs_of(entries), source_of(entries));
}

void save_optimizer_state(const Parameters& parameters, checkpoint::OutputFolder& folder) {
  const std::vector<Entry> entries = optimizer_entries(parameters);
  checkpoint::write_safetensors(folder, kOptimizerFile, specs_of(entries), source_of(entries));
}

void load_optimizer_state(Parameters& parameters, const std::string& folder) {
  const checkpoint::SafetensorsFile file(folder + "/" + kOptimizerFile);
  for (Entry& entry : optimizer_entries(parameters)) {
    const checkpoint::TensorView* view = file.find(entry.spec.name);
    const std::string where = file.path() + ": tensor " + entry.spec.name;
    if (view == nullptr) throw InputError(where + " is missing; the file is damaged");
    read_state(*view, where, entry.rows);
  }
  parameters.refresh_weights();
}

int64_t checkpoint_bytes(const Parameters& parameters) {
  int64_t bytes = 0;
  for (const Entry& entry : weight_entries(parameters)) bytes += entry.spec.num_bytes();
  for (const Entry& entry : optimizer_entries(parameters)) bytes += entry.spec.num_bytes();
  return bytes;
}

}  // namespace oomb::model
