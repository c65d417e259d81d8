// One rank of a group of real processes: collectives over MPI and the page exchange over UCX. Started by mpirun.
//
// usage: comm_ranks step [SEED]            everything, checked; the last line of each rank is "rank R ok"
//        comm_ranks fault WHERE HOW        the last rank stops (HOW: stop) or kills (HOW: kill) itself while the others
//                                          are in WHERE: means, get, contribution, reduce_scatter, segment. Each of
//                                          them must get a PeerLost that names it, and then prints "rank R ok".
#include <mpi.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/collectives/mpi_point_to_point.h"
#include "comm/collectives/pairwise_collectives.h"
#include "comm/exchange/link_measurement.h"
#include "comm/exchange/page_exchange.h"
#include "comm/exchange/ucx_transport.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/toy_step.h"

namespace oomb::comm {
namespace {

constexpr double kLostSeconds = 5.0;  // a progress thread of a busy machine may be kept waiting for long
constexpr double kPatience = 60;      // no step of these tests takes that long on a busy machine

struct Group {
  explicit Group(double lost_seconds) {
    const auto gather = [this](const std::string& own) {
      return collectives->all_gather_bytes(own, in_seconds(kPatience));
    };
    collectives = make_pairwise_collectives(make_mpi_point_to_point(MPI_COMM_WORLD),
                                            [this] { return transport ? transport->failure() : nullptr; });
    UcxOptions options;
    options.rank = collectives->rank();
    options.size = collectives->size();
    options.lost_seconds = lost_seconds;
    options.goodbye_seconds = 20;
    transport = make_ucx_transport(options, gather);
  }
  int rank() const { return collectives->rank(); }
  int size() const { return collectives->size(); }

  std::unique_ptr<Collectives> collectives;
  std::unique_ptr<Transport> transport;
};

void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong: " + what);
}

// Sizes at which transports change their ways, between two registered buffers.
void check_gets(Group& group) {
  if (group.size() == 1) return;
  constexpr std::int64_t most = std::int64_t{3} << 20;
  std::vector<unsigned char> home(most), target(most);
  for (std::size_t i = 0; i < home.size(); ++i) {
    home[i] = static_cast<unsigned char>((i * 31 + i / 251 + static_cast<std::size_t>(group.rank())) % 256);
  }
  const SegmentId segment =
      group.transport->register_segment(home.data(), most, MemoryKind::kHost, in_seconds(kPatience));
  group.collectives->barrier(in_seconds(kPatience));
  const int peer = (group.rank() + 1) % group.size();
  for (const std::int64_t bytes : {0l, 1l, 4l, 8l, 288l, 4097l, 65536l, 262144l, static_cast<long>(most) - 5}) {
    std::fill(target.begin(), target.end(), static_cast<unsigned char>(0));
    const GetRequest request{peer, {segment, 5}, target.data(), bytes, MemoryKind::kHost};
    group.transport->wait(group.transport->get({&request, 1}), in_seconds(kPatience), "a get of a test");
    for (std::int64_t i = 0; i < bytes; ++i) {
      const auto at = static_cast<std::size_t>(i + 5);
      expect(target[static_cast<std::size_t>(i)] ==
                 static_cast<unsigned char>((at * 31 + at / 251 + static_cast<std::size_t>(peer)) % 256),
             "byte " + std::to_string(i) + " of a get of " + std::to_string(bytes));
    }
    if (bytes < most - 5) expect(target[static_cast<std::size_t>(bytes)] == 0, "the byte after a get");
  }
  // Many at once, more than are in flight.
  std::vector<GetRequest> many;
  for (std::int64_t i = 0; i < 700; ++i) many.push_back({peer, {segment, i * 4096}, target.data() + i * 4096, 4096});
  group.transport->wait(group.transport->get(many), in_seconds(kPatience), "many gets");
  expect(target[699 * 4096 + 1] ==
             static_cast<unsigned char>(((699 * 4096 + 1) * 31 + (699 * 4096 + 1) / 251 + peer) % 256),
         "the last of many gets");
  group.collectives->barrier(in_seconds(kPatience));
  group.transport->unregister_segment(segment, in_seconds(kPatience));
  group.collectives->barrier(in_seconds(kPatience));
  const GetRequest gone{peer, {segment, 0}, target.data(), 8, MemoryKind::kHost};
  try {
    group.transport->get({&gone, 1});
    expect(false, "a get from a segment that is gone was taken");
  } catch (const std::logic_error&) {
  }
}

// Keeps bodies by their length.
class Received : public MessageSink {
 public:
  void on_message(int peer, MessageKind, std::span<const std::byte> body) override {
    const std::lock_guard lock(mutex_);
    bodies_[{peer, body.size()}].assign(body.begin(), body.end());
    changed_.notify_all();
  }
  void on_failure(const Failure&) override {}
  std::vector<std::byte> take(int peer, std::size_t length) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, in_seconds(kPatience), [&] { return bodies_.contains({peer, length}); })) {
      throw std::runtime_error("no message of " + std::to_string(length) + " bytes came");
    }
    return bodies_[{peer, length}];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, std::size_t>, std::vector<std::byte>> bodies_;
};

// Bodies of all sizes arrive whole, before and after there is a sink.
void check_messages(Group& group) {
  Received received;
  const std::vector<std::size_t> lengths = {0, 1, 8191, 65536, (std::size_t{9} << 20) + 3};
  const auto body_of = [](int rank, std::size_t length) {
    std::vector<std::byte> body(length);
    for (std::size_t i = 0; i < length; ++i)
      body[i] = static_cast<std::byte>(i * 7 + i / 255 + static_cast<std::size_t>(rank));
    return body;
  };
  for (const std::size_t length : lengths) {
    if (length == 8191) group.transport->set_sink(&received);
    group.transport->send_to_all(MessageKind::kUser, body_of(group.rank(), length));
  }
  for (int peer = 0; peer < group.size(); ++peer) {
    for (const std::size_t length : lengths) {
      if (peer == group.rank()) continue;
      expect(received.take(peer, length) == body_of(peer, length), "a message of " + std::to_string(length) + " bytes");
    }
  }
  group.transport->set_sink(nullptr);
  group.collectives->barrier(in_seconds(kPatience));  // or the next sink's messages would come to this one
}

