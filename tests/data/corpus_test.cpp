#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "tests/data/test_files.h"
#include "worker/data/path_list.h"
#include "worker/data/token_stream.h"

namespace oomb::data {
namespace {

using test::error_of;
using test::expect_mentions;
using test::raw;
using test::raw_all;
using test::TempFolder;

std::vector<int64_t> all_tokens(const TokenStream& stream) {
  std::vector<int64_t> out(static_cast<size_t>(stream.size()), -7);
  stream.read(0, out);
  return out;
}

CorpusOptions corpus(std::vector<std::string> paths) {
  CorpusOptions options;
  options.paths = std::move(paths);
  return options;
}

std::string llmc_file(const std::vector<int64_t>& ids) {
  std::string file = raw(int32_t{20240520}) + raw(int32_t{1}) + raw(static_cast<int32_t>(ids.size()));
  file.resize(1024, '\0');
  return file + raw_all<uint16_t>(ids);
}

std::string index_file(const std::vector<int64_t>& lengths, const std::vector<int64_t>& documents) {
  std::string index("MMIDIDX\0\0", 9);
  index += raw(uint64_t{1}) + raw(uint8_t{4}) + raw(uint64_t{lengths.size()}) + raw(uint64_t{documents.size()});
  index += raw_all<int32_t>(lengths);
  int64_t at = 0;
  for (const int64_t length : lengths) {
    index += raw(at);
    at += length * 4;
  }
  return index + raw_all<int64_t>(documents);
}

TEST(PathList, SortedRecursiveFilteredOnce) {
  const TempFolder dir;
  dir.write("b/z.h", "1");
  dir.write("b/a.cpp", "2");
  dir.write("a.h", "3");
  dir.write("B.h", "4");
  dir.write("plain", "5");
  dir.write(".git/config.h", "6");
  std::filesystem::create_symlink(dir / "b", dir / "b/loop");  // into itself
  std::filesystem::create_symlink(dir.path(), dir / "c");      // up
  std::filesystem::create_symlink(dir / "a.h", dir / "zz.h");  // a second name of one file
  std::filesystem::create_symlink(dir / "nowhere", dir / "dangling.h");
  const auto names = [&](const std::vector<std::string>& paths) {
    std::vector<std::string> short_names;
    for (const std::string& path : paths) short_names.push_back(path.substr(dir.path().size() + 1));
    return short_names;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(expand_paths({dir.path()})), (Names{"B.h", "a.h", "b/a.cpp", "b/z.h", "plain"}));
  EXPECT_EQ(names(expand_paths({dir.path()}, {".h"})), (Names{"B.h", "a.h", "b/z.h"}));
  EXPECT_EQ(names(expand_paths({dir.path()}, {"cpp", ""})), (Names{"b/a.cpp", "plain"}));
  EXPECT_EQ(names(expand_paths({dir / "*.h"})), (Names{"B.h", "a.h"}));
  EXPECT_EQ(names(expand_paths({dir / "b", dir / "a.h", dir / "b/z.h"})), (Names{"a.h", "b/a.cpp", "b/z.h"}));
}

TEST(PathList, NamesWhatMatchesNothing) {
  const TempFolder dir;
  dir.write("only.txt", "x");
  expect_mentions(error_of([&] { expand_paths({dir / "missing.txt"}); }), {"missing.txt", "No such file"});
  expect_mentions(error_of([&] { expand_paths({dir / "only.txt", dir / "*.json"}); }), {"*.json", "matches no"});
  expect_mentions(error_of([&] { expand_paths({dir.path()}, {"md"}); }), {dir.path(), "extensions"});
  error_of([] { expand_paths({}); });
  error_of([] { expand_paths({""}); });
}

TEST(Text, DocumentsWithSeparators) {
  const TempFolder dir;
  dir.write("t/1.txt", "ab");
  dir.write("t/2.txt", "");  // an empty file in a folder is no document
  dir.write("t/3.txt", std::string("\xff\0z", 3));
  const auto stream = open_corpus(corpus({dir / "t"}));
  EXPECT_EQ(stream->vocab_size_needed(), 257);
  EXPECT_EQ(all_tokens(*stream), (std::vector<int64_t>{97, 98, 256, 255, 0, 122, 256}));
  for (int64_t begin = 0; begin <= 7; ++begin) {
    for (int64_t count = 0; begin + count <= 7; ++count) {
      std::vector<int64_t> part(static_cast<size_t>(count), -7);
      stream->read(begin, part);
      const auto whole = all_tokens(*stream);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin)) << begin << " " << count;
    }
  }
  std::vector<int64_t> beyond(2);
  EXPECT_THROW(stream->read(6, beyond), std::logic_error);
  EXPECT_THROW(stream->read(-1, beyond), std::logic_error);
  expect_mentions(stream->locate(4), {"3.txt", "byte 1"});
}

