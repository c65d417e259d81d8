// The little that pairwise collectives need from a network: non-blocking sends and receives between ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace oomb::comm {

/// One rank's end. Messages between two ranks are matched in the order in which they were started. Not thread-safe.
class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string description() const = 0;

  using Request = std::int64_t;
  /// `bytes` is at most kMaxBytes and the same on both sides. The buffer stays the caller's and must live until test()
  /// says so; after a failure, until this object is gone.
  virtual Request start_send(int peer, const void* data, std::int64_t bytes) = 0;
  virtual Request start_receive(int peer, void* data, std::int64_t bytes) = 0;
  static constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;

  /// Whether it is complete; drives progress. True ends the request. CommError when the network reports a failure.
  virtual bool test(Request request) = 0;
  /// Called when nothing was complete: gives way to whoever has something to do, for at most about 100 us.
  virtual void idle() = 0;
};

}  // namespace oomb::comm
