// How a sequence is cut: N tokens into chunks of C, and into pages of P. P divides C, so a chunk begins on a page
// border; the last chunk and the last page may be partly filled.
#pragma once

#include <algorithm>
#include <cstdint>

namespace oomb {

struct ChunkGrid {
  int64_t num_tokens = 0;    ///< N
  int64_t chunk_tokens = 0;  ///< C
  int64_t page_tokens = 0;   ///< P

  int64_t num_chunks() const { return (num_tokens + chunk_tokens - 1) / chunk_tokens; }
  int64_t num_pages() const { return (num_tokens + page_tokens - 1) / page_tokens; }
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_tokens; }
  int64_t tokens_of(int64_t chunk) const { return std::min(chunk_tokens, num_tokens - begin_of(chunk)); }
  /// First page of a chunk; also the number of pages before it, all of them full.
  int64_t first_page_of(int64_t chunk) const { return begin_of(chunk) / page_tokens; }
  int64_t pages_of(int64_t chunk) const { return (tokens_of(chunk) + page_tokens - 1) / page_tokens; }
};

}  // namespace oomb
