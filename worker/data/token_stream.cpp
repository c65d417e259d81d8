#include "worker/data/token_stream.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>

#include "configs/error.h"
#include "worker/data/mapped_file.h"
#include "worker/data/path_list.h"

namespace oomb::data {
namespace {

// Below this a text file is copied: a corpus of many small files would use up the mappings that a process may have.
constexpr int64_t kCopyBelow = int64_t{1} << 20;
constexpr int64_t kScanBlock = int64_t{1} << 16;

/// One file of a corpus. Text parts have one token more than `range`: the separator.
struct Part {
  std::string path;
  MappedFile mapped;
  std::vector<std::byte> copied;
  TokenRange range;
  bool is_text = false;
  std::vector<int64_t> document_begin;

  std::span<const std::byte> bytes() const { return copied.empty() ? mapped.bytes() : std::span(copied); }
  int64_t num_tokens() const { return range.count + (is_text ? 1 : 0); }

  std::string locate(int64_t token) const {
    std::string where = path + (is_text ? ", byte " : ", token ") + std::to_string(token);
    if (!document_begin.empty()) {
      const auto after = std::upper_bound(document_begin.begin(), document_begin.end(), token);
      where += ", document " + std::to_string(after - document_begin.begin() - 1);
    }
    return where;
  }

  /// Copies tokens [begin, begin + out.size()) of this part and checks their range.
  void read(int64_t begin, std::span<int64_t> out, int64_t vocab_size) const {
    const int64_t stored = std::min<int64_t>(static_cast<int64_t>(out.size()), range.count - begin);
    const auto body = out.first(static_cast<size_t>(std::max<int64_t>(stored, 0)));
    widen_tokens(bytes(), range, begin, body);
    if (body.size() < out.size()) out.back() = kTextSeparator;
    if (is_text) return;
    // A negative id is a huge unsigned one, so one comparison finds both.
    const uint64_t limit = vocab_size > 0 ? static_cast<uint64_t>(vocab_size) : uint64_t{1} << 63;
    const auto bad = std::find_if(body.begin(), body.end(), [&](int64_t id) { return uint64_t(id) >= limit; });
    if (bad == body.end()) return;
    throw InputError(locate(begin + (bad - body.begin())) + ": id " + std::to_string(*bad) +
                     (vocab_size > 0 ? " is outside the vocabulary [0, " + std::to_string(vocab_size) + ")"
                                     : std::string(" is negative")));
  }
};

class CorpusStream final : public TokenStream {
 public:
  CorpusStream(std::vector<Part> parts, const CorpusOptions& options)
      : parts_(std::move(parts)), vocab_size_(options.vocab_size) {
    for (const Part& part : parts_) {
      begin_.push_back(size_);
      size_ += part.num_tokens();
    }
    vocab_size_needed_ = parts_.front().is_text ? kTextVocabSize : scan(options.scan_bytes);
  }

  int64_t size() const override { return size_; }
  int64_t vocab_size_needed() const override { return vocab_size_needed_; }

  void read(int64_t begin, std::span<int64_t> out) const override {
    const auto count = static_cast<int64_t>(out.size());
    if (begin < 0 || begin > size_ || count > size_ - begin) {
      throw std::logic_error("TokenStream::read of [" + std::to_string(begin) + ", +" + std::to_string(count) +
                             ") outside " + std::to_string(size_) + " tokens");
    }
    if (count == 0) return;
    for (size_t p = part_of(begin); !out.empty(); ++p) {
      const int64_t inside = begin - begin_[p];
      const int64_t take = std::min(static_cast<int64_t>(out.size()), parts_[p].num_tokens() - inside);
      parts_[p].read(inside, out.first(static_cast<size_t>(take)), vocab_size_);
      out = out.subspan(static_cast<size_t>(take));
      begin += take;
    }
  }

  std::string locate(int64_t position) const override {
    if (position < 0 || position >= size_) {
      throw std::logic_error("TokenStream::locate(" + std::to_string(position) + ") of " + std::to_string(size_));
    }
    const size_t p = part_of(position);
    return parts_[p].locate(position - begin_[p]);
  }

 private:
  size_t part_of(int64_t position) const {
    // Parts are never empty, so their first tokens rise strictly.
    const auto after = std::upper_bound(begin_.begin(), begin_.end(), position);
    return static_cast<size_t>(after - begin_.begin()) - 1;
  }

