// Harness of the kernel tests: buffers in the memory of the device under test, with guard bytes on both sides and
// poison inside, and the parameter that runs one case on the CPU and on the GPU.
//
//   class RmsNormTest : public DeviceTest {};
//   TEST_P(RmsNormTest, ...) {
//     Buffer x = input(DType::bf16, values);         // rounded to bf16; x.values() gives what the op sees
//     Buffer y = output(DType::bf16, n);             // NaN inside
//     ASSERT_OK(op(queue(), {...x.data(), y.data()...}));
//     EXPECT_NEAR_ALL(y.read(), expected, absolute, relative);
//   }                                                // guards are checked by read() and by the destructor
//   OOMB_ON_ALL_DEVICES(RmsNormTest);
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/types.h"
#ifdef OOMB_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace oomb::kernels::testing {

inline const char* name_of(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }
inline const char* name_of(DType type) {
  switch (type) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
  }
  return "?";
}

/// Why CUDA cannot be tested here, or null.
inline const char* no_cuda() {
#ifdef OOMB_HAVE_CUDA
  static const bool present = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }();
  return present ? nullptr : "no GPU on this machine: CUDA kernels not run";
#else
  return "built without CUDA: CUDA kernels not run";
#endif
}

// --- element types, written apart from kernels/ so that a fault there cannot hide itself
// -------------------------------

/// Half the distance between neighbours of 1: the largest relative error of one rounding.
inline double unit_roundoff(DType type) {
  switch (type) {
    case DType::f64:
      return std::ldexp(1.0, -53);
    case DType::f32:
      return std::ldexp(1.0, -24);
    case DType::bf16:
      return std::ldexp(1.0, -8);
  }
  return 0;
}

/// Nearest value of `type`, ties to even; exact steps in double.
inline double rounded(double x, DType type) {
  if (type == DType::f64 || x == 0 || !std::isfinite(x)) return x;
  if (type == DType::f32) return static_cast<double>(static_cast<float>(x));
  int exponent = 0;
  std::frexp(x, &exponent);  // |x| in [2^(e-1), 2^e): 8 significant bits leave a step of 2^(e-8)
  const double step = std::ldexp(1.0, exponent < -125 ? -133 : exponent - 8);
  return std::nearbyint(x / step) * step;
}

inline void encode(double value, DType type, unsigned char* to) {
  if (type == DType::f64) {
    std::memcpy(to, &value, 8);
  } else if (type == DType::f32) {
    const float f = static_cast<float>(value);
    std::memcpy(to, &f, 4);
  } else {
    const float f = static_cast<float>(rounded(value, DType::bf16));
    uint16_t bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16);
    if (std::isnan(value)) bits = 0x7fc0;
    std::memcpy(to, &bits, 2);
  }
}

