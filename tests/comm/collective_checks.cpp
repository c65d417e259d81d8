#include "tests/comm/collective_checks.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace oomb::comm::test {

namespace {

void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong: " + what);
}

// Whole numbers, so that sums are exact in every type.
template <class T>
T value_of(int rank, std::int64_t i) {
  return static_cast<T>((rank + 1) * 3 + i * 7 % 101);
}
template <class T>
T sum_of(int size, std::int64_t i) {
  T sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value_of<T>(rank, i);
  return sum;
}

template <class T>
void check_sums(Collectives& collectives, ElementType type, std::int64_t count, Deadline deadline) {
  const int size = collectives.size(), rank = collectives.rank();
  const std::string what = std::string(name_of(type)) + ", " + std::to_string(count) + " a rank";
  std::vector<T> all(static_cast<std::size_t>(count * size)), slice(static_cast<std::size_t>(count), T{-1});
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = value_of<T>(rank, static_cast<std::int64_t>(i));
  collectives.reduce_scatter_sum(all.data(), slice.data(), count, type, deadline);
  for (std::int64_t i = 0; i < count; ++i) {
    expect(slice[static_cast<std::size_t>(i)] == sum_of<T>(size, rank * count + i), "reduce-scatter of " + what);
  }
  std::vector<T> in_place = all;
  collectives.reduce_scatter_sum(in_place.data(), in_place.data() + rank * count, count, type, deadline);
  expect(std::equal(slice.begin(), slice.end(), in_place.begin() + rank * count),
         "in place, reduce-scatter of " + what);
  collectives.all_gather(slice.data(), in_place.data(), count, type, deadline);
  collectives.all_reduce_sum(all.data(), count * size, type, deadline);
  for (std::size_t i = 0; i < all.size(); ++i) {
    expect(all[i] == sum_of<T>(size, static_cast<std::int64_t>(i)), "all-reduce of " + what);
    expect(all[i] == in_place[i], "all-gather of " + what);
  }
}

}  // namespace

void check_collectives(Collectives& collectives, double deadline_seconds) {
  const int size = collectives.size(), rank = collectives.rank();
  const auto deadline = [&] { return in_seconds(deadline_seconds); };
  for (const std::int64_t count : {0, 1, 7, 127, 5003}) {
    check_sums<float>(collectives, ElementType::kFloat32, count, deadline());
    check_sums<double>(collectives, ElementType::kFloat64, count, deadline());
    check_sums<std::int64_t>(collectives, ElementType::kInt64, count, deadline());
  }
  // A vector that the ranks do not divide, above the size that goes whole.
  std::vector<double> odd(20011);
  for (std::size_t i = 0; i < odd.size(); ++i) odd[i] = value_of<double>(rank, static_cast<std::int64_t>(i));
  collectives.all_reduce_sum(odd.data(), 20011, ElementType::kFloat64, deadline());
  for (std::size_t i = 0; i < odd.size(); ++i) {
    expect(odd[i] == sum_of<double>(size, static_cast<std::int64_t>(i)), "all-reduce of 20011 fp64");
  }
  std::vector<std::uint16_t> halves(static_cast<std::size_t>(5 * size));
  const std::vector<std::uint16_t> own(5, static_cast<std::uint16_t>(0x3F80 + rank));
  collectives.all_gather(own.data(), halves.data(), 5, ElementType::kBFloat16, deadline());
  for (std::size_t i = 0; i < halves.size(); ++i) expect(halves[i] == 0x3F80 + i / 5, "all-gather of bf16");

  for (int root = 0; root < size; ++root) {
    std::vector<std::int64_t> values(3, rank == root ? 100 + root : -1);
    collectives.broadcast(values.data(), 3, ElementType::kInt64, root, deadline());
    expect(values[2] == 100 + root, "broadcast from rank " + std::to_string(root));
    collectives.barrier(deadline());
  }
  const auto texts = collectives.all_gather_bytes(std::string(static_cast<std::size_t>(rank * 1000), 'x'), deadline());
  for (int r = 0; r < size; ++r) {
    expect(texts[static_cast<std::size_t>(r)].size() == static_cast<std::size_t>(r * 1000), "all-gather of texts");
  }
}

void check_large(Collectives& collectives, std::int64_t count_per_rank, double deadline_seconds) {
  check_sums<float>(collectives, ElementType::kFloat32, count_per_rank, in_seconds(deadline_seconds));
}

}  // namespace oomb::comm::test
