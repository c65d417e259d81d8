#include "worker/data/token_files.h"

#include <algorithm>
#include <random>

#include "tests/data/test_files.h"

namespace oomb::data {
namespace {

using test::bytes_of;
using test::error_of;
using test::expect_mentions;
using test::raw;
using test::raw_all;

std::vector<int64_t> tokens_of(const std::string& file, const TokenRange& range) {
  std::vector<int64_t> out(static_cast<size_t>(range.count));
  widen_tokens(bytes_of(file), range, 0, out);
  return out;
}

std::string llmc_header(int32_t magic, int32_t version, int32_t count) {
  std::string header = raw(magic) + raw(version) + raw(count);
  header.resize(1024, '\x7f');
  return header;
}

std::string npy_file(const std::string& descr, const std::string& shape, const std::string& body, int major = 1) {
  std::string dict = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
  const size_t prefix = major == 1 ? 10 : 12;
  while ((prefix + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  std::string file = std::string("\x93NUMPY") + static_cast<char>(major) + '\0';
  file += major == 1 ? raw(static_cast<uint16_t>(dict.size())) : raw(static_cast<uint32_t>(dict.size()));
  return file + dict + body;
}

std::string megatron_index(uint8_t code, const std::vector<int64_t>& lengths, const std::vector<int64_t>& documents,
                           int64_t item) {
  std::string index("MMIDIDX\0\0", 9);
  index += raw(uint64_t{1}) + raw(code) + raw(uint64_t{lengths.size()}) + raw(uint64_t{documents.size()});
  index += raw_all<int32_t>(lengths);
  std::vector<int64_t> pointers;
  int64_t at = 0;
  for (const int64_t length : lengths) {
    pointers.push_back(at);
    at += length * item;
  }
  return index + raw_all<int64_t>(pointers) + raw_all<int64_t>(documents);
}

TEST(LlmC, ReadsBothMagics) {
  const std::vector<int64_t> gpt2{50256, 0, 7, 65535, 11};
  const std::string small = llmc_header(20240520, 1, 5) + raw_all<uint16_t>(gpt2);
  EXPECT_EQ(tokens_of(small, parse_llmc(bytes_of(small), "s.bin")), gpt2);
  const std::vector<int64_t> llama{128009, 3, 4294967295};
  const std::string large = llmc_header(20240801, 7, 3) + raw_all<uint32_t>(llama);
  EXPECT_EQ(tokens_of(large, parse_llmc(bytes_of(large), "l.bin")), llama);
}

TEST(LlmC, RefusesWhatDoesNotFit) {
  const std::string good = llmc_header(20240520, 1, 3) + raw_all<uint16_t>({1, 2, 3});
  for (const size_t size : {good.size() - 1, good.size() - 2, size_t{1024}, size_t{1023}, size_t{11}}) {
    const std::string cut = good.substr(0, size);
    expect_mentions(error_of([&] { parse_llmc(bytes_of(cut), "cut.bin"); }), {"cut.bin"});
  }
  const std::string longer = good + '\0';
  expect_mentions(error_of([&] { parse_llmc(bytes_of(longer), "x.bin"); }), {"1031", "3 tokens", "1030"});
  const std::string version = llmc_header(20240520, 7, 3) + raw_all<uint16_t>({1, 2, 3});
  expect_mentions(error_of([&] { parse_llmc(bytes_of(version), "x.bin"); }), {"version 7", "expected 1"});
  for (const int32_t count : {0, -1, INT32_MIN}) {
    const std::string bad = llmc_header(20240801, 7, count);
    error_of([&] { parse_llmc(bytes_of(bad), "x.bin"); });
  }
}

TEST(Npy, ReadsIntegerVectors) {
  const std::vector<int64_t> ids{0, 1, 200, 65535};
  const auto read = [](const std::string& file) { return tokens_of(file, parse_npy(bytes_of(file), "a.npy")); };
  EXPECT_EQ(read(npy_file("<u2", "(4,)", raw_all<uint16_t>(ids))), ids);
  EXPECT_EQ(read(npy_file("<u4", "(4,)", raw_all<uint32_t>(ids), 2)), ids);
  EXPECT_EQ(read(npy_file("<i4", "(4,)", raw_all<int32_t>(ids))), ids);
  EXPECT_EQ(read(npy_file("<i8", "(4,)", raw_all<int64_t>({-5, 1, 2, int64_t{1} << 40}), 3)),
            (std::vector<int64_t>{-5, 1, 2, int64_t{1} << 40}));
}

TEST(Npy, RefusesOtherArrays) {
  const std::string body(16, '\1');
  const auto refuse = [](const std::string& file, std::initializer_list<std::string> parts) {
    expect_mentions(error_of([&] { parse_npy(bytes_of(file), "a.npy"); }), parts);
  };
  refuse(npy_file("<f4", "(4,)", body), {"a.npy", "<f4"});
  refuse(npy_file(">i4", "(4,)", body), {">i4"});
  refuse(npy_file("<i4", "(2, 2)", body), {"one dimension"});
  refuse(npy_file("<i4", "()", body), {"one dimension"});
  refuse(npy_file("<i4", "(5,)", body), {"5 elements", "16 bytes"});
  refuse(npy_file("<i4", "(3,)", body), {"3 elements", "16 bytes"});
  refuse(npy_file("<i4", "(99999999999999999999999,)", body), {"too large"});
  refuse(npy_file("<i4", "(4,)", body).substr(0, 40), {"truncated"});
  refuse(npy_file("<i4", "(4,)", body, 9), {"version 9"});
}

TEST(Megatron, ReadsSequencesAndDocuments) {
  const std::string index = megatron_index(8, {3, 0, 5, 2}, {0, 2, 3, 4}, 2);
  const MegatronIndex parsed = parse_megatron_index(bytes_of(index), 20, "c.idx", "c.bin");
  EXPECT_EQ(parsed.tokens.type, TokenType::kU16);
  EXPECT_EQ(parsed.tokens.count, 10);
  EXPECT_EQ(parsed.document_begin, (std::vector<int64_t>{0, 3, 8, 10}));
  const std::string modes = index + std::string(4, '\1');  // one mode per sequence may follow
  EXPECT_EQ(parse_megatron_index(bytes_of(modes), 20, "c.idx", "c.bin").tokens.count, 10);
}

TEST(Megatron, BinCutByTwoBytes) {
  const std::string index = megatron_index(4, {3, 4}, {0, 1, 2}, 4);
  expect_mentions(error_of([&] { parse_megatron_index(bytes_of(index), 26, "c.idx", "c.bin"); }),
                  {"c.bin", "26", "28"});
}

TEST(Megatron, RefusesBrokenIndexes) {
  const auto refuse = [](const std::string& index, int64_t bin, std::initializer_list<std::string> parts) {
    expect_mentions(error_of([&] { parse_megatron_index(bytes_of(index), bin, "c.idx", "c.bin"); }), parts);
  };
  const std::string good = megatron_index(4, {3, 4}, {0, 1, 2}, 4);
  for (size_t size = 0; size < good.size(); ++size) refuse(good.substr(0, size), 28, {"c.idx"});
  refuse(good + '\0', 28, {"left over"});
  refuse(megatron_index(6, {3, 4}, {0, 1, 2}, 8), 56, {"code 6"});
  refuse(megatron_index(4, {3, -4}, {0, 1, 2}, 4), -4, {"sequence 1"});
  refuse(megatron_index(4, {3, 4}, {0, 1, 2}, 2), 28, {"sequence 1", "expected byte 12"});
  refuse(megatron_index(4, {3, 4}, {0, 2, 1}, 4), 28, {"boundary"});
  refuse(megatron_index(4, {3, 4}, {0, 1}, 4), 28, {"boundary 1"});
  refuse(megatron_index(4, {3, 4}, {0, 3, 2}, 4), 28, {"boundary 1"});
  refuse(megatron_index(4, {3, 4}, {-1, 2}, 4), 28, {"boundary 0"});
  std::string huge = good;
  huge.replace(18, 8, raw(uint64_t{0xFFFFFFFFFFFFFFF0}));
  refuse(huge, 28, {"truncated"});
}

TEST(Headerless, SizeMustBeWhole) {
  const std::string file(7, 'x');
  expect_mentions(error_of([&] { parse_headerless(bytes_of(file), TokenType::kU16, "train.bin"); }),
                  {"train.bin", "7 bytes", "u16"});
  EXPECT_EQ(parse_headerless(bytes_of(file), TokenType::kU8, "train.bin").count, 7);
}

TEST(Names, RoundTripAndRefusal) {
  for (const char* name : {"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"}) {
    EXPECT_STREQ(name_of(parse_token_type(name)), name);
  }
  EXPECT_EQ(parse_token_type("uint16"), TokenType::kU16);
  for (const char* name : {"auto", "text", "llmc", "megatron", "nanogpt", "npy"}) {
    EXPECT_STREQ(name_of(parse_token_format(name)), name);
  }
  expect_mentions(error_of([] { parse_token_type("float32"); }), {"float32", "u16"});
  expect_mentions(error_of([] { parse_token_format("parquet"); }), {"parquet", "megatron"});
}

/// Whatever the bytes are, a parser either answers with a range inside the file or throws InputError.
TEST(Parsers, SurviveGarbage) {
  constexpr uint64_t kSeed = 20240520;
  RecordProperty("seed", static_cast<int>(kSeed));
  std::mt19937_64 random(kSeed);
  const std::vector<std::string> seeds{llmc_header(20240520, 1, 3) + raw_all<uint16_t>({1, 2, 3}),
                                       llmc_header(20240801, 7, 2) + raw_all<uint32_t>({1, 2}),
                                       npy_file("<i4", "(4,)", std::string(16, '\1')),
                                       megatron_index(8, {3, 0, 5, 2}, {0, 2, 3, 4}, 2)};
  int64_t accepted = 0;
  int64_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string file = seeds[random() % seeds.size()];
    for (uint64_t flips = random() % 4; flips-- > 0;) {
      // Mostly in the first 80 bytes, where the headers are.
      file[random() % (random() % 4 != 0 ? std::min<size_t>(80, file.size()) : file.size())] =
          static_cast<char>(random());
    }
    if (random() % 4 == 0) file.resize(random() % (file.size() + 1));
    const auto attempt = [&](const auto& parse) {
      try {
        const TokenRange range = parse();
        const auto size = static_cast<int64_t>(file.size());
        ASSERT_GE(range.count, 0);
        ASSERT_LE(range.offset + range.count * size_of(range.type), size);
        tokens_of(file, range);
        ++accepted;
      } catch (const InputError&) {
        ++refused;
      }
    };
    attempt([&] { return parse_llmc(bytes_of(file), "f"); });
    attempt([&] { return parse_npy(bytes_of(file), "f"); });
    attempt([&] {
      const MegatronIndex index = parse_megatron_index(bytes_of(file), 20, "f.idx", "f.bin");
      EXPECT_EQ(index.tokens.count * size_of(index.tokens.type), 20);
      EXPECT_EQ(index.document_begin.back(), index.tokens.count);
      return TokenRange{};
    });
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 20000);
}

}  // namespace
}  // namespace oomb::data
