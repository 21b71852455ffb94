// A span of wire bytes, and a place in it: what the parsers of wire text pass to each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvindexer::wire {

using Span = std::span<const uint8_t>;

struct Cursor {
  const uint8_t* at;
  const uint8_t* end;
  size_t left() const { return static_cast<size_t>(end - at); }
};

}  // namespace kvindexer::wire
