// Runs one sequence through the pipeline with dense attention and writes what it computed, for comparison with another
// implementation:
//   parity_dump MODEL IDS.safetensors OUT.safetensors [options]
//
// MODEL is a Hugging Face folder. IDS holds "ids" I64 [N] and, if labels are not simply the next ids, "labels" I64 [N]:
// already shifted (labels[i] is what position i predicts), -100 where a prediction does not count. OUT gets
//   num_labels                I64 []
//   loss_sum, loss_mean       F64 []      of the training step; loss_mean is 0 without a label
//   eval_loss_sum             F64 []      of the evaluation pass, unless --no-eval
//   logits                    [N, V]      of the evaluation pass, compute dtype, unless --no-eval
//   grad.NAME                 gradient of loss_mean by the parameter's Hugging Face name, accumulator dtype
// Exit status 2 and one line on bad input.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "configs/error.h"
#include "worker/checkpoint/output.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/safetensors_writer.h"
#include "worker/data/sequences.h"
#include "worker/model/hf_config.h"
#include "worker/model/hf_folder.h"
#include "worker/model/parameters.h"
#include "worker/pipeline/sequence_pipeline.h"
#include "worker/tensor/segments.h"

namespace oomb {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string model, ids, out, save;
  std::string compute = "fp32";
  bool gpu = false, no_eval = false;
  int64_t chunk = 16, page = 4, row_tile = 5;
};

at::ScalarType scalar_type(const std::string& name) {
  if (name == "fp64") return at::kDouble;
  return name == "fp32" ? at::kFloat : at::kBFloat16;
}

std::vector<int64_t> integers(const checkpoint::SafetensorsFile& file, const std::string& name, size_t count) {
  const checkpoint::TensorView* view = file.find(name);
  if (view == nullptr || view->dtype != checkpoint::DType::kI64 || view->shape.size() != 1 || view->bytes.empty() ||
      (count > 0 && static_cast<size_t>(view->num_elements()) != count)) {
    throw InputError(file.path() + ": " + name + " must be I64 [N], N >= 1, as many labels as ids");
  }
  std::vector<int64_t> values(static_cast<size_t>(view->num_elements()));
  std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  return values;
}

struct Sequence {
  std::vector<int64_t> ids, labels;
};

Sequence read_sequence(const std::string& path, int64_t vocab) {
  const checkpoint::SafetensorsFile file(path);
  Sequence s;
  s.ids = integers(file, "ids", 0);
  if (file.find("labels") != nullptr) {
    s.labels = integers(file, "labels", s.ids.size());
  } else {
    s.labels.resize(s.ids.size());
    data::make_labels(s.ids, s.labels);
  }
  const auto outside = [&](int64_t id) { return id < 0 || id >= vocab; };
  if (std::any_of(s.ids.begin(), s.ids.end(), outside) ||
      std::any_of(s.labels.begin(), s.labels.end(),
                  [&](int64_t label) { return label != data::kIgnoredLabel && outside(label); })) {
    throw InputError(path + ": an id is not in [0, " + std::to_string(vocab) + ")");
  }
  return s;
}

// Host memory that begins as NaN in every floating-point type: nothing may read a slot before it is written.
pages::SegmentSource poisoned_segments() {
  pages::SegmentSource source = pages::host_segments();
  const auto allocate = source.allocate;
  source.allocate = [allocate](int64_t bytes) {
    void* segment = allocate(bytes);
    if (segment != nullptr) std::memset(segment, 0xFF, static_cast<size_t>(bytes));
    return segment;
  };
  return source;
}

// Tensors in the order they were added.
class Results {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    tensors_[name] = tensor.cpu().contiguous();
    specs_.push_back({name, type_of(tensor.scalar_type()), tensor.sizes().vec()});
  }
  void add(const std::string& name, double value) { add(name, at::full({}, value, at::kDouble)); }

  void write(const fs::path& path) const {
    const auto folder = checkpoint::open_disk_folder(path.has_parent_path() ? path.parent_path().string() : ".");
    checkpoint::write_safetensors(
        *folder, path.filename().string(), specs_, [this](const checkpoint::TensorSpec& spec) {
          const at::Tensor& tensor = tensors_.at(spec.name);
          return std::span(static_cast<const std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes()));
        });
  }

 private:
  static checkpoint::DType type_of(at::ScalarType type) {
    if (type == at::kLong) return checkpoint::DType::kI64;
    if (type == at::kDouble) return checkpoint::DType::kF64;
    return type == at::kFloat ? checkpoint::DType::kF32 : checkpoint::DType::kBF16;
  }

  std::vector<checkpoint::TensorSpec> specs_;
  std::map<std::string, at::Tensor> tensors_;
};

