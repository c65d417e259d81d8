// One of two ranks that share a folder but no network of MPI: for tests that put them into network namespaces.
//
// usage: comm_cable read RANK PREFIX   rank 0 reads 64 MiB from rank 1 and prints "read N bytes"
//        comm_cable cut RANK PREFIX    rank 0 makes PREFIX.waiting and waits for means; both must get a PeerLost of the
//        other
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "comm/exchange/page_exchange.h"
#include "comm/exchange/ucx_transport.h"

namespace oomb::comm {
namespace {

// The n-th exchange of texts through files, each written whole and then renamed.
class Files {
 public:
  Files(std::string prefix, int rank) : prefix_(std::move(prefix)), rank_(rank) {}

  std::vector<std::string> all_gather(const std::string& own) {
    ++turn_;
    const std::string name = name_of(rank_);
    std::ofstream(name + ".new", std::ios::binary) << own;
    std::filesystem::rename(name + ".new", name);
    std::vector<std::string> all(2);
    for (int rank = 0; rank < 2; ++rank) {
      const Deadline deadline = in_seconds(30);
      while (!std::filesystem::exists(name_of(rank))) {
        if (Clock::now() > deadline) throw DeadlinePassed("the other rank's file");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      std::ifstream file(name_of(rank), std::ios::binary);
      all[static_cast<std::size_t>(rank)].assign(std::istreambuf_iterator<char>(file), {});
    }
    return all;
  }

 private:
  std::string name_of(int rank) const { return prefix_ + "." + std::to_string(turn_) + "." + std::to_string(rank); }
  const std::string prefix_;
  const int rank_;
  int turn_ = 0;
};

void read(Transport& transport, Files& files) {
  constexpr std::int64_t total = std::int64_t{64} << 20, page = std::int64_t{256} << 10;
  std::vector<std::byte> home(total, std::byte{5}), target(total);
  const SegmentId segment = transport.register_segment(home.data(), total, MemoryKind::kHost, in_seconds(30));
  files.all_gather("registered");
  if (transport.rank() == 0) {
    std::vector<GetRequest> gets;
    for (std::int64_t at = 0; at < total; at += page) gets.push_back({1, {segment, at}, target.data() + at, page});
    transport.wait(transport.get(gets), in_seconds(40), "pages over the cable");
    if (target != home) throw std::runtime_error("the wrong bytes came");
    std::printf("read %lld bytes\n", static_cast<long long>(total));
  }
  files.all_gather("read");
}

void wait_for_the_cut(Transport& transport, const std::string& prefix) {
  PageExchange exchange(&transport, {});
  SequenceShape shape;
  shape.num_layers = 1;
  shape.num_pages = 2;
  shape.pages_per_chunk = 1;
  shape.num_workers = 2;
  exchange.begin_sequence(shape);
  if (transport.rank() == 0) std::ofstream(prefix + ".waiting") << "\n";
  try {
    exchange.take_means(0, 1 - transport.rank(), in_seconds(40));
    throw std::runtime_error("means came through a cut cable");
  } catch (const PeerLost& lost) {
    std::printf("%s\n", lost.what());
    if (lost.rank() != 1 - transport.rank()) throw std::runtime_error("the wrong rank is named");
  }
}

}  // namespace
}  // namespace oomb::comm

int main(int argc, char** argv) {
  using namespace oomb::comm;  // NOLINT(google-build-using-namespace)
  if (argc != 4) {
    std::fprintf(stderr, "usage: comm_cable read|cut RANK PREFIX\n");
    return 2;
  }
  try {
    const std::string mode = argv[1];
    Files files(argv[3], std::stoi(argv[2]));
    UcxOptions options;
    options.rank = std::stoi(argv[2]);
    options.size = 2;
    options.lost_seconds = 2;
    const auto transport = make_ucx_transport(options, [&](const std::string& own) { return files.all_gather(own); });
    if (mode == "read") {
      read(*transport, files);
    } else {
      wait_for_the_cut(*transport, argv[3]);
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
