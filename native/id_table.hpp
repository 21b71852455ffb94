// A hash table from 64-bit keys to numbers of records, which know their own keys. It grows, shrinks and is
// swept in small slices.
//
// Shape. A directory over the leading bits names segments (extendible hashing: Fagin, Nievergelt, Pippenger
// and Strong 1979), and in a segment the entries lie in key order with gaps, each at or after the place that
// its key is proportional to (ordered linear probing: Amble and Knuth 1974). An entry is 6 bytes: the number
// (28 bits) and 20 bits of its key, which give its place in the segment and tell nearly all other keys from
// it: one in some dozens looks at a record for nothing. Only a split needs more of the keys, one new bit of
// each, and reads them once in five splits.
//
// A full segment (32 KiB, 5,400 places) splits in two. Were all equally likely, all would fill and split at
// one time, and the load of the table would swing between 0.86 and 0.43. So keys are bent first (`bend`):
// along the directory their density falls to a half, smoothly, as in spiral storage (Martin 1979). Then at
// any moment some segments split and others have just done so, the load of the whole stays about 0.62 at any
// size, or 9.7 bytes an entry, and an entry is moved once in a doubling. Tried before: segments that grow by
// one 4 KiB page at a time, up to 32 KiB. They need 8.2 bytes an entry, but an entry is moved five times in a
// doubling.
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
    const uint64_t spot = bend(key);
    const Segment& segment = segments_[segment_of(spot)];
    const uint8_t* at = segment.at(segment.home(segment.tag(spot)));
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
    const uint64_t spot = bend(key);
    const Segment& segment = segments_[segment_of(spot)];
    if (segment.size == 0) return kNoBlock;
    const uint64_t tag = segment.tag(spot);
    const uint8_t* at = segment.at(segment.home(tag));
    uint64_t entry = load(at);
    while (entry != 0 && entry >> kIdBits < tag) entry = load(at += kEntryBytes);
    return entry != 0 && entry >> kIdBits == tag ? id_of(entry) : kNoBlock;
  }

  // All records with this key, until `visit(id)` says that it has had enough. It must not change the table.
  template <class Visit>
  void each(uint64_t key, Visit visit) const {
    const uint64_t spot = bend(key);
    const Segment& segment = segments_[segment_of(spot)];
    if (segment.size == 0) return;
    const uint64_t tag = segment.tag(spot);
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
    const uint64_t spot = bend(key);
    while (true) {
      const uint32_t index = segment_of(spot);
      Segment& segment = segments_[index];
      if (segment.size >= segment.fill_max) {
        make_room(index);
        continue;
      }
      const uint64_t tag = segment.tag(spot);
      uint8_t* at = segment.at(segment.home(tag));
      uint64_t entry = load(at);
      while (entry != 0 && entry >> kIdBits <= tag) entry = load(at += kEntryBytes);
      uint8_t* gap = at;
      while (entry != 0) entry = load(gap += kEntryBytes);
      if (gap == segment.at(segment.places - 1)) {  // the last place stays empty
        widen(index);
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
    const uint64_t spot = bend(key);
    const uint32_t index = segment_of(spot);
    Segment& segment = segments_[index];
    const uint64_t wanted = segment.tag(spot) << kIdBits | id;
    uint32_t place = segment.home(segment.tag(spot));
    while (load(segment.at(place)) != wanted) {
      assert(load(segment.at(place)) != 0 && "what is erased is in the table");
      ++place;
    }
    erase_at(segment, place);
    if (segment.is_sparse()) shrink(index);
  }

  // Some record, chosen by a random number; kNoBlock when the table is empty.
  BlockId some(uint64_t random) const {
    if (size_ == 0) return kNoBlock;
    for (uint64_t spot = random;;) {
      const Segment& segment = segments_[segment_of(spot)];
      for (uint32_t place = segment.size == 0 ? segment.places : segment.home(segment.tag(spot));
           place < segment.places; ++place)
        if (const uint64_t entry = load(segment.at(place)); entry != 0) return id_of(entry);
      spot = segment.first_spot_behind(spot);
    }
  }

  // Visits records in the order of the table from `cursor` on, at most about `visits_max` of them. `keep(id)`
  // returns false to have the entry erased, and touches neither this table nor the record's key. Returns the
  // number visited; `cursor` becomes the place to go on from, `done` tells that the end was reached.
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
          cursor = segment.first_spot(cursor, tag);
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
      const uint64_t next = segment.first_spot_behind(cursor);
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
  static constexpr size_t kSegmentPages = 8;  // of one that is full-grown
  static constexpr uint32_t kBentDepth = 4;   // shallower segments are not evenly dense
  static constexpr uint32_t kStaleBitsMax = 4;
  static_assert(BlockPool::kIdsMax <= BlockId{1} << kIdBits);

  struct Segment {
    Pages memory;
    uint32_t range = 0;     // homes are 0..range-1
    uint32_t places = 0;    // places - range take what overflows at the end, the last stays empty
    uint32_t fill_max = 0;  // entries
    uint32_t size = 0;
    uint32_t depth = 0;     // leading bits that all spots share
    uint32_t tag_from = 0;  // tags are the bits from here on; at most kStaleBitsMax fewer than `depth`

    uint8_t* at(uint32_t place) const { return static_cast<uint8_t*>(memory.base()) + place * kEntryBytes; }
    uint64_t tag(uint64_t spot) const { return (spot << tag_from) >> (64 - kTagBits); }
    uint32_t home(uint64_t tag) const {
      const uint64_t own = tag << (depth - tag_from) & ((uint64_t{1} << kTagBits) - 1);
      return static_cast<uint32_t>((own * range) >> kTagBits);
    }
    bool is_sparse() const { return memory.pages() > 1 && size < places / 5; }
    // The smallest spot with this tag; `spot` is any of the segment.
    uint64_t first_spot(uint64_t spot, uint64_t tag) const {
      const uint64_t shared = tag_from == 0 ? 0 : (spot >> (64 - tag_from)) << (64 - tag_from);
      return shared | (tag << (64 - kTagBits)) >> tag_from;
    }
    // The smallest spot of the next segment, 0 behind the last one.
    uint64_t first_spot_behind(uint64_t spot) const {
      if (depth == 0) return 0;
      return ((spot >> (64 - depth)) + 1) << (64 - depth);
    }
  };

  // Keys to spots, in order: log2(1 + key / 2^64) in sixteen straight pieces. Where the pieces begin, and
  // their slopes as 2.62 fixed point.
  static uint64_t bend(uint64_t key) {
    static constexpr uint64_t kFrom[17] = {
        0x0000000000000000, 0x0B5586CF9890F629, 0x172B83C7D517ADCD, 0x2387A6E75623866C, 0x306FE0A31B7152DE,
        0x3DEA64C12342235B, 0x4BFDAD5362A271D4, 0x5AB07DD48542958C, 0x6A09E667F3BCC908, 0x7A11473EB0186D7D,
        0x8ACE5422AA0DB5BA, 0x9C49182A3F0901C7, 0xAE89F995AD3AD5E8, 0xC199BDD85529C222, 0xD5818DCFBA48725D,
        0xEA4AFA2A490D9858, UINT64_MAX};
    static constexpr uint64_t kSlope[16] = {
        0x5A58CFED99F42CE7, 0x568439F9456211B5, 0x52D936DDA5ED80C8, 0x4F560361F5432D4C,
        0x4BF8EF6EC9E8B79B, 0x48C05D3E756AA599, 0x45AAC09630168A30, 0x42B69E07B2B65954,
        0x3FE28A3AE2CEDFC0, 0x3D2D293F39C45A97, 0x3A952DE492FF15B3, 0x3819591B10B8916B,
        0x35B87959CA81AEC5, 0x33716A0BFBD567BA, 0x314313046C2B385E, 0x2F2C67F6CCFA166F};
    static constexpr uint8_t kFirst[32] = {0, 0, 1,  2,  2,  3,  3,  4,  5,  5,  6,  6,  7,  7,  8,  8,
                                           9, 9, 10, 10, 11, 11, 12, 12, 12, 13, 13, 14, 14, 14, 15, 15};
    unsigned piece = kFirst[key >> 59];
    piece += key >= kFrom[piece + 1] && piece < 15 ? 1 : 0;
    const auto along = static_cast<unsigned __int128>(key - kFrom[piece]) * kSlope[piece];
    return (uint64_t{piece} << 60) + static_cast<uint64_t>(along >> 62);
  }

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

  uint32_t segment_of(uint64_t spot) const {
    return directory_[directory_bits_ == 0 ? 0 : spot >> (64 - directory_bits_)];
  }

  static size_t pages_for(size_t entries) {  // a power of two, at a load of 0.5 or less
    return std::bit_ceil((entries * 2 * kEntryBytes + Pages::kPageBytes) / Pages::kPageBytes);
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
    if (pages >= kSegmentPages && segment.depth < depth_max) return split(index);
    lift(segment);
    lay_out(segment, lifted_.data(), lifted_.size(), std::max<size_t>(1, pages * 2));
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
    const uint64_t bit = uint64_t{1} << (kIdBits + kTagBits - 1 - (lower.depth - lower.tag_from));
    const auto middle = std::partition_point(lifted_.begin(), lifted_.end(),
                                             [bit](uint64_t entry) { return (entry & bit) == 0; });
    const size_t low_count = static_cast<size_t>(middle - lifted_.begin());
    const size_t high_count = lifted_.size() - low_count;
    const uint64_t any_spot = bend(key_of_(id_of(lifted_.front())));
    upper.depth = ++lower.depth;
    if (lower.depth - lower.tag_from > kStaleBitsMax) {
      lower.tag_from = lower.depth;
      retag(lower, 0, low_count);
      retag(lower, low_count, lifted_.size());
    }
    upper.tag_from = lower.tag_from;
    lay_out(upper, lifted_.data() + low_count, high_count, kSegmentPages);
    lay_out(lower, lifted_.data(), low_count, kSegmentPages);
    // The directory cells of the old segment are one run; its upper half now names the new one.
    const size_t run = size_t{1} << (directory_bits_ - lower.depth + 1);
    const size_t first = (any_spot >> (64 - directory_bits_)) & ~(run - 1);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(first + run / 2), run / 2, fresh);
  }

  // Gives lifted entries the tags that the segment now wants, and puts those in order that shared one.
  void retag(const Segment& segment, size_t begin, size_t end) {
    constexpr size_t kAhead = 16;
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) key_of_.prefetch(id_of(lifted_[i + kAhead]));
      const BlockId id = id_of(lifted_[i]);
      const uint64_t entry = segment.tag(bend(key_of_(id))) << kIdBits | id;
      size_t place = i;
      for (; place > begin && lifted_[place - 1] > entry; --place) lifted_[place] = lifted_[place - 1];
      lifted_[place] = entry;
    }
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
    segment.fill_max = segment.places * (segment.depth < kBentDepth ? 77 : 110) / 128;
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
