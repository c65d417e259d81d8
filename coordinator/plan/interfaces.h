// The network interface that workers of several nodes talk over.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "configs/topology.h"

namespace oomb::plan {

struct Interface {
  std::string name;
  std::string address;  // IPv4 or IPv6, numeric
  int prefix = 0;       // bits of the subnet
  bool up = true;       // administratively, with a carrier
  bool loopback = false;
  std::int64_t mbits = 0;  // speed of the link; 0: unknown
};

struct NodeInterfaces {
  std::string node;
  std::vector<Interface> interfaces;
};

struct InterfaceChoice {
  std::vector<std::string> names;  // one for each node, in their order
  std::string subnet;              // such as 10.1.0.0/16
  std::string text() const;        // one line, to be shown
};

/// The interfaces over which every node reaches every other: up, in one subnet, with an address of its own on each
/// node (container bridges have the same one everywhere). `wanted` that is not auto permits only those exact names, the
/// first of them preferred. Else the fastest link wins, then the first name; loopback and the bridges of container and
/// virtual-machine engines are taken on a single node only. InputError names the node or subnet that stands in the way.
InterfaceChoice choose_interfaces(std::span<const NodeInterfaces> nodes, const NameList& wanted);

/// Those of this machine that have an address; link-local ones are left out.
std::vector<Interface> local_interfaces();

}  // namespace oomb::plan
