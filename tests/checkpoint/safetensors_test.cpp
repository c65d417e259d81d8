#include "worker/checkpoint/safetensors.h"

#include <cmath>
#include <random>

#include "tests/data/test_files.h"
#include "worker/checkpoint/crc32c.h"
#include "worker/checkpoint/hf_weights.h"
#include "worker/checkpoint/safetensors_writer.h"

namespace oomb::checkpoint {
namespace {

using test::bytes_of;
using test::error_of;
using test::expect_mentions;
using test::raw;
using test::read_all;
using test::TempFolder;

std::string file_of(const std::string& header, const std::string& buffer) {
  return raw(uint64_t{header.size()}) + header + buffer;
}

TensorMap parse(const std::string& file) { return parse_safetensors(bytes_of(file), "w.safetensors", nullptr); }

void refuse(const std::string& header, const std::string& buffer, std::initializer_list<std::string> parts) {
  const std::string message = error_of([&] { parse(file_of(header, buffer)); });
  expect_mentions(message, {"w.safetensors"});
  expect_mentions(message, parts);
}

constexpr const char* kGood =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
    R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,5],"data_offsets":[16,16]}})";

/// Bytes of a tensor that differ from tensor to tensor and from byte to byte.
std::string content(const TensorSpec& spec) {
  std::string bytes(static_cast<size_t>(spec.num_bytes()), '\0');
  const uint32_t salt = crc32c(bytes_of(spec.name));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(salt + i * 7 + i / 251);
  return bytes;
}

TensorSource source_of(std::string* buffer) {
  return [buffer](const TensorSpec& spec) {
    *buffer = content(spec);
    return bytes_of(*buffer);
  };
}

std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(Crc32c, KnownAnswersAndBothPaths) {
  // RFC 3720, B.4, and the usual check value.
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283u);
  EXPECT_EQ(crc32c(bytes_of(std::string(32, '\0'))), 0x8A9136AAu);
  EXPECT_EQ(crc32c(bytes_of(std::string(32, '\xff'))), 0x62A8AB43u);
  EXPECT_EQ(crc32c({}), 0u);
  std::string text(1021, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i);
  for (size_t cut = 0; cut <= text.size(); cut += 13) {
    const auto head = bytes_of(std::string_view(text).substr(0, cut));
    const auto tail = bytes_of(std::string_view(text).substr(cut));
    EXPECT_EQ(crc32c(tail, crc32c(head)), crc32c_portable(bytes_of(text)));
    EXPECT_EQ(crc32c_portable(tail, crc32c_portable(head)), crc32c(bytes_of(text)));
  }
}

TEST(Safetensors, ReadsScalarsEmptyTensorsAndMetadata) {
  const std::string file = file_of(std::string(kGood) + "   ", "ABCDabcdefghijkl");
  Metadata metadata;
  const TensorMap tensors = parse_safetensors(bytes_of(file), "w", &metadata);
  EXPECT_EQ(metadata.at("format"), "pt");
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(as_text(tensors.at("a").bytes), "ABCD");
  EXPECT_EQ(tensors.at("a").num_elements(), 1);
  EXPECT_TRUE(tensors.at("a").shape.empty());
  EXPECT_EQ(tensors.at("b").dtype, DType::kBF16);
  EXPECT_EQ(tensors.at("b").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(as_text(tensors.at("b").bytes), "abcdefghijkl");
  EXPECT_EQ(tensors.at("e").num_elements(), 0);
  EXPECT_TRUE(parse(file_of("{}", "")).empty());
}

TEST(Safetensors, RefusesDamagedFiles) {
  const std::string good = file_of(kGood, "ABCDabcdefghijkl");
  for (size_t size = 0; size < good.size(); ++size) {
    const std::string cut = good.substr(0, size);
    expect_mentions(error_of([&] { parse(cut); }), {"w.safetensors"});
  }
  expect_mentions(error_of([&] { parse(good.substr(0, good.size() - 1)); }), {"truncated"});
  expect_mentions(error_of([&] { parse(good + 'x'); }), {"1 bytes left over"});
  std::string long_header = good;
  long_header.replace(0, 8, raw(uint64_t{1} << 40));
  expect_mentions(error_of([&] { parse(long_header); }), {"1099511627776", "limit"});
  long_header.replace(0, 8, raw(~uint64_t{0}));
  expect_mentions(error_of([&] { parse(long_header); }), {"limit"});
}

TEST(Safetensors, RefusesWrongHeaders) {
  refuse(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", "12345", {"\"a\"", "hole"});
  refuse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
         "123", {"\"b\"", "overlap"});
  refuse(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
         "1234", {"\"b\"", "hole"});
  refuse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
         "12", {"\"a\"", "twice"});
  refuse(R"({"a":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}})", std::string(16, 'x'), {"F128"});
  refuse(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", "x", {"dtype"});
  refuse(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "x", {"shape"});
  refuse(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "x", {"shape"});
  refuse(R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", "x", {"shape"});
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "1234", {"[2]", "F32"});
  refuse(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}})", "", {"data_offsets"});
  refuse(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "", {"shape"});
  refuse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", "x", {"pair"});
  refuse(R"({"a":{"dtype":"U8","shape":[1]}})", "x", {"data_offsets"});
  refuse(R"({"a":[1]})", "x", {"\"a\""});
  refuse(R"({"__metadata__":{"format":1}})", "", {"__metadata__"});
  refuse(R"( {})", "", {"{"});
  refuse(R"({"a":)", "", {"JSON"});
  refuse(R"([])", "", {"{"});
  refuse("{\"\xff\xfe\":1}", "", {"JSON"});
}

