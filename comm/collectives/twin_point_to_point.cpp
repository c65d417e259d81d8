#include "comm/collectives/twin_point_to_point.h"

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace oomb::comm {

namespace {

struct Mailboxes {
  explicit Mailboxes(int num_ranks) : size(num_ranks), boxes(static_cast<std::size_t>(num_ranks * num_ranks)) {}
  std::deque<std::vector<std::byte>>& box(int from, int to) {
    return boxes[static_cast<std::size_t>(from * size + to)];
  }
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<std::vector<std::byte>>> boxes;  // [from, to]
};

class TwinPointToPoint final : public PointToPoint {
 public:
  TwinPointToPoint(std::shared_ptr<Mailboxes> mail, int rank)
      : mail_(std::move(mail)), rank_(rank), waiting_(static_cast<std::size_t>(mail_->size)) {}

  int rank() const override { return rank_; }
  int size() const override { return mail_->size; }
  std::string description() const override { return "threads"; }

  Request start_send(int peer, const void* data, std::int64_t bytes) override {
    const auto* begin = static_cast<const std::byte*>(data);
    const std::lock_guard lock(mail_->mutex);
    mail_->box(rank_, peer).emplace_back(begin, begin + bytes);
    mail_->changed.notify_all();
    return ++last_;
  }

  Request start_receive(int peer, void* data, std::int64_t bytes) override {
    waiting_[static_cast<std::size_t>(peer)].push_back({++last_, data, bytes});
    receivers_[last_] = peer;
    return last_;
  }

  bool test(Request request) override {
    const auto found = receivers_.find(request);
    if (found == receivers_.end()) return true;  // a send
    const int peer = found->second;
    auto& waiting = waiting_[static_cast<std::size_t>(peer)];
    if (waiting.front().request != request) return false;  // earlier ones first
    std::vector<std::byte> letter;
    {
      const std::lock_guard lock(mail_->mutex);
      auto& box = mail_->box(peer, rank_);
      if (box.empty()) return false;
      letter = std::move(box.front());
      box.pop_front();
    }
    const Receive receive = waiting.front();
    if (static_cast<std::int64_t>(letter.size()) != receive.bytes) {
      throw std::logic_error("a message of " + std::to_string(letter.size()) + " bytes where " +
                             std::to_string(receive.bytes) + " are received");
    }
    if (!letter.empty()) std::memcpy(receive.data, letter.data(), letter.size());
    waiting.pop_front();
    receivers_.erase(found);
    return true;
  }

  void idle() override {
    std::unique_lock lock(mail_->mutex);
    mail_->changed.wait_for(lock, std::chrono::microseconds(100));
  }

 private:
  struct Receive {
    Request request;
    void* data;
    std::int64_t bytes;
  };
  std::shared_ptr<Mailboxes> mail_;
  const int rank_;
  std::vector<std::deque<Receive>> waiting_;    // by peer, in the order of start
  std::unordered_map<Request, int> receivers_;  // request -> peer
  Request last_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<PointToPoint>> make_twin_point_to_point(int size) {
  const auto mail = std::make_shared<Mailboxes>(size);
  std::vector<std::unique_ptr<PointToPoint>> ends;
  for (int rank = 0; rank < size; ++rank) ends.push_back(std::make_unique<TwinPointToPoint>(mail, rank));
  return ends;
}

}  // namespace oomb::comm
