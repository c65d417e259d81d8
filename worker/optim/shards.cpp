#include "worker/optim/shards.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/moment_code.h"
#include "worker/tensor/glue.h"

namespace oomb {

namespace {

comm::ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return comm::ElementType::kFloat32;
    case at::kDouble:
      return comm::ElementType::kFloat64;
    case at::kBFloat16:
      return comm::ElementType::kBFloat16;
    case at::kByte:
      return comm::ElementType::kByte;
    default:
      throw std::logic_error(std::string("no collective for elements of type ") + at::toString(type));
  }
}

int64_t shard_elements(int64_t num_elements, int size) {
  const int64_t blocks = (num_elements + kernels::kMomentBlock - 1) / kernels::kMomentBlock;
  return (blocks + size - 1) / size * kernels::kMomentBlock;
}

// Calls f(rank, begin, count) for the part [offset, offset + length) of each rank's shard that exists. Shards have
// `shard` values, of which there are `total`.
template <class F>
void for_each_part(int size, int64_t shard, int64_t total, int64_t offset, int64_t length, F&& f) {
  for (int rank = 0; rank < size; ++rank) {
    const int64_t begin = rank * shard + offset;
    const int64_t count = std::min({length, total - begin, shard - offset});
    if (count > 0) f(rank, begin, count);
  }
}

}  // namespace

ElementRange shard_of(int64_t num_elements, int rank, int size) {
  const int64_t shard = shard_elements(num_elements, size);
  const int64_t begin = std::min(rank * shard, num_elements);
  return {begin, std::min(shard, num_elements - begin)};
}

at::TensorOptions ParameterShards::scratch_options(const at::Tensor& values) const {
  const bool on_device = collectives_->memory() == comm::MemoryKind::kCuda;
  return values.options().device(on_device ? values.device() : at::Device(at::kCPU));
}

void ParameterShards::reduce(at::Tensor& values) const {
  const int size = collectives_->size(), rank = collectives_->rank();
  at::Tensor flat = values.view({-1});
  const int64_t total = flat.numel(), shard = shard_elements(total, size);
  const int64_t piece = std::min<int64_t>(shard, kScratchBytes / (size * flat.element_size()));
  at::Tensor all = at::empty({size, piece}, scratch_options(values)), own = at::empty({piece}, all.options());
  for (int64_t offset = 0; offset < shard; offset += piece) {
    if (rank * shard + offset + piece > total || (size - 1) * shard + offset + piece > total) all.zero_();
    for_each_part(size, shard, total, offset, piece, [&](int r, int64_t begin, int64_t count) {
      all[r].narrow(0, 0, count).copy_(flat.narrow(0, begin, count));
    });
    synchronise(values.device());
    collectives_->reduce_scatter_sum(all.data_ptr(), own.data_ptr(), piece, element_type(values.scalar_type()),
                                     deadline());
    for_each_part(size, shard, total, offset, piece, [&](int r, int64_t begin, int64_t count) {
      if (r == rank) flat.narrow(0, begin, count).copy_(own.narrow(0, 0, count));
    });
  }
}

void ParameterShards::gather(at::Tensor& values, int64_t elements_per_value) const {
  const int size = collectives_->size(), rank = collectives_->rank();
  at::Tensor flat = values.view({-1});
  const int64_t total = flat.numel();
  const int64_t shard = shard_elements(total * elements_per_value, size) / elements_per_value;
  const int64_t piece = std::min<int64_t>(shard, kScratchBytes / (size * flat.element_size()));
  at::Tensor all = at::empty({size, piece}, scratch_options(values)), own = at::zeros({piece}, all.options());
  for (int64_t offset = 0; offset < shard; offset += piece) {
    for_each_part(size, shard, total, offset, piece, [&](int r, int64_t begin, int64_t count) {
      if (r == rank) own.narrow(0, 0, count).copy_(flat.narrow(0, begin, count));
    });
    synchronise(values.device());
    collectives_->all_gather(own.data_ptr(), all.data_ptr(), piece, element_type(values.scalar_type()), deadline());
    for_each_part(size, shard, total, offset, piece, [&](int r, int64_t begin, int64_t count) {
      if (r != rank) flat.narrow(0, begin, count).copy_(all[r].narrow(0, 0, count));
    });
  }
}

void ParameterShards::reduce_gradients(model::Parameters& parameters) const {
  for (model::Parameter& p : parameters.all()) reduce(p.grad);
}

double ParameterShards::sum(double own) const {
  at::Tensor value = at::full({1}, own, at::kDouble);
  const bool on_device = collectives_->memory() == comm::MemoryKind::kCuda;
  if (on_device) value = value.to(at::kCUDA);
  collectives_->all_reduce_sum(value.data_ptr(), 1, comm::ElementType::kFloat64, deadline());
  return value.item<double>();
}

void ParameterShards::gather_weights(model::Parameters& parameters) const {
  for (model::Parameter& p : parameters.all()) gather(p.weight);
}

void ParameterShards::gather_state(model::Parameters& parameters) const {
  for (model::Parameter& p : parameters.all()) {
    if (p.master.defined() && !p.master.is_same(p.weight)) gather(p.master);
    gather(p.m);
    gather(p.v);
    if (!p.m_scale.defined()) continue;
    gather(p.m_scale, kernels::kMomentBlock);
    gather(p.v_scale, kernels::kMomentBlock);
  }
}

}  // namespace oomb
