// Numbers out of wire text: arrays of integers in msgpack or JSON become flat little-endian buffers.
//
// A stored-blocks event carries thousands of token ids. Building an object for each costs more than indexing
// them, so these parsers go from the raw span of the array to the buffer that the index reads, in one pass
// and with no allocation: the caller asks for the capacity, provides the room and gets the count.
//
// They are strict: an element that is not an integer in range stops the parse and is named by kind and index,
// because a token id that is silently rounded or wrapped gives a wrong prefix for every block behind it.
// Engine hashes are integers of either sign (negative ones keep their two's complement) or byte strings, of
// which the last 8 bytes are taken as a big-endian number. Nothing is read past the span, whatever lengths it
// declares.
//
// `skip` and `Container` cut a msgpack value into the spans of its children without recursion: nesting costs
// nothing, and a declared length is believed only as far as there are bytes to back it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "digit_scan.hpp"
#include "digit_scan_avx2.hpp"
#include "token_strides.hpp"
#include "wire_cursor.hpp"

namespace kvindexer::wire {

static_assert(std::endian::native == std::endian::little, "buffers are written in host order");

enum class Fault : uint8_t {
  kNone,
  kNotArray,    // the span does not begin with an array
  kTruncated,   // the span ends inside a value
  kTrailing,    // bytes after the value
  kSyntax,      // not a value of this notation (JSON: also leading zeros and plus signs)
  kOutOfRange,  // an integer that does not fit
  kFloat,
  kBoolean,
  kNull,
  kText,
  kBytes,       // a byte string where only integers are allowed
  kEmptyBytes,  // a hash of no bytes
  kHex,         // JSON text that is not pairs of hexadecimal digits
  kNested,      // an array inside the array
  kOther,       // a map, an extension, or a map with a key that is not text
  kTooMany,     // a container with more children than the caller wants
};

struct Parsed {
  Fault fault = Fault::kNone;
  size_t index = 0;  // of the element at fault
  size_t count = 0;  // elements written
};

// -- msgpack

// Big-endian number of `width` bytes.
inline uint64_t read_be(const uint8_t* at, size_t width) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i) value = value << 8 | at[i];
  return value;
}

// Head of one msgpack value: what follows it are `bytes` payload bytes, then `children` values.
struct Head {
  Fault fault = Fault::kNone;
  uint64_t bytes = 0;
  uint64_t children = 0;
};

// Moves the cursor past the head of the next value.
inline Head read_head(Cursor& cursor) {
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  const uint8_t byte = *cursor.at++;
  if (byte <= 0x7f || byte >= 0xe0) return {};
  if (byte <= 0x8f) return {Fault::kNone, 0, 2ull * (byte & 0x0f)};
  if (byte <= 0x9f) return {Fault::kNone, 0, byte & 0x0full};
  if (byte <= 0xbf) return {Fault::kNone, byte & 0x1full, 0};
  // Of 0xc0..0xdf: how many bytes the head's own length takes, then the payload that comes on top of that
  // length.
  static constexpr uint8_t kLengthWidth[32] = {0, 0, 0, 0, 1, 2, 4, 1, 2, 4, 0, 0, 0, 0, 0, 0,
                                               0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4};
  static constexpr uint8_t kPayload[32] = {0, 0, 0, 0, 0, 0, 0, 1, 1,  1, 4, 8, 1, 2, 4, 8,
                                           1, 2, 4, 8, 2, 3, 5, 9, 17, 0, 0, 0, 0, 0, 0, 0};
  if (byte == 0xc1) return {Fault::kSyntax};
  const size_t width = kLengthWidth[byte - 0xc0];
  if (cursor.left() < width) return {Fault::kTruncated};
  const uint64_t length = read_be(cursor.at, width);
  cursor.at += width;
  if (byte >= 0xde) return {Fault::kNone, 0, 2 * length};
  if (byte >= 0xdc) return {Fault::kNone, 0, length};
  return {Fault::kNone, length + kPayload[byte - 0xc0], 0};
}

