#include "worker/data/token_files.h"

#include <array>
#include <cstring>
#include <limits>
#include <string_view>

#include "configs/error.h"

namespace oomb::data {
namespace {

constexpr int64_t kLlmcHeaderBytes = 256 * 4;
constexpr int32_t kLlmcGpt2Magic = 20240520;
constexpr int32_t kLlmcLlamaMagic = 20240801;
constexpr std::string_view kMegatronMagic{"MMIDIDX\0\0", 9};
constexpr std::string_view kNpyMagic{"\x93NUMPY", 6};

struct TypeName {
  TokenType type;
  int64_t size;
  const char* name;
  const char* alias;
};
constexpr std::array<TypeName, 8> kTypes{{{TokenType::kU8, 1, "u8", "uint8"},
                                          {TokenType::kI8, 1, "i8", "int8"},
                                          {TokenType::kU16, 2, "u16", "uint16"},
                                          {TokenType::kI16, 2, "i16", "int16"},
                                          {TokenType::kU32, 4, "u32", "uint32"},
                                          {TokenType::kI32, 4, "i32", "int32"},
                                          {TokenType::kU64, 8, "u64", "uint64"},
                                          {TokenType::kI64, 8, "i64", "int64"}}};

struct FormatName {
  TokenFormat format;
  const char* name;
};
constexpr std::array<FormatName, 6> kFormats{{{TokenFormat::kAuto, "auto"},
                                              {TokenFormat::kText, "text"},
                                              {TokenFormat::kLlmC, "llmc"},
                                              {TokenFormat::kMegatron, "megatron"},
                                              {TokenFormat::kHeaderless, "nanogpt"},
                                              {TokenFormat::kNpy, "npy"}}};

bool starts_with(std::span<const std::byte> file, std::string_view magic) {
  return file.size() >= magic.size() && std::memcmp(file.data(), magic.data(), magic.size()) == 0;
}

/// Reads one little-endian value at `offset`; the caller has checked the bounds. All hosts we build for are
/// little-endian.
template <typename T>
T load(std::span<const std::byte> file, int64_t offset) {
  T value;
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

int64_t bytes_of(std::span<const std::byte> file) { return static_cast<int64_t>(file.size()); }

template <typename T>
void widen(const std::byte* source, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    out[i] = static_cast<int64_t>(value);
  }
}

/// The text after `key` (a quoted name) and its colon in a NumPy header dictionary, or empty.
std::string_view npy_value(std::string_view header, std::string_view key) {
  size_t at = header.find(key);
  if (at == std::string_view::npos) return {};
  at = header.find_first_not_of(" \t", at + key.size());
  if (at == std::string_view::npos || header[at] != ':') return {};
  at = header.find_first_not_of(" \t", at + 1);
  return at == std::string_view::npos ? std::string_view() : header.substr(at);
}

TokenType npy_type(std::string_view header, const std::string& name) {
  std::string_view descr = npy_value(header, "'descr'");
  const size_t end = descr.empty() ? std::string_view::npos : descr.find('\'', 1);
  if (descr.empty() || descr.front() != '\'' || end == std::string_view::npos) {
    throw InputError(name + ": .npy header has no simple 'descr'; want an integer array such as '<i4'");
  }
  descr = descr.substr(1, end - 1);
  const std::array<std::pair<std::string_view, TokenType>, 8> known{{{"|u1", TokenType::kU8},
                                                                     {"|i1", TokenType::kI8},
                                                                     {"<u2", TokenType::kU16},
                                                                     {"<i2", TokenType::kI16},
                                                                     {"<u4", TokenType::kU32},
                                                                     {"<i4", TokenType::kI32},
                                                                     {"<u8", TokenType::kU64},
                                                                     {"<i8", TokenType::kI64}}};
  for (const auto& [text, type] : known) {
    if (descr == text) return type;
  }
  throw InputError(name + ": .npy element type '" + std::string(descr) + "' is not a little-endian integer");
}

/// The one number of a shape tuple "(n,)".
int64_t npy_length(std::string_view header, const std::string& name) {
  const std::string wrong = name + ": .npy array must have one dimension";
  std::string_view shape = npy_value(header, "'shape'");
  if (shape.empty() || shape.front() != '(') throw InputError(wrong);
  shape.remove_prefix(1);
  int64_t length = 0;
  size_t digits = 0;
  while (digits < shape.size() && shape[digits] >= '0' && shape[digits] <= '9') {
    if (length > (std::numeric_limits<int64_t>::max() - 9) / 10) throw InputError(name + ": .npy length is too large");
    length = length * 10 + (shape[digits++] - '0');
  }
  const std::string_view rest = shape.substr(digits, 2);
  if (digits == 0 || rest != ",)") throw InputError(wrong);
  return length;
}

}  // namespace

int64_t size_of(TokenType type) { return kTypes[static_cast<size_t>(type)].size; }
const char* name_of(TokenType type) { return kTypes[static_cast<size_t>(type)].name; }

TokenType parse_token_type(const std::string& text) {
  for (const TypeName& t : kTypes) {
    if (text == t.name || text == t.alias) return t.type;
  }
  throw InputError("token type '" + text + "' is not known: use u8, i8, u16, i16, u32, i32, u64 or i64");
}

TokenFormat parse_token_format(const std::string& text) {
  for (const FormatName& f : kFormats) {
    if (text == f.name) return f.format;
  }
  throw InputError("data format '" + text + "' is not known: use auto, text, llmc, megatron, nanogpt or npy");
}

const char* name_of(TokenFormat format) { return kFormats[static_cast<size_t>(format)].name; }

bool is_llmc(std::span<const std::byte> file) {
  if (bytes_of(file) < 8) return false;
  const int32_t magic = load<int32_t>(file, 0);
  return magic == kLlmcGpt2Magic || magic == kLlmcLlamaMagic;
}
bool is_npy(std::span<const std::byte> file) { return starts_with(file, kNpyMagic); }
bool is_megatron_index(std::span<const std::byte> file) { return starts_with(file, kMegatronMagic); }

TokenRange parse_llmc(std::span<const std::byte> file, const std::string& name) {
  if (!is_llmc(file)) {
    throw InputError(name + ": not an llm.c token file (magic 20240520 or 20240801 expected at its start)");
  }
  if (bytes_of(file) < kLlmcHeaderBytes) {
    throw InputError(name + ": truncated: " + std::to_string(file.size()) + " bytes, the llm.c header alone has 1024");
  }
  const int32_t magic = load<int32_t>(file, 0);
  const int32_t version = load<int32_t>(file, 4);
  const int32_t count = load<int32_t>(file, 8);
  const int32_t wanted = magic == kLlmcGpt2Magic ? 1 : 7;
  if (version != wanted) {
    throw InputError(name + ": llm.c version " + std::to_string(version) + " under magic " + std::to_string(magic) +
                     ", expected " + std::to_string(wanted));
  }
  TokenRange range{magic == kLlmcGpt2Magic ? TokenType::kU16 : TokenType::kU32, kLlmcHeaderBytes, count};
  if (count <= 0) throw InputError(name + ": llm.c header counts " + std::to_string(count) + " tokens");
  const int64_t expected = kLlmcHeaderBytes + range.count * size_of(range.type);
  if (expected != bytes_of(file)) {
    throw InputError(name + ": " + std::to_string(file.size()) + " bytes, but its header says " +
                     std::to_string(count) + " tokens, which need " + std::to_string(expected));
  }
  return range;
}

TokenRange parse_npy(std::span<const std::byte> file, const std::string& name) {
  if (!is_npy(file) || bytes_of(file) < 12) throw InputError(name + ": not a .npy file, or cut inside its header");
  const auto major = load<uint8_t>(file, 6);
  if (major < 1 || major > 3) throw InputError(name + ": .npy version " + std::to_string(major) + " is not known");
  const int64_t prefix = major == 1 ? 10 : 12;
  const int64_t length = major == 1 ? load<uint16_t>(file, 8) : int64_t{load<uint32_t>(file, 8)};
  if (length > bytes_of(file) - prefix) throw InputError(name + ": truncated inside the .npy header");
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + prefix, static_cast<size_t>(length));
  TokenRange range{npy_type(header, name), prefix + length, npy_length(header, name)};
  const int64_t data_bytes = bytes_of(file) - range.offset;
  if (data_bytes % size_of(range.type) != 0 || data_bytes / size_of(range.type) != range.count) {
    throw InputError(name + ": the .npy header says " + std::to_string(range.count) + " elements of " +
                     name_of(range.type) + ", but " + std::to_string(data_bytes) + " bytes follow it");
  }
  return range;
}

