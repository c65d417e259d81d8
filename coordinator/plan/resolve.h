// A topology with a number in the place of every `auto`, in SI units, and which of them are assumed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "configs/topology.h"

namespace oomb::plan {

/// What `auto` stands for; a value, so that tests make their own.
struct MachineFacts {
  std::map<std::string, std::string> environment;  // SLURM_*
  std::string host;
  std::vector<std::string> gpus;  // models, such as "NVIDIA H200"
  std::int64_t memory_bytes = 0;  // that a process may take
  std::int64_t cores = 1;
};
MachineFacts this_machine();

/// Of one worker, in flop/s, bytes/s and seconds.
struct Rates {
  double gemm = 0, attention_forward = 0, attention_backward = 0, select = 0, copy = 0;
  double pcie = 0, pcie_latency = 0;
  double intra_node = 0, intra_node_latency = 0;
  double inter_node = 0, inter_node_latency = 0;
};

struct Hardware {
  std::string name;
  std::vector<std::string> node_names;  // empty where the topology has none
  std::int64_t nodes = 1;
  std::int64_t workers_per_node = 1;  // GPUs of a node; without GPUs its cores
  bool gpu = false;
  std::string gpu_name;
  std::int64_t gpu_bytes = 0;    // of one GPU; 0 without one
  std::int64_t host_bytes = 0;   // of one node
  std::int64_t cores = 1;        // of one node
  std::int64_t disk_bytes = -1;  // -1: not known
  double peak = 0;               // flop/s of one GPU; 0 without one
  Rates rates;
  std::vector<std::string> assumed;  // topology fields that nobody gave or measured

  bool all_on_one_node(std::int64_t workers) const { return workers <= workers_per_node; }
};

/// `place` (file, or "this machine") begins the errors: a GPU whose memory or peak is not known by its name; node names
/// or counts of Slurm that cannot be read. A rate that is 0 becomes the measured one of an H200, in proportion to the
/// peak or, for links, as it is.
Hardware resolve(const Topology& topology, const MachineFacts& facts, const std::string& place);

}  // namespace oomb::plan
