// Cuts the arrays of numbers out of a JSON text: what is left is short, and a general parser may read it.
//
// A query is a few short fields around thousands of integers. Here the arrays under the names of `kCuts`, at
// any depth, go to buffers by the strict parsers of wire.hpp, and in the place of each stands its number.
// What is left must then be read by a real JSON parser, which takes the numbers for what they are.
//
// Why that is exact. Strings are followed as JSON has them, so a cut is never inside of one; a cut replaces
// one whole valid array, behind a name and a colon, by a number and a space, which cannot join what follows.
// So the text is valid exactly when what is left is. A number can stand for nothing but a cut: a name of
// `kCuts` before anything else than an array or null is refused, and so is every escaped name. Refused means
// false: the caller takes another way, which says what is wrong.
//
// Cost: strings are skipped by memchr, numbers are parsed once; nothing is built for them.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>

#include "wire.hpp"

namespace kvindexer::wire {

// A hash of ours: unsigned, and never text.
inline Parsed parse_json_unsigned(Span data, uint8_t* out) {
  return parse_json<uint64_t>(data, out, [](Cursor& cursor, uint64_t& number) {
    const Integer read = read_json_integer(cursor);
    number = read.bits;
    return read.fault == Fault::kNone && read.negative ? Fault::kOutOfRange : read.fault;
  });
}

inline Parsed parse_msgpack_unsigned(Span data, uint8_t* out) {
  return parse_msgpack(data, out, [](Cursor& cursor, size_t count, uint8_t* numbers) {
    return read_elements<uint64_t>(cursor, 0, count, numbers, [](Cursor& at, uint64_t& number) {
      const Integer read = read_integer(at);
      number = read.bits;
      return read.fault == Fault::kNone && read.negative ? Fault::kOutOfRange : read.fault;
    });
  });
}

struct Cut {
  std::string_view name;
  Parsed (*parse)(Span, uint8_t*);
  size_t width;
};

inline constexpr std::array<Cut, 3> kCuts{{{"token_ids", parse_json_tokens, 4},
                                           {"block_hashes", parse_json_hashes, 8},
                                           {"prefix_hashes", parse_json_unsigned, 8}}};

inline const uint8_t* find_byte(const uint8_t* from, const uint8_t* end, char wanted) {
  if (from == end) return nullptr;
  return static_cast<const uint8_t*>(std::memchr(from, wanted, static_cast<size_t>(end - from)));
}

// The closing quote of the string that is open at `at`, null when there is none; `escaped` when it has an
// escape in it. A quote is looked for again only behind an escaped one: from every escape it would be
// quadratic.
inline const uint8_t* end_of_string(const uint8_t* at, const uint8_t* end, bool& escaped) {
  escaped = false;
  const uint8_t* quote = find_byte(at, end, '"');
  while (quote != nullptr) {
    const uint8_t* const escape = find_byte(at, quote, '\\');
    if (escape == nullptr) return quote;
    escaped = true;
    at = escape + 2;
    if (at > quote) quote = find_byte(at, end, '"');
  }
  return nullptr;
}

// `take(span, cut)` parses an array; false refuses it. `rest` gets what is left.
template <typename Take>
bool cut_json(Span body, size_t arrays_max, std::string& rest, Take take) {
  const uint8_t* at = body.data();
  const uint8_t* const end = at + body.size();
  const uint8_t* copied = at;
  size_t arrays = 0;
  const auto copy_to = [&](const uint8_t* until) {
    rest.append(reinterpret_cast<const char*>(copied), static_cast<size_t>(until - copied));
  };
  while (const uint8_t* open = find_byte(at, end, '"')) {
    bool escaped = false;
    const uint8_t* const close = end_of_string(open + 1, end, escaped);
    if (close == nullptr) return false;
    Cursor cursor{close + 1, end};
    skip_space(cursor);
    at = cursor.at;
    if (at == end || *at != ':') continue;
    if (escaped) return false;
    const std::string_view name(reinterpret_cast<const char*>(open + 1),
                                static_cast<size_t>(close - open - 1));
    const auto cut = std::find_if(kCuts.begin(), kCuts.end(), [&](const Cut& c) { return c.name == name; });
    if (cut == kCuts.end()) continue;
    ++cursor.at;
    skip_space(cursor);
    at = cursor.at;
    if (cursor.left() >= 4 && std::memcmp(at, "null", 4) == 0) continue;
    if (at == end || *at != '[' || arrays == arrays_max) return false;
    // Numbers and hexadecimal text have no bracket, and nested arrays are refused by their parsers.
    const uint8_t* const bracket = find_byte(at, end, ']');
    if (bracket == nullptr || !take(Span(at, static_cast<size_t>(bracket + 1 - at)), *cut)) return false;
    copy_to(at);
    std::array<char, 24> digits;
    const auto written = std::to_chars(digits.data(), digits.data() + digits.size() - 1, arrays++);
    *written.ptr = ' ';
    rest.append(digits.data(), static_cast<size_t>(written.ptr + 1 - digits.data()));
    at = copied = bracket + 1;
  }
  copy_to(end);
  return true;
}

// Values that an array or an object of valid JSON holds, as far as `max` + 1: counted before anything is
// built for them.
inline size_t count_json_children(Span data, size_t max) {
  const uint8_t* at = data.data();
  const uint8_t* const end = at + data.size();
  size_t depth = 0;
  size_t commas = 0;
  bool any = false;
  for (; at != end && commas <= max; ++at) {
    const uint8_t byte = *at;
    if (byte == '"') {
      bool escaped = false;
      at = end_of_string(at + 1, end, escaped);
      any = true;
      if (at == nullptr) break;
    } else if (byte == '[' || byte == '{') {
      any = any || depth > 0;
      ++depth;
    } else if (byte == ']' || byte == '}') {
      depth -= depth > 0 ? 1 : 0;
    } else if (byte == ',') {
      commas += depth == 1 ? 1 : 0;
    } else if (byte > ' ') {
      any = any || depth > 0;
    }
  }
  return any ? std::min(commas, max) + 1 : 0;
}

}  // namespace kvindexer::wire
