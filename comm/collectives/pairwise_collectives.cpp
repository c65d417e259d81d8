#include "comm/collectives/pairwise_collectives.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace oomb::comm {

std::int64_t bytes_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat64:
      return 8;
    case ElementType::kBFloat16:
      return 2;
    case ElementType::kInt64:
      return 8;
    case ElementType::kByte:
      return 1;
  }
  return 0;
}

const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return "fp32";
    case ElementType::kFloat64:
      return "fp64";
    case ElementType::kBFloat16:
      return "bf16";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kByte:
      return "byte";
  }
  return "?";
}

namespace {

constexpr std::int64_t kSmallBytes = std::int64_t{64} << 10;

std::byte* at(void* data, std::int64_t offset) { return static_cast<std::byte*>(data) + offset; }

// out[i] = parts[0][i] + parts[1][i] + ..., in this order, wide enough that only the last rounding counts.
template <class T, class Wide>
void sum_parts(const std::vector<const std::byte*>& parts, std::byte* out, std::int64_t count) {
  constexpr std::int64_t block = 512;
  Wide sums[block];
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t length = std::min(block, count - begin);
    std::fill(sums, sums + length, Wide{0});
    for (const std::byte* part : parts) {
      const T* values = reinterpret_cast<const T*>(part) + begin;
      for (std::int64_t i = 0; i < length; ++i) sums[i] += static_cast<Wide>(values[i]);
    }
    T* target = reinterpret_cast<T*>(out) + begin;
    for (std::int64_t i = 0; i < length; ++i) target[i] = static_cast<T>(sums[i]);
  }
}

void sum_parts(const std::vector<const std::byte*>& parts, std::byte* out, std::int64_t count, ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return sum_parts<float, double>(parts, out, count);
    case ElementType::kFloat64:
      return sum_parts<double, double>(parts, out, count);
    case ElementType::kInt64:
      return sum_parts<std::int64_t, std::int64_t>(parts, out, count);
    case ElementType::kBFloat16:
    case ElementType::kByte:
      break;
  }
  throw std::logic_error(std::string(name_of(type)) + " is not summed");
}

class PairwiseCollectives final : public Collectives {
 public:
  PairwiseCollectives(std::unique_ptr<PointToPoint> network, FailureWatch watch)
      : network_(std::move(network)), watch_(std::move(watch)) {}

  int rank() const override { return network_->rank(); }
  int size() const override { return network_->size(); }
  MemoryKind memory() const override { return MemoryKind::kHost; }
  std::string description() const override { return "pairwise over " + network_->description(); }

  void reduce_scatter_sum(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                          Deadline deadline) override {
    const Call call(this, "a reduce-scatter", deadline);
    const std::int64_t slice = count_per_rank * bytes_of(type);
    std::vector<std::int64_t> begins(static_cast<std::size_t>(size()) + 1);
    for (int r = 0; r <= size(); ++r) begins[static_cast<std::size_t>(r)] = r * slice;
    reduce_slices(static_cast<const std::byte*>(send), begins, static_cast<std::byte*>(receive), type);
  }

  void all_gather(const void* send, void* receive, std::int64_t count_per_rank, ElementType type,
                  Deadline deadline) override {
    const Call call(this, "an all-gather", deadline);
    const std::int64_t slice = count_per_rank * bytes_of(type);
    std::byte* own = at(receive, rank() * slice);
    if (send != own) std::memmove(own, send, static_cast<std::size_t>(slice));
    std::vector<std::int64_t> begins(static_cast<std::size_t>(size()) + 1);
    for (int r = 0; r <= size(); ++r) begins[static_cast<std::size_t>(r)] = r * slice;
    gather_slices(static_cast<std::byte*>(receive), begins);
  }

  void all_reduce_sum(void* data, std::int64_t count, ElementType type, Deadline deadline) override {
    const Call call(this, "an all-reduce", deadline);
    const std::int64_t width = bytes_of(type), bytes = count * width;
    if (bytes <= kSmallBytes) return reduce_small(static_cast<std::byte*>(data), count, type);
    std::vector<std::int64_t> begins(static_cast<std::size_t>(size()) + 1);
    const std::int64_t share = count / size(), left = count % size();
    for (int r = 0; r <= size(); ++r) {
      begins[static_cast<std::size_t>(r)] = (r * share + std::min<std::int64_t>(r, left)) * width;
    }
    auto* bytes_in_place = static_cast<std::byte*>(data);
    reduce_slices(bytes_in_place, begins, bytes_in_place + begins[static_cast<std::size_t>(rank())], type);
    gather_slices(bytes_in_place, begins);
  }

