#include "comm/exchange/keys.h"

namespace oomb::comm {

std::string describe(const SequenceId& id, std::int64_t layer, std::int64_t chunk) {
  return "layer " + std::to_string(layer) + ", chunk " + std::to_string(chunk) + " of sequence " +
         std::to_string(id.sequence) + ", step " + std::to_string(id.step);
}

}  // namespace oomb::comm
