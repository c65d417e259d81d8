// Page memory taken from LibTorch's allocators: device memory, or pinned host memory that the device can address.
#pragma once

#include <ATen/ATen.h>

#include "worker/pages/arena.h"

namespace oomb {

/// Segments are tensors made with `options` (a CUDA device, or pinned_memory(true)); allocate returns null where
/// LibTorch throws.
pages::SegmentSource tensor_segments(const at::TensorOptions& options);

}  // namespace oomb
