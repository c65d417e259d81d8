#include "comm/exchange/means_board.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace oomb::comm {

MeansBoard::MeansBoard(const SequenceShape& shape)
    : shape_(shape),
      entries_(static_cast<std::size_t>(shape.num_layers * shape.num_chunks())),
      addresses_(static_cast<std::size_t>(shape.num_layers * shape.num_pages)) {}

bool MeansBoard::exists(std::int64_t layer, std::int64_t chunk) const {
  return layer >= 0 && layer < shape_.num_layers && chunk >= 0 && chunk < shape_.num_chunks();
}

std::size_t MeansBoard::index(std::int64_t layer, std::int64_t chunk) const {
  if (!exists(layer, chunk)) throw std::logic_error("no such place: " + describe(shape_.id, layer, chunk));
  return static_cast<std::size_t>(layer * shape_.num_chunks() + chunk);
}

bool MeansBoard::put(std::int64_t layer, std::int64_t chunk, std::span<const RemoteAddress> pages,
                     std::span<const std::byte> means) {
  if (!exists(layer, chunk)) throw ProtocolError("means of " + describe(shape_.id, layer, chunk) + ": no such place");
  if (static_cast<std::int64_t>(pages.size()) != shape_.pages_of(chunk)) {
    throw ProtocolError("means of " + describe(shape_.id, layer, chunk) + " come with " + std::to_string(pages.size()) +
                        " pages instead of " + std::to_string(shape_.pages_of(chunk)));
  }
  Entry& entry = entries_[index(layer, chunk)];
  if (entry.state != State::kAbsent) return false;
  entry.state = State::kWaiting;
  entry.means.assign(means.begin(), means.end());
  held_bytes_ += static_cast<std::int64_t>(means.size());
  std::copy(pages.begin(), pages.end(), addresses_.begin() + layer * shape_.num_pages + chunk * shape_.pages_per_chunk);
  return true;
}

bool MeansBoard::has_means(std::int64_t layer, std::int64_t chunk) const {
  return entries_[index(layer, chunk)].state == State::kWaiting;
}

bool MeansBoard::published(std::int64_t layer, std::int64_t chunk) const {
  return entries_[index(layer, chunk)].state != State::kAbsent;
}

std::vector<std::byte> MeansBoard::take(std::int64_t layer, std::int64_t chunk) {
  Entry& entry = entries_[index(layer, chunk)];
  if (entry.state != State::kWaiting) {
    throw std::logic_error("no means to take of " + describe(shape_.id, layer, chunk));
  }
  entry.state = State::kTaken;
  held_bytes_ -= static_cast<std::int64_t>(entry.means.size());
  return std::exchange(entry.means, {});
}

RemoteAddress MeansBoard::address_of(std::int64_t layer, std::int64_t page) const {
  if (page < 0 || page >= shape_.num_pages) throw std::logic_error("no page " + std::to_string(page));
  const std::int64_t chunk = shape_.chunk_of(page);
  if (!published(layer, chunk)) throw std::logic_error("not published: " + describe(shape_.id, layer, chunk));
  return addresses_[static_cast<std::size_t>(layer * shape_.num_pages + page)];
}

}  // namespace oomb::comm