TokenRange parse_headerless(std::span<const std::byte> file, TokenType type, const std::string& name) {
  if (bytes_of(file) % size_of(type) != 0) {
    throw InputError(name + ": " + std::to_string(file.size()) + " bytes are not a whole number of " + name_of(type) +
                     " tokens: truncated, or another dtype");
  }
  return {type, 0, bytes_of(file) / size_of(type)};
}

MegatronIndex parse_megatron_index(std::span<const std::byte> index, int64_t bin_bytes, const std::string& index_name,
                                   const std::string& bin_name) {
  constexpr int64_t kHeader = 9 + 8 + 1 + 8 + 8;
  if (!is_megatron_index(index)) throw InputError(index_name + ": not a Megatron index (MMIDIDX expected)");
  if (bytes_of(index) < kHeader) throw InputError(index_name + ": truncated inside its header");
  const auto version = load<uint64_t>(index, 9);
  if (version != 1) throw InputError(index_name + ": version " + std::to_string(version) + ", expected 1");
  const auto code = load<uint8_t>(index, 17);
  TokenType type;
  switch (code) {
    case 1:
      type = TokenType::kU8;
      break;
    case 2:
      type = TokenType::kI8;
      break;
    case 3:
      type = TokenType::kI16;
      break;
    case 4:
      type = TokenType::kI32;
      break;
    case 5:
      type = TokenType::kI64;
      break;
    case 8:
      type = TokenType::kU16;
      break;
    default:
      throw InputError(index_name + ": element type code " + std::to_string(code) + " is not an integer type");
  }
  const auto sequences = load<uint64_t>(index, 18);
  const auto boundaries = load<uint64_t>(index, 26);
  const auto room = static_cast<uint64_t>(bytes_of(index) - kHeader);
  // Compared by division: the counts may be anything.
  if (sequences > room / 12 || boundaries > (room - sequences * 12) / 8) {
    throw InputError(index_name + ": truncated: " + std::to_string(index.size()) + " bytes for " +
                     std::to_string(sequences) + " sequences and " + std::to_string(boundaries) +
                     " document boundaries");
  }
  const uint64_t left = room - sequences * 12 - boundaries * 8;
  if (left != 0 && left != sequences) {
    throw InputError(index_name + ": " + std::to_string(left) + " bytes left over after its arrays");
  }
  if (boundaries == 0) throw InputError(index_name + ": no document boundaries");

  const auto num_sequences = static_cast<int64_t>(sequences);
  const int64_t pointers_at = kHeader + num_sequences * 4;
  const int64_t documents_at = pointers_at + num_sequences * 8;
  std::vector<int64_t> begin(static_cast<size_t>(num_sequences) + 1, 0);
  for (int64_t s = 0; s < num_sequences; ++s) {
    const auto at = static_cast<size_t>(s);
    const auto length = load<int32_t>(index, kHeader + s * 4);
    const auto pointer = load<int64_t>(index, pointers_at + s * 8);
    if (length < 0 || pointer != begin[at] * size_of(type)) {
      throw InputError(index_name + ": sequence " + std::to_string(s) + " has length " + std::to_string(length) +
                       " at byte " + std::to_string(pointer) + ", expected byte " +
                       std::to_string(begin[at] * size_of(type)));
    }
    begin[at + 1] = begin[at] + length;
    if (begin[at + 1] > int64_t{1} << 56) throw InputError(index_name + ": its lengths add up to an absurd number");
  }
  MegatronIndex result;
  result.tokens = {type, 0, begin.back()};
  if (result.tokens.count * size_of(type) != bin_bytes) {
    throw InputError(bin_name + ": " + std::to_string(bin_bytes) + " bytes, but " + index_name + " says " +
                     std::to_string(result.tokens.count) + " tokens of " + name_of(type) + ", which need " +
                     std::to_string(result.tokens.count * size_of(type)));
  }
  int64_t previous = 0;
  for (uint64_t d = 0; d < boundaries; ++d) {
    const auto sequence = load<int64_t>(index, documents_at + static_cast<int64_t>(d) * 8);
    const bool ends_right = (d != 0 || sequence == 0) && (d + 1 != boundaries || sequence == num_sequences);
    if (sequence < previous || sequence > num_sequences || !ends_right) {
      throw InputError(index_name + ": document boundary " + std::to_string(d) + " is " + std::to_string(sequence) +
                       " of " + std::to_string(num_sequences) + " sequences; they must rise from 0 to the last");
    }
    previous = sequence;
    result.document_begin.push_back(begin[static_cast<size_t>(sequence)]);
  }
  return result;
}

void widen_tokens(std::span<const std::byte> file, const TokenRange& range, int64_t begin, std::span<int64_t> out) {
  const std::byte* source = file.data() + range.offset + begin * size_of(range.type);
  switch (range.type) {
    case TokenType::kU8:
      return widen<uint8_t>(source, out);
    case TokenType::kI8:
      return widen<int8_t>(source, out);
    case TokenType::kU16:
      return widen<uint16_t>(source, out);
    case TokenType::kI16:
      return widen<int16_t>(source, out);
    case TokenType::kU32:
      return widen<uint32_t>(source, out);
    case TokenType::kI32:
      return widen<int32_t>(source, out);
    case TokenType::kU64:
      return widen<uint64_t>(source, out);
    case TokenType::kI64:
      return widen<int64_t>(source, out);
  }
}

}  // namespace oomb::data