// Whole size of the values whose first byte alone says it; 0 for the others. Branching on the kinds of
// numbers instead mispredicts at every second token id, which was measured at 3 times the cost.
inline constexpr std::array<uint8_t, 256> kFixedSize = [] {
  std::array<uint8_t, 256> sizes{};
  for (size_t byte = 0; byte < 256; ++byte) {
    if (byte <= 0x7f || byte >= 0xe0 || byte == 0xc0 || byte == 0xc2 || byte == 0xc3) sizes[byte] = 1;
    if (byte >= 0xcc && byte <= 0xd3) sizes[byte] = static_cast<uint8_t>(1 + (1 << (byte & 3)));
  }
  sizes[0xca] = 5;
  sizes[0xcb] = 9;
  return sizes;
}();

// Moves the cursor past one whole value. A count of values still to come stands for the nesting.
inline Fault skip(Cursor& cursor) {
  uint64_t pending = 1;
  while (pending != 0) {
    const size_t fixed = cursor.at != cursor.end ? kFixedSize[*cursor.at] : 0;
    if (fixed != 0) {
      if (fixed > cursor.left()) return Fault::kTruncated;
      cursor.at += fixed;
      --pending;
      continue;
    }
    const Head head = read_head(cursor);
    if (head.fault != Fault::kNone) return head.fault;
    // Every value still to come takes at least one byte.
    pending += head.children - 1;
    if (head.bytes > cursor.left() || pending > cursor.left() - head.bytes) return Fault::kTruncated;
    cursor.at += head.bytes;
  }
  return Fault::kNone;
}

enum class Shape : uint8_t { kArray, kMap, kScalar };

inline Shape shape_of(uint8_t byte) {
  if ((byte & 0xf0) == 0x90 || byte == 0xdc || byte == 0xdd) return Shape::kArray;
  if ((byte & 0xf0) == 0x80 || byte == 0xde || byte == 0xdf) return Shape::kMap;
  return Shape::kScalar;
}

// An array or a map, opened: `cursor` stands at its first child; a map has 2 children an entry.
struct Container {
  Fault fault = Fault::kNone;
  Shape shape = Shape::kScalar;
  size_t children = 0;
  Cursor cursor{nullptr, nullptr};
};

inline Container open_container(Span data) {
  Container opened;
  opened.cursor = {data.data(), data.data() + data.size()};
  if (data.empty()) {
    opened.fault = Fault::kTruncated;
    return opened;
  }
  opened.shape = shape_of(data[0]);
  if (opened.shape == Shape::kScalar) {
    opened.fault = Fault::kNotArray;
    return opened;
  }
  const Head head = read_head(opened.cursor);
  opened.fault = head.fault;
  if (head.fault == Fault::kNone && head.children > opened.cursor.left()) opened.fault = Fault::kTruncated;
  opened.children = static_cast<size_t>(head.children);
  return opened;
}

// What a msgpack value that is no integer is called when an integer was wanted.
inline Fault not_an_integer(uint8_t byte) {
  if (byte == 0xc0) return Fault::kNull;
  if (byte == 0xc1) return Fault::kSyntax;
  if (byte == 0xc2 || byte == 0xc3) return Fault::kBoolean;
  if (byte >= 0xc4 && byte <= 0xc6) return Fault::kBytes;
  if (byte == 0xca || byte == 0xcb) return Fault::kFloat;
  if ((byte & 0xe0) == 0xa0 || (byte >= 0xd9 && byte <= 0xdb)) return Fault::kText;
  return shape_of(byte) == Shape::kArray ? Fault::kNested : Fault::kOther;
}

struct Integer {
  Fault fault = Fault::kNone;
  bool negative = false;
  uint64_t bits = 0;  // two's complement when negative
};

inline Integer read_integer(Cursor& cursor) {
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  const uint8_t byte = *cursor.at;
  if (byte <= 0x7f) {
    ++cursor.at;
    return {Fault::kNone, false, byte};
  }
  if (byte >= 0xe0) {
    ++cursor.at;
    return {Fault::kNone, true, ~uint64_t{0xff} | byte};
  }
  if (byte < 0xcc || byte > 0xd3) return {not_an_integer(byte)};
  const size_t width = size_t{1} << (byte & 3);
  if (cursor.left() <= width) return {Fault::kTruncated};
  uint64_t bits = read_be(cursor.at + 1, width);
  cursor.at += 1 + width;
  if (byte <= 0xcf) return {Fault::kNone, false, bits};
  const bool negative = bits >> (8 * width - 1) != 0;
  if (negative && width < 8) bits |= ~uint64_t{0} << (8 * width);
  return {Fault::kNone, negative, bits};
}