TEST(Safetensors, SurvivesGarbage) {
  constexpr uint64_t kSeed = 11;
  std::mt19937_64 random(kSeed);
  const std::string good = file_of(kGood, "ABCDabcdefghijkl");
  int64_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string file = good;
    for (uint64_t flips = 1 + random() % 3; flips-- > 0;) {
      // Digits and punctuation hit more often than random bytes would.
      constexpr std::string_view kLikely = "0123456789[]{},:\"-e.";
      file[random() % file.size()] =
          random() % 2 == 0 ? kLikely[random() % kLikely.size()] : static_cast<char>(random());
    }
    if (random() % 8 == 0) file.resize(random() % file.size());
    try {
      size_t total = 0;
      for (const auto& [name, view] : parse(file)) {
        ASSERT_GE(reinterpret_cast<const char*>(view.bytes.data()), file.data());
        ASSERT_LE(reinterpret_cast<const char*>(view.bytes.data()) + view.bytes.size(), file.data() + file.size());
        total += view.bytes.size();
      }
      ASSERT_LE(total, file.size());
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

const std::vector<TensorSpec> kSpecs{{"model.embed_tokens.weight", DType::kBF16, {13, 7}},
                                     {"model.norm.weight", DType::kF32, {7}},
                                     {"step", DType::kI64, {}},
                                     {"odd \"name\"\n", DType::kU8, {3}},
                                     {"empty", DType::kF64, {0, 4}},
                                     {"half", DType::kF16, {1, 1, 5}}};

TEST(SafetensorsWriter, RoundTripAlignedWithFormat) {
  const TempFolder dir;
  const auto folder = open_disk_folder(dir.path());
  std::string buffer;
  write_safetensors(*folder, "w.safetensors", kSpecs, source_of(&buffer), {{"step", "10"}});
  const SafetensorsFile file(dir / "w.safetensors");
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"step", "10"}}));
  ASSERT_EQ(file.tensors().size(), kSpecs.size());
  for (const TensorSpec& spec : kSpecs) {
    const TensorView* view = file.find(spec.name);
    ASSERT_NE(view, nullptr) << spec.name;
    EXPECT_EQ(view->dtype, spec.dtype);
    EXPECT_EQ(view->shape, spec.shape);
    EXPECT_EQ(as_text(view->bytes), content(spec));
    // The mapping starts on a page, so addresses show the alignment in the file.
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view->bytes.data()) % static_cast<uintptr_t>(size_of(spec.dtype)), 0u);
  }
  const std::string bytes = read_all(dir / "w.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ((header + 8) % 64, 0u);
  EXPECT_EQ(static_cast<int64_t>(bytes.size()), safetensors_bytes(kSpecs, {{"step", "10"}}));
  EXPECT_EQ(file.find("missing"), nullptr);
}

TEST(SafetensorsWriter, RefusesWrongUse) {
  const TempFolder dir;
  const auto folder = open_disk_folder(dir.path());
  const TensorSource wrong = [](const TensorSpec&) { return bytes_of("x"); };
  EXPECT_THROW(write_safetensors(*folder, "a", {{"t", DType::kF32, {1}}}, wrong), std::logic_error);
  std::string buffer;
  EXPECT_THROW(write_safetensors(*folder, "b", {{"t", DType::kU8, {1}}, {"t", DType::kU8, {1}}}, source_of(&buffer)),
               std::logic_error);
  EXPECT_THROW(folder->create("../escape"), std::logic_error);
  expect_mentions(error_of([&] { write_text(*open_disk_folder(dir / "missing"), "f", "x"); }), {"missing/f"});
}

