// An open-addressing hash table of small entries with 64-bit keys that grows, shrinks and is swept in small
// slices.
//
// Shape. A directory indexed by the leading bits of the key (extendible hashing: Fagin, Nievergelt, Pippenger
// and Strong 1979) names segments of at most 128 KiB. Inside a segment entries lie in key order with gaps,
// each at or after the place that its key is proportional to (ordered linear probing: Amble and Knuth 1974).
// Equal keys are allowed and lie side by side.
//
// What that buys.
//   - A segment grows by an eighth, or splits, on its own: the longest pause is one pass over 128 KiB (about
//   20 us),
//     and the load stays between 0.75 and 0.85, so a 16-byte entry costs about 20 bytes at any size.
//   - A miss ends at the first larger key: as cheap as a hit, though the load is high.
//   - No tombstones: erasing shifts the few entries behind it back.
//   - The whole table is in key order, so a sweep is resumed from the last key it saw, whatever moved
//   meanwhile.
//
// Tried: buckets of one cache line with linear probing between them, four or three entries each. Steady
// insertion was the same (47 and 58 ns against 49 and 60 ns for 16 and 20 bytes), but hits (27 against 24
// ns), misses (53 against 24) and growth (175 against 125 ns an insertion) were slower: how full a bucket is
// cannot be predicted. Growth by a quarter instead of an eighth halves its cost, but then two tables need
// more than 48 bytes a block. Segments in huge pages made a cold match of 256 blocks a third faster (15.0
// to 9.8 us), but their page faults pause for 5 ms.
//
// Keys must be uniform in their leading bits (they are hashes; mix64 those that others choose). Skewed keys
// stay correct and cost linear time in the length of the cluster.
//
// An Entry is trivially copyable, all zero when empty, and has `uint64_t key` and `bool empty() const`.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "pages.hpp"

namespace kvindexer {

template <class Entry>
class SegmentedTable {
  static_assert(std::is_trivially_copyable_v<Entry>);

 public:
  SegmentedTable() : directory_(1, 0), segments_(1) {}

  size_t size() const { return size_; }
  size_t bytes() const {
    return page_bytes_ + directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  }

  // An empty table gets its segments for so many entries now, and each segment its memory with its first
  // entry. For whoever fills it in key order: a table that grows meanwhile crowds all keys at the front of
  // what it has, and an insertion becomes a scan (a snapshot of 2 million names: 1.85 s instead of 0.35).
  void reserve(size_t entries) {
    if (size_ != 0 || directory_bits_ != 0) return;
    constexpr size_t kBitsMax = 16;
    const size_t full = kSegmentPagesMax * Pages::kPageBytes / sizeof(Entry) * 3 / 4;
    unsigned bits = 0;
    while (bits < kBitsMax && (entries >> bits) > full) ++bits;
    const size_t each = entries >> bits;
    const size_t uneven = 4 * static_cast<size_t>(std::sqrt(static_cast<double>(each)));
    directory_.resize(
        size_t{1} << bits);  // what is behind the first stays unread, should there be no more memory
    segments_.resize(size_t{1} << bits);
    directory_bits_ = bits;
    first_pages_ =
        std::min(kSegmentPagesMax, pages_for(static_cast<uint32_t>(std::min(each + uneven, full))));
    for (uint32_t index = 0; index < segments_.size(); ++index) {
      directory_[index] = index;
      segments_[index].depth = directory_bits_;
    }
  }

  void prefetch(uint64_t key) const {
    const Segment& segment = segments_[segment_of(key)];
    // As a number: an empty segment has no memory, and no pointers into it.
    const uintptr_t at = reinterpret_cast<uintptr_t>(segment.slots()) + segment.home(key) * sizeof(Entry);
    // GCC 12 takes a function that only prefetches for one without effect and drops the calls; this is an
    // effect.
    asm volatile("" : : "r"(at));
    __builtin_prefetch(reinterpret_cast<const void*>(at));
    // An entry lies up to a few places behind its home; the second line is wanted often enough to pay for it.
    __builtin_prefetch(reinterpret_cast<const void*>(at + 64));
  }