// The engine hash that a byte string stands for: its last 8 bytes as a big-endian number, zero-extended.
inline uint64_t hash_of_bytes(const uint8_t* at, size_t size) {
  const size_t width = std::min<size_t>(size, 8);
  return read_be(at + (size - width), width);
}

inline Integer read_hash(Cursor& cursor) {
  if (cursor.left() >= 9 && *cursor.at == 0xcf) {
    uint64_t bits;
    std::memcpy(&bits, cursor.at + 1, sizeof(bits));
    cursor.at += 9;
    return {Fault::kNone, false, __builtin_bswap64(bits)};
  }
  if (cursor.at == cursor.end || *cursor.at < 0xc4 || *cursor.at > 0xc6) return read_integer(cursor);
  const Head head = read_head(cursor);
  if (head.fault != Fault::kNone) return {head.fault};
  if (head.bytes > cursor.left()) return {Fault::kTruncated};
  if (head.bytes == 0) return {Fault::kEmptyBytes};
  const uint64_t bits = hash_of_bytes(cursor.at, static_cast<size_t>(head.bytes));
  cursor.at += head.bytes;
  return {Fault::kNone, false, bits};
}

// Elements that a msgpack array holds at most; 0 when the span is no such thing (parsing it then says why).
inline size_t msgpack_capacity(Span data) {
  const Container array = open_container(data);
  return array.fault == Fault::kNone && array.shape == Shape::kArray ? array.children : 0;
}

// Elements `first` to `count` of an array, at the cursor.
template <typename Number, typename ReadElement>
Parsed read_elements(Cursor& cursor, size_t first, size_t count, uint8_t* out, ReadElement read_element) {
  for (size_t i = first; i < count; ++i) {
    Number number;
    const Fault fault = read_element(cursor, number);
    if (fault != Fault::kNone) return {fault, i, i};
    std::memcpy(out + i * sizeof(Number), &number, sizeof(Number));
  }
  return {Fault::kNone, count, count};
}

// The elements of an array of tokens, 4 bytes each.
inline Parsed read_tokens(Cursor& cursor, size_t count, uint8_t* out) {
  const size_t read = stride_tokens(cursor, count, out);
  return read_elements<uint32_t>(cursor, read, count, out, [](Cursor& at, uint32_t& number) {
    const Integer integer = read_integer(at);
    if (integer.fault != Fault::kNone) return integer.fault;
    if (integer.bits > UINT32_MAX) return Fault::kOutOfRange;
    number = static_cast<uint32_t>(integer.bits);
    return Fault::kNone;
  });
}

// The elements of an array of engine hashes, 8 bytes each.
inline Parsed read_hashes(Cursor& cursor, size_t count, uint8_t* out) {
  return read_elements<uint64_t>(cursor, 0, count, out, [](Cursor& at, uint64_t& number) {
    const Integer integer = read_hash(at);
    number = integer.bits;
    return integer.fault;
  });
}

template <typename ReadArray>
Parsed parse_msgpack(Span data, uint8_t* out, ReadArray read_array) {
  Container array = open_container(data);
  if (array.fault != Fault::kNone) return {array.fault};
  if (array.shape != Shape::kArray) return {Fault::kNotArray};
  Parsed parsed = read_array(array.cursor, array.children, out);
  if (parsed.fault == Fault::kNone && array.cursor.at != array.cursor.end) parsed.fault = Fault::kTrailing;
  return parsed;
}

// `out` has room for msgpack_capacity(data) numbers of 4 bytes.
inline Parsed parse_msgpack_tokens(Span data, uint8_t* out) { return parse_msgpack(data, out, read_tokens); }

// `out` has room for msgpack_capacity(data) numbers of 8 bytes.
inline Parsed parse_msgpack_hashes(Span data, uint8_t* out) { return parse_msgpack(data, out, read_hashes); }

// -- JSON

inline bool is_digit(uint8_t byte) { return static_cast<uint8_t>(byte - '0') <= 9; }