void run(const Arguments& a) {
  if (a.chunk % a.page != 0) throw InputError("--page must divide --chunk");
  const model::ModelConfig config = model::read_hf_config(a.model);
  const TensorTypes types{scalar_type(a.compute), a.gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)};
  initialise_device(types.device);
  model::Parameters parameters(config, types, /*training=*/true);
  model::load_hf_weights(parameters, a.model,
                         [](const std::string& text) { std::fprintf(stderr, "warning: %s\n", text.c_str()); });
  if (!a.save.empty()) model::save_hf_folder(parameters, *checkpoint::open_disk_folder(a.save));

  const Sequence s = read_sequence(a.ids, config.vocab_size);
  PipelineOptions options;
  options.chunk_tokens = a.chunk;
  options.selection.dense = true;
  options.selection.page_tokens = a.page;
  options.selection.query_tile = a.page;
  options.gradient_dtype = types.acc();
  options.loss_row_tile = a.row_tile;
  pages::PageMemory::Options memory_options;
  memory_options.host_bytes = int64_t{1} << 30;
  memory_options.segment_bytes = int64_t{1} << 16;
  memory_options.host = poisoned_segments();
  if (a.gpu) {
    memory_options.fast = tensor_segments(types.acc_options());
    memory_options.fast_bytes = int64_t{32} << 30;
    memory_options.segment_bytes = int64_t{1} << 28;
    memory_options.host_bytes = 0;
  }
  pages::PageMemory memory(SequencePipeline::page_layout(config, options, types, static_cast<int64_t>(s.ids.size())),
                           memory_options);
  SequencePipeline pipeline(&parameters, options, &memory);

  Results results;
  const int64_t num_labels =
      static_cast<int64_t>(s.labels.size()) - std::count(s.labels.begin(), s.labels.end(), data::kIgnoredLabel);
  const double scale = num_labels > 0 ? 1.0 / static_cast<double>(num_labels) : 0.0;
  const SequenceLoss trained = pipeline.train(s.ids, s.labels, scale);
  if (trained.num_labels != num_labels) throw std::logic_error("labels miscounted");
  results.add("num_labels", at::full({}, num_labels, at::kLong));
  results.add("loss_sum", trained.loss_sum);
  results.add("loss_mean", trained.loss_sum * scale);

  if (!a.no_eval) {
    std::vector<at::Tensor> logits;
    PipelineObserver observer;
    observer.on_logits = [&](int64_t, const at::Tensor& rows) { logits.push_back(rows.clone()); };
    pipeline.set_observer(observer);
    results.add("eval_loss_sum", pipeline.evaluate(s.ids, s.labels).loss_sum);
    results.add("logits", at::cat(logits, 0));
  }
  for (const model::Parameter& p : parameters.all()) {
    for (const model::ParameterPart& part : p.parts) {
      results.add("grad." + part.hf_name, p.grad.narrow(0, part.row, part.rows));
    }
  }
  if (memory.slots_in_use() != 0) throw std::logic_error("pages left behind");
  results.write(a.out);
}

}  // namespace
}  // namespace oomb

int main(int argc, char** argv) {
  CLI::App app{"Loss, logits and gradients of one sequence, for comparison with another implementation."};
  oomb::Arguments a;
  app.add_option("MODEL", a.model, "Hugging Face folder")->required();
  app.add_option("IDS", a.ids, "safetensors file with ids and, optionally, labels")->required();
  app.add_option("OUT", a.out, "safetensors file to write; must not exist")->required();
  app.add_option("--compute", a.compute, "Compute dtype")->check(CLI::IsMember({"fp64", "fp32", "bf16"}));
  app.add_option("--chunk", a.chunk, "Tokens of a chunk")->check(CLI::PositiveNumber);
  app.add_option("--page", a.page, "Tokens of a page")->check(CLI::PositiveNumber);
  app.add_option("--row-tile", a.row_tile, "Rows of logits that exist at once")->check(CLI::PositiveNumber);
  app.add_option("--save", a.save, "Existing empty folder: write the loaded weights there first");
  app.add_flag("--gpu", a.gpu, "Compute on the first GPU");
  app.add_flag("--no-eval", a.no_eval, "No evaluation pass");
  CLI11_PARSE(app, argc, argv);
  int status = 0;
  try {
    oomb::run(a);
  } catch (const oomb::InputError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    status = 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: internal: %s\n", error.what());
    status = 1;
  }
  oomb::end_process(status);
}
