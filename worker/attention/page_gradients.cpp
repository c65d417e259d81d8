#include "worker/attention/page_gradients.h"

#include "worker/tensor/glue.h"

namespace oomb::attention {

void add_to_slots(const kernels::PageShape& shape, const at::Tensor& dk, const at::Tensor& dv,
                  const GradientPlaces& places, const cluster::GradientSlots& slots, at::ScalarType slot_dtype) {
  const auto device = dk.device();
  const at::Tensor begin = to_device(places.begin, device), sources = to_device(places.sources, device);
  const at::Tensor addresses = addresses_to_device(slots.slots, device), first = to_device(slots.first, device);
  kernels::PageScatter op;
  op.shape = shape;
  op.num_segments = static_cast<int64_t>(slots.slots.size());
  op.pages_per_tile = places.pages_per_tile;
  op.dtype = dtype_of(dk);
  op.slot_dtype = dtype_of(slot_dtype);
  op.dk = dk.data_ptr();
  op.dv = dv.data_ptr();
  op.segment_begin = begin.data_ptr<int64_t>();
  op.sources = sources.data_ptr<int32_t>();
  op.slots = static_cast<void* const*>(addresses.data_ptr());
  op.first = first.data_ptr<uint8_t>();
  check(kernels::page_scatter(queue_of(dk), op), "page_scatter");
}

}  // namespace oomb::attention
