// A hash table from 64-bit keys to numbers of records, which know their own keys. It grows, shrinks and is
// swept in small slices.
//
// Shape. As in segmented_table.hpp: a directory over the leading bits of the key names segments, and in a
// segment the entries lie in key order with gaps, each at or after the place that its key is proportional to.
// But an entry is 6 bytes: the number (28 bits) and the next 20 bits of its key behind those that the
// directory looks at. They give its place in the segment, and tell nearly all other keys from it: one in some
// hundred looks at a record for nothing. Only a split needs whole keys, one new bit of each: that reads every
// record once in a doubling.
//
// What that buys. A segment is 16 to 32 KiB for 3,000 to 4,500 entries, so laying one out anew stays in the
// first cache, and a load between 0.66 and 0.82 costs 7.3 to 9.1 bytes an entry.
//
// Keys must be uniform in their leading bits. Skewed keys stay correct and cost linear time.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block_pool.hpp"
#include "pages.hpp"

namespace kvindexer {

// KeyOf: `uint64_t operator()(BlockId) const` and `void prefetch(BlockId) const`.
template <class KeyOf>
class IdTable {
 public:
  explicit IdTable(KeyOf key_of) : key_of_(key_of), directory_(1, 0), segments_(1) {}

  size_t size() const { return size_; }
  size_t bytes() const {
    return page_bytes_ + directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  }

  void prefetch(uint64_t key) const {
    const Segment& segment = segments_[segment_of(key)];
    const uint8_t* at = segment.at(segment.home(segment.tag(key)));
    // GCC 12 takes a function that only prefetches for one without effect and drops the calls.
    asm volatile("" : : "r"(at));
    __builtin_prefetch(at);
  }

  // The number of a record with this key, kNoBlock when there is none.
  BlockId find(uint64_t key) const {
    BlockId found = kNoBlock;
    each(key, [&](BlockId id) {
      found = id;
      return true;
    });
    return found;
  }

  // The number of a record that probably has this key, without a look at it; kNoBlock when there is none.
  BlockId likely(uint64_t key) const {
    const Segment& segment = segments_[segment_of(key)];
    if (segment.size == 0) return kNoBlock;
    const uint64_t tag = segment.tag(key);
    const uint8_t* at = segment.at(segment.home(tag));
    uint64_t entry = load(at);
    while (entry != 0 && entry >> kIdBits < tag) entry = load(at += kEntryBytes);
    return entry != 0 && entry >> kIdBits == tag ? id_of(entry) : kNoBlock;
  }

  // All records with this key, until `visit(id)` says that it has had enough. It must not change the table.
  template <class Visit>
  void each(uint64_t key, Visit visit) const {
    const Segment& segment = segments_[segment_of(key)];
    if (segment.size == 0) return;
    const uint64_t tag = segment.tag(key);
    const uint8_t* at = segment.at(segment.home(tag));
    uint64_t entry = load(at);
    while (entry != 0 && entry >> kIdBits < tag) entry = load(at += kEntryBytes);
    for (; entry != 0 && entry >> kIdBits == tag; entry = load(at += kEntryBytes)) {
      const BlockId id = id_of(entry);
      if (key_of_(id) == key && visit(id)) return;
    }
  }

  // `key` is that of the record; the record is not in the table yet.
  void insert(uint64_t key, BlockId id) {
    while (true) {
      Segment& segment = segments_[segment_of(key)];
      if (segment.size + 1 > segment.fill_max) {
        make_room(segment_of(key));
        continue;
      }
      const uint64_t tag = segment.tag(key);
      uint8_t* at = segment.at(segment.home(tag));
      uint64_t entry = load(at);
      while (entry != 0 && entry >> kIdBits <= tag) entry = load(at += kEntryBytes);
      uint8_t* gap = at;
      while (entry != 0) entry = load(gap += kEntryBytes);
      if (gap == segment.at(segment.places - 1)) {  // the last place stays empty
        widen(segment_of(key));
        continue;
      }
      std::memmove(at + kEntryBytes, at, static_cast<size_t>(gap - at));
      save(at, tag << kIdBits | id);
      ++segment.size;
      ++size_;
      return;
    }
  }