  int64_t scan(int64_t scan_bytes) const {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += part.range.count * size_of(part.range.type);
    if (bytes > scan_bytes) return vocab_size_;
    int64_t largest = 0;
    std::vector<int64_t> block(static_cast<size_t>(std::min(size_, kScanBlock)));
    for (int64_t at = 0; at < size_; at += kScanBlock) {
      const auto now = std::span(block).first(static_cast<size_t>(std::min(kScanBlock, size_ - at)));
      read(at, now);
      largest = std::max(largest, *std::max_element(now.begin(), now.end()));
    }
    return largest == std::numeric_limits<int64_t>::max() ? largest : largest + 1;
  }

  std::vector<Part> parts_;
  std::vector<int64_t> begin_;
  int64_t size_ = 0;
  int64_t vocab_size_ = 0;
  int64_t vocab_size_needed_ = 0;
};

class MemoryStream final : public TokenStream {
 public:
  explicit MemoryStream(std::vector<int64_t> ids) : ids_(std::move(ids)) {
    if (ids_.empty()) throw std::logic_error("make_stream: no ids");
  }
  int64_t size() const override { return static_cast<int64_t>(ids_.size()); }
  int64_t vocab_size_needed() const override { return *std::max_element(ids_.begin(), ids_.end()) + 1; }
  void read(int64_t begin, std::span<int64_t> out) const override {
    if (begin < 0 || begin > size() || static_cast<int64_t>(out.size()) > size() - begin) {
      throw std::logic_error("TokenStream::read outside its tokens");
    }
    std::copy_n(ids_.begin() + begin, out.size(), out.begin());
  }
  std::string locate(int64_t position) const override { return "memory, token " + std::to_string(position); }