TEST(Text, LargeFilesAndMaxBytes) {
  const TempFolder dir;
  std::string large((1 << 20) + 13, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31 + i / 257);
  dir.write("a.txt", "start");
  dir.write("b.txt", large);
  auto options = corpus({dir.path()});
  const auto stream = open_corpus(options);
  EXPECT_EQ(stream->size(), 5 + 1 + static_cast<int64_t>(large.size()) + 1);
  std::vector<int64_t> tail(10);
  stream->read(stream->size() - 10, tail);
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(tail[i], static_cast<uint8_t>(large[large.size() - 9 + i]));
  EXPECT_EQ(tail[9], 256);
  for (const int64_t limit : {1, 4, 5, 6, 100}) {
    options.max_bytes = limit;
    EXPECT_EQ(open_corpus(options)->size(), limit + (limit > 5 ? 2 : 1)) << limit;
  }
}

TEST(Text, Refusals) {
  const TempFolder dir;
  const std::string empty = dir.write("empty.txt", "");
  expect_mentions(error_of([&] { open_corpus(corpus({empty})); }), {"empty.txt", "empty"});
  expect_mentions(error_of([&] { open_corpus(corpus({dir.path()})); }), {dir.path(), "empty"});
  const std::string text = dir.write("some.txt", "abc");
  auto options = corpus({text});
  options.vocab_size = 256;
  expect_mentions(error_of([&] { open_corpus(options); }), {"some.txt", "257", "256"});
  options.vocab_size = 257;
  EXPECT_EQ(open_corpus(options)->size(), 4);
  ASSERT_EQ(::mkfifo((dir / "pipe.txt").c_str(), 0600), 0);
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "pipe.txt"})); }), {"pipe.txt", "regular file"});
  if (::geteuid() != 0) {
    ASSERT_EQ(::chmod(text.c_str(), 0), 0);
    expect_mentions(error_of([&] { open_corpus(corpus({text})); }), {"some.txt", "Permission denied"});
  }
}

TEST(Tokens, AutoDetection) {
  const TempFolder dir;
  dir.write("llmc.bin", llmc_file({5, 6, 7}));
  dir.write("nano.bin", raw_all<uint16_t>({1, 2}));
  dir.write("mega.idx", index_file({2, 1}, {0, 1, 2}));
  dir.write("mega.bin", raw_all<int32_t>({70000, 2, 3}));
  const auto read = [&](const std::string& name) { return all_tokens(*open_corpus(corpus({dir / name}))); };
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(read("llmc.bin"), (Ids{5, 6, 7}));
  EXPECT_EQ(read("nano.bin"), (Ids{1, 2}));
  EXPECT_EQ(read("mega.idx"), (Ids{70000, 2, 3}));
  EXPECT_EQ(read("mega.bin"), (Ids{70000, 2, 3}));
  // The folder: three corpora one after the other, the Megatron pair once.
  const auto whole = open_corpus(corpus({dir.path()}));
  EXPECT_EQ(all_tokens(*whole), (Ids{5, 6, 7, 70000, 2, 3, 1, 2}));
  EXPECT_EQ(whole->vocab_size_needed(), 70001);
  expect_mentions(whole->locate(5), {"mega.bin", "token 2", "document 1"});
  dir.write("notes.txt", "text");
  expect_mentions(error_of([&] { open_corpus(corpus({dir.path()})); }), {"notes.txt", "llmc.bin"});
  dir.write("model.bin", raw(int32_t{20240326}) + std::string(1020, '\0'));
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "model.bin"})); }), {"model.bin", "not a token file"});
}

