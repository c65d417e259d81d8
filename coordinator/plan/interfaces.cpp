#include "coordinator/plan/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <bit>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "configs/error.h"

namespace oomb::plan {
namespace {

// Networks inside one machine, whatever their address.
bool stays_inside(const Interface& candidate) {
  static constexpr std::array<const char*, 9> kPrefixes = {"docker", "br-",     "virbr", "veth", "cni",
                                                           "podman", "flannel", "cali",  "lxc"};
  if (candidate.loopback) return true;
  return std::any_of(kPrefixes.begin(), kPrefixes.end(), [&](const char* p) { return candidate.name.starts_with(p); });
}

// `10.1.2.3`, 16 -> `10.1.0.0/16`; nothing for what is no address.
std::optional<std::string> subnet_of(const std::string& address, int prefix) {
  std::array<unsigned char, 16> bytes{};
  const int family = address.find(':') == std::string::npos ? AF_INET : AF_INET6;
  if (inet_pton(family, address.c_str(), bytes.data()) != 1) return std::nullopt;
  const int bits = family == AF_INET ? 32 : 128;
  if (prefix < 0 || prefix > bits) return std::nullopt;
  for (int bit = prefix; bit < bits; ++bit)
    bytes[static_cast<std::size_t>(bit / 8)] &= static_cast<unsigned char>(~(0x80 >> bit % 8));
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(family, bytes.data(), text.data(), text.size());
  return std::string(text.data()) + "/" + std::to_string(prefix);
}

std::size_t rank_in(const NameList& wanted, const std::string& name) {
  return static_cast<std::size_t>(std::find(wanted.names.begin(), wanted.names.end(), name) - wanted.names.begin());
}

// Of one subnet: what each node has in it, the best first.
using Candidates = std::vector<const Interface*>;

void check_wanted(const NodeInterfaces& node, const NameList& wanted) {
  if (wanted.automatic) return;
  for (const Interface& i : node.interfaces) {
    if (i.up && rank_in(wanted, i.name) < wanted.names.size()) return;
  }
  std::string has;
  for (const Interface& i : node.interfaces) has += (has.empty() ? "" : ", ") + i.name + (i.up ? "" : " (down)");
  throw InputError("interfaces: none of those listed is up on node " + node.node +
                   "; allowed: " + (has.empty() ? "none, it has no interface with an address" : has));
}

bool distinct_addresses(const Candidates& of_nodes) {
  std::set<std::string> addresses;
  return std::all_of(of_nodes.begin(), of_nodes.end(),
                     [&](const Interface* i) { return addresses.insert(i->address).second; });
}

}  // namespace

std::string InterfaceChoice::text() const {
  std::set<std::string> distinct(names.begin(), names.end());
  std::string list;
  for (const std::string& name : distinct) list += (list.empty() ? "" : ", ") + name;
  return "network: " + list + " (" + subnet + ") on " + std::to_string(names.size()) +
         (names.size() == 1 ? " node" : " nodes");
}

InterfaceChoice choose_interfaces(std::span<const NodeInterfaces> nodes, const NameList& wanted) {
  const bool single = nodes.size() == 1;
  std::map<std::string, Candidates> subnets;  // those that every node so far has an interface in
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    check_wanted(nodes[n], wanted);
    std::map<std::string, const Interface*> best;
    for (const Interface& i : nodes[n].interfaces) {
      if (!i.up || (wanted.automatic ? !single && stays_inside(i) : rank_in(wanted, i.name) == wanted.names.size()))
        continue;
      const auto subnet = subnet_of(i.address, i.prefix);
      if (!subnet) continue;
      const Interface*& kept = best[*subnet];
      const auto worse = [&](const Interface& a, const Interface& b) {
        return std::pair(a.mbits, b.name) < std::pair(b.mbits, a.name);
      };
      if (kept == nullptr || worse(*kept, i)) kept = &i;
    }
    for (auto& [subnet, interface] : best) {
      Candidates& list = subnets[subnet];
      if (list.size() == n) list.push_back(interface);
    }
    std::erase_if(subnets, [&](const auto& entry) { return entry.second.size() != n + 1; });
    if (subnets.empty()) {
      throw InputError("interfaces: node " + nodes[n].node + " has no interface that is up in a subnet " +
                       (n == 0 ? "of its own; allowed: an interface other than loopback and container bridges"
                               : "which nodes " + nodes[0].node + " to " + nodes[n - 1].node + " share"));
    }
  }
  std::erase_if(subnets, [](const auto& entry) { return !distinct_addresses(entry.second); });
  if (subnets.empty()) throw InputError("interfaces: two nodes have the same address in every subnet that all share");

  const auto slowest = [](const Candidates& list) {
    return (*std::min_element(list.begin(), list.end(), [](auto a, auto b) { return a->mbits < b->mbits; }))->mbits;
  };
  const auto better = [&](const auto& a, const auto& b) {
    const Candidates &x = a.second, &y = b.second;
    if (!wanted.automatic && rank_in(wanted, x[0]->name) != rank_in(wanted, y[0]->name))
      return rank_in(wanted, x[0]->name) < rank_in(wanted, y[0]->name);
    if (single && x[0]->loopback != y[0]->loopback) return x[0]->loopback;
    if (slowest(x) != slowest(y)) return slowest(x) > slowest(y);
    return x[0]->name < y[0]->name;
  };
  const auto chosen = std::min_element(subnets.begin(), subnets.end(), better);
  InterfaceChoice choice;
  choice.subnet = chosen->first;
  for (const Interface* i : chosen->second) choice.names.push_back(i->name);
  return choice;
}

std::vector<Interface> local_interfaces() {
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(raw, &freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = list.get(); entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_netmask == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    const void *address = nullptr, *mask = nullptr;
    std::size_t size = 0;
    if (family == AF_INET) {
      address = &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr;
      mask = &reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask)->sin_addr;
      size = sizeof(in_addr);
    } else if (family == AF_INET6) {
      const auto* full = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&full->sin6_addr)) continue;
      address = &full->sin6_addr;
      mask = &reinterpret_cast<const sockaddr_in6*>(entry->ifa_netmask)->sin6_addr;
      size = sizeof(in6_addr);
    } else {
      continue;
    }
    Interface one;
    one.name = entry->ifa_name;
    one.up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
    one.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (inet_ntop(family, address, text.data(), text.size()) == nullptr) continue;
    one.address = text.data();
    const auto* bytes = static_cast<const unsigned char*>(mask);
    for (std::size_t i = 0; i < size; ++i) one.prefix += std::popcount(bytes[i]);
    std::ifstream speed("/sys/class/net/" + one.name + "/speed");  // -1 or unreadable where nobody knows
    if (std::int64_t mbits = 0; speed >> mbits && mbits > 0) one.mbits = mbits;
    found.push_back(std::move(one));
  }
  return found;
}

}  // namespace oomb::plan
