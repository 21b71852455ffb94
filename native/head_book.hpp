// Heads of requests that came before, by number: who sends thousands of requests a second says the same with
// each of them.
//
// Whoever knows the number knows what the head means without looking at path, query and headers again. Two
// heads are the same when path, query and every header that an answer may depend on (request_head.hpp) are,
// byte by byte; how long the body is does not count. Heads that name one request only (an id, a trace, a
// number of a batch), and those with a key, which may be taken back, are not for this book.
//
// Bound: kHeadsMax heads of kKeyBytesMax bytes; with one more all are forgotten, and numbers begin anew.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "request_head.hpp"

namespace kvindexer {

class HeadBook {
 public:
  static constexpr size_t kHeadsMax = 1'024;
  static constexpr size_t kKeyBytesMax = 1'024;

  std::optional<uint32_t> find(const wire::RequestHead& head) {
    if (!write_key(head)) return std::nullopt;
    const auto found = numbers_.find(key_);
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }

  // The number of a head from now on: the next one, or 0 where all others are forgotten. None: not for this
  // book.
  std::optional<uint32_t> put(const wire::RequestHead& head) {
    const std::optional<uint32_t> known = find(head);
    if (known || key_.empty()) return known;
    if (numbers_.size() == kHeadsMax) numbers_.clear();
    return numbers_.emplace(key_, static_cast<uint32_t>(numbers_.size())).first->second;
  }

 private:
  // False, and no key, for a head that is not for this book.
  bool write_key(const wire::RequestHead& head) {
    if (!append_key(head) || key_.size() > kKeyBytesMax) key_.clear();
    return !key_.empty();
  }

  bool append_key(const wire::RequestHead& head) {
    if (head.query.find("seq=") != std::string_view::npos) return false;
    key_.assign(head.path);
    key_ += '?';
    key_ += head.query;
    for (size_t i = 0; i < head.line_count; ++i) {
      const wire::HeaderLine& line = head.lines[i];
      const std::string_view name = wire::asked_name(line.name);
      if (name.empty()) continue;
      if (name == "authorization" || name == "x-request-id" || name == "traceparent") return false;
      key_ += '\n';
      key_ += name;
      key_ += ':';
      key_ += line.value;
    }
    return true;
  }

  std::unordered_map<std::string, uint32_t> numbers_;
  std::string key_;  // of the head that was asked for last
};

}  // namespace kvindexer
