// The UCX transport's inside, shared by its two halves: ucx_transport.cpp has what application threads do,
// ucx_progress.cpp what the progress thread does. They meet in the two queues.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/exchange/transport_base.h"
#include "comm/exchange/ucx_handles.h"
#include "comm/exchange/ucx_transport.h"
#include "comm/exchange/wire.h"

namespace oomb::comm {

/// First byte of a kSegment and of a kGoodbye message.
enum class SegmentWord : std::uint8_t { kAdd, kAdded, kDrop, kDropped };
enum class GoodbyeWord : std::uint8_t { kDone, kFailed };

/// UCX's number of our one kind of active message, and the header in front of each.
inline constexpr unsigned kUcxMessageId = 1;
struct UcxEnvelope {
  std::uint32_t kind = 0;
  std::int32_t sender = 0;
};

using Body = std::shared_ptr<const std::vector<std::byte>>;
inline Body body_of(std::span<const std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
}
inline std::span<const std::byte> as_bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class UcxTransport final : public TransportBase {
 public:
  /// See make_ucx_transport(). failure() says whether the peers answered.
  UcxTransport(const UcxOptions& options, const AllGatherBytes& all_gather);
  ~UcxTransport() override;

  std::string description() const override { return "ucx " + transports_; }
  bool supports(MemoryKind kind) const override { return worker_.supports(kind); }
  SegmentId register_segment(void* memory, std::int64_t bytes, MemoryKind kind, Deadline deadline) override;
  void unregister_segment(SegmentId segment, Deadline deadline) override;
  void send(int peer, MessageKind kind, std::span<const std::byte> body) override;
  void send_to_all(MessageKind kind, std::span<const std::byte> body) override;
  Ticket get(std::span<const GetRequest> requests) override;

 private:
  struct Peer {  // of the progress thread alone
    UcxTransport* owner = nullptr;
    int rank = 0;
    ucp_ep_h endpoint = nullptr;
    Deadline last_heard, last_sent;
    Deadline broken_since = Deadline::max();  // when its connection was seen to be broken
    std::string how_broken;
    bool connected = false, left = false, heartbeat_pending = false;
  };
  struct Outgoing {
    int peer = 0;
    MessageKind kind = MessageKind::kUser;
    Body body;
    std::int64_t queued_bytes = 0;
  };
  struct Sending : Outgoing {  // until UCX is done with it
    UcxTransport* owner = nullptr;
    UcxEnvelope envelope;
  };
  struct RemoteSegment {
    UcxKey key;
    std::uint64_t begin = 0;
    std::int64_t bytes = 0;
    std::int64_t gets_under_way = 0;
    bool dropping = false;
  };
  using RemoteId = std::pair<int, SegmentId>;
  struct Getting {
    UcxTransport* owner = nullptr;
    GetRequest request;
    Ticket ticket = 0;
  };

  // --- application threads
  void enqueue(Outgoing message);
  void tell_all(MessageKind kind, const Body& body);
  void wake();
  void wait_for_answers(std::map<SegmentId, int>& missing, SegmentId segment, Deadline deadline, const char* what);
  Body segment_word(SegmentWord word, SegmentId segment) const;

  // --- the progress thread
  void run();
  void connect_and_run();
  bool progress();
  bool submit();
  void start_send(Outgoing message);
  void start_get(const Getting& get);
  void finish_get(Getting* get, ucs_status_t status);
  void watch(Deadline now);
  void send_heartbeats(Deadline now);
  void sleep();
  void received(const UcxEnvelope& envelope, std::span<const std::byte> body);
  void segment_message(int peer, std::span<const std::byte> body);
  void goodbye_message(int peer, std::span<const std::byte> body);
  void add_segment(int peer, SegmentId segment, WireReader& reader);
  void drop_if_unused(std::map<RemoteId, RemoteSegment>::iterator at);
  void broken(Peer& peer, ucs_status_t status);
  void pass_on_failure();
  void close();
  bool everyone_left() const;
  template <class Done>
  void progress_until(Deadline deadline, Done done);

  static ucs_status_t on_message(void* self, const void* header, std::size_t header_length, void* data,
                                 std::size_t length, const ucp_am_recv_param_t* param);
  static void on_error(void* peer, ucp_ep_h, ucs_status_t status) {
    static_cast<Peer*>(peer)->owner->broken(*static_cast<Peer*>(peer), status);
  }
  static void on_sent(void* request, ucs_status_t status, void* sending);
  static void on_got(void* request, ucs_status_t status, void* getting);

  const UcxOptions options_;
  UcxWorker worker_;
  std::string transports_ = "?";
  std::vector<Peer> peers_;
  int wake_fd_ = -1, event_fd_ = -1;
  std::thread thread_;

  // Under queue_mutex_.
  std::mutex queue_mutex_;
  std::deque<Outgoing> outgoing_;
  std::deque<Getting> gets_;
  bool sleeping_ = false, closing_ = false;

  // Under segments_mutex_; entries come and go on the progress thread.
  std::mutex segments_mutex_;
  std::map<RemoteId, RemoteSegment> remote_;

  std::vector<std::byte> probe_;

  // Under mutex_ of the base.
  std::map<SegmentId, std::unique_ptr<UcxMemory>> own_segments_;
  std::map<SegmentId, int> keys_to_come_, keys_to_go_;  // peers that have not answered yet
  SegmentId last_segment_ = kProbeSegment;
  int num_connected_ = 0;

  // Of the progress thread.
  int gets_in_flight_ = 0;
  std::int64_t sends_in_flight_ = 0;
  bool failure_passed_on_ = false, shutting_ = false;
  Deadline last_turn_;
};

}  // namespace oomb::comm