TEST(HfWeights, ShardedRoundTrip) {
  for (const int64_t limit : {1, 100, 182, 200, 1000000}) {
    const TempFolder dir;
    const auto folder = open_disk_folder(dir.path());
    std::string buffer;
    write_hf_weights(*folder, kSpecs, source_of(&buffer), limit);
    EXPECT_EQ(std::filesystem::exists(dir / "model.safetensors.index.json"), limit < 1000000);
    EXPECT_EQ(std::filesystem::exists(dir / "model.safetensors"), limit == 1000000);
    const HfWeights weights(dir.path());
    EXPECT_EQ(weights.names().size(), kSpecs.size());
    for (const TensorSpec& spec : kSpecs) EXPECT_EQ(as_text(weights.at(spec.name).bytes), content(spec));
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
      const std::string name = entry.path().filename();
      if (!name.ends_with(".safetensors")) continue;
      int64_t data = 0;
      const SafetensorsFile shard(entry.path());
      for (const auto& [tensor, view] : shard.tensors()) data += static_cast<int64_t>(view.bytes.size());
      EXPECT_TRUE(data <= limit || shard.tensors().size() == 1) << name << " " << data;
    }
  }
}

TEST(HfWeights, PrefixVariants) {
  const std::string stored[] = {"model.layers.0.w", "layers.0.w", "model.model.layers.0.w"};
  for (const std::string& name : stored) {
    const TempFolder dir;
    std::string buffer;
    write_hf_weights(*open_disk_folder(dir.path()), {{name, DType::kU8, {3}}, {"lm_head.weight", DType::kU8, {1}}},
                     source_of(&buffer));
    const HfWeights weights(dir.path());
    ASSERT_NE(weights.find("model.layers.0.w"), nullptr) << name;
    EXPECT_EQ(weights.at("model.layers.0.w").num_elements(), 3);
    EXPECT_EQ(weights.at("lm_head.weight").num_elements(), 1);
    EXPECT_EQ(weights.find("model.layers.1.w"), nullptr);
    EXPECT_NE(weights.file_of("model.layers.0.w").find("model.safetensors"), std::string::npos);
    expect_mentions(error_of([&] { weights.at("model.norm.weight"); }), {dir.path(), "model.norm.weight"});
    // A single file may be named as well.
    EXPECT_EQ(HfWeights(dir / "model.safetensors").names().size(), 2u);
  }
}

TEST(HfWeights, RefusesBrokenFolders) {
  const TempFolder dir;
  const std::string index = dir / "model.safetensors.index.json";
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {dir.path(), "model.safetensors"});
  dir.write("pytorch_model.bin", "x");
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {"pytorch_model.bin"});
  std::string buffer;
  write_hf_weights(*open_disk_folder(dir.path()), kSpecs, source_of(&buffer), 200);
  EXPECT_EQ(HfWeights(dir.path()).names().size(), kSpecs.size());

  const std::string shard = dir / "model-00002-of-00002.safetensors";
  ASSERT_TRUE(std::filesystem::exists(shard));
  const std::string whole = read_all(shard);
  dir.write("model-00002-of-00002.safetensors", whole.substr(0, whole.size() - 1));
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {shard, "truncated"});
  dir.write("model-00002-of-00002.safetensors", whole + "x");
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {shard, "left over"});
  std::filesystem::remove(shard);
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {shard, "missing"});
  dir.write("model-00002-of-00002.safetensors", read_all(dir / "model-00001-of-00002.safetensors"));
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {"model-00002", "model-00001", "too"});
  dir.write("model-00002-of-00002.safetensors", file_of("{}", ""));
  expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {"model-00002", "has no tensor"});

  for (const char* text : {"{}", "[]", R"({"weight_map": {}})", R"({"weight_map": {"a": 1}})",
                           R"({"weight_map": {"a": "../other.safetensors"}})",
                           R"({"weight_map": {"a": "/etc/passwd"}})", R"({"weight_map": {"a": "x", "a": "y"}})", "{"}) {
    dir.write("model.safetensors.index.json", text);
    expect_mentions(error_of([&] { HfWeights w(dir.path()); }), {index});
  }
}

}  // namespace
}  // namespace oomb::checkpoint
