#include "comm/exchange/ucx_handles.h"

#include <cstdio>
#include <cstdlib>
#include <set>

namespace oomb::comm {

namespace {

// UCX crashes when it may use gdr_copy for GPU memory but nothing that copies plainly.
void check_transport_list() {
  const char* list = std::getenv("UCX_TLS");
  if (list == nullptr) return;
  const std::string text = list;
  if (text.find("gdr_copy") != std::string::npos && text.find("cuda_copy") == std::string::npos &&
      text.find("cuda,") == std::string::npos && !text.ends_with("cuda") && text.front() != '^') {
    throw CommError("UCX_TLS=" + text + " has gdr_copy without cuda_copy, which crashes UCX: add cuda_copy");
  }
}

}  // namespace

void check_ucx(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) throw CommError(what + ": " + ucs_status_string(status));
}

ucs_memory_type_t ucx_memory_type(MemoryKind kind) {
  return kind == MemoryKind::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

UcxWorker::UcxWorker() {
  check_transport_list();
  ucp_config_t* config = nullptr;
  check_ucx(ucp_config_read(nullptr, nullptr, &config), "UCX cannot read its settings (UCX_* variables)");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.name = "oomb";
  params.mt_workers_shared = 1;  // memory is mapped while the progress thread works
  const ucs_status_t started = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  check_ucx(started, "UCX cannot start (is UCX_TLS right?)");

  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucp_context_query(context_, &attributes) == UCS_OK) memory_types_ = attributes.memory_types;

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made and unmade here, used by the progress thread
  const ucs_status_t made = ucp_worker_create(context_, &worker_params, &worker_);
  if (made != UCS_OK) ucp_cleanup(context_);
  check_ucx(made, "UCX cannot make a worker");
}

UcxWorker::~UcxWorker() {
  ucp_worker_destroy(worker_);
  ucp_cleanup(context_);
}

bool UcxWorker::supports(MemoryKind kind) const {
  return kind == MemoryKind::kHost || (memory_types_ & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

std::string UcxWorker::address() const {
  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  check_ucx(ucp_worker_get_address(worker_, &address, &length), "UCX has no address for this worker");
  std::string text(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  return text;
}

int UcxWorker::event_fd() const {
  int fd = -1;
  check_ucx(ucp_worker_get_efd(worker_, &fd), "UCX has no event to wait for");
  return fd;
}

UcxMemory::UcxMemory(const UcxWorker& worker, void* memory, std::int64_t bytes, MemoryKind kind)
    : context_(worker.context()) {
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = memory;
  params.length = static_cast<std::size_t>(bytes);
  params.memory_type = ucx_memory_type(kind);
  check_ucx(ucp_mem_map(context_, &params, &handle_),
            "UCX cannot register " + std::to_string(bytes) + " bytes of " + name_of(kind) +
                " memory (over InfiniBand the limit of 'ulimit -l' must allow it)");
}

UcxMemory::~UcxMemory() { ucp_mem_unmap(context_, handle_); }

std::string UcxMemory::packed_key() const {
  void* key = nullptr;
  std::size_t length = 0;
  check_ucx(ucp_rkey_pack(context_, handle_, &key, &length), "UCX cannot pack a remote key");
  std::string text(static_cast<const char*>(key), length);
  ucp_rkey_buffer_release(key);
  return text;
}

UcxKey unpack_key(ucp_ep_h endpoint, const void* packed, int peer) {
  ucp_rkey_h key = nullptr;
  check_ucx(ucp_ep_rkey_unpack(endpoint, packed, &key),
            "UCX cannot read the remote key of worker " + std::to_string(peer));
  return UcxKey(key);
}

ucp_ep_h connect_ucx(const UcxWorker& worker, const std::string& address, ucp_err_handler_cb_t on_error,
                     void* argument) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = argument;
  ucp_ep_h endpoint = nullptr;
  check_ucx(
      ucp_ep_create(worker.get(), &params, &endpoint),
      "UCX finds no transport to a peer that also reports errors (shared memory needs UCX_POSIX_ERROR_HANDLING=y)");
  return endpoint;
}

std::string transports_of(ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t length = 0;
  std::FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) return "?";
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);
  // Lines like "lane[0]: 2:tcp/lo.0 md[1] -> ...".
  std::set<std::string> names;
  const std::string info(text, length);
  std::free(text);
  for (std::size_t at = info.find("lane["); at != std::string::npos; at = info.find("lane[", at + 1)) {
    const std::size_t slash = info.find('/', at), colon = info.rfind(':', slash);
    if (slash == std::string::npos || colon == std::string::npos || colon < at) continue;
    names.insert(info.substr(colon + 1, slash - colon - 1));
  }
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : "+") + name;
  return joined.empty() ? "?" : joined;
}

}  // namespace oomb::comm