  // The first entry with this key, or nullptr. Valid until the next insert, erase or clear.
  Entry* find(uint64_t key) {
    Segment& segment = segments_[segment_of(key)];
    if (segment.size == 0) return nullptr;
    Entry* at = segment.slots() + segment.home(key);
    while (!at->empty() && at->key < key) ++at;
    return !at->empty() && at->key == key ? at : nullptr;
  }

  // The next entry with the same key, or nullptr.
  template <class Pointer>  // Entry* or const Entry*
  static Pointer next_equal(Pointer entry) {
    Pointer next = entry + 1;  // a segment always ends with an empty place
    return !next->empty() && next->key == entry->key ? next : nullptr;
  }

  // Adds an entry, behind those with an equal key. Returns where it lies now.
  Entry* insert(const Entry& entry) {
    assert(!entry.empty() && "an all-zero entry cannot be stored");
    const Gap found = find_gap(entry.key);
    std::memmove(found.at + 1, found.at,
                 reinterpret_cast<char*>(found.gap) - reinterpret_cast<char*>(found.at));
    *found.at = entry;
    ++found.segment->size;
    ++size_;
    return found.at;
  }

  // The next insertion, if it is that of this key, needs no memory.
  void make_way(uint64_t key) { find_gap(key); }

  // Removes one entry that `find`, `next_equal` or `insert` returned; pointers into the table are void
  // afterwards.
  void erase(Entry* entry) {
    const uint32_t index = segment_of(entry->key);
    erase_in(segments_[index], entry);
    if (segments_[index].is_sparse()) shrink(index);
  }

  // Visits entries with key >= cursor in key order, at most about `visits_max` of them. `keep(entry)` may
  // change all but the key, and returns false to have the entry erased; it must not touch this table
  // otherwise. Returns the number visited; `cursor` becomes the place to go on from, `done` tells that the
  // end was reached.
  template <class Keep>
  size_t sweep(uint64_t& cursor, bool& done, size_t visits_max, Keep keep) {
    size_t visits = 0;
    done = false;
    while (visits < visits_max) {
      const uint32_t index = segment_of(cursor);
      Segment& segment = segments_[index];
      if (segment.size != 0) {
        Entry* at = segment.slots() + segment.home(cursor);
        Entry* const end = segment.slots() + segment.places;
        while (at < end) {
          if (at->empty() || at->key < cursor) {
            ++at;
            continue;
          }
          if (visits >= visits_max && at->key != last_key_) break;  // never stop between equal keys
          last_key_ = at->key;
          ++visits;
          if (keep(*at)) {
            ++at;
          } else {
            erase_in(segment, at);  // the next entry, if any, has moved here or lies behind
          }
        }
        const bool stopped = at < end;
        if (stopped) {
          cursor = at->key;
          if (segment.is_sparse()) shrink(index);
          return visits;
        }
        if (segment.is_sparse()) shrink(index);
      } else {
        ++visits;  // empty segments cost something too
      }
      const uint64_t next = segments_[index].first_key_behind(cursor);
      if (next == 0) {
        cursor = 0;
        done = true;
        return visits;
      }
      cursor = next;
    }
    return visits;
  }

  // Visits entries with key >= cursor in key order until `visit(entry)` says that it has had enough; equal
  // keys are never parted. Returns true at the end of the table; else `cursor` becomes the place to go on
  // from. An entry that stays in the table from the first call to the last is visited once, whatever comes
  // and goes.
  template <class Visit>
  bool walk(uint64_t& cursor, Visit visit) const {
    bool enough = false;
    uint64_t last_key = 0;
    while (true) {
      const Segment& segment = segments_[segment_of(cursor)];
      if (segment.size != 0) {
        const Entry* const end = segment.slots() + segment.places;
        for (const Entry* at = segment.slots() + segment.home(cursor); at < end; ++at) {
          if (at->empty() || at->key < cursor) continue;
          if (enough && at->key != last_key) {
            cursor = at->key;
            return false;
          }
          last_key = at->key;
          enough = !visit(*at) || enough;
        }
      }
      cursor = segment.first_key_behind(cursor);
      if (cursor == 0) return true;
      if (enough) return false;
    }
  }

