// page_write, page_gather, page_scatter, page_gradient_read. Copies are compared bit for bit; sums too, since their
// order and their rounding are part of the contract.
#include <algorithm>
#include <memory>
#include <numeric>

#include "kernels/pages.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

using Values = std::vector<double>;

struct Shape {
  int64_t kv_heads, page_tokens, head_dim;
  PageShape page() const { return {kv_heads, page_tokens, head_dim}; }
};
constexpr Shape kShapes[] = {{1, 1, 1}, {2, 3, 5}, {3, 4, 2}, {1, 7, 8}, {2, 16, 24}, {2, 128, 128}};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Slots in one arena, in shuffled order, with poison around each. Unaligned: each starts one element off 16 bytes.
class Arena {
 public:
  Arena(Device device, DType type, const PageShape& shape, int64_t count, bool aligned, uint64_t seed = 11,
        const Values* contents = nullptr)
      : elements_(shape.slot_elements()) {
    const int64_t unit = aligned ? 16 : 1;
    stride_ = ceil_div(elements_ + 1, unit) * unit;
    places_.resize(static_cast<size_t>(count));
    std::iota(places_.begin(), places_.end(), 0);
    std::shuffle(places_.begin(), places_.end(), std::mt19937_64(seed));
    Values all(static_cast<size_t>(count * stride_), std::nan(""));
    if (contents != nullptr) {
      for (int64_t s = 0; s < count; ++s) {
        std::copy_n(contents->begin() + s * elements_, elements_,
                    all.begin() + places_[static_cast<size_t>(s)] * stride_);
      }
    }
    buffer_ = std::make_unique<Buffer>(device, type, all, aligned ? 0 : 1);
    std::vector<void*> addresses;
    for (int64_t s = 0; s < count; ++s) {
      addresses.push_back(static_cast<char*>(buffer_->data()) +
                          places_[static_cast<size_t>(s)] * stride_ * size_of(type));
    }
    addresses_ = addresses;
  }
  const std::vector<void*>& addresses() const { return addresses_; }
  /// Contents of the slots in their order. Poison between slots must still be there.
  Values read() const {
    const Values all = buffer_->read();
    Values slots;
    for (const int64_t place : places_) {
      slots.insert(slots.end(), all.begin() + place * stride_, all.begin() + place * stride_ + elements_);
      for (int64_t e = elements_; e < stride_; ++e) {
        EXPECT_TRUE(std::isnan(all[static_cast<size_t>(place * stride_ + e)])) << "written past the end of a slot";
      }
    }
    return slots;
  }

 private:
  int64_t elements_, stride_ = 0;
  std::vector<int64_t> places_;
  std::unique_ptr<Buffer> buffer_;
  std::vector<void*> addresses_;
};

/// Index in a slot of K (0) or V (1), head, token, dimension.
int64_t in_slot(const Shape& s, int64_t kv, int64_t h, int64_t p, int64_t d) {
  return ((kv * s.kv_heads + h) * s.page_tokens + p) * s.head_dim + d;
}

