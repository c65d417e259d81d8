#include "coordinator/plan/resolve.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "configs/error.h"
#include "configs/this_machine.h"
#include "coordinator/plan/hostlist.h"

extern char** environ;  // NOLINT: POSIX declares it nowhere

namespace oomb::plan {
namespace {

struct KnownGpu {
  const char* name;      // part of the driver's name
  std::int64_t gib;      // what a process can use
  double peak_tflops;    // dense bf16, from the vendor's data sheet
  double memory_gbytes;  // HBM bandwidth, from the same
};
constexpr KnownGpu kKnownGpus[] = {
    {"H200", 139, 989, 4800},          {"H100 PCIe", 79, 756, 2000}, {"H100", 79, 989, 3350},
    {"A100-SXM4-80GB", 79, 312, 2039}, {"A100", 39, 312, 1555},
};

// Measured on one H200 (989 TFLOP/s, 4.8 TB/s), Qwen2.5-7B shapes in bf16, as parts of those ceilings.
constexpr double kGemmPart = 669.0 / 989, kForwardPart = 634.0 / 989, kBackwardPart = 548.0 / 989;
constexpr double kSelectPart = 263.0 / 989, kCopyPart = 4.24 / 4.8;
// One core of a CPU worker: the order of magnitude of an AVX2 core in fp32.
constexpr double kCoreFlops = 25e9, kCoreBytes = 5e9;

const KnownGpu* find_gpu(const std::string& model) {
  const auto found = std::find_if(std::begin(kKnownGpus), std::end(kKnownGpus),
                                  [&](const KnownGpu& gpu) { return model.find(gpu.name) != std::string::npos; });
  return found == std::end(kKnownGpus) ? nullptr : found;
}

std::int64_t variable(const MachineFacts& facts, const char* name, std::int64_t otherwise) {
  const auto found = facts.environment.find(name);
  if (found == facts.environment.end() || found->second.empty()) return otherwise;
  const std::string& text = found->second;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw InputError(std::string(name) + "=" + text.substr(0, 100) + ": not a number; it is set by Slurm");
  return value;
}

class Resolver {
 public:
  Resolver(const Topology& topology, const MachineFacts& facts, const std::string& place)
      : topology_(topology), facts_(facts), place_(place) {}

  Hardware resolve() {
    out_.name = topology_.name;
    set_nodes();
    set_gpus();
    set_host();
    set_rates();
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& text) const { throw InputError(place_ + ": " + text); }

  bool in_job() const { return facts_.environment.contains("SLURM_JOB_ID"); }

  void set_nodes() {
    if (!topology_.nodes.automatic) {
      out_.nodes = topology_.nodes.count;
      out_.node_names = topology_.nodes.names;
    } else if (in_job()) {
      const auto list = facts_.environment.find("SLURM_JOB_NODELIST");
      if (list != facts_.environment.end() && !list->second.empty())
        out_.node_names = expand_hostlist(list->second, list->first);
      const auto named = static_cast<std::int64_t>(out_.node_names.size());
      out_.nodes = variable(facts_, "SLURM_JOB_NUM_NODES", std::max<std::int64_t>(named, 1));
      if (out_.nodes < 1 || (named > 0 && named != out_.nodes))
        fail("nodes: SLURM_JOB_NUM_NODES is " + std::to_string(out_.nodes) + " and SLURM_JOB_NODELIST names " +
             std::to_string(named) + "; allowed: the same number");
    } else {
      out_.node_names = {facts_.host};
    }
  }

  void set_gpus() {
    std::int64_t count = topology_.gpus_per_node.value;
    if (topology_.gpus_per_node.automatic)
      count = variable(facts_, "SLURM_GPUS_ON_NODE", static_cast<std::int64_t>(facts_.gpus.size()));
    out_.gpu = count > 0;
    out_.workers_per_node = count;
    if (!out_.gpu) return;
    out_.gpu_name = topology_.gpu.name;
    if (out_.gpu_name.empty() && !facts_.gpus.empty()) out_.gpu_name = facts_.gpus.front();
    const KnownGpu* known = find_gpu(out_.gpu_name);
    const bool is_known = known != nullptr;
    const std::string named = out_.gpu_name.empty() ? "an unnamed GPU" : "GPU " + out_.gpu_name;
    if (topology_.gpu.memory.automatic && !is_known)
      fail("gpu.memory: auto, and that of " + named + " is not known; allowed: a size such as 80GiB");
    if (topology_.gpu.peak_tflops == 0 && !is_known)
      fail("gpu.peak_tflops: 0, and that of " + named + " is not known; allowed: a number > 0");
    out_.gpu_bytes = topology_.gpu.memory.automatic ? known->gib << 30 : topology_.gpu.memory.bytes;
    out_.peak = 1e12 * (topology_.gpu.peak_tflops > 0 ? topology_.gpu.peak_tflops : known->peak_tflops);
    memory_bandwidth_ = is_known ? known->memory_gbytes * 1e9 : out_.peak * (4800.0 / 989e3);
  }

