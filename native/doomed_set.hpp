// Prefixes that are gone while their records still lie somewhere: whatever carries one of them is dead.
//
// In front of the set lies a filter, so that most of those who ask are answered from a cache: three bits of
// one word a prefix. A table would grow by an eighth again and again, which took more than a half of an
// insertion; so room for all that is expected is laid out with the first, and fetched from the kernel as it
// is used.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pages.hpp"
#include "segmented_table.hpp"

namespace kvindexer {

class DoomedSet {
 public:
  bool empty() const { return prefixes_.size() == 0; }
  size_t size() const { return prefixes_.size(); }
  size_t bytes() const {
    size_t bytes = prefixes_.bytes() + filter_.bytes();
    for (const Table& spent : spent_) bytes += spent.bytes();
    return bytes;
  }

  bool contains(uint64_t prefix) {
    return !empty() && may_contain(prefix) && prefixes_.find(prefix) != nullptr;
  }

  // The same in steps, for many at once. The first and the second not when it is empty.
  void prefetch(uint64_t prefix) const { __builtin_prefetch(&words()[word_of(prefix)]); }
  bool may_contain(uint64_t prefix) const { return (~words()[word_of(prefix)] & bits_of(prefix)) == 0; }
  void prefetch_entry(uint64_t prefix) const { prefixes_.prefetch(prefix); }
  bool contains_likely(uint64_t prefix) { return prefixes_.find(prefix) != nullptr; }

  // One that it does not contain. `expected`: how many there are going to be, should it be empty now.
  void add(uint64_t prefix, size_t expected) {
    if (empty()) lay_out(expected);
    prefixes_.insert({prefix});
    words()[word_of(prefix)] |= bits_of(prefix);
  }
  // One that it contains.
  void remove(uint64_t prefix) { prefixes_.erase(prefixes_.find(prefix)); }

  // `give_back` gives back what it took, in slices; true when nothing is left of that.
  void clear() {
    spent_.push_back(std::exchange(prefixes_, Table()));
    filter_.discard(0, filter_.pages());
    is_marked_ = false;
  }
  bool give_back() {
    if (!spent_.empty() && spent_.back().dismantle(1, [](const Entry&) {})) spent_.pop_back();
    return spent_.empty();
  }

 private:
  static constexpr size_t kBitsPerPrefix = 12;
  static constexpr size_t kFilterBytesMax = size_t{1} << 22;  // is emptied in one go

  struct Entry {
    uint64_t key;  // prefix hash
    bool empty() const { return key == 0; }
  };
  using Table = SegmentedTable<Entry>;

  void lay_out(size_t expected) {
    const size_t bytes = std::bit_ceil(expected * kBitsPerPrefix / 8 + 1);
    const size_t pages = std::clamp(bytes, Pages::kPageBytes, kFilterBytesMax) / Pages::kPageBytes;
    if (pages != filter_.pages()) {
      filter_ = Pages();
      filter_.resize(pages);
    } else if (is_marked_) {
      filter_.discard(0, pages);
    }
    is_marked_ = true;
    prefixes_.reserve(expected);
  }

  uint64_t* words() const { return static_cast<uint64_t*>(filter_.base()); }
  size_t word_of(uint64_t prefix) const { return prefix & (filter_.bytes() / 8 - 1); }
  static uint64_t bits_of(uint64_t prefix) {
    return uint64_t{1} << (prefix >> 58) | uint64_t{1} << (prefix >> 52 & 63) |
           uint64_t{1} << (prefix >> 46 & 63);
  }

  Table prefixes_;
  Pages filter_;
  bool is_marked_ = false;  // it may have bits, though the set is empty
  std::vector<Table> spent_;
};

}  // namespace kvindexer