class PagesTest : public DeviceTest {
 protected:
  void check_write(const Shape& s, int64_t tokens, DType type, bool aligned) {
    SCOPED_TRACE(::testing::Message() << name_of(type) << " Hkv " << s.kv_heads << " P " << s.page_tokens << " D "
                                      << s.head_dim << " tokens " << tokens << " aligned " << aligned);
    const int64_t pages = ceil_div(tokens, s.page_tokens), count = s.kv_heads * tokens * s.head_dim;
    const Values k = rounded_values(normal_values(count, 1), type), v = rounded_values(normal_values(count, 2), type);
    const Buffer k_in = input(type, k, aligned ? 0 : 1), v_in = input(type, v, aligned ? 0 : 1);
    const Arena arena(device(), type, s.page(), pages, aligned);
    const Items<void*> slots = items(arena.addresses());
    ASSERT_OK(page_write(queue(), {s.page(), tokens, type, k_in.data(), v_in.data(), slots.data()}));
    Values expected(static_cast<size_t>(pages * s.page().slot_elements()), 0.0);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      for (int64_t c = 0; c < tokens; ++c) {
        for (int64_t d = 0; d < s.head_dim; ++d) {
          const int64_t slot = c / s.page_tokens * s.page().slot_elements(), p = c % s.page_tokens;
          const size_t from = static_cast<size_t>((h * tokens + c) * s.head_dim + d);
          expected[static_cast<size_t>(slot + in_slot(s, 0, h, p, d))] = k[from];
          expected[static_cast<size_t>(slot + in_slot(s, 1, h, p, d))] = v[from];
        }
      }
    }
    EXPECT_EQ(arena.read(), expected);
  }

  void check_gather(const Shape& s, int64_t tiles, int64_t per_tile, DType type, bool aligned) {
    SCOPED_TRACE(::testing::Message() << name_of(type) << " Hkv " << s.kv_heads << " P " << s.page_tokens << " D "
                                      << s.head_dim << " tiles " << tiles << " of " << per_tile << " aligned "
                                      << aligned);
    const int64_t pages = 5;
    const Values contents = rounded_values(normal_values(pages * s.page().slot_elements(), 3), type);
    const Arena arena(device(), type, s.page(), pages, aligned, 12, &contents);
    std::vector<const void*> chosen;
    std::vector<int64_t> page_of;
    for (int64_t i = 0; i < tiles * per_tile; ++i) {
      page_of.push_back((i * i + 3 * i) % pages);  // pages shared by tiles, in no order
      chosen.push_back(arena.addresses()[static_cast<size_t>(page_of.back())]);
    }
    const Items<const void*> slots = items(chosen);
    const int64_t count = tiles * s.kv_heads * per_tile * s.page_tokens * s.head_dim;
    const Buffer k = output(type, count, aligned ? 0 : 1), v = output(type, count, aligned ? 0 : 1);
    ASSERT_OK(page_gather(queue(), {s.page(), tiles, per_tile, type, slots.data(), k.data(), v.data()}));
    Values expected[2];
    for (int64_t kv = 0; kv < 2; ++kv) {
      for (int64_t t = 0; t < tiles; ++t) {
        for (int64_t h = 0; h < s.kv_heads; ++h) {
          for (int64_t key = 0; key < per_tile * s.page_tokens; ++key) {
            for (int64_t d = 0; d < s.head_dim; ++d) {
              const int64_t page = page_of[static_cast<size_t>(t * per_tile + key / s.page_tokens)];
              expected[kv].push_back(contents[static_cast<size_t>(page * s.page().slot_elements() +
                                                                  in_slot(s, kv, h, key % s.page_tokens, d))]);
            }
          }
        }
      }
    }
    EXPECT_EQ(k.read(), expected[0]);
    EXPECT_EQ(v.read(), expected[1]);
  }

  void check_scatter(const Shape& s, DType type, DType slot_type, bool aligned);
  void check_gradient_read(const Shape& s, int64_t tokens, DType type, DType slot_type, bool aligned);

  /// Adds one gradient of one value to a slot of one page, `times` times in one call or in as many calls.
  double accumulate(DType type, DType slot_type, const Values& addends, bool one_call) {
    const PageShape shape{1, 8, 1};
    const Values zeros(16, 0.0);
    const Arena arena(device(), slot_type, shape, 1, true, 1, &zeros);
    const Items<void*> slots = items(arena.addresses());
    const int64_t calls = one_call ? 1 : static_cast<int64_t>(addends.size());
    const int64_t per_call = one_call ? static_cast<int64_t>(addends.size()) : 1;
    std::vector<int32_t> all(static_cast<size_t>(per_call));
    std::iota(all.begin(), all.end(), 0);
    const Items<int32_t> sources = items(all);
    const Items<int64_t> begin = items(std::vector<int64_t>{0, per_call});
    const Items<uint8_t> first = items(std::vector<uint8_t>{0});
    for (int64_t call = 0; call < calls; ++call) {
      Values d;
      for (int64_t i = 0; i < per_call; ++i) d.insert(d.end(), 8, addends[static_cast<size_t>(call * per_call + i)]);
      const Buffer dk = input(type, d), dv = input(type, d);
      EXPECT_OK(page_scatter(queue(), {shape, 1, per_call, type, slot_type, dk.data(), dv.data(), begin.data(),
                                       sources.data(), slots.data(), first.data()}));
      if (device() == Device::cuda) dk.read();  // the buffers live until the stream has used them
    }
    const Values sum = arena.read();
    EXPECT_EQ(sum, Values(16, sum[0]));
    return sum[0];
  }
};