  // The record is in the table under this key.
  void erase(uint64_t key, BlockId id) {
    const uint32_t index = segment_of(key);
    Segment& segment = segments_[index];
    const uint64_t wanted = segment.tag(key) << kIdBits | id;
    uint32_t place = segment.home(segment.tag(key));
    while (load(segment.at(place)) != wanted) {
      assert(load(segment.at(place)) != 0 && "what is erased is in the table");
      ++place;
    }
    erase_at(segment, place);
    if (segment.is_sparse()) shrink(index);
  }

  // A record whose key is about the first at or behind this one, going round past the end; kNoBlock when the
  // table is empty.
  BlockId seek(uint64_t key) const {
    if (size_ == 0) return kNoBlock;
    while (true) {
      const Segment& segment = segments_[segment_of(key)];
      for (uint32_t place = segment.size == 0 ? segment.places : segment.home(segment.tag(key));
           place < segment.places; ++place)
        if (const uint64_t entry = load(segment.at(place)); entry != 0) return id_of(entry);
      key = segment.first_key_behind(key);
    }
  }

  // Visits records in key order from `cursor` on, at most about `visits_max` of them. `keep(id)` returns
  // false to have the entry erased, and touches neither this table nor the record's key. Returns the number
  // visited; `cursor` becomes the place to go on from, `done` tells that the end was reached.
  template <class Keep>
  size_t sweep(uint64_t& cursor, bool& done, size_t visits_max, Keep keep) {
    size_t visits = 0;
    done = false;
    while (visits < visits_max) {
      const uint32_t index = segment_of(cursor);
      Segment& segment = segments_[index];
      const uint64_t first_tag = segment.tag(cursor);
      uint32_t place = segment.size == 0 ? segment.places : segment.home(first_tag);
      uint64_t last_tag = UINT64_MAX;
      visits += segment.size == 0 ? 1 : 0;  // empty segments cost something too
      while (place < segment.places) {
        const uint64_t entry = load(segment.at(place));
        const uint64_t tag = entry >> kIdBits;
        if (entry == 0 || tag < first_tag) {
          ++place;
          continue;
        }
        if (visits >= visits_max && tag != last_tag) {  // never stop between equal tags
          cursor = segment.first_key(cursor, tag);
          if (segment.is_sparse()) shrink(index);
          return visits;
        }
        last_tag = tag;
        ++visits;
        if (keep(id_of(entry)))
          ++place;
        else
          erase_at(segment, place);  // the next entry, if any, has moved here or lies behind
      }
      const uint64_t next = segment.first_key_behind(cursor);
      if (segment.is_sparse()) shrink(index);
      cursor = next;
      if (next == 0) {
        done = true;
        return visits;
      }
    }
    return visits;
  }

  // Gives back the memory of at most `segments_max` segments after `drop(id)` for each of their entries.
  // Returns true when nothing is left. For a table that is not used any more.
  template <class Drop>
  bool dismantle(size_t segments_max, Drop drop) {
    while (segments_max-- > 0 && !segments_.empty()) {
      Segment& segment = segments_.back();
      for (uint32_t place = 0; place < segment.places; ++place)
        if (const uint64_t entry = load(segment.at(place)); entry != 0) drop(id_of(entry));
      size_ -= segment.size;
      page_bytes_ -= segment.memory.bytes();
      segments_.pop_back();
    }
    return segments_.empty();
  }

 private:
  static constexpr unsigned kIdBits = 28;
  static constexpr unsigned kTagBits = 20;
  static constexpr size_t kEntryBytes = 6;
  static constexpr uint32_t kSegmentPagesMax = 8;
  static_assert(BlockPool::kIdsMax <= BlockId{1} << kIdBits);

  struct Segment {
    Pages memory;
    uint32_t range = 0;     // homes are 0..range-1
    uint32_t places = 0;    // places - range take what overflows at the end, the last stays empty
    uint32_t fill_max = 0;  // entries: a load of 0.82
    uint32_t size = 0;
    uint32_t depth = 0;  // leading key bits that all entries share