  // Gives back the memory of at most `segments_max` segments after `drop(entry)` for each of their entries.
  // Returns true when nothing is left. For a table that is not used any more.
  template <class Drop>
  bool dismantle(size_t segments_max, Drop drop) {
    while (segments_max-- > 0 && !segments_.empty()) {
      Segment& segment = segments_.back();
      for (Entry* at = segment.slots(); at < segment.slots() + segment.places; ++at)
        if (!at->empty()) drop(*at);
      size_ -= segment.size;
      page_bytes_ -= segment.memory.bytes();
      segments_.pop_back();
    }
    return segments_.empty();
  }

 private:
  static constexpr uint32_t kSegmentPagesMax = 32;

  struct Segment {
    Pages memory;
    uint32_t range = 0;   // homes are 0..range-1
    uint32_t places = 0;  // allocated; places - range take what overflows at the end, the last stays empty
    uint32_t size = 0;
    uint32_t depth = 0;  // leading key bits that all entries share

    Entry* slots() const { return static_cast<Entry*>(memory.base()); }
    uint32_t home(uint64_t key) const {
      return static_cast<uint32_t>((((key << depth) >> 32) * uint64_t{range}) >> 32);
    }
    uint32_t fill_max() const { return static_cast<uint32_t>(uint64_t{places} * 109 / 128); }  // 0.85
    bool is_sparse() const { return memory.pages() > 1 && size < places / 3; }
    // The smallest key of the next segment in key order, 0 behind the last one.
    uint64_t first_key_behind(uint64_t key) const {
      if (depth == 0) return 0;
      return ((key >> (64 - depth)) + 1) << (64 - depth);
    }
  };

  uint32_t segment_of(uint64_t key) const {
    return directory_[directory_bits_ == 0 ? 0 : key >> (64 - directory_bits_)];
  }

  static uint32_t pages_for(uint32_t entries) {  // at a load of about 0.77
    const size_t places = uint64_t{entries} * 83 / 64 + 32;
    return static_cast<uint32_t>((places * sizeof(Entry) + Pages::kPageBytes - 1) / Pages::kPageBytes);
  }

  struct Gap {
    Segment* segment;
    Entry* at;   // where the entry goes
    Entry* gap;  // how far those that lie there can move back
  };

  Gap find_gap(uint64_t key) {
    while (true) {
      Segment& segment = segments_[segment_of(key)];
      if (segment.size + 1 > segment.fill_max()) {
        make_room(segment_of(key));
        continue;
      }
      Entry* const slots = segment.slots();
      Entry* at = slots + segment.home(key);
      while (!at->empty() && at->key <= key) ++at;
      Entry* gap = at;
      while (!gap->empty()) ++gap;
      if (gap != slots + segment.places - 1) return {&segment, at, gap};
      widen(segment_of(key));  // the guard place stays empty
    }
  }

  void erase_in(Segment& segment, Entry* entry) {
    const Entry* const slots = segment.slots();
    Entry* end = entry + 1;
    while (!end->empty() && slots + segment.home(end->key) < end) ++end;
    std::memmove(entry, entry + 1, reinterpret_cast<char*>(end) - reinterpret_cast<char*>(entry + 1));
    *(end - 1) = Entry{};
    --segment.size;
    --size_;
  }

  void make_room(uint32_t index) {
    Segment& segment = segments_[index];
    const size_t pages = segment.memory.pages();
    // Skewed keys would deepen the directory without end: past this depth a segment grows instead of
    // splitting.
    const uint32_t depth_max = static_cast<uint32_t>(std::bit_width(segments_.size())) + 3;
    if (pages >= kSegmentPagesMax && segment.depth < depth_max) return split(index);
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(),
            pages == 0 ? first_pages_ : pages + std::max<size_t>(1, pages / 8));
  }