void PagesTest::check_scatter(const Shape& s, DType type, DType slot_type, bool aligned) {
  SCOPED_TRACE(::testing::Message() << name_of(type) << " into " << name_of(slot_type) << " Hkv " << s.kv_heads << " P "
                                    << s.page_tokens << " D " << s.head_dim << " aligned " << aligned);
  const int64_t tiles = 7, per_tile = 3, pages = 5, block = s.page_tokens * s.head_dim;
  const int64_t count = tiles * s.kv_heads * per_tile * block;
  const Values d[2] = {rounded_values(normal_values(count, 4), type), rounded_values(normal_values(count, 5), type)};
  // Page 0 is in every tile, page 1 gets nothing (and becomes zero), the others share what is left.
  std::vector<std::vector<int32_t>> of_page(pages);
  for (int32_t i = 0; i < tiles * per_tile; ++i)
    of_page[static_cast<size_t>(i % 3 == 0 ? 0 : 2 + i % 7 % 3)].push_back(i);
  std::vector<int64_t> begin{0};
  std::vector<int32_t> sources;
  for (const auto& list : of_page) {
    sources.insert(sources.end(), list.begin(), list.end());
    begin.push_back(static_cast<int64_t>(sources.size()));
  }
  const std::vector<uint8_t> first{1, 1, 0, 1, 0};
  const int64_t slot_elements = s.page().slot_elements();
  Values contents = rounded_values(normal_values(pages * slot_elements, 6, 30.0), slot_type);
  for (int64_t page = 0; page < pages; ++page) {
    if (first[static_cast<size_t>(page)] != 0) {
      std::fill_n(contents.begin() + page * slot_elements, slot_elements, std::nan(""));
    }
  }
  const Arena arena(device(), slot_type, s.page(), pages, true, 13, &contents);
  const Buffer dk = input(type, d[0], aligned ? 0 : 1), dv = input(type, d[1], aligned ? 0 : 1);
  const Items<void*> slots = items(arena.addresses());
  const Items<int64_t> begin_in = items(begin);
  const Items<int32_t> sources_in = items(sources);
  const Items<uint8_t> first_in = items(first);
  ASSERT_OK(page_scatter(queue(), {s.page(), pages, per_tile, type, slot_type, dk.data(), dv.data(), begin_in.data(),
                                   sources_in.data(), slots.data(), first_in.data()}));
  const bool wide = type == DType::f64 || slot_type == DType::f64;
  Values expected = contents;
  for (int64_t page = 0; page < pages; ++page) {
    for (int64_t e = 0; e < slot_elements; ++e) {
      const int64_t kv = e / (s.kv_heads * block), h = e / block % s.kv_heads;
      double sum =
          first[static_cast<size_t>(page)] != 0 ? 0.0 : contents[static_cast<size_t>(page * slot_elements + e)];
      for (const int32_t source : of_page[static_cast<size_t>(page)]) {
        const int64_t tile = source / per_tile, j = source % per_tile;
        sum += d[kv][static_cast<size_t>(((tile * s.kv_heads + h) * per_tile + j) * block + e % block)];
        if (!wide) sum = rounded(sum, DType::f32);
      }
      if (slot_type == DType::bf16) sum = rounded(sum, DType::f32);
      expected[static_cast<size_t>(page * slot_elements + e)] = rounded(sum, slot_type);
    }
  }
  EXPECT_EQ(arena.read(), expected);
}

