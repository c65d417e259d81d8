#include "worker/pipeline/host_activations.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <string>

namespace oomb {

namespace {

constexpr size_t kAhead = 3;  // items on their way in pass 2: two layers of computation hide one copy many times over
constexpr int64_t kAlignment = 4096;
int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Where the parts of one layer lie in its piece of a block.
struct LayerLayout {
  int64_t o = 0, lse = 0, bytes = 0;  // x1 lies at 0
};

LayerLayout layout_of(const model::ModelConfig& config, at::ScalarType compute, int64_t chunk_tokens) {
  const auto element = static_cast<int64_t>(c10::elementSize(compute));
  LayerLayout layout;
  layout.o = round_up(chunk_tokens * config.hidden_size * element);
  layout.lse = layout.o + round_up(chunk_tokens * config.num_heads * config.head_dim * element);
  layout.bytes = layout.lse + round_up(chunk_tokens * config.num_heads * (compute == at::kDouble ? 8 : 4));
  return layout;
}

}  // namespace

int64_t HostActivations::block_bytes(const model::ModelConfig& config, at::ScalarType compute, int64_t chunk_tokens) {
  const LayerLayout layout = layout_of(config, compute, chunk_tokens);
  return config.num_layers * layout.bytes + layout.o;
}

HostActivations::HostActivations(const model::ModelConfig& config, const at::Device& device, at::ScalarType compute,
                                 int64_t chunk_tokens)
    : config_(config), device_(device), compute_(compute), chunk_tokens_(chunk_tokens) {
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    out_ = guard.getStreamFromGlobalPool(device);
    in_ = guard.getStreamFromGlobalPool(device);
  }
}

HostActivations::~HostActivations() {
  if (out_) out_->synchronize();
  if (in_) in_->synchronize();
}

void HostActivations::begin_sequence(int64_t num_chunks) {
  block_of_.assign(static_cast<size_t>(num_chunks), -1);
  tokens_of_.assign(static_cast<size_t>(num_chunks), 0);
  blocks_used_ = 0;
  coming_.clear();
  next_fetch_.reset();
}

bool HostActivations::reserve(int64_t chunk) {
  if (holds(chunk)) return true;
  if (blocks_used_ == static_cast<int64_t>(blocks_.size())) {
    auto block = PinnedBlock::allocate(block_bytes(config_, compute_, chunk_tokens_), device_);
    if (block == nullptr) return false;
    blocks_.push_back(std::move(block));
  }
  block_of_[static_cast<size_t>(chunk)] = blocks_used_++;
  return true;
}

HostActivations::Item HostActivations::host_item(int64_t chunk, int64_t layer) const {
  const PinnedBlock& block = *blocks_[static_cast<size_t>(block_of_.at(static_cast<size_t>(chunk)))];
  const LayerLayout layout = layout_of(config_, compute_, chunk_tokens_);
  const int64_t tokens = tokens_of_[static_cast<size_t>(chunk)], begin = layer * layout.bytes;
  Item item{chunk, layer, block.view(begin, {tokens, config_.hidden_size}, compute_), {}, {}, {}};
  if (layer == config_.num_layers) return item;
  const int64_t kv_heads = config_.num_kv_heads;
  item.o = block.view(begin + layout.o, {tokens, config_.num_heads * config_.head_dim}, compute_);
  item.lse = block.view(begin + layout.lse, {kv_heads, tokens, config_.num_heads / kv_heads},
                        compute_ == at::kDouble ? at::kDouble : at::kFloat);
  return item;
}

// The copy runs after what is enqueued now; the allocator keeps the memory until it is done.
void HostActivations::send(at::Tensor& device, const at::Tensor& host) {
  if (out_) {
    c10::Event ready(device_.type());
    ready.record(current_stream(device_));
    out_->wait(ready);
    const c10::StreamGuard guard(*out_);
    host.copy_(device, /*non_blocking=*/true);
    device.record_stream(*out_);
  } else {
    host.copy_(device);
  }
  device.reset();
}

void HostActivations::store(int64_t chunk, int64_t layer, LayerActivations& a) {
  tokens_of_[static_cast<size_t>(chunk)] = a.x1.size(0);
  const Item host = host_item(chunk, layer);
  send(a.x1, host.x);
  send(a.attention.o, host.o);
  send(a.attention.lse, host.lse);
}

void HostActivations::store_final(int64_t chunk, at::Tensor& x) {
  tokens_of_[static_cast<size_t>(chunk)] = x.size(0);
  send(x, host_item(chunk, config_.num_layers).x);
}

void HostActivations::start_next() {
  const auto [chunk, layer] = *next_fetch_;
  Item item = host_item(chunk, layer);
  if (in_) {
    c10::Event stored(device_.type());
    stored.record(*out_);
    in_->wait(stored);
    const c10::StreamGuard guard(*in_);
    for (at::Tensor* tensor : {&item.x, &item.o, &item.lse}) {
      if (tensor->defined()) *tensor = tensor->to(device_, /*non_blocking=*/true);
    }
    item.arrived.emplace(device_.type());
    item.arrived->record(*in_);
  } else {
    for (at::Tensor* tensor : {&item.x, &item.o, &item.lse}) {
      if (tensor->defined()) *tensor = tensor->clone();
    }
  }
  coming_.push_back(std::move(item));
  if (layer > 0) {
    next_fetch_ = {chunk, layer - 1};
  } else if (chunk > 0 && holds(chunk - 1)) {
    next_fetch_ = {chunk - 1, config_.num_layers};
  } else {
    next_fetch_.reset();
  }
}

HostActivations::Item HostActivations::take(int64_t chunk, int64_t layer) {
  if (coming_.empty() && !next_fetch_) next_fetch_ = {chunk, layer};
  while (next_fetch_ && coming_.size() < kAhead) start_next();
  Item item = std::move(coming_.front());
  coming_.pop_front();
  if (item.chunk != chunk || item.layer != layer) {
    throw std::logic_error("HostActivations: chunk " + std::to_string(chunk) + ", layer " + std::to_string(layer) +
                           " asked for, next is chunk " + std::to_string(item.chunk) + ", layer " +
                           std::to_string(item.layer));
  }
  if (item.arrived) {
    const c10::Stream stream = current_stream(device_);
    item.arrived->block(stream);
    for (const at::Tensor* tensor : {&item.x, &item.o, &item.lse}) {
      if (tensor->defined()) tensor->record_stream(stream);
    }
  }
  return item;
}

at::Tensor HostActivations::fetch_final(int64_t chunk) { return take(chunk, config_.num_layers).x; }

void HostActivations::fetch(int64_t chunk, int64_t layer, LayerActivations& a) {
  Item item = take(chunk, layer);
  a.x1 = std::move(item.x);
  a.attention.o = std::move(item.o);
  a.attention.lse = std::move(item.lse);
}

}  // namespace oomb