inline void skip_space(Cursor& cursor) {
  while (cursor.at != cursor.end &&
         (*cursor.at == ' ' || *cursor.at == '\n' || *cursor.at == '\r' || *cursor.at == '\t')) {
    ++cursor.at;
  }
}

// What JSON text that is no integer is called when an integer was wanted.
inline Fault not_a_json_integer(uint8_t byte) {
  switch (byte) {
    case 'n':
      return Fault::kNull;
    case 't':
    case 'f':
      return Fault::kBoolean;
    case '"':
      return Fault::kText;
    case '[':
      return Fault::kNested;
    case '{':
      return Fault::kOther;
    default:
      return Fault::kSyntax;
  }
}

// The run of decimal digits among 8 bytes, read at once: a loop over digits mispredicts where each number
// ends. `digits` is 8 when more may follow.
struct DigitRun {
  size_t digits;
  uint64_t value;
};

inline DigitRun read_eight(const uint8_t* at) {
  uint64_t chunk;
  std::memcpy(&chunk, at, sizeof(chunk));
  const uint64_t offset = chunk - 0x3030303030303030;
  // High bit of each byte outside '0'..'9'; exact up to the first such byte, which is the only one that
  // counts.
  const uint64_t outside = ((chunk + 0x4646464646464646) | offset) & 0x8080808080808080;
  const size_t digits = static_cast<size_t>(std::countr_zero(outside)) / 8;
  if (digits == 0) return {0, 0};
  uint64_t value = offset << (8 * (8 - digits));
  value = value * 10 + (value >> 8);
  value = ((value & 0x000000ff000000ff) * 0x000f424000000064 +
           ((value >> 16) & 0x000000ff000000ff) * 0x0000271000000001) >>
          32;
  return {digits, value};
}

// An integer of at most 64 bits: -2^63..2^64-1. "-0" is 0, as everywhere in JSON.
inline Integer read_json_integer(Cursor& cursor) {
  if (cursor.left() > 8) {
    const DigitRun run = read_eight(cursor.at);
    const uint8_t after = cursor.at[run.digits];
    if (run.digits - 1 < 7 && (*cursor.at != '0' || run.digits == 1) && (after == ',' || after == ']')) {
      cursor.at += run.digits;
      return {Fault::kNone, false, run.value};
    }
  }
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  const bool negative = *cursor.at == '-';
  if (negative) ++cursor.at;
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  if (!is_digit(*cursor.at)) return {negative ? Fault::kSyntax : not_a_json_integer(*cursor.at)};
  const uint8_t* first = cursor.at;
  uint64_t value = 0;
  // 19 digits always fit in 64 bits; the 20th has to be looked at, a 21st never fits.
  const uint8_t* safe = first + std::min<size_t>(cursor.left(), 19);
  while (cursor.at != safe && is_digit(*cursor.at)) value = value * 10 + (*cursor.at++ - '0');
  bool overflow = false;
  while (cursor.at != cursor.end && is_digit(*cursor.at)) {
    const uint64_t digit = *cursor.at++ - '0';
    overflow = overflow || value > (UINT64_MAX - digit) / 10;
    if (!overflow) value = value * 10 + digit;
  }
  if (*first == '0' && cursor.at - first > 1) return {Fault::kSyntax};
  if (cursor.at != cursor.end && (*cursor.at == '.' || *cursor.at == 'e' || *cursor.at == 'E')) {
    return {Fault::kFloat};
  }
  if (overflow || (negative && value > uint64_t{1} << 63)) return {Fault::kOutOfRange};
  return {Fault::kNone, negative && value != 0, negative ? ~value + 1 : value};
}