TEST(Tokens, IdOutsideVocabularyNamesFileTokenAndDocument) {
  const TempFolder dir;
  dir.write("mega.idx", index_file({2, 3, 1}, {0, 1, 2, 3}));
  dir.write("mega.bin", raw_all<int32_t>({1, 2, 3, 152064, 5, 6}));
  auto options = corpus({dir / "mega.idx"});
  options.vocab_size = 152065;
  EXPECT_EQ(open_corpus(options)->vocab_size_needed(), 152065);
  options.vocab_size = 152064;
  expect_mentions(error_of([&] { open_corpus(options); }),
                  {"mega.bin", "token 3", "document 1", "id 152064", "[0, 152064)"});
  options.scan_bytes = 0;  // too large to scan: found when it is read
  const auto stream = open_corpus(options);
  std::vector<int64_t> ids(3);
  stream->read(0, ids);
  expect_mentions(error_of([&] { stream->read(1, ids); }), {"mega.bin", "token 3", "document 1"});
  dir.write("mega.bin", raw_all<int32_t>({1, 2, 3, 4, -5, 6}));
  options = corpus({dir / "mega.idx"});
  expect_mentions(error_of([&] { open_corpus(options); }), {"token 4", "-5", "negative"});
}

TEST(Tokens, HeaderlessUint16AndLargeVocabularies) {
  // 151643 stored as uint16 is 20571, 128009 is 62473: nothing in the file tells.
  const TempFolder dir;
  const std::string path = dir.write("train.bin", raw_all<uint16_t>({151643, 128009, 7}));
  auto options = corpus({path});
  options.vocab_size = 152064;
  expect_mentions(error_of([&] { open_corpus(options); }), {"train.bin", "152064", "dtype"});
  options.dtype = "uint16";
  EXPECT_EQ(all_tokens(*open_corpus(options)), (std::vector<int64_t>{20571, 62473, 7}));
  options.dtype.clear();
  options.vocab_size = 65536;
  EXPECT_EQ(open_corpus(options)->size(), 3);
  dir.write("wide.bin", raw_all<uint32_t>({151643, 128009}));
  options = corpus({dir / "wide.bin"});
  options.vocab_size = 152064;
  options.dtype = "u32";
  EXPECT_EQ(all_tokens(*open_corpus(options)), (std::vector<int64_t>{151643, 128009}));
}

TEST(Tokens, MaxBytesCutsWholeTokens) {
  const TempFolder dir;
  dir.write("a.bin", raw_all<uint16_t>({1, 2, 3}));
  dir.write("b.bin", raw_all<uint16_t>({4, 5}));
  auto options = corpus({dir.path()});
  options.max_bytes = 9;
  EXPECT_EQ(all_tokens(*open_corpus(options)), (std::vector<int64_t>{1, 2, 3, 4}));
  options.max_bytes = 1;  // not even one token
  error_of([&] { open_corpus(options); });
}

TEST(Tokens, TruncatedFilesAreNamed) {
  const TempFolder dir;
  dir.write("mega.idx", index_file({2, 1}, {0, 1, 2}));
  dir.write("mega.bin", raw_all<int32_t>({7, 2, 3}).substr(0, 10));
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "mega.idx"})); }), {"mega.bin", "10", "12"});
  std::filesystem::remove(dir / "mega.bin");
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "mega.idx"})); }), {"mega.bin", "No such file"});
  dir.write("cut.bin", llmc_file({1, 2, 3}).substr(0, 1029));
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "cut.bin"})); }), {"cut.bin", "1029", "1030"});
  dir.write("odd.bin", "abc");
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "odd.bin"})); }), {"odd.bin", "3 bytes"});
  dir.write("empty.bin", "");
  expect_mentions(error_of([&] { open_corpus(corpus({dir / "empty.bin"})); }), {"empty.bin", "empty"});
}

TEST(Tokens, ReadFromSeveralThreads) {
  const TempFolder dir;
  std::vector<int64_t> ids(10007);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * i % 65521);
  dir.write("a.bin", raw_all<uint16_t>(ids));
  const auto stream = open_corpus(corpus({dir / "a.bin"}));
  std::vector<int> wrong(4, 0);
  {
    std::vector<std::jthread> threads;
    for (size_t t = 0; t < wrong.size(); ++t) {
      threads.emplace_back([&, t] {
        std::vector<int64_t> part(97);
        for (size_t begin = t; begin + part.size() <= ids.size(); begin += 89) {
          stream->read(static_cast<int64_t>(begin), part);
          wrong[t] += std::equal(part.begin(), part.end(), ids.begin() + static_cast<int64_t>(begin)) ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace oomb::data