    uint8_t* at(uint32_t place) const { return static_cast<uint8_t*>(memory.base()) + place * kEntryBytes; }
    uint64_t tag(uint64_t key) const { return (key << depth) >> (64 - kTagBits); }
    uint32_t home(uint64_t tag) const { return static_cast<uint32_t>((tag * range) >> kTagBits); }
    bool is_sparse() const { return memory.pages() > 1 && size < places / 3; }
    // The smallest key with this tag; `key` is any of the segment.
    uint64_t first_key(uint64_t key, uint64_t tag) const {
      const uint64_t shared = depth == 0 ? 0 : (key >> (64 - depth)) << (64 - depth);
      return shared | (tag << (64 - kTagBits)) >> depth;
    }
    // The smallest key of the next segment in key order, 0 behind the last one.
    uint64_t first_key_behind(uint64_t key) const {
      if (depth == 0) return 0;
      return ((key >> (64 - depth)) + 1) << (64 - depth);
    }
  };

  static BlockId id_of(uint64_t entry) {
    return static_cast<BlockId>(entry & ((uint64_t{1} << kIdBits) - 1));
  }
  // Reads two bytes of the neighbour too: a segment ends with as many to spare.
  static uint64_t load(const uint8_t* at) {
    uint64_t entry;
    std::memcpy(&entry, at, sizeof(entry));
    return entry & 0xFFFF'FFFF'FFFF;
  }
  static void save(uint8_t* at, uint64_t entry) { std::memcpy(at, &entry, kEntryBytes); }

  uint32_t segment_of(uint64_t key) const {
    return directory_[directory_bits_ == 0 ? 0 : key >> (64 - directory_bits_)];
  }

  static size_t pages_for(size_t entries) {  // at a load of about 0.75
    return ((entries * 4 / 3 + 32) * kEntryBytes + Pages::kPageBytes - 1) / Pages::kPageBytes;
  }

  void erase_at(Segment& segment, uint32_t place) {
    uint32_t end = place + 1;
    while (true) {
      const uint64_t entry = load(segment.at(end));
      if (entry == 0 || segment.home(entry >> kIdBits) >= end) break;
      ++end;
    }
    std::memmove(segment.at(place), segment.at(place + 1), (end - place - 1) * kEntryBytes);
    save(segment.at(end - 1), 0);
    --segment.size;
    --size_;
  }

  void make_room(uint32_t index) {
    Segment& segment = segments_[index];
    const size_t pages = segment.memory.pages();
    // Skewed keys would deepen the directory without end: past this depth a segment grows instead.
    const uint32_t depth_max = static_cast<uint32_t>(std::bit_width(segments_.size())) + 3;
    if (pages >= kSegmentPagesMax && segment.depth < depth_max) return split(index);
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(), pages + std::max<size_t>(1, pages / 8));
  }