void PagesTest::check_gradient_read(const Shape& s, int64_t tokens, DType type, DType slot_type, bool aligned) {
  SCOPED_TRACE(::testing::Message() << name_of(slot_type) << " into " << name_of(type) << " Hkv " << s.kv_heads << " P "
                                    << s.page_tokens << " D " << s.head_dim << " tokens " << tokens);
  const int64_t pages = ceil_div(tokens, s.page_tokens), count = s.kv_heads * tokens * s.head_dim;
  const Values before[2] = {rounded_values(normal_values(count, 7), type),
                            rounded_values(normal_values(count, 8), type)};
  Values contents = rounded_values(normal_values(pages * s.page().slot_elements(), 9), slot_type);
  for (int64_t e = 0; e < static_cast<int64_t>(contents.size()); ++e) {  // the tail of the last page must not be read
    const int64_t token = e / s.page().slot_elements() * s.page_tokens + e / s.head_dim % s.page_tokens;
    if (token >= tokens) contents[static_cast<size_t>(e)] = std::nan("");
  }
  const Arena arena(device(), slot_type, s.page(), pages, true, 14, &contents);
  std::vector<const void*> addresses(arena.addresses().begin(), arena.addresses().end());
  for (size_t page = 1; page < addresses.size(); page += 3) addresses[page] = nullptr;
  const Items<const void*> slots = items(addresses);
  const Buffer dk = input(type, before[0], aligned ? 0 : 1), dv = input(type, before[1], aligned ? 0 : 1);
  ASSERT_OK(page_gradient_read(queue(), {s.page(), tokens, type, slot_type, slots.data(), dk.data(), dv.data()}));
  const bool wide = type == DType::f64 || slot_type == DType::f64;
  for (int64_t kv = 0; kv < 2; ++kv) {
    Values expected = before[kv];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t d = i % s.head_dim, c = i / s.head_dim % tokens, h = i / s.head_dim / tokens;
      const int64_t page = c / s.page_tokens;
      if (addresses[static_cast<size_t>(page)] == nullptr) continue;
      double sum =
          expected[static_cast<size_t>(i)] +
          contents[static_cast<size_t>(page * s.page().slot_elements() + in_slot(s, kv, h, c % s.page_tokens, d))];
      if (!wide || type == DType::bf16) sum = rounded(sum, DType::f32);
      expected[static_cast<size_t>(i)] = rounded(sum, type);
    }
    EXPECT_EQ((kv == 0 ? dk : dv).read(), expected);
  }
}

TEST_P(PagesTest, WriteFillsSlotsAndZeroesTheTail) {
  for (const DType type : kAllTypes) {
    for (const Shape& s : kShapes) {
      for (const int64_t tokens : {int64_t{1}, s.page_tokens, s.page_tokens + 1, 2 * s.page_tokens + 1}) {
        check_write(s, tokens, type, true);
        check_write(s, tokens, type, false);
      }
    }
  }
}

// Every length from 1 to 300 on a GPU; on the CPU every 13th.
TEST_P(PagesTest, WriteStaysInsideForAllLengths) {
  const int64_t step = device() == Device::cpu ? 13 : 1;
  for (int64_t tokens = 1; tokens <= 300; tokens += step) check_write({2, 16, 8}, tokens, DType::bf16, tokens % 2 == 0);
}

TEST_P(PagesTest, GatherIsOneBatchPerTile) {
  for (const DType type : kAllTypes) {
    for (const Shape& s : kShapes) {
      check_gather(s, 1, 1, type, true);
      check_gather(s, 3, 5, type, true);
      check_gather(s, 3, 5, type, false);
    }
  }
}

TEST_P(PagesTest, ScatterSumsInOrder) {
  for (const DType type : kAllTypes) {
    for (const DType slot_type : kAllTypes) {
      for (const Shape& s : kShapes) {
        check_scatter(s, type, slot_type, true);
        check_scatter(s, type, slot_type, false);
      }
    }
  }
}

TEST_P(PagesTest, GradientReadAddsWhatThereIs) {
  for (const DType type : kAllTypes) {
    for (const DType slot_type : kAllTypes) {
      for (const Shape& s : kShapes) {
        check_gradient_read(s, 1, type, slot_type, true);
        check_gradient_read(s, 4 * s.page_tokens + 1, type, slot_type, true);
        check_gradient_read(s, 4 * s.page_tokens + 1, type, slot_type, false);
      }
    }
  }
}

// 256 then 1: bf16 sums stop at 256. fp32 slots must not, in one call or in two.
TEST_P(PagesTest, Fp32SlotsKeepSmallContributions) {
  for (const bool one_call : {true, false}) {
    EXPECT_EQ(accumulate(DType::bf16, DType::f32, {256, 1}, one_call), 257);
    EXPECT_EQ(accumulate(DType::bf16, DType::f32, Values(1024, 1.0), one_call), 1024);
  }
}