  void set_host() {
    const HostSection& host = topology_.host;
    out_.cores = host.cores.automatic ? variable(facts_, "SLURM_CPUS_ON_NODE", facts_.cores) : host.cores.value;
    if (!out_.gpu) out_.workers_per_node = out_.cores;
    if (!host.memory.automatic) {
      out_.host_bytes = host.memory.bytes;
    } else if (const std::int64_t mib = variable(facts_, "SLURM_MEM_PER_NODE", 0); mib > 0) {
      out_.host_bytes = mib << 20;
    } else {
      out_.host_bytes = std::max<std::int64_t>(facts_.memory_bytes, 0);
    }
    if (!host.disk.automatic) out_.disk_bytes = host.disk.bytes;
  }

  // The given rate, or what is assumed; noted then.
  double rate(const char* field, double given, double scale, double otherwise) {
    if (given > 0) return given * scale;
    out_.assumed.emplace_back(field);
    return otherwise;
  }

  void set_rates() {
    Rates& r = out_.rates;
    const GpuSection& g = topology_.gpu;
    const LinksSection& l = topology_.links;
    const double cpu = kCoreFlops * static_cast<double>(out_.cores), top = out_.gpu ? out_.peak : cpu;
    const auto part = [&](double of_gpu) { return out_.gpu ? of_gpu * top : cpu; };
    r.gemm = rate("gpu.gemm_tflops", g.gemm_tflops, 1e12, part(kGemmPart));
    r.attention_forward = rate("gpu.attention_forward_tflops", g.attention_forward_tflops, 1e12, part(kForwardPart));
    r.attention_backward =
        rate("gpu.attention_backward_tflops", g.attention_backward_tflops, 1e12, part(kBackwardPart));
    r.select = rate("gpu.select_tflops", g.select_tflops, 1e12, part(kSelectPart));
    const double copy = out_.gpu ? kCopyPart * memory_bandwidth_ : kCoreBytes * static_cast<double>(out_.cores);
    r.copy = rate("gpu.copy_gbytes", g.copy_gbytes, 1e9, copy);
    r.pcie = rate("links.pcie.gbytes", l.pcie.gbytes, 1e9, 47e9);
    r.pcie_latency = rate("links.pcie.latency_us", l.pcie.latency_us, 1e-6, 10e-6);
    if (out_.workers_per_node > 1) {
      r.intra_node = rate("links.intra_node.gbytes", l.intra_node.gbytes, 1e9, out_.gpu ? 370e9 : 5e9);
      r.intra_node_latency = rate("links.intra_node.latency_us", l.intra_node.latency_us, 1e-6, 5e-6);
    }
    if (out_.nodes > 1) {
      r.inter_node = rate("links.inter_node.gbytes", l.inter_node.gbytes, 1e9, out_.gpu ? 45e9 : 1e9);
      r.inter_node_latency = rate("links.inter_node.latency_us", l.inter_node.latency_us, 1e-6, 10e-6);
    }
  }

  const Topology& topology_;
  const MachineFacts& facts_;
  const std::string& place_;
  double memory_bandwidth_ = 0;
  Hardware out_;
};

// The NVIDIA driver's list: one folder a GPU, with a line `Model: NVIDIA H200`.
std::vector<std::string> gpu_models() {
  std::vector<std::string> models;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::ifstream file(entry.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("Model:")) continue;
      const std::size_t begin = line.find_first_not_of(" \t", 6);
      models.push_back(begin == std::string::npos ? "" : line.substr(begin));
    }
  }
  std::sort(models.begin(), models.end());
  return models;
}

}  // namespace

bool is_known_gpu(const std::string& model) { return find_gpu(model) != nullptr; }

MachineFacts this_machine() {
  MachineFacts facts;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (text.starts_with("SLURM_") && equals != std::string::npos)
      facts.environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) facts.host = host.data();
  facts.gpus = gpu_models();
  facts.memory_bytes = available_host_bytes();
  facts.cores = available_cores();
  facts.interfaces = local_interfaces();
  return facts;
}

Hardware resolve(const Topology& topology, const MachineFacts& facts, const std::string& place) {
  return Resolver(topology, facts, place).resolve();
}

}  // namespace oomb::plan
