// What the links of this machine or cluster give the page exchange and the collectives, against the bytes and messages
// that the headers of comm/ promise. Started by mpirun or srun, two ranks or more; rank 0 prints.
//
// usage: comm_bench [--json] [--in-flight N]
// Each figure is the median of its repetitions after a warm-up; ranks work at the same time, so all links are busy.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/collectives/mpi_point_to_point.h"
#include "comm/collectives/pairwise_collectives.h"
#include "comm/exchange/ucx_transport.h"

namespace oomb::comm {
namespace {

constexpr double kPatience = 120;
constexpr int kTimes = 9;

double seconds_of(const std::function<void()>& call) {
  const auto begun = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

// Counts what arrives.
class Counter : public MessageSink {
 public:
  void on_message(int, MessageKind, std::span<const std::byte>) override { add(); }
  void on_failure(const Failure&) override { add(); }
  void wait_for(int count) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, in_seconds(kPatience), [&] { return count_ >= count; })) {
      throw DeadlinePassed("messages of a benchmark");
    }
  }

 private:
  void add() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

class Bench {
 public:
  Bench(bool json, int in_flight) : json_(json) {
    collectives_ = make_pairwise_collectives(make_mpi_point_to_point(MPI_COMM_WORLD), {});
    if (collectives_->size() < 2) throw CommError("start it with two ranks or more: mpirun -np 2 comm_bench");
    UcxOptions options;
    options.rank = collectives_->rank();
    options.size = collectives_->size();
    if (in_flight > 0) options.max_gets_in_flight = in_flight;
    transport_ = make_ucx_transport(
        options, [this](const std::string& own) { return collectives_->all_gather_bytes(own, in_seconds(kPatience)); });
    if (collectives_->rank() == 0 && !json_) {
      std::printf("%d ranks, pages over %s, collectives %s; figures of rank 0\n\n", collectives_->size(),
                  transport_->description().c_str(), collectives_->description().c_str());
      std::printf("%-34s %12s %14s %14s %10s\n", "what", "bytes", "promised", "moved", "");
    }
  }

  void gets() {
    constexpr std::int64_t total = std::int64_t{16} << 20;
    std::vector<std::byte> home(total, std::byte{3}), target(total);
    const SegmentId segment =
        transport_->register_segment(home.data(), total, MemoryKind::kHost, in_seconds(kPatience));
    const int peer = (transport_->rank() + 1) % transport_->size();
    collectives_->barrier(in_seconds(kPatience));
    // 256 KiB is a page of Qwen2.5-7B in bf16.
    for (const std::int64_t bytes : {4096, 65536, 262144, 1048576}) {
      std::vector<GetRequest> requests;
      for (std::int64_t at = 0; at < total; at += bytes)
        requests.push_back({peer, {segment, at}, target.data() + at, bytes});
      const std::int64_t before = transport_->traffic().peers[static_cast<std::size_t>(peer)].got.bytes;
      const double seconds =
          median([&] { transport_->wait(transport_->get(requests), in_seconds(kPatience), "gets of a benchmark"); });
      const std::int64_t moved = transport_->traffic().peers[static_cast<std::size_t>(peer)].got.bytes - before;
      if (target[total - 1] != std::byte{3}) throw CommError("a get brought the wrong bytes");
      print("gets, many at once", bytes, total * (kTimes + 1), moved, static_cast<double>(total) / seconds * 1e-9,
            "GB/s");
    }
    GetRequest one{peer, {segment, 0}, target.data(), 8};
    const double seconds = median(
        [&] {
          transport_->wait(transport_->get({&one, 1}), in_seconds(kPatience), "a get of a benchmark");
        },
        200);
    print("one get at a time", 8, 8, 8, seconds * 1e6, "us");
    collectives_->barrier(in_seconds(kPatience));
    transport_->unregister_segment(segment, in_seconds(kPatience));
  }

