// What libFuzzer does, without its coverage: runs every file of a corpus, then mutations of them until the time is
// over.
//
// usage: fuzz_TARGET CORPUS SECONDS [SEED]
//
// The sequence of inputs depends on the corpus and the seed alone. The input being run is kept in fuzz-input.bin in the
// current folder, mapped, so that it is there after a crash; `fuzz_TARGET FOLDER 0` with that file in FOLDER runs it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "tests/fuzz/fuzz.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMaxInput = std::size_t{1} << 16;
constexpr auto kLongestRun = std::chrono::seconds(5);  // of an input this small, under a sanitizer on a busy machine

class KeptInput {
 public:
  KeptInput() {
    const int fd = open("fuzz-input.bin", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, kMaxInput) != 0) {
      std::perror("fuzz-input.bin");
      std::exit(2);
    }
    place_ = static_cast<std::uint8_t*>(mmap(nullptr, kMaxInput, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    if (place_ == MAP_FAILED) {
      std::perror("mmap");
      std::exit(2);
    }
    fd_ = fd;
  }

  void run(const Bytes& input) {
    if (ftruncate(fd_, static_cast<off_t>(input.size())) != 0) std::abort();
    if (!input.empty()) std::memcpy(place_, input.data(), input.size());
    const auto begin = Clock::now();
    // From the heap, with nothing behind it, so that the sanitizer sees a read beyond the end.
    const Bytes exact(input);
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
    oomb::fuzz::require(Clock::now() - begin < kLongestRun, "an input takes no longer than 5 s");
  }

 private:
  int fd_ = -1;
  std::uint8_t* place_ = nullptr;
};

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, std::uint64_t seed) : corpus_(corpus), random_(seed) {}

  Bytes next() {
    Bytes input = corpus_[below(corpus_.size())];
    for (std::size_t rounds = 1 + below(8); rounds > 0; --rounds) mutate(input);
    if (input.size() > kMaxInput) input.resize(kMaxInput);
    return input;
  }

 private:
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : static_cast<std::size_t>(random_() % limit); }

  // Sizes and counts are where parsers go wrong.
  void write_number(Bytes& input) {
    static constexpr std::uint64_t kNumbers[] = {0,
                                                 1,
                                                 2,
                                                 127,
                                                 128,
                                                 255,
                                                 256,
                                                 32767,
                                                 65535,
                                                 65536,
                                                 2147483647,
                                                 2147483648,
                                                 4294967295U,
                                                 4294967296U,
                                                 9223372036854775807U,
                                                 18446744073709551615U};
    std::uint64_t number = kNumbers[below(std::size(kNumbers))] + below(3) - 1;
    if (below(4) == 0) number = input.size() - below(16);
    const std::size_t width = std::size_t{1} << below(4), at = below(input.size());
    for (std::size_t i = 0; i < width && at + i < input.size(); ++i)
      input[at + i] = static_cast<std::uint8_t>(number >> (8 * i));
  }

  void splice(Bytes& input) {
    const Bytes& other = corpus_[below(corpus_.size())];
    const std::size_t from = below(other.size()), count = below(other.size() - from + 1);
    const auto at = input.begin() + static_cast<std::ptrdiff_t>(below(input.size() + 1));
    input.insert(at, other.begin() + static_cast<std::ptrdiff_t>(from),
                 other.begin() + static_cast<std::ptrdiff_t>(from + count));
  }

  void repeat(Bytes& input) {
    const std::size_t from = below(input.size()), count = 1 + below(std::min<std::size_t>(16, input.size() - from));
    const Bytes part(input.begin() + static_cast<std::ptrdiff_t>(from),
                     input.begin() + static_cast<std::ptrdiff_t>(from + count));
    for (std::size_t times = 1 + below(64); times > 0 && input.size() < kMaxInput; --times)
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(from), part.begin(), part.end());
  }

  void mutate(Bytes& input) {
    if (input.empty()) return splice(input);
    const std::size_t at = below(input.size());
    switch (below(8)) {
      case 0:
        input[at] = static_cast<std::uint8_t>(input[at] ^ (1U << below(8)));
        break;
      case 1:
        input[at] = static_cast<std::uint8_t>(random_());
        break;
      case 2:
        input.resize(at);
        break;
      case 3:
        input.erase(
            input.begin() + static_cast<std::ptrdiff_t>(at),
            input.begin() + static_cast<std::ptrdiff_t>(at + 1 + below(std::min<std::size_t>(8, input.size() - at))));
        break;
      case 4:
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(random_()));
        break;
      case 5:
        write_number(input);
        break;
      case 6:
        splice(input);
        break;
      case 7:
        repeat(input);
        break;
    }
  }

  const std::vector<Bytes>& corpus_;
  std::mt19937_64 random_;
};

std::vector<Bytes> read_corpus(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Bytes> corpus;
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    if (corpus.back().size() > kMaxInput) corpus.back().resize(kMaxInput);
  }
  return corpus;
}

template <typename Number>
bool parse(const char* text, Number& number) {
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), number);
  return error == std::errc() && *end == 0;
}

}  // namespace

int main(int argc, char** argv) {
  int seconds = 0;
  std::uint64_t seed = 1;
  if (argc < 3 || argc > 4 || !parse(argv[2], seconds) || (argc == 4 && !parse(argv[3], seed))) {
    std::fprintf(stderr, "usage: %s CORPUS SECONDS [SEED]\n", argv[0]);
    return 2;
  }
  const std::vector<Bytes> corpus = read_corpus(argv[1]);
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no corpus\n", argv[1]);
    return 2;
  }
  KeptInput kept;
  for (const Bytes& input : corpus) kept.run(input);
  Mutator mutator(corpus, seed);
  std::uint64_t runs = 0;
  for (const auto end = Clock::now() + std::chrono::seconds(seconds); Clock::now() < end; ++runs) {
    kept.run(mutator.next());
  }
  std::printf("%zu inputs of the corpus and %llu mutations of them, seed %llu\n", corpus.size(),
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(seed));
  return 0;
}
