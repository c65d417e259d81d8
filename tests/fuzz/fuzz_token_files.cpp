// Token files: any bytes are refused with InputError by each format's parser, or give a range of tokens that lies in
// the file and can be read to its end.
#include <algorithm>
#include <span>
#include <vector>

#include "configs/error.h"
#include "tests/fuzz/fuzz.h"
#include "worker/data/token_files.h"

namespace {

using namespace oomb;

void read_all(std::span<const std::byte> file, const data::TokenRange& range) {
  fuzz::require(range.offset >= 0 && range.count >= 0, "a range has no negative size");
  const auto bytes = static_cast<std::int64_t>(file.size());
  fuzz::require(range.offset <= bytes && range.count <= (bytes - range.offset) / data::size_of(range.type),
                "a range lies in the file");
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(range.count));
  data::widen_tokens(file, range, 0, tokens);
}

template <typename Parse>
void expect_range_or_error(std::span<const std::byte> file, Parse parse) {
  try {
    read_all(file, parse());
  } catch (const InputError&) {
  }
}

// The index tells of another file, whose size is taken from the input as well.
void check_megatron(std::span<const std::byte> input) {
  if (input.empty()) return;
  const std::int64_t bin_bytes = std::int64_t{1} << (std::to_integer<int>(input[0]) % 48);
  const auto index = input.subspan(1);
  try {
    const data::MegatronIndex parsed = data::parse_megatron_index(index, bin_bytes, "fuzz.idx", "fuzz.bin");
    const data::TokenRange& tokens = parsed.tokens;
    fuzz::require(tokens.offset >= 0 && tokens.offset <= bin_bytes, "tokens begin in the .bin file");
    fuzz::require(tokens.count >= 0 && tokens.count <= (bin_bytes - tokens.offset) / data::size_of(tokens.type),
                  "tokens end in the .bin file");
    fuzz::require(std::is_sorted(parsed.document_begin.begin(), parsed.document_begin.end()), "documents are in order");
    fuzz::require(!parsed.document_begin.empty() && parsed.document_begin.back() == tokens.count,
                  "documents end with the tokens");
  } catch (const InputError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  const auto file = std::as_bytes(std::span(input, size));
  data::is_llmc(file);
  data::is_npy(file);
  data::is_megatron_index(file);
  expect_range_or_error(file, [&] { return data::parse_llmc(file, "fuzz.bin"); });
  expect_range_or_error(file, [&] { return data::parse_npy(file, "fuzz.npy"); });
  for (const data::TokenType type : {data::TokenType::kU8, data::TokenType::kU16, data::TokenType::kI64})
    expect_range_or_error(file, [&] { return data::parse_headerless(file, type, "fuzz.bin"); });
  check_megatron(file);
  return 0;
}