inline double decode(const unsigned char* from, DType type) {
  if (type == DType::f64) {
    double d = 0;
    std::memcpy(&d, from, 8);
    return d;
  }
  if (type == DType::f32) {
    float f = 0;
    std::memcpy(&f, from, 4);
    return f;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// --- memory
// -----------------------------------------------------------------------------------------------------------

/// `bytes` bytes of the device's memory between two guards. `shift` moves the start off its 256-byte alignment.
class Memory {
 public:
  static constexpr int64_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xa5;

  Memory(Device device, int64_t bytes, int64_t shift) : device_(device), bytes_(bytes), shift_(shift) {
    const std::vector<unsigned char> fill(static_cast<size_t>(total()), kGuardByte);
    if (device_ == Device::cpu) {
      base_ = static_cast<unsigned char*>(::operator new (fill.size(), std::align_val_t{256}));
      std::memcpy(base_, fill.data(), fill.size());
      return;
    }
#ifdef OOMB_HAVE_CUDA
    void* p = nullptr;
    if (cudaMalloc(&p, fill.size()) != cudaSuccess) throw std::runtime_error("out of GPU memory");
    base_ = static_cast<unsigned char*>(p);
    copy(base_, fill.data(), fill.size());
#endif
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(shift_, other.shift_);
    return *this;
  }
  ~Memory() {
    if (base_ == nullptr) return;
    read();  // checks the guards
    if (device_ == Device::cpu) ::operator delete (base_, std::align_val_t{256});
#ifdef OOMB_HAVE_CUDA
    if (device_ == Device::cuda) cudaFree(base_);
#endif
  }

  unsigned char* data() const { return base_ + kGuard + shift_; }
  int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  void write(const void* from) {
    if (bytes_ > 0) copy(data(), from, static_cast<size_t>(bytes_));
  }

  /// Waits for the device, checks that nothing was written outside, and returns the bytes.
  std::vector<unsigned char> read() const {
    std::vector<unsigned char> all(static_cast<size_t>(total()));
    copy(all.data(), base_, all.size());
    const int64_t begin = kGuard + shift_;
    for (int64_t i = 0; i < total(); ++i) {
      if ((i < begin || i >= begin + bytes_) && all[static_cast<size_t>(i)] != kGuardByte) {
        ADD_FAILURE() << "guard byte overwritten at offset " << i - begin << " of a buffer of " << bytes_ << " bytes";
        break;
      }
    }
    return {all.begin() + begin, all.begin() + begin + bytes_};
  }

 private:
  int64_t total() const { return bytes_ + shift_ + 2 * kGuard; }
  void copy(void* to, const void* from, size_t bytes) const {
    if (device_ == Device::cpu) {
      std::memcpy(to, from, bytes);
      return;
    }
#ifdef OOMB_HAVE_CUDA
    const cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
#endif
  }

  Device device_ = Device::cpu;
  unsigned char* base_ = nullptr;
  int64_t bytes_ = 0, shift_ = 0;
};

/// Elements of a DType. `shift_elements` makes its address odd, so that 16-byte paths must step aside.
class Buffer {
 public:
  Buffer(Device device, DType type, const std::vector<double>& values, int64_t shift_elements = 0)
      : type_(type),
        count_(static_cast<int64_t>(values.size())),
        memory_(device, count_ * size_of(type), shift_elements * size_of(type)) {
    std::vector<unsigned char> bytes(static_cast<size_t>(count_ * size_of(type)));
    for (int64_t i = 0; i < count_; ++i) {
      encode(values[static_cast<size_t>(i)], type, bytes.data() + i * size_of(type));
    }
    memory_.write(bytes.data());
  }

  void* data() const { return memory_.data(); }
  int64_t size() const { return count_; }
  DType type() const { return type_; }

  std::vector<double> read() const {
    const std::vector<unsigned char> bytes = memory_.read();
    std::vector<double> values(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) {
      values[static_cast<size_t>(i)] = decode(bytes.data() + i * size_of(type_), type_);
    }
    return values;
  }
  std::vector<unsigned char> read_bytes() const { return memory_.read(); }

 private:
  DType type_;
  int64_t count_;
  Memory memory_;
};

/// Integers, pointers, flags: any trivially copyable T.
template <class T>
class Items {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Items(Device device, const std::vector<T>& values)
      : count_(values.size()), memory_(device, static_cast<int64_t>(values.size() * sizeof(T)), 0) {
    memory_.write(values.data());
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::vector<T> read() const {
    const std::vector<unsigned char> bytes = memory_.read();
    std::vector<T> values(count_);
    if (count_ > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

 private:
  size_t count_;
  Memory memory_;
};

// --- values
// -----------------------------------------------------------------------------------------------------------

/// Normal values from a fixed seed; the seed is printed with a failing case (see DeviceTest).
inline std::vector<double> normal_values(int64_t n, uint64_t seed, double deviation = 1.0) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  std::vector<double> values(static_cast<size_t>(n));
  for (double& v : values) v = normal(engine);
  return values;
}

inline std::vector<double> rounded_values(std::vector<double> values, DType type) {
  for (double& v : values) v = rounded(v, type);
  return values;
}

/// |a - b| <= absolute + relative * |b| for every element, equal infinities and NaN only where NaN is expected.
/// Reports the worst element.
inline ::testing::AssertionResult near_all(const std::vector<double>& actual, const std::vector<double>& expected,
                                           double absolute, double relative) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " elements, expected " << expected.size();
  }
  double worst = 0;
  size_t worst_at = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], b = expected[i];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    const double bound = absolute + relative * std::fabs(b);
    double excess = std::fabs(a - b) / bound;
    if (std::isnan(excess)) excess = std::numeric_limits<double>::infinity();
    if (excess > worst) {
      worst = excess;
      worst_at = i;
    }
  }
  if (worst <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "element " << worst_at << " of " << actual.size() << " is "
                                       << actual[worst_at] << ", expected " << expected[worst_at] << ": " << worst
                                       << " times the bound (absolute " << absolute << ", relative " << relative << ")";
}
#define EXPECT_NEAR_ALL(actual, expected, absolute, relative) \
  EXPECT_TRUE(::oomb::kernels::testing::near_all(actual, expected, absolute, relative))

inline ::testing::AssertionResult is_ok(const Status& status) {
  if (status) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "status " << static_cast<int>(status.code) << ": " << status.what;
}
#define ASSERT_OK(call) ASSERT_TRUE(::oomb::kernels::testing::is_ok(call))
#define EXPECT_OK(call) EXPECT_TRUE(::oomb::kernels::testing::is_ok(call))

/// A test of one op on one device. Buffers made through it live on that device.
class DeviceTest : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::cuda && no_cuda() != nullptr) GTEST_SKIP() << no_cuda();
  }
  Queue queue() const { return {GetParam(), nullptr}; }
  Device device() const { return GetParam(); }
  Buffer input(DType type, const std::vector<double>& values, int64_t shift_elements = 0) const {
    return {device(), type, values, shift_elements};
  }
  /// `n` NaNs.
  Buffer output(DType type, int64_t n, int64_t shift_elements = 0) const {
    return {device(), type, std::vector<double>(static_cast<size_t>(n), std::nan("")), shift_elements};
  }
  template <class T>
  Items<T> items(const std::vector<T>& values) const {
    return {device(), values};
  }
  /// Workspace of `bytes` bytes, full of 0xff (NaN in every element type).
  Items<unsigned char> workspace(int64_t bytes) const {
    return {device(), std::vector<unsigned char>(static_cast<size_t>(bytes), 0xff)};
  }
};

#define OOMB_ON_ALL_DEVICES(suite)                                                                         \
  INSTANTIATE_TEST_SUITE_P(Devices, suite,                                                                 \
                           ::testing::Values(::oomb::kernels::Device::cpu, ::oomb::kernels::Device::cuda), \
                           [](const auto& device) { return ::oomb::kernels::testing::name_of(device.param); })

/// The types most cases run on.
inline constexpr DType kAllTypes[] = {DType::f64, DType::f32, DType::bf16};

}  // namespace oomb::kernels::testing