  // Ranks 2k and 2k+1 answer each other.
  void messages() {
    Counter counter;
    transport_->set_sink(&counter);
    const int peer = transport_->rank() ^ 1;
    if (peer < transport_->size()) {
      for (const std::size_t bytes : {std::size_t{64}, std::size_t{65536}}) {
        const std::vector<std::byte> body(bytes);
        const auto sent = [&] {
          return transport_->traffic().peers[static_cast<std::size_t>(peer)].sent[static_cast<int>(MessageKind::kUser)];
        };
        const Traffic::Count before = sent();
        constexpr int rounds = 300;
        const double seconds = median(
            [&] {
              if (transport_->rank() < peer) transport_->send(peer, MessageKind::kUser, body);
              counter.wait_for(++expected_);
              if (transport_->rank() > peer) transport_->send(peer, MessageKind::kUser, body);
            },
            rounds);
        print("message there and back, half", static_cast<std::int64_t>(bytes),
              static_cast<std::int64_t>(bytes) * (rounds + 1), sent().bytes - before.bytes, seconds * 1e6 / 2, "us");
      }
    }
    collectives_->barrier(in_seconds(kPatience));
    transport_->set_sink(nullptr);
  }

  void sums() {
    const int size = collectives_->size();
    for (const std::int64_t count : {std::int64_t{1} << 14, std::int64_t{1} << 20}) {
      std::vector<float> all(static_cast<std::size_t>(count * size), 1.0f), own(static_cast<std::size_t>(count));
      const std::int64_t bytes = count * size * 4, promised = bytes / size * (size - 1);
      double seconds = median([&] {
        collectives_->reduce_scatter_sum(all.data(), own.data(), count, ElementType::kFloat32, in_seconds(kPatience));
      });
      if (own[0] != static_cast<float>(size)) throw CommError("a reduce-scatter gave the wrong sum");
      print("reduce_scatter_sum fp32", bytes, promised, -1, static_cast<double>(promised) / seconds * 1e-9, "GB/s");
      seconds = median([&] {
        collectives_->all_gather(own.data(), all.data(), count, ElementType::kFloat32, in_seconds(kPatience));
      });
      print("all_gather fp32", bytes, promised, -1, static_cast<double>(promised) / seconds * 1e-9, "GB/s");
    }
    const double seconds = median([&] { collectives_->barrier(in_seconds(kPatience)); }, 50);
    print("barrier", 0, 0, 0, seconds * 1e6, "us");
  }

 private:
  static double median(const std::function<void()>& call, int times = kTimes) {
    call();
    std::vector<double> seconds;
    for (int i = 0; i < times; ++i) seconds.push_back(seconds_of(call));
    std::nth_element(seconds.begin(), seconds.begin() + times / 2, seconds.end());
    return seconds[static_cast<std::size_t>(times / 2)];
  }

  // `moved` is what the transport counted, -1 where nothing counts.
  void print(const char* what, std::int64_t bytes, std::int64_t promised, std::int64_t moved, double value,
             const char* unit) {
    if (moved >= 0 && promised != moved) {
      throw CommError(std::string(what) + " moved " + std::to_string(moved) + " bytes instead of " +
                      std::to_string(promised));
    }
    if (collectives_->rank() != 0) return;
    if (json_) {
      std::printf(
          "{\"what\": \"%s\", \"ranks\": %d, \"transport\": \"%s\", \"bytes\": %lld, \"value\": %.4g, \"unit\": "
          "\"%s\"}\n",
          what, collectives_->size(), transport_->description().c_str(), static_cast<long long>(bytes), value, unit);
    } else {
      const std::string counted = moved < 0 ? "" : std::to_string(moved);
      std::printf("%-34s %12lld %14lld %14s %10.2f %s\n", what, static_cast<long long>(bytes),
                  static_cast<long long>(promised), counted.c_str(), value, unit);
    }
    std::fflush(stdout);
  }

  const bool json_;
  std::unique_ptr<Collectives> collectives_;
  std::unique_ptr<Transport> transport_;
  int expected_ = 0;
};

}  // namespace
}  // namespace oomb::comm

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  int status = 0;
  try {
    bool json = false;
    int in_flight = 0;
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "--json") == 0) {
        json = true;
      } else if (std::strcmp(argv[i], "--in-flight") == 0 && i + 1 < argc) {
        in_flight = std::stoi(argv[++i]);
      } else {
        throw oomb::comm::CommError("usage: comm_bench [--json] [--in-flight N]");
      }
    }
    oomb::comm::Bench bench(json, in_flight);
    bench.gets();
    bench.messages();
    bench.sums();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "comm_bench: %s\n", error.what());
    status = 1;
  }
  if (status != 0) _exit(status);  // other ranks may be anywhere, so MPI cannot be finalised
  MPI_Finalize();
  return status;
}
