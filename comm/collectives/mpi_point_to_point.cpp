#include "comm/collectives/mpi_point_to_point.h"

#include <array>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>

#include "comm/errors.h"

namespace oomb::comm {

namespace {

constexpr int kTag = 1;
constexpr int kIdleTurnsBeforeSleep = 200;
constexpr auto kIdleSleep = std::chrono::microseconds(50);

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(std::string("MPI, ") + what + ": " + text.data());
}

class MpiPointToPoint final : public PointToPoint {
 public:
  explicit MpiPointToPoint(MPI_Comm communicator) {
    check_mpi(MPI_Comm_dup(communicator, &communicator_), "duplicating a communicator");
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(communicator_, &rank_);
    MPI_Comm_size(communicator_, &size_);
  }
  // Freeing waits for what is under way, so after a failure the communicator is left alone.
  ~MpiPointToPoint() override {
    if (requests_.empty()) MPI_Comm_free(&communicator_);
  }
  MpiPointToPoint(const MpiPointToPoint&) = delete;
  MpiPointToPoint& operator=(const MpiPointToPoint&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override { return "mpi"; }

  Request start_send(int peer, const void* data, std::int64_t bytes) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Isend(data, count_of(bytes), MPI_BYTE, peer, kTag, communicator_, &request), "starting a send");
    return keep(request);
  }

  Request start_receive(int peer, void* data, std::int64_t bytes) override {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Irecv(data, count_of(bytes), MPI_BYTE, peer, kTag, communicator_, &request), "starting a receive");
    return keep(request);
  }

  bool test(Request request) override {
    const auto found = requests_.find(request);
    if (found == requests_.end()) throw std::logic_error("no such request");
    int done = 0;
    check_mpi(MPI_Test(&found->second, &done, MPI_STATUS_IGNORE), "waiting for a message");
    if (done == 0) return false;
    requests_.erase(found);
    idle_turns_ = 0;
    return true;
  }

  // Short waits stay awake; in long ones ranks that compute on the same cores go first.
  void idle() override {
    if (++idle_turns_ < kIdleTurnsBeforeSleep) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kIdleSleep);
    }
  }

 private:
  static int count_of(std::int64_t bytes) {
    if (bytes < 0 || bytes > kMaxBytes) throw std::logic_error("a piece of " + std::to_string(bytes) + " bytes");
    return static_cast<int>(bytes);
  }
  Request keep(MPI_Request request) {
    requests_[++last_] = request;
    return last_;
  }

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::unordered_map<Request, MPI_Request> requests_;
  Request last_ = 0;
  int idle_turns_ = 0;
};

}  // namespace

std::unique_ptr<PointToPoint> make_mpi_point_to_point(MPI_Comm communicator) {
  return std::make_unique<MpiPointToPoint>(communicator);
}

}  // namespace oomb::comm