inline int hex_value(uint8_t byte) {
  if (is_digit(byte)) return byte - '0';
  const uint8_t lower = byte | 0x20;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// A hash written as JSON text: pairs of hexadecimal digits, the bytes of the digest in order.
inline Integer read_json_hex(Cursor& cursor) {
  uint64_t bits = 0;
  size_t digits = 0;
  for (++cursor.at; cursor.at != cursor.end && *cursor.at != '"'; ++cursor.at, ++digits) {
    const int value = hex_value(*cursor.at);
    if (value < 0) return {Fault::kHex};
    bits = bits << 4 | static_cast<uint64_t>(value);  // the last 16 digits stay
  }
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  ++cursor.at;
  if (digits == 0) return {Fault::kEmptyBytes};
  if (digits % 2 != 0) return {Fault::kHex};
  return {Fault::kNone, false, bits};
}

// Elements that a JSON array of numbers or hexadecimal texts holds at most.
inline size_t json_capacity(Span data) { return count_commas(data) + 1; }

template <typename Number, typename ReadElement>
Parsed parse_json_plainly(Span data, uint8_t* out, ReadElement read_element) {
  Cursor cursor{data.data(), data.data() + data.size()};
  skip_space(cursor);
  if (cursor.at == cursor.end) return {Fault::kTruncated};
  if (*cursor.at != '[') return {Fault::kNotArray};
  ++cursor.at;
  skip_space(cursor);
  size_t count = 0;
  bool more = cursor.at == cursor.end || *cursor.at != ']';
  if (!more) ++cursor.at;
  while (more) {
    Number number;
    const Fault fault = read_element(cursor, number);
    if (fault != Fault::kNone) return {fault, count, count};
    std::memcpy(out + count * sizeof(Number), &number, sizeof(Number));
    ++count;
    skip_space(cursor);
    if (cursor.at == cursor.end) return {Fault::kTruncated, count, count};
    if (*cursor.at != ',' && *cursor.at != ']') return {Fault::kSyntax, count - 1, count};
    more = *cursor.at++ == ',';
    if (more) skip_space(cursor);
  }
  skip_space(cursor);
  return {cursor.at == cursor.end ? Fault::kNone : Fault::kTrailing, count, count};
}

// The fastest scan that this processor has.
template <typename Number>
bool scan_fast(Span text, uint8_t* out, size_t& count) {
#ifdef KVINDEXER_DIGIT_SCAN_AVX2
  if constexpr (sizeof(Number) == 4)
    if (has_avx2()) return scan_tokens_avx2(text, out, count);
#endif
  return scan_digits<FastMasks, Number>(text, out, count);
}

// The same as parse_json_plainly, and most arrays faster.
template <typename Number, typename ReadElement>
Parsed parse_json(Span data, uint8_t* out, ReadElement read_element) {
  size_t count = 0;
  if (scan_fast<Number>(data, out, count)) return {Fault::kNone, count, count};
  return parse_json_plainly<Number>(data, out, read_element);
}

// `out` has room for json_capacity(data) numbers of 4 bytes.
inline Parsed parse_json_tokens(Span data, uint8_t* out) {
  return parse_json<uint32_t>(data, out, [](Cursor& cursor, uint32_t& number) {
    const Integer read = read_json_integer(cursor);
    if (read.fault != Fault::kNone) return read.fault;
    if (read.bits > UINT32_MAX) return Fault::kOutOfRange;
    number = static_cast<uint32_t>(read.bits);
    return Fault::kNone;
  });
}

// `out` has room for json_capacity(data) numbers of 8 bytes.
inline Parsed parse_json_hashes(Span data, uint8_t* out) {
  return parse_json<uint64_t>(data, out, [](Cursor& cursor, uint64_t& number) {
    const bool text = cursor.at != cursor.end && *cursor.at == '"';
    const Integer read = text ? read_json_hex(cursor) : read_json_integer(cursor);
    number = read.bits;
    return read.fault;
  });
}

// -- words

// One word a fault: what a caller branches on.
inline const char* fault_name(Fault fault) {
  static constexpr const char* kNames[] = {
      "none", "not_array", "truncated", "trailing", "syntax", "range",        "float", "boolean",
      "null", "text",      "bytes",     "empty",    "hex",    "nested_array", "other", "too_many"};
  return kNames[static_cast<size_t>(fault)];
}

// The end of the sentence "element 3 is ...".
inline const char* fault_words(Fault fault) {
  static constexpr const char* kWords[] = {
      "fine",
      "not an array",
      "cut off",
      "followed by more bytes",
      "not a value",
      "out of range",
      "not an integer but a float",
      "not an integer but a boolean",
      "not an integer but null",
      "not an integer but text",
      "not an integer but bytes",
      "empty",
      "not pairs of hexadecimal digits",
      "not an integer but an array",
      "a map or an extension",
      "a container of too many values",
  };
  return kWords[static_cast<size_t>(fault)];
}

}  // namespace kvindexer::wire
