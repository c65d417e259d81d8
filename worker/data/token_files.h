// Headers of the token file formats. All multi-byte values are little-endian.
//
// Each parser takes the bytes of a file and answers where its tokens lie, or throws InputError naming `name`; nothing
// is read outside the span, whatever the bytes are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace oomb::data {

/// Element types of token files.
enum class TokenType { kU8, kI8, kU16, kI16, kU32, kI32, kU64, kI64 };

int64_t size_of(TokenType type);
const char* name_of(TokenType type);
/// "u8", "i8", "u16"/"uint16", "i16", "u32"/"uint32", "i32"/"int32", "u64", "i64"/"int64"; else InputError listing
/// them.
TokenType parse_token_type(const std::string& text);

/// Where the tokens of one file lie: `count` elements of `type` from byte `offset`.
struct TokenRange {
  TokenType type = TokenType::kU16;
  int64_t offset = 0;
  int64_t count = 0;
};

/// Formats that can be told from the content or the name.
enum class TokenFormat { kAuto, kText, kLlmC, kMegatron, kHeaderless, kNpy };
/// "auto", "text", "llmc", "megatron", "nanogpt", "npy"; else InputError listing them.
TokenFormat parse_token_format(const std::string& text);
const char* name_of(TokenFormat format);

/// True when the file starts with the header of a known llm.c token file.
bool is_llmc(std::span<const std::byte> file);
bool is_npy(std::span<const std::byte> file);
bool is_megatron_index(std::span<const std::byte> file);

/// llm.c: 256 int32 of header ([0] magic 20240520 version 1 with uint16 tokens, or magic 20240801 version 7 with uint32
/// tokens; [2] token count), then the tokens. The file's size must match the count exactly.
TokenRange parse_llmc(std::span<const std::byte> file, const std::string& name);

/// NumPy .npy, one dimension, little-endian integers, versions 1 to 3.
TokenRange parse_npy(std::span<const std::byte> file, const std::string& name);

/// Headerless elements of `type` that fill the whole file.
TokenRange parse_headerless(std::span<const std::byte> file, TokenType type, const std::string& name);

/// Megatron index. Documents are runs of sequences; `document_begin[d]` is the first token of document d, and
/// `document_begin.back()` the number of tokens. Sequences must lie in the .bin file one after the other without gaps.
struct MegatronIndex {
  TokenRange tokens;
  std::vector<int64_t> document_begin;
};
MegatronIndex parse_megatron_index(std::span<const std::byte> index, int64_t bin_bytes, const std::string& index_name,
                                   const std::string& bin_name);

/// Widens tokens [begin, begin + out.size()) of `range` to int64. u64 values above 2^63 − 1 come out negative.
/// The caller guarantees that the range lies in `file` and [begin, ...) in the range.
void widen_tokens(std::span<const std::byte> file, const TokenRange& range, int64_t begin, std::span<int64_t> out);

}  // namespace oomb::data