int step(std::uint64_t seed) {
  test::ToyMemory memory;  // outlives the transport
  Group group(30);         // starved ranks of a busy machine are not lost
  test::check_collectives(*group.collectives, kPatience);
  check_gets(group);
  check_messages(group);
  test::ToyOptions options;
  options.seed = seed;
  options.num_steps = 2;
  options.page_values = 1031;
  options.deadline_seconds = kPatience;
  const test::ToyResult result = test::run_toy_steps(*group.transport, options, &memory);
  expect(group.size() == 1 || result.pages_read > 0, "no page was read");
  const LinkMeasurement link = measure_link(*group.transport, 0.05, in_seconds(kPatience));
  std::printf("rank %d: %s\n", group.rank(), describe(link, *group.transport).c_str());
  group.collectives->barrier(in_seconds(kPatience));
  return 0;
}

void pause() {
  Group group(8);
  const int victim = group.size() - 1;
  const auto pids = group.collectives->all_gather_bytes(std::to_string(getpid()), in_seconds(kPatience));
  if (group.rank() == 0) {
    const auto pid = static_cast<pid_t>(std::stol(pids[static_cast<std::size_t>(victim)]));
    kill(pid, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(3));  // more than a heartbeat, less than a loss
    kill(pid, SIGCONT);
  }
  group.collectives->barrier(in_seconds(kPatience));
  check_gets(group);
}

// --- faults ---------------------------------------------------------------------------------------------------------

SequenceShape shape_of(int workers) {
  SequenceShape shape;
  shape.num_layers = 1;
  shape.num_pages = 2 * workers;
  shape.pages_per_chunk = 1;
  shape.num_workers = workers;
  return shape;
}

// Waits for what the victim will never do.
void wait_in(const std::string& where, Group& group, PageExchange& exchange, std::vector<double>& memory) {
  const int victim = group.size() - 1;
  if (where == "means") exchange.take_means(0, victim, in_seconds(kPatience));
  if (where == "contribution") exchange.take_contributions(0, group.size() + victim, in_seconds(kPatience));
  if (where == "reduce_scatter") {
    group.collectives->reduce_scatter_sum(memory.data(), memory.data() + 100000, 1000, ElementType::kFloat64,
                                          in_seconds(kPatience));
  }
  for (const Deadline end = in_seconds(kPatience); where == "get" && Clock::now() < end;) {
    const GetRequest request{victim, {kProbeSegment, 0}, memory.data(), 400000, MemoryKind::kHost};
    group.transport->wait(group.transport->get({&request, 1}), end, "a page of the victim");
  }
  for (const Deadline end = in_seconds(kPatience); where == "segment" && Clock::now() < end;) {
    group.transport->unregister_segment(group.transport->register_segment(memory.data(), 4096, MemoryKind::kHost, end),
                                        end);
  }
  throw std::runtime_error("the wait in " + where + " ended without an error");
}

// Never returns to main: MPI cannot be finalised with a rank that is gone.
[[noreturn]] void fault(const std::string& where, const std::string& how) {
  std::vector<double> memory(200000);  // outlives the transport
  Group group(kLostSeconds);
  auto exchange = std::make_unique<PageExchange>(group.transport.get(), PageExchange::Options{});
  exchange->begin_sequence(shape_of(group.size()));
  const int victim = group.size() - 1;
  const auto pids = group.collectives->all_gather_bytes(std::to_string(getpid()), in_seconds(kPatience));
  group.collectives->barrier(in_seconds(kPatience));
  if (group.rank() == victim) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the others are waiting by then, most often
    if (how == "abort") {
      group.transport->abort("a test");
      std::this_thread::sleep_for(std::chrono::seconds(1));
      _exit(0);
    }
    raise(how == "kill" ? SIGKILL : SIGSTOP);
    _exit(3);
  }
  const Deadline begun = Clock::now();
  int status = 1;
  try {
    wait_in(where, group, *exchange, memory);
  } catch (const PeerLost& lost) {
    const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    std::printf("rank %d: after %.2f s: %s\n", group.rank(), seconds, lost.what());
    status = lost.rank() == victim && seconds < 4 * kLostSeconds ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("rank %d: not a lost peer: %s\n", group.rank(), error.what());
  }
  // Closing after a failure takes no peer's help and little time.
  const Deadline closing = Clock::now();
  exchange.reset();
  group.transport.reset();
  if (Clock::now() - closing > std::chrono::seconds(10)) status = 1;
  if (status == 0) std::printf("rank %d ok\n", group.rank());
  std::fflush(stdout);
  if (group.rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(static_cast<pid_t>(std::stol(pids[static_cast<std::size_t>(victim)])), SIGKILL);  // a stopped one would stay
  }
  _exit(status);
}

}  // namespace
}  // namespace oomb::comm

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "step") {
      oomb::comm::step(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
    } else if (mode == "pause") {
      oomb::comm::pause();
    } else if (mode == "fault" && argc == 4) {
      oomb::comm::fault(argv[2], argv[3]);
    } else {
      throw std::runtime_error("usage: comm_ranks step [SEED] | pause | fault WHERE HOW");
    }
    std::printf("rank %d ok\n", rank);
    MPI_Finalize();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    std::fflush(nullptr);
    _exit(1);
  }
}