  void widen(uint32_t index) {
    Segment& segment = segments_[index];
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(), segment.memory.pages() + 1);
  }

  void shrink(uint32_t index) {
    Segment& segment = segments_[index];
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(), pages_for(segment.size));
  }

  void split(uint32_t index) {
    if (segments_[index].depth == directory_bits_) {
      std::vector<uint32_t> doubled(directory_.size() * 2);
      for (size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
      directory_ = std::move(doubled);
      ++directory_bits_;
    }
    const uint32_t fresh = static_cast<uint32_t>(segments_.size());
    segments_.emplace_back();
    Segment& lower = segments_[index];
    Segment& upper = segments_[fresh];
    lift(lower);
    const uint64_t bit = uint64_t{1} << (kIdBits + kTagBits - 1);
    const auto middle = std::partition_point(lifted_.begin(), lifted_.end(),
                                             [bit](uint64_t entry) { return (entry & bit) == 0; });
    const uint64_t any_key = key_of_(id_of(lifted_.front()));
    upper.depth = ++lower.depth;
    retag(lower);
    const size_t low_count = static_cast<size_t>(middle - lifted_.begin());
    const size_t high_count = lifted_.size() - low_count;
    lay_out(upper, lifted_.data() + low_count, high_count, pages_for(high_count));
    lay_out(lower, lifted_.data(), low_count, pages_for(low_count));
    // The directory cells of the old segment are one run; its upper half now names the new one.
    const size_t run = size_t{1} << (directory_bits_ - lower.depth + 1);
    const size_t first = (any_key >> (64 - directory_bits_)) & ~(run - 1);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(first + run / 2), run / 2, fresh);
  }

  // Gives the lifted entries the tags of a segment that is one bit deeper, and puts those in order that
  // shared one.
  void retag(const Segment& segment) {
    constexpr size_t kAhead = 16;
    std::vector<uint64_t>& lifted = lifted_;
    for (size_t i = 0; i < lifted.size(); ++i) {
      if (i + kAhead < lifted.size()) key_of_.prefetch(id_of(lifted[i + kAhead]));
      const BlockId id = id_of(lifted[i]);
      // The bit that tells the halves apart stands above the others while they are put in order.
      const uint64_t half = lifted[i] & uint64_t{1} << (kIdBits + kTagBits - 1);
      uint64_t entry = half << 1 | segment.tag(key_of_(id)) << kIdBits | id;
      size_t place = i;
      for (; place > 0 && lifted[place - 1] > entry; --place) lifted[place] = lifted[place - 1];
      lifted[place] = entry;
    }
    for (uint64_t& entry : lifted) entry &= 0xFFFF'FFFF'FFFF;
  }

  // Copies a segment's entries, in order, to lifted_.
  void lift(const Segment& segment) {
    lifted_.resize(segment.places);
    uint64_t* to = lifted_.data();
    for (uint32_t place = 0; place < segment.places; ++place) {
      *to = load(segment.at(place));
      to += *to != 0 ? 1 : 0;
    }
    lifted_.resize(segment.size);
  }

  // Gives the segment `pages` pages, or more where the keys cluster at its end, and spreads the entries over
  // them.
  void lay_out(Segment& segment, const uint64_t* entries, size_t count, size_t pages) {
    uint32_t tail = 0;
    while (true) {
      const uint32_t places =
          static_cast<uint32_t>((pages * Pages::kPageBytes - (sizeof(uint64_t) - kEntryBytes)) / kEntryBytes);
      const uint32_t slack = 16 + places / 64 + tail;
      if (slack < places) {
        segment.range = places - slack;
        uint32_t end = 0;
        for (size_t i = 0; i < count; ++i) end = std::max(segment.home(entries[i] >> kIdBits), end) + 1;
        if (end < places) {
          segment.places = places;
          break;
        }
        tail += end - places + 32;
      }
      pages += 1 + tail * kEntryBytes / Pages::kPageBytes;
    }
    page_bytes_ -= segment.memory.bytes();
    segment.memory.resize(pages);
    page_bytes_ += segment.memory.bytes();
    std::memset(segment.memory.base(), 0, segment.memory.bytes());
    uint32_t place = 0;
    for (size_t i = 0; i < count; ++i) {
      place = std::max(segment.home(entries[i] >> kIdBits), place);
      save(segment.at(place++), entries[i]);
    }
    segment.size = static_cast<uint32_t>(count);
    segment.fill_max = static_cast<uint32_t>(uint64_t{segment.places} * 105 / 128);
  }

  KeyOf key_of_;
  std::vector<uint32_t> directory_;  // leading key bits -> index in segments_
  uint32_t directory_bits_ = 0;
  std::vector<Segment> segments_;
  size_t size_ = 0;
  size_t page_bytes_ = 0;
  static inline thread_local std::vector<uint64_t> lifted_;
};

// The two keys that a record is found by.
struct PrefixOf {
  const BlockPool* pool;
  uint64_t operator()(BlockId id) const { return (*pool)[id].prefix; }
  void prefetch(BlockId id) const { pool->prefetch(id); }
};
struct NameOf {
  const BlockPool* pool;
  uint64_t operator()(BlockId id) const { return (*pool)[id].name; }
  void prefetch(BlockId id) const { pool->prefetch(id); }
};

}  // namespace kvindexer
