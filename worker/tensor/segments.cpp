#include "worker/tensor/segments.h"

#include <map>
#include <memory>
#include <utility>

namespace oomb {

pages::SegmentSource tensor_segments(const at::TensorOptions& options) {
  auto owners = std::make_shared<std::map<void*, at::Tensor>>();
  return {[owners, options](int64_t bytes) -> void* {
            try {
              at::Tensor segment = at::empty({bytes}, options.dtype(at::kByte));
              void* memory = segment.data_ptr();
              owners->emplace(memory, std::move(segment));
              return memory;
            } catch (const c10::Error&) {
              return nullptr;  // the arena reports it with the budget's figures
            }
          },
          [owners](void* segment, int64_t) { owners->erase(segment); }};
}

}  // namespace oomb