  void widen(uint32_t index) {
    Segment& segment = segments_[index];
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(), segment.memory.pages() + 1);
  }

  // Where there is no memory for a smaller layout, the segment stays as it is.
  void shrink(uint32_t index) noexcept {
    Segment& segment = segments_[index];
    try {
      lift(segment);
      lay_out(segment, lifted_.data(), lifted_.size(), pages_for(segment.size));
    } catch (const std::bad_alloc&) {
    }
  }

  void split(uint32_t index) {
    if (segments_[index].depth == directory_bits_) {
      std::vector<uint32_t> doubled(directory_.size() * 2);
      for (size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
      directory_ = std::move(doubled);
      ++directory_bits_;
    }
    const uint32_t fresh = static_cast<uint32_t>(segments_.size());
    lift(segments_[index]);
    segments_.emplace_back();
    Segment& lower = segments_[index];
    Segment& upper = segments_[fresh];
    const uint32_t depth = lower.depth;
    const uint64_t bit = uint64_t{1} << (63 - depth);
    const auto middle = std::partition_point(lifted_.begin(), lifted_.end(),
                                             [bit](const Entry& entry) { return (entry.key & bit) == 0; });
    const size_t low_count = static_cast<size_t>(middle - lifted_.begin());
    const size_t high_count = lifted_.size() - low_count;
    upper.depth = depth + 1;
    try {
      lay_out(upper, lifted_.data() + low_count, high_count, pages_for(high_count));
      lower.depth = depth + 1;
      lay_out(lower, lifted_.data(), low_count, pages_for(low_count));
    } catch (...) {  // no more memory: all is where it was
      lower.depth = depth;
      page_bytes_ -= upper.memory.bytes();
      segments_.pop_back();
      throw;
    }
    // The directory cells of the old segment are one run; its upper half now names the new one.
    const size_t run = size_t{1} << (directory_bits_ - lower.depth + 1);
    const size_t first = (lifted_.front().key >> (64 - directory_bits_)) & ~(run - 1);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(first + run / 2), run / 2, fresh);
  }

  // Copies a segment's entries, in order, to lifted_.
  void lift(const Segment& segment) {
    std::vector<Entry>& lifted = lifted_;
    lifted.resize(segment.size);
    Entry* to = lifted.data();
    const Entry* const end = segment.slots() + segment.places;
    for (const Entry* at = segment.slots(); at < end; ++at)
      if (!at->empty()) *to++ = *at;
  }

  // Gives the segment `pages` pages, or more where the keys cluster at its end, and spreads the entries over
  // them. Throws std::bad_alloc, and then nothing has changed.
  void lay_out(Segment& segment, const Entry* entries, size_t count, size_t pages) {
    const uint32_t range_before = segment.range;
    uint32_t tail = 0, places = 0;
    while (true) {
      places = static_cast<uint32_t>(pages * Pages::kPageBytes / sizeof(Entry));
      const uint32_t slack = 16 + places / 64 + tail;
      if (slack < places) {
        segment.range = places - slack;
        uint32_t end = 0;
        for (size_t i = 0; i < count; ++i) end = std::max(segment.home(entries[i].key), end) + 1;
        if (end < places) break;
        tail += end - places + 32;
      }
      pages += 1 + tail * sizeof(Entry) / Pages::kPageBytes;
    }
    const size_t bytes_before = segment.memory.bytes();
    try {
      segment.memory.resize(pages);
    } catch (...) {  // no more memory: all is where it was
      segment.range = range_before;
      throw;
    }
    segment.places = places;
    page_bytes_ += segment.memory.bytes() - bytes_before;
    const size_t written = std::min(bytes_before, segment.memory.bytes());  // the rest is zero
    Entry* const slots = segment.slots();
    std::memset(static_cast<void*>(slots), 0, written);
    uint32_t place = 0;
    for (size_t i = 0; i < count; ++i) {
      place = std::max(segment.home(entries[i].key), place);
      slots[place++] = entries[i];
    }
    segment.size = static_cast<uint32_t>(count);
  }

  std::vector<uint32_t> directory_;  // leading key bits -> index in segments_
  uint32_t directory_bits_ = 0;
  uint32_t first_pages_ = 1;  // of a segment with its first entry
  std::vector<Segment> segments_;
  size_t size_ = 0;
  size_t page_bytes_ = 0;
  uint64_t last_key_ = 0;  // of the sweep under way
  static inline thread_local std::vector<Entry> lifted_;
};

}  // namespace kvindexer
