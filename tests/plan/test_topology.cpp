// Topology files and their mistakes, `auto`, Slurm's node lists, and the choice of network interfaces.
#include <gtest/gtest.h>

#include <filesystem>

#include "configs/topology.h"
#include "coordinator/plan/hostlist.h"
#include "coordinator/plan/interfaces.h"
#include "coordinator/plan/resolve.h"
#include "tests/plan/error_of.h"

namespace oomb::plan {
namespace {

using Names = std::vector<std::string>;

std::string topology_error(const std::string& yaml) {
  return error_of([&] { parse_topology(yaml, "t.yaml"); });
}

MachineFacts cpu_machine() { return {{}, "here", {}, std::int64_t{24} << 30, 2, {}}; }

TEST(TopologyFile, GivenValuesAndDefaults) {
  const Topology t = parse_topology(
      "nodes: [a, b]\ngpus_per_node: 8\ngpu: {name: H200, memory: 139GiB}\nlinks:\n  inter_node: {gbytes: 45}\n",
      "x/t.yaml");
  EXPECT_EQ(t.name, "t");
  EXPECT_EQ(t.nodes, (NodeList{false, 2, {"a", "b"}}));
  EXPECT_EQ(t.gpus_per_node, Count::of(8));
  EXPECT_EQ(t.gpu.memory.bytes, std::int64_t{139} << 30);
  EXPECT_EQ(t.links.inter_node.gbytes, 45);
  EXPECT_TRUE(t.interfaces.automatic);
  EXPECT_TRUE(t.host.cores.automatic);
  EXPECT_NE(to_json(t).find("\"nodes\": [\n    \"a\",\n    \"b\"\n  ]"), std::string::npos) << to_json(t);
}

TEST(TopologyFile, MistakesNameFileLineAndField) {
  const std::pair<const char*, const char*> cases[] = {
      {"name: x\nnodes: 0\n",
       "t.yaml:2: nodes: 0 is not allowed; allowed: auto, an integer >= 1, or a list of distinct names"},
      {"nodes: many\n", "t.yaml:1: nodes: many is not allowed"},
      {"nodes: \"4\"\n", "t.yaml:1: nodes: the text \"4\" is not allowed"},
      {"nodes: [a, a]\n", "t.yaml:1: nodes[1]: a is not allowed; allowed: auto"},
      {"nodes: []\n", "t.yaml:1: nodes: a list is not allowed"},
      {"gpus_per_node: -1\n", "t.yaml:1: gpus_per_node: -1 is not allowed; allowed: auto, or an integer >= 0"},
      {"gpu: {memory: big}\n", "t.yaml:1: gpu.memory: big is not allowed"},
      {"gpu:\n  peak_tflops: -5\n", "t.yaml:2: gpu.peak_tflops: -5 is not allowed; allowed: a number >= 0"},
      {"interfaces: eth0\n", "t.yaml:1: interfaces: eth0 is not allowed; allowed: auto, or a list of distinct names"},
      {"host: {cores: 0}\n", "t.yaml:1: host.cores: 0 is not allowed"},
      {"links: {pcie: {gbyte: 4}}\n", "t.yaml:1: links.pcie.gbyte: unknown key, did you mean links.pcie.gbytes?"},
      {"latency_us: 4\n", "t.yaml:1: latency_us: unknown key"},
      {"- a\n", "t.yaml: not a settings file"},
  };
  for (const auto& [yaml, start] : cases) {
    const std::string error = topology_error(yaml);
    EXPECT_TRUE(error.starts_with(start)) << error;
  }
  EXPECT_EQ(error_of([] { load_topology("/nonexistent/t.yaml"); }), "/nonexistent/t.yaml: no such topology file");
}

TEST(TopologyFile, ReadyFilesResolve) {
  struct Want {
    const char* file;
    std::int64_t nodes, gpus;
    bool inter_node;
  };
  const Want wanted[] = {{"one-h200", 1, 1, false},
                         {"node-8xh200", 1, 8, false},
                         {"4-nodes-8xh200", 4, 8, true},
                         {"128-nodes-8xh200", 128, 8, true}};
  for (const Want& want : wanted) {
    const std::string path = std::string(OOMB_SOURCE_FOLDER "/configs/topologies/") + want.file + ".yaml";
    const Hardware h = resolve(load_topology(path), cpu_machine(), path);
    EXPECT_EQ(h.nodes, want.nodes);
    EXPECT_EQ(h.workers_per_node, want.gpus);
    EXPECT_EQ(h.gpu_bytes, std::int64_t{139} << 30);
    EXPECT_EQ(h.peak, 989e12);
    EXPECT_EQ(h.rates.gemm, 669e12);
    EXPECT_EQ(h.rates.inter_node > 0, want.inter_node);
    EXPECT_TRUE(h.assumed.empty()) << path << ": " << h.assumed.front();
  }
}

TEST(TopologyAuto, ThisMachineWithoutAndWithGpus) {
  const Topology automatic = load_topology(OOMB_SOURCE_FOLDER "/configs/topologies/this-machine.yaml");
  EXPECT_EQ(automatic.nodes, NodeList{});
  const Hardware cpu = resolve(automatic, cpu_machine(), "here");
  EXPECT_FALSE(cpu.gpu);
  EXPECT_EQ(cpu.workers_per_node, 2);
  EXPECT_EQ(cpu.host_bytes, std::int64_t{24} << 30);
  EXPECT_EQ(cpu.node_names, Names{"here"});
  EXPECT_FALSE(cpu.assumed.empty());

  MachineFacts facts = cpu_machine();
  facts.gpus = {"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"};
  const Hardware gpu = resolve(automatic, facts, "here");
  EXPECT_EQ(gpu.workers_per_node, 2);
  EXPECT_EQ(gpu.gpu_bytes, std::int64_t{79} << 30);
  EXPECT_NEAR(gpu.rates.gemm, 669e12, 1e6);

  facts.gpus = {"Some Accelerator"};
  EXPECT_EQ(error_of([&] { resolve(automatic, facts, "here"); }),
            "here: gpu.memory: auto, and that of GPU Some Accelerator is not known; allowed: a size such as 80GiB");
}

TEST(TopologyAuto, SlurmAllocation) {
  MachineFacts facts = cpu_machine();
  facts.environment = {{"SLURM_JOB_ID", "7"},        {"SLURM_JOB_NODELIST", "n[1-3],m9"},
                       {"SLURM_JOB_NUM_NODES", "4"}, {"SLURM_GPUS_ON_NODE", "8"},
                       {"SLURM_CPUS_ON_NODE", "96"}, {"SLURM_MEM_PER_NODE", "1048576"}};
  facts.gpus = {"NVIDIA H200"};  // the node of this process shows fewer than the job has a node
  const Hardware h = resolve(Topology{}, facts, "here");
  EXPECT_EQ(h.node_names, (Names{"n1", "n2", "n3", "m9"}));
  EXPECT_EQ(h.nodes, 4);
  EXPECT_EQ(h.workers_per_node, 8);
  EXPECT_EQ(h.cores, 96);
  EXPECT_EQ(h.host_bytes, std::int64_t{1} << 40);

  facts.environment["SLURM_JOB_NUM_NODES"] = "5";
  EXPECT_NE(error_of([&] { resolve(Topology{}, facts, "here"); }).find("SLURM_JOB_NODELIST names 4"),
            std::string::npos);
  facts.environment["SLURM_JOB_NUM_NODES"] = "x";
  EXPECT_EQ(error_of([&] { resolve(Topology{}, facts, "here"); }),
            "SLURM_JOB_NUM_NODES=x: not a number; it is set by Slurm");
}

TEST(Hostlist, Expands) {
  EXPECT_EQ(expand_hostlist("a", "L"), Names{"a"});
  EXPECT_EQ(expand_hostlist("gpu[08-11,7],x", "L"), (Names{"gpu08", "gpu09", "gpu10", "gpu11", "gpu7", "x"}));
  EXPECT_EQ(expand_hostlist("r[1-2]n[3,5]-ib", "L"), (Names{"r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"}));
  for (const char* bad : {"", ",", "a,", "a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[x]", "a[1-99999999]", "a[[1]]",
                          "a[1,]", "a[-1]", "a[1-300]b[1-300]"}) {
    EXPECT_TRUE(error_of([&] { expand_hostlist(bad, "L"); }).starts_with("L=")) << bad;
  }
}

// --- interfaces ----------------------------------------------------------------------------------------------------

Interface loopback() { return {"lo", "127.0.0.1", 8, true, true, 0}; }
Interface docker() { return {"docker0", "172.17.0.1", 16, true, false, 10'000}; }
NodeInterfaces node(const std::string& name, std::vector<Interface> more) {
  more.insert(more.begin(), {loopback(), docker()});
  return {name, std::move(more)};
}

TEST(Interfaces, SharedSubnetWhateverTheNames) {
  const NodeInterfaces nodes[] = {node("a", {{"eth0", "10.1.0.1", 16}, {"eth1", "192.168.1.1", 24}}),
                                  node("b", {{"eno2", "10.1.7.2", 16}, {"eth1", "192.168.2.1", 24}})};
  const InterfaceChoice choice = choose_interfaces(nodes, {});
  EXPECT_EQ(choice.names, (Names{"eth0", "eno2"}));
  EXPECT_EQ(choice.subnet, "10.1.0.0/16");
  EXPECT_EQ(choice.text(), "network: eno2, eth0 (10.1.0.0/16) on 2 nodes");
}

TEST(Interfaces, FasterLinkThenNameButNeverOneThatIsDown) {
  std::vector<NodeInterfaces> nodes = {
      node("a", {{"eth0", "10.1.0.1", 16, true, false, 1000}, {"ib0", "10.2.0.1", 16, true, false, 400'000}}),
      node("b", {{"eth0", "10.1.0.2", 16, true, false, 1000}, {"ib0", "10.2.0.2", 16, true, false, 400'000}})};
  EXPECT_EQ(choose_interfaces(nodes, {}).names, (Names{"ib0", "ib0"}));
  nodes[1].interfaces[3].up = false;
  EXPECT_EQ(choose_interfaces(nodes, {}).names, (Names{"eth0", "eth0"}));
  nodes[1].interfaces[2].up = false;
  EXPECT_EQ(error_of([&] { choose_interfaces(nodes, {}); }),
            "interfaces: node b has no interface that is up in a subnet which nodes a to a share");
}

TEST(Interfaces, ContainerBridgesAreNotShared) {
  // Also under a name that nobody could know: the address is the same on both nodes.
  const Interface bridge{"mybridge", "10.88.0.1", 16, true, false, 10'000};
  const NodeInterfaces nodes[] = {node("a", {bridge}), node("b", {bridge})};
  EXPECT_EQ(error_of([&] { choose_interfaces(nodes, {}); }),
            "interfaces: two nodes have the same address in every subnet that all share");
  const NodeInterfaces only_docker[] = {node("a", {}), node("b", {})};
  EXPECT_TRUE(error_of([&] { choose_interfaces(only_docker, {}); }).starts_with("interfaces: node a has no interface"));
}

TEST(Interfaces, ListedNamesAreExactAndOrdered) {
  const NodeInterfaces nodes[] = {node("a", {{"eth0", "10.1.0.1", 16}, {"eth01", "10.2.0.1", 16}}),
                                  node("b", {{"eth0", "10.1.0.2", 16}, {"eth01", "10.2.0.2", 16}})};
  EXPECT_EQ(choose_interfaces(nodes, {false, {"eth01", "eth0"}}).names, (Names{"eth01", "eth01"}));
  EXPECT_EQ(error_of([&] {
              choose_interfaces(nodes, {false, {"eth"}});
            }),
            "interfaces: none of those listed is up on node a; allowed: lo, docker0, eth0, eth01");
}

TEST(Interfaces, SingleNodeUsesLoopback) {
  const NodeInterfaces nodes[] = {node("a", {{"eth0", "10.1.0.1", 16}})};
  EXPECT_EQ(choose_interfaces(nodes, {}).names, Names{"lo"});
  EXPECT_EQ(choose_interfaces(nodes, {false, {"eth0"}}).names, Names{"eth0"});
}

TEST(Interfaces, SixteenByteAddressesAndOddPrefixes) {
  const NodeInterfaces nodes[] = {{"a", {{"e", "fd00::1:1", 107}, {"f", "10.0.0.9", 30}}},
                                  {"b", {{"e", "fd00::1:2", 107}, {"f", "10.0.0.14", 30}}}};
  EXPECT_EQ(choose_interfaces(nodes, {}).names, (Names{"e", "e"}));  // 10.0.0.8/30 and 10.0.0.12/30 differ
}

TEST(Interfaces, ThisMachineHasLoopback) {
  const std::vector<Interface> found = local_interfaces();
  const auto lo = std::find_if(found.begin(), found.end(), [](const Interface& i) { return i.loopback; });
  ASSERT_NE(lo, found.end());
  EXPECT_TRUE(lo->up);
  EXPECT_EQ(lo->address, "127.0.0.1");
  EXPECT_EQ(lo->prefix, 8);
}

}  // namespace
}  // namespace oomb::plan