// bf16 slots round at each call: sums inside a call are fp32, sums over calls lose what the option says they lose.
TEST_P(PagesTest, Bf16SlotsRoundOncePerCall) {
  EXPECT_EQ(accumulate(DType::bf16, DType::bf16, Values(1024, 1.0), true), 1024);
  EXPECT_EQ(accumulate(DType::bf16, DType::bf16, Values(1024, 1.0), false), 256);
}

// <gather(x), y> = <x, scatter(y)>: scatter is the transpose of gather.
TEST_P(PagesTest, ScatterIsTheTransposeOfGather) {
  const Shape s{2, 5, 6};
  const int64_t tiles = 4, per_tile = 3, pages = 6, slot_elements = s.page().slot_elements();
  const int64_t count = tiles * s.kv_heads * per_tile * s.page_tokens * s.head_dim;
  const Values x = normal_values(pages * slot_elements, 21), yk = normal_values(count, 22),
               yv = normal_values(count, 23);
  const Arena in(device(), DType::f64, s.page(), pages, true, 15, &x), out(device(), DType::f64, s.page(), pages, true);
  std::vector<const void*> chosen;
  std::vector<std::vector<int32_t>> of_page(pages);
  for (int32_t i = 0; i < tiles * per_tile; ++i) {
    const size_t page = static_cast<size_t>(i / per_tile + i % per_tile) % pages;
    chosen.push_back(in.addresses()[page]);
    of_page[page].push_back(i);
  }
  std::vector<int64_t> begin{0};
  std::vector<int32_t> sources;
  for (const auto& list : of_page) {
    sources.insert(sources.end(), list.begin(), list.end());
    begin.push_back(static_cast<int64_t>(sources.size()));
  }
  const Items<const void*> slots = items(chosen);
  const Items<void*> out_slots = items(out.addresses());
  const Items<int64_t> begin_in = items(begin);
  const Items<int32_t> sources_in = items(sources);
  const Items<uint8_t> first = items(std::vector<uint8_t>(pages, 1));
  const Buffer k = output(DType::f64, count), v = output(DType::f64, count);
  const Buffer dk = input(DType::f64, yk), dv = input(DType::f64, yv);
  ASSERT_OK(page_gather(queue(), {s.page(), tiles, per_tile, DType::f64, slots.data(), k.data(), v.data()}));
  ASSERT_OK(page_scatter(queue(), {s.page(), pages, per_tile, DType::f64, DType::f64, dk.data(), dv.data(),
                                   begin_in.data(), sources_in.data(), out_slots.data(), first.data()}));
  const Values kv = k.read(), vv = v.read(), summed = out.read();
  const double left = std::inner_product(kv.begin(), kv.end(), yk.begin(), 0.0) +
                      std::inner_product(vv.begin(), vv.end(), yv.begin(), 0.0);
  const double right = std::inner_product(x.begin(), x.end(), summed.begin(), 0.0);
  EXPECT_NEAR(left, right, 1e-11);
}

TEST_P(PagesTest, BadArgumentsAreRefused) {
  const Buffer x = input(DType::f32, Values(16, 1.0));
  EXPECT_EQ(page_write(queue(), {{0, 4, 4}, 4, DType::f32, x.data(), x.data(), nullptr}).code, Code::invalid_argument);
  EXPECT_EQ(page_write(queue(), {{1, 4, 4}, 4, DType::f32, x.data(), nullptr, nullptr}).code, Code::invalid_argument);
  EXPECT_EQ(page_gather(queue(), {{1, 4, 4}, -1, 1, DType::f32, nullptr, x.data(), x.data()}).code,
            Code::invalid_argument);
  EXPECT_EQ(page_scatter(queue(), {{1, 4, 4}, 1, 0, DType::f32, DType::f32, x.data(), x.data()}).code,
            Code::invalid_argument);
  EXPECT_OK(page_gather(queue(), {{1, 4, 4}, 3, 0}));  // no pages, nothing to do
  EXPECT_OK(page_scatter(queue(), {{1, 4, 4}, 0, 0}));
}

OOMB_ON_ALL_DEVICES(PagesTest);

}  // namespace
}  // namespace oomb::kernels::testing
