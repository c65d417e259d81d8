// UCX's objects with owners, and its status codes as our errors. Included by the UCX backend only.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "comm/errors.h"
#include "comm/memory_kind.h"

namespace oomb::comm {

/// CommError "what: UCX's text" unless `status` is UCS_OK.
void check_ucx(ucs_status_t status, const std::string& what);

ucs_memory_type_t ucx_memory_type(MemoryKind kind);

/// A context and the one worker that uses it. The worker belongs to one thread at a time; map and unmap may be called
/// from any thread.
class UcxWorker {
 public:
  /// CommError when UCX cannot start, or for a UCX_TLS that is known to crash.
  UcxWorker();
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h get() const { return worker_; }
  bool supports(MemoryKind kind) const;
  std::string address() const;
  /// Readable when arm() has succeeded and something happens.
  int event_fd() const;

  ucp_context_h context() const { return context_; }

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::uint64_t memory_types_ = 0;
};

/// Memory that peers may read, for as long as this lives; the worker's context must outlive it.
class UcxMemory {
 public:
  UcxMemory(const UcxWorker& worker, void* memory, std::int64_t bytes, MemoryKind kind);
  ~UcxMemory();
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;
  /// What a peer unpacks.
  std::string packed_key() const;

 private:
  ucp_context_h context_;
  ucp_mem_h handle_ = nullptr;
};

/// A peer's key, tied to the endpoint that unpacked it. Ends before the worker does.
struct UcxKeyDeleter {
  void operator()(ucp_rkey_h key) const { ucp_rkey_destroy(key); }
};
using UcxKey = std::unique_ptr<std::remove_pointer_t<ucp_rkey_h>, UcxKeyDeleter>;
UcxKey unpack_key(ucp_ep_h endpoint, const void* packed, int peer);

/// An endpoint to the worker with this address; `on_error` is called with `argument` when the connection breaks.
ucp_ep_h connect_ucx(const UcxWorker& worker, const std::string& address, ucp_err_handler_cb_t on_error,
                     void* argument);

/// Names of the transports an endpoint uses, joined by '+', from UCX's own description; "?" if it has none.
std::string transports_of(ucp_ep_h endpoint);

}  // namespace oomb::comm
