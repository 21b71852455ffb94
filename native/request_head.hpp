// The head of a plain POST request, read at one go: what routers and engines send thousands of times a
// second.
//
// The server's own parser calls back for every line of a head, and its caller makes a task for every request.
// A request whose head has come whole and holds nothing unusual needs neither. Plain is a subset of RFC 9112
// on which no two parsers differ: POST, a path in origin form, HTTP/1.1, one Content-Length, lines that end
// in CRLF, names of token characters, values of visible ASCII with neither fold nor blanks at their end.
// Whatever could change how the message or the connection is framed, or who is taken for the client
// (Transfer-Encoding, Connection other than keep-alive, Upgrade, Expect, Forwarded), is not plain: the bytes
// go to the server's parser as they are. The tests hold that what is plain means the same to that one.
//
// Cost: one pass over the head, nothing is copied.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "wire_cursor.hpp"

namespace kvindexer::wire {

inline constexpr size_t kHeadBytesMax = 8'192;
inline constexpr size_t kHeadLinesMax = 64;

struct HeaderLine {
  std::string_view name;  // in the case that it came in
  std::string_view value;
};

struct RequestHead {
  std::string_view path;   // of the target, before the first question mark
  std::string_view query;  // behind it
  std::array<HeaderLine, kHeadLinesMax> lines;
  size_t line_count = 0;
  size_t bytes = 0;       // of the head, with the empty line at its end
  size_t body_bytes = 0;  // as its Content-Length says
};

// By byte: bit 0 for those of names, bit 1 for those of values.
inline constexpr auto kHeadBytes = [] {
  std::array<uint8_t, 256> kinds{};
  for (size_t byte = 0; byte < 256; ++byte) {
    const bool in_value = byte == '\t' || (byte >= 0x20 && byte <= 0x7e);
    bool in_name =
        (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
    for (const char mark : std::string_view("!#$%&'*+-.^_`|~")) in_name |= byte == static_cast<uint8_t>(mark);
    kinds[byte] = static_cast<uint8_t>((in_name ? 1 : 0) | (in_value ? 2 : 0));
  }
  return kinds;
}();

inline bool same_but_case(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(), [](char a, char b) {
           return (a >= 'A' && a <= 'Z' ? static_cast<char>(a + ('a' - 'A')) : a) == b;
         });
}

// Headers beside Content-Length and Connection that make a request another one than its head alone says.
inline bool is_unusual(std::string_view name) {
  static constexpr std::array<std::string_view, 5> kUnusual{"transfer-encoding", "upgrade", "expect",
                                                            "forwarded", "proxy-connection"};
  if (name.size() >= 12 && same_but_case(name.substr(0, 12), "x-forwarded-")) return true;
  return std::any_of(kUnusual.begin(), kUnusual.end(),
                     [&](std::string_view unusual) { return same_but_case(name, unusual); });
}

// What an answer may depend on beside path and body.
inline constexpr std::array<std::string_view, 6> kAskedNames{
    "content-type", "content-encoding", "accept", "authorization", "x-request-id", "traceparent"};

// The name in lower case, empty for one that is not asked for.
inline std::string_view asked_name(std::string_view name) {
  const auto found = std::find_if(kAskedNames.begin(), kAskedNames.end(),
                                  [&](std::string_view asked) { return same_but_case(name, asked); });
  return found == kAskedNames.end() ? std::string_view() : *found;
}

inline bool read_length(std::string_view digits, size_t& length) {
  if (digits.empty() || digits.size() > 15) return false;
  length = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return false;
    length = length * 10 + static_cast<size_t>(digit - '0');
  }
  return true;
}

// The target of the request line; false for what is no path of visible ASCII.
inline bool read_target(Cursor& cursor, RequestHead& head) {
  const char* const start = reinterpret_cast<const char*>(cursor.at);
  if (cursor.at == cursor.end || *cursor.at != '/') return false;
  while (cursor.at != cursor.end && *cursor.at > ' ' && *cursor.at < 0x7f && *cursor.at != '#') ++cursor.at;
  const std::string_view target(start, static_cast<size_t>(reinterpret_cast<const char*>(cursor.at) - start));
  const size_t mark = target.find('?');
  head.path = target.substr(0, mark);
  head.query = mark == std::string_view::npos ? std::string_view() : target.substr(mark + 1);
  return true;
}

inline bool read_exactly(Cursor& cursor, std::string_view text) {
  if (cursor.left() < text.size() || std::memcmp(cursor.at, text.data(), text.size()) != 0) return false;
  cursor.at += text.size();
  return true;
}

inline bool read_header(Cursor& cursor, HeaderLine& line) {
  const auto run = [&](uint8_t kind) {
    const uint8_t* const start = cursor.at;
    while (cursor.at != cursor.end && (kHeadBytes[*cursor.at] & kind) != 0) ++cursor.at;
    return std::string_view(reinterpret_cast<const char*>(start), static_cast<size_t>(cursor.at - start));
  };
  line.name = run(1);
  if (line.name.empty() || !read_exactly(cursor, ":")) return false;
  while (cursor.at != cursor.end && *cursor.at == ' ') ++cursor.at;
  line.value = run(2);
  if (line.value.empty() || line.value.back() == ' ' || line.value.back() == '\t' || line.value[0] == '\t')
    return false;
  return read_exactly(cursor, "\r\n");
}

// False for what is not plain, a head that has not come whole included.
inline bool read_request_head(Span data, RequestHead& head) {
  Cursor cursor{data.data(), data.data() + std::min(data.size(), kHeadBytesMax)};
  if (!read_exactly(cursor, "POST ") || !read_target(cursor, head) ||
      !read_exactly(cursor, " HTTP/1.1\r\n")) {
    return false;
  }
  bool has_length = false;
  while (!read_exactly(cursor, "\r\n")) {
    if (head.line_count == kHeadLinesMax) return false;
    HeaderLine& line = head.lines[head.line_count++];
    if (!read_header(cursor, line) || is_unusual(line.name)) return false;
    if (same_but_case(line.name, "content-length")) {
      if (has_length || !read_length(line.value, head.body_bytes)) return false;
      has_length = true;
    } else if (same_but_case(line.name, "connection") && !same_but_case(line.value, "keep-alive")) {
      return false;
    }
  }
  head.bytes = static_cast<size_t>(cursor.at - data.data());
  return has_length;
}

}  // namespace kvindexer::wire
