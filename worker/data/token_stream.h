// A corpus as one long stream of token ids.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "worker/data/token_files.h"

namespace oomb::data {

/// Byte-level text: a byte is its own id, and this id follows the last byte of each document.
inline constexpr int64_t kTextSeparator = 256;
inline constexpr int64_t kTextVocabSize = 257;

/// Documents one after the other. Immutable after opening: const members may be called from any thread.
class TokenStream {
 public:
  virtual ~TokenStream() = default;
  /// Number of tokens, ≥ 1.
  virtual int64_t size() const = 0;
  /// A vocabulary of this size holds every id: 257 for text, largest id + 1 for token files that were scanned, the
  /// model's vocabulary for those too large to scan.
  virtual int64_t vocab_size_needed() const = 0;
  /// Copies tokens [begin, begin + out.size()). A range outside [0, size()) is a std::logic_error. Throws InputError
  /// with file and token index when an id is negative or not below the vocabulary given at opening.
  virtual void read(int64_t begin, std::span<int64_t> out) const = 0;
  /// Where token `position` comes from, for messages: "PATH, token 17" (Megatron: "…, document 2").
  virtual std::string locate(int64_t position) const = 0;
};

struct CorpusOptions {
  /// Files, folders, globs (see expand_paths).
  std::vector<std::string> paths;
  /// kAuto: .npy or its magic, llm.c magic, .idx or a .bin beside its .idx (Megatron), any other .bin (headerless),
  /// everything else text. Text and token files in one corpus are an error.
  TokenFormat format = TokenFormat::kAuto;
  /// For folders: take only files with these extensions. Giving them makes kAuto mean text.
  std::vector<std::string> extensions;
  /// Use at most this many bytes of text (token bytes for token files); 0 = all. The document on the border is cut.
  int64_t max_bytes = 0;
  /// The model's vocabulary: ids outside [0, vocab_size) are refused. 0 = not known, only negative ids are refused.
  int64_t vocab_size = 0;
  /// Element type of headerless files ("" = uint16, which is refused for a vocabulary above 65,536: ids above 65,535
  /// would have been cut when the file was written).
  std::string dtype;
  /// Files whose tokens take up to this many bytes in all are scanned when opened, so that a bad id stops a run before
  /// its first step; larger ones are checked as they are read.
  int64_t scan_bytes = int64_t{8} << 30;
};

/// Opens a corpus. Throws InputError, one line naming the file or the entry of `paths`: no match, unreadable, no data,
/// header and size that disagree, id out of range (with token index and, for Megatron, document).
/// Text files below 1 MiB are held in memory, everything else is mapped.
std::unique_ptr<TokenStream> open_corpus(const CorpusOptions& options);

/// A stream over ids in memory, mostly for tests. `ids` must not be empty.
std::unique_ptr<TokenStream> make_stream(std::vector<int64_t> ids);

}  // namespace oomb::data