  // A binomial tree: every rank receives once and sends at most ceil(log2 W) times.
  void broadcast(void* data, std::int64_t count, ElementType type, int root, Deadline deadline) override {
    if (root < 0 || root >= size()) throw std::logic_error("a broadcast from no rank");
    const Call call(this, "a broadcast", deadline);
    const std::int64_t bytes = count * bytes_of(type);
    const int place = (rank() - root + size()) % size();  // the root's place is 0
    int reach = 1;
    while (reach < size()) reach *= 2;
    for (reach /= 2; reach > 0; reach /= 2) {
      if (place % (2 * reach) == reach) move_whole((place - reach + root) % size(), data, bytes, Way::kReceive);
      if (place % (2 * reach) == 0 && place + reach < size()) {
        move_whole((place + reach + root) % size(), data, bytes, Way::kSend);
      }
    }
  }

  // Dissemination: after round k a rank has heard, through others, of 2^(k+1) ranks.
  void barrier(Deadline deadline) override {
    const Call call(this, "a barrier", deadline);
    for (int step = 1; step < size(); step *= 2) {
      send((rank() + step) % size(), nullptr, 0);
      receive((rank() - step + size()) % size(), nullptr, 0);
      wait_all();
    }
  }

  std::vector<std::string> all_gather_bytes(const std::string& own, Deadline deadline) override {
    const Call call(this, "an all-gather of texts", deadline);
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(size()));
    lengths[static_cast<std::size_t>(rank())] = static_cast<std::int64_t>(own.size());
    std::vector<std::int64_t> begins;
    for (int r = 0; r <= size(); ++r) begins.push_back(r * 8);
    gather_slices(reinterpret_cast<std::byte*>(lengths.data()), begins);
    for (int r = 0; r < size(); ++r)
      begins[static_cast<std::size_t>(r) + 1] =
          begins[static_cast<std::size_t>(r)] + lengths[static_cast<std::size_t>(r)];
    std::string all(static_cast<std::size_t>(begins.back()), '\0');
    std::copy(own.begin(), own.end(), all.begin() + begins[static_cast<std::size_t>(rank())]);
    gather_slices(reinterpret_cast<std::byte*>(all.data()), begins);
    std::vector<std::string> texts;
    for (int r = 0; r < size(); ++r) {
      texts.push_back(all.substr(static_cast<std::size_t>(begins[static_cast<std::size_t>(r)]),
                                 static_cast<std::size_t>(lengths[static_cast<std::size_t>(r)])));
    }
    return texts;
  }

  void abort(const std::string& reason) override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    abort_reason_ = {Failure::Kind::kAborted, -1, reason};
    aborted_.store(true);
  }

 private:
  enum class Way { kSend, kReceive };

  // The frame of one operation: what it is called, until when, and that a failed one ends the object's use.
  class Call {
   public:
    Call(PairwiseCollectives* self, const char* what, Deadline deadline)
        : self_(self), uncaught_(std::uncaught_exceptions()) {
      self_->raise_if_aborted(what);
      if (!self_->broken_.empty()) throw Aborted(self_->broken_, what);
      self_->what_ = what;
      self_->deadline_ = deadline;
    }
    ~Call() {
      if (std::uncaught_exceptions() > uncaught_) self_->broken_ = std::string(self_->what_) + " failed before";
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    PairwiseCollectives* self_;
    int uncaught_;
  };

  struct Pending {
    PointToPoint::Request request;
    int peer;
    Way way;
  };

  void send(int peer, const void* data, std::int64_t bytes) {
    pending_.push_back({network_->start_send(peer, data, bytes), peer, Way::kSend});
  }
  void receive(int peer, void* data, std::int64_t bytes) {
    pending_.push_back({network_->start_receive(peer, data, bytes), peer, Way::kReceive});
  }

  void raise_if_aborted(const std::string& waiting_for) {
    if (!aborted_.load()) return;
    const std::lock_guard lock(abort_mutex_);
    abort_reason_.raise(waiting_for);
  }

  void wait_all() {
    while (!pending_.empty()) {
      const std::size_t before = pending_.size();
      std::erase_if(pending_, [&](const Pending& pending) { return network_->test(pending.request); });
      if (pending_.empty()) return;
      raise_if_aborted(what_);
      if (pending_.size() == before) {
        const std::string waiting_for =
            what_ + (pending_[0].way == Way::kSend ? " to send to rank " : " to receive from rank ") +
            std::to_string(pending_[0].peer);
        if (const Failure* failure = watch_ ? watch_() : nullptr) failure->raise(waiting_for);
        if (Clock::now() >= deadline_) throw DeadlinePassed(waiting_for);
        network_->idle();
      }
    }
  }

  std::byte* scratch(std::int64_t bytes) {
    if (static_cast<std::int64_t>(scratch_.size()) < bytes) scratch_.resize(static_cast<std::size_t>(bytes));
    return scratch_.data();
  }

  // Slice r of the vector, bytes [begins[r], begins[r+1]), is summed at rank r: piece by piece, every rank sends each
  // other its part of that rank's slice.
  void reduce_slices(const std::byte* send_from, const std::vector<std::int64_t>& begins, std::byte* sum_to,
                     ElementType type) {
    const std::int64_t width = bytes_of(type);
    const auto slice = [&](int r) {
      return begins[static_cast<std::size_t>(r) + 1] - begins[static_cast<std::size_t>(r)];
    };
    std::int64_t longest = 0;
    for (int r = 0; r < size(); ++r) longest = std::max(longest, slice(r));
    const std::int64_t piece = std::max(width, kScratchBytes / size() / width * width);
    std::byte* incoming = scratch(std::min(piece, longest) * size());
    const std::int64_t room = std::min(piece, longest);
    for (std::int64_t done = 0; done < longest; done += piece) {
      const auto length = [&](int r) { return std::clamp<std::int64_t>(slice(r) - done, 0, piece); };
      std::vector<const std::byte*> parts;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) {
          parts.push_back(send_from + begins[static_cast<std::size_t>(r)] + done);
          continue;
        }
        parts.push_back(incoming + r * room);
        if (length(rank()) > 0) receive(r, incoming + r * room, length(rank()));
        if (length(r) > 0) send(r, send_from + begins[static_cast<std::size_t>(r)] + done, length(r));
      }
      wait_all();
      if (length(rank()) > 0) sum_parts(parts, sum_to + done, length(rank()) / width, type);
    }
  }

  // Every rank sends its slice to each other rank, in pieces that MPI can count.
  void gather_slices(std::byte* data, const std::vector<std::int64_t>& begins) {
    const std::int64_t piece = std::min(PointToPoint::kMaxBytes, kScratchBytes);
    std::int64_t longest = 0;
    for (int r = 0; r < size(); ++r) {
      longest = std::max(longest, begins[static_cast<std::size_t>(r) + 1] - begins[static_cast<std::size_t>(r)]);
    }
    for (std::int64_t done = 0; done < longest; done += piece) {
      for (int distance = 1; distance < size(); ++distance) {
        const int to = (rank() + distance) % size(), from = (rank() - distance + size()) % size();
        const auto length = [&](int r) {
          return std::clamp<std::int64_t>(
              begins[static_cast<std::size_t>(r) + 1] - begins[static_cast<std::size_t>(r)] - done, 0, piece);
        };
        if (length(from) > 0) receive(from, data + begins[static_cast<std::size_t>(from)] + done, length(from));
        if (length(rank()) > 0) send(to, data + begins[static_cast<std::size_t>(rank())] + done, length(rank()));
      }
      wait_all();
    }
  }

  // Everything to everyone, each adds all: one exchange instead of two.
  void reduce_small(std::byte* data, std::int64_t count, ElementType type) {
    const std::int64_t bytes = count * bytes_of(type);
    std::byte* all = scratch(std::max<std::int64_t>(bytes, 1) * size());
    std::vector<std::int64_t> begins;
    std::vector<const std::byte*> parts;
    for (int r = 0; r <= size(); ++r) begins.push_back(r * bytes);
    for (int r = 0; r < size(); ++r) parts.push_back(all + r * bytes);
    if (bytes > 0) std::memcpy(all + rank() * bytes, data, static_cast<std::size_t>(bytes));
    gather_slices(all, begins);
    sum_parts(parts, data, count, type);
  }

  void move_whole(int peer, void* data, std::int64_t bytes, Way way) {
    for (std::int64_t done = 0; done < bytes; done += PointToPoint::kMaxBytes) {
      const std::int64_t length = std::min(PointToPoint::kMaxBytes, bytes - done);
      if (way == Way::kSend) {
        send(peer, at(data, done), length);
      } else {
        receive(peer, at(data, done), length);
      }
    }
    wait_all();
  }

  std::vector<std::byte> scratch_;  // outlives the network below, which may still write to it after a failure
  std::unique_ptr<PointToPoint> network_;
  const FailureWatch watch_;
  std::vector<Pending> pending_;
  std::string what_, broken_;
  Deadline deadline_;
  std::atomic<bool> aborted_{false};
  std::mutex abort_mutex_;
  Failure abort_reason_;
};

}  // namespace

std::unique_ptr<Collectives> make_pairwise_collectives(std::unique_ptr<PointToPoint> network, FailureWatch watch) {
  return std::make_unique<PairwiseCollectives>(std::move(network), std::move(watch));
}

}  // namespace oomb::comm