 private:
  std::vector<int64_t> ids_;
};

bool ends_with(std::string_view text, std::string_view end) { return text.ends_with(end); }

bool exists(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0;
}

std::string sibling(const std::string& path, const char* extension) {
  return path.substr(0, path.rfind('.')) + extension;
}

/// llm.c writes other files that end in .bin too; as headerless tokens they would train on noise.
void refuse_other_llmc_files(const MappedFile& file) {
  if (file.size() < 4) return;
  int32_t magic = 0;
  std::memcpy(&magic, file.bytes().data(), sizeof magic);
  constexpr std::array<int32_t, 5> kOthers{20240326, 20240328, 20240522, 20240527, 20240803};
  if (std::find(kOthers.begin(), kOthers.end(), magic) != kOthers.end()) {
    throw InputError(file.path() + ": an llm.c model, state, tokenizer or evaluation file, not a token file");
  }
}

TokenFormat detect(const MappedFile& file, const CorpusOptions& options) {
  if (options.format != TokenFormat::kAuto) return options.format;
  if (!options.extensions.empty()) return TokenFormat::kText;
  const std::string& path = file.path();
  if (is_npy(file.bytes()) || ends_with(path, ".npy")) return TokenFormat::kNpy;
  if (is_llmc(file.bytes())) return TokenFormat::kLlmC;
  if (is_megatron_index(file.bytes()) || ends_with(path, ".idx")) return TokenFormat::kMegatron;
  if (!ends_with(path, ".bin")) return TokenFormat::kText;
  if (exists(sibling(path, ".idx"))) return TokenFormat::kMegatron;
  refuse_other_llmc_files(file);
  return TokenFormat::kHeaderless;
}

TokenType headerless_type(const CorpusOptions& options, const std::string& path) {
  if (!options.dtype.empty()) return parse_token_type(options.dtype);
  if (options.vocab_size > 65536) {
    throw InputError(path + ": headerless token file and a vocabulary of " + std::to_string(options.vocab_size) +
                     ": ids above 65535 would have been cut in uint16; state the file's dtype");
  }
  return TokenType::kU16;
}

/// Opens the Megatron pair that `path` belongs to; `index_path` receives the .idx file's name.
Part open_megatron(const std::string& path, std::string* index_path) {
  *index_path = ends_with(path, ".bin") ? sibling(path, ".idx") : path;
  const std::string bin_path = sibling(*index_path, ".bin");
  const MappedFile index(*index_path);
  Part part;
  part.path = bin_path;
  part.mapped = MappedFile(bin_path);
  MegatronIndex parsed = parse_megatron_index(index.bytes(), part.mapped.size(), *index_path, bin_path);
  part.range = parsed.tokens;
  part.document_begin = std::move(parsed.document_begin);
  return part;
}

Part make_part(MappedFile file, TokenFormat format, const CorpusOptions& options) {
  Part part;
  part.path = file.path();
  switch (format) {
    case TokenFormat::kLlmC:
      part.range = parse_llmc(file.bytes(), part.path);
      break;
    case TokenFormat::kNpy:
      part.range = parse_npy(file.bytes(), part.path);
      break;
    case TokenFormat::kHeaderless:
      part.range = parse_headerless(file.bytes(), headerless_type(options, part.path), part.path);
      break;
    case TokenFormat::kText:
      part.range = {TokenType::kU8, 0, file.size()};
      part.is_text = true;
      break;
    case TokenFormat::kAuto:
    case TokenFormat::kMegatron:
      throw std::logic_error("make_part: format handled elsewhere");
  }
  if (part.is_text && file.size() < kCopyBelow) {
    part.copied.assign(file.bytes().begin(), file.bytes().end());
  } else {
    part.mapped = std::move(file);
  }
  return part;
}

/// Inside folders only these names can be of a stated token format.
std::vector<std::string> folder_extensions(const CorpusOptions& options) {
  if (!options.extensions.empty()) return options.extensions;
  switch (options.format) {
    case TokenFormat::kLlmC:
    case TokenFormat::kHeaderless:
      return {"bin"};
    case TokenFormat::kMegatron:
      return {"idx"};
    case TokenFormat::kNpy:
      return {"npy"};
    case TokenFormat::kAuto:
    case TokenFormat::kText:
      break;
  }
  return {};
}

std::vector<Part> open_parts(const CorpusOptions& options) {
  const auto files = expand_paths(options.paths, folder_extensions(options));
  std::vector<Part> parts;
  std::set<std::string> indexes;
  int64_t left = options.max_bytes > 0 ? options.max_bytes : std::numeric_limits<int64_t>::max();
  for (const std::string& path : files) {
    if (left <= 0) break;
    MappedFile file(path);
    const TokenFormat format = detect(file, options);
    Part part;
    if (format == TokenFormat::kMegatron) {
      std::string index_path;
      part = open_megatron(path, &index_path);
      if (!indexes.insert(index_path).second) continue;
    } else {
      part = make_part(std::move(file), format, options);
    }
    if (part.range.count == 0) {
      const bool named = std::find(options.paths.begin(), options.paths.end(), path) != options.paths.end();
      if (named || !part.is_text) throw InputError(path + ": the file is empty");
      continue;
    }
    const int64_t item = size_of(part.range.type);
    part.range.count = std::min(part.range.count, left / item);
    left -= std::max(part.range.count * item, int64_t{1});
    if (part.range.count == 0) break;
    if (!parts.empty() && parts.front().is_text != part.is_text) {
      const auto& [text, tokens] =
          part.is_text ? std::tie(part.path, parts.front().path) : std::tie(parts.front().path, part.path);
      throw InputError("one corpus holds text (" + text + ") and tokens (" + tokens +
                       "): name the format or the extensions to take");
    }
    parts.push_back(std::move(part));
  }
  if (parts.empty())
    throw InputError(options.paths.front() + ": no data: every file is empty, or max_bytes is below one token");
  return parts;
}

}  // namespace

std::unique_ptr<TokenStream> open_corpus(const CorpusOptions& options) {
  if (options.max_bytes < 0 || options.vocab_size < 0) {
    throw InputError("corpus: max_bytes and vocab_size must not be negative");
  }
  auto parts = open_parts(options);
  if (parts.front().is_text && options.vocab_size > 0 && options.vocab_size < kTextVocabSize) {
    throw InputError(parts.front().path + ": byte-level text needs a vocabulary of at least " +
                     std::to_string(kTextVocabSize) + ", the model's has " + std::to_string(options.vocab_size));
  }
  return std::make_unique<CorpusStream>(std::move(parts), options);
}

std::unique_ptr<TokenStream> make_stream(std::vector<int64_t> ids) {
  return std::make_unique<MemoryStream>(std::move(ids));
}

}  // namespace oomb::data
