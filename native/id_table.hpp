// A hash table from 64-bit keys to numbers of records, which know their own keys. It grows and shrinks in
// small slices.
//
// Shape. A directory over the leading bits names segments (extendible hashing: Fagin, Nievergelt, Pippenger
// and Strong 1979). A segment is a run of buckets, each a cache line with eleven entries: a record's number
// and a tag, 16 bits of its key. So nearly every probe is one cache line and one comparison of eleven tags at
// once; an entry that found its bucket full lies in one behind it, and the full one counts how many went by
// (as F14 does: Bronson and Shi 2019).
//
// Groups. Buckets stand in groups of three or four. Of a key, the bits behind the segment's depth are the
// number of the group, and the eight behind those tell which of its buckets. The tag has these eight, so a
// bucket and a tag tell as much of a key as moving its entry to another layout takes, and the record is not
// looked at. Each layout in twice as many groups puts one more bit of the tag behind the group's end; past
// kStaleBitsMax such bits, which tell entries of one bucket apart no more, the keys are read again.
//
// Growth. A full segment (16 pages) splits in two of 12 pages, each of which grows to 16 and splits: groups
// of four become two of three, and groups of three groups of four, always in order, so that a bucket's
// entries go to two neighbours (bucket_deal.hpp). Were all segments equally likely, all would fill at one
// time. So keys are bent first (`bend`): along the directory their density falls to a half, smoothly, as in
// spiral storage (Martin 1979). Then at any moment some segments split and others have just done so, and the
// load of the whole stays about the same at any size: from 100,000 entries on 0.75 where segments are dense,
// 7.5 to 8.0 bytes an entry, 7.7 in the mean, and 0.57 where they are loose, 9.8 to 10.6 bytes, 10.2. An
// entry is moved about twice in a doubling.
//
// Loose or dense. Of 256 new blocks that come together 256 go into the table of names and one into that of
// prefixes. With names at 88 of 128 places in place of 116, so that few find their bucket full, they take 17
// us in an index of 1M in place of 21, and their removal 12 in place of 14, for 2.5 bytes a block. (At 96
// places 1 us more, 9.4 bytes an entry; at 104 3 us more, 8.6.)
//
// Tried, with the CPU time of storing 256 new blocks, two insertions each (one by now), in an index of 1M:
// entries of 6 bytes in key order with gaps (ordered linear probing), in segments that grow by a page at a
// time, 8.2 bytes an entry: 85 us; the same in segments that split (bent keys), 9.7 bytes: 65 us; these
// buckets: 53 us, of which a quarter is waiting for page walks. Huge pages take 12 % off, but each costs 2 ms
// when it is touched first. Splits of 8 pages into two times 8, entry by entry: 8.4 to 9.2 bytes an entry;
// the same time on average, but 6 % less in the median in 1M blocks and 17 % in 10M, where fewer entries find
// their bucket full, and 1.4 ms at most in place of 0.5. Segments of 8 pages that split into 6: more system
// calls, 3 us more. Fuller ones (120 of 128 places in place of 116): 7.5 bytes, and 3 ns more an insertion,
// for entries that find their bucket full.
//
// Keys must be uniform in their leading bits. Skewed keys stay correct and cost linear time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "block_pool.hpp"
#include "bucket_deal.hpp"
#include "pages.hpp"

namespace kvindexer {

// How full a segment gets before it has to grow, in 128ths of its places: small, or quick (see above).
inline constexpr uint32_t kFillDense = 116;
inline constexpr uint32_t kFillLoose = 88;

// KeyOf: `uint64_t operator()(BlockId) const` and `void prefetch(BlockId) const`. `kDealNarrow` is for tests:
// grow as on a machine without wide registers.
template <class KeyOf, uint32_t kFillMax = kFillDense, bool kDealNarrow = false>
class IdTable {
 public:
  explicit IdTable(KeyOf key_of) : key_of_(key_of), directory_(1, 0), segments_(1) {}

  size_t size() const { return size_; }
  size_t bytes() const {
    return page_bytes_ + directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  }

  // Where the entries of a key lie, whatever the shape of the table: whoever asks more than once for a key
  // finds it out once.
  enum class Spot : uint64_t {};
  static Spot spot_of(uint64_t key) { return Spot{bend(key)}; }

  void prefetch(uint64_t key) const { prefetch(spot_of(key)); }
  void prefetch(Spot spot) const { prefetch(home_of(spot)); }

  // The number of a record with this key, kNoBlock when there is none.
  BlockId find(uint64_t key) const { return find(key, spot_of(key)); }
  BlockId find(uint64_t key, Spot spot) const {
    BlockId found = kNoBlock;
    each_likely(bits(spot), [&](BlockId id) {
      if (key_of_(id) != key) return false;
      found = id;
      return true;
    });
    return found;
  }

  // What is known of a key that is probably new: the record that has it or, when there is none, where its
  // entry goes. Means something until the table changes.
  class Probe;
  Probe probe(uint64_t key, Spot spot) {
    Segment& segment = segments_[segment_of(bits(spot))];
    if (segment.size < segment.fill_max) [[likely]] {
      Bucket& home = segment.buckets()[segment.home(bits(spot))];
      const uint16_t tag = segment.tag(bits(spot));
      if (home.passed == 0 && home.count < kEntries && home.matches(tag) == 0)
        return {kNoBlock, spot, tag, &segment, &home};
    }
    return {find(key, spot), spot};
  }

  // The number of a record that probably has this key, without a look at it; kNoBlock when there is none.
  BlockId likely(uint64_t key) const {
    BlockId found = kNoBlock;
    each_likely(bend(key), [&](BlockId id) {
      found = id;
      return true;
    });
    return found;
  }

  // All records with this key, until `visit(id)` says that it has had enough. It must not change the table.
  template <class Visit>
  void each(uint64_t key, Visit visit) const {
    each_likely(bend(key), [&](BlockId id) { return key_of_(id) == key && visit(id); });
  }

  // An empty table gets its directory for about so many entries now, and each segment the memory of a half
  // with its first entry: for whoever knows what is coming. The densest segments will split once, as they
  // would have: made to hold them, the others would stay too empty.
  void reserve(size_t entries) {
    if (size_ != 0 || directory_bits_ != 0) return;
    constexpr unsigned kBitsMax = 16;
    const size_t full = fill_max(buckets_in(kSegmentPages), kBentDepth);
    unsigned bits = 0;
    while (bits < kBitsMax && (entries >> bits) > full * 23 / 16) ++bits;
    if (bits == 0) return;
    directory_.resize(size_t{1} << bits);
    segments_.resize(size_t{1} << bits);  // from here on nothing fails
    directory_bits_ = bits;
    first_pages_ = kHalfPages;
    for (uint32_t index = 0; index < segments_.size(); ++index) {
      directory_[index] = index;
      segments_[index].depth = static_cast<uint8_t>(directory_bits_);
      segments_[index].first_spot = uint64_t{index} << (64 - directory_bits_);
    }
  }

  // `key` is that of the record; the record is not in the table yet.
  void insert(uint64_t key, BlockId id) { insert(spot_of(key), id); }
  void insert(Spot spot, BlockId id) {
    uint32_t index = segment_of(bits(spot));
    while (segments_[index].size >= segments_[index].fill_max) [[unlikely]] {
      make_room(index);
      index = segment_of(bits(spot));
    }
    put(segments_[index], bits(spot), id);
    ++size_;
  }

  void insert(const Probe& probe, BlockId id) {
    if (probe.room_ == nullptr) return insert(probe.spot_, id);
    probe.room_->add(probe.tag_, id, false);
    ++probe.segment_->size;
    ++size_;
  }

  // The record is in the table under this key, or has never come to be there for want of memory.
  void erase(uint64_t key, BlockId id) { erase(spot_of(key), id); }
  void erase(Spot of_key, BlockId id) {
    const uint64_t spot = bits(of_key);
    const uint32_t index = segment_of(spot);
    Segment& segment = segments_[index];
    if (segment.size == 0) return;
    const uint16_t tag = segment.tag(spot);
    Bucket* const buckets = segment.buckets();
    const uint32_t home = segment.home(spot);
    uint32_t at = home;
    uint32_t place = buckets[at].place_of(tag, id);
    for (uint32_t seen = 1; place == kEntries; ++seen) {
      if (buckets[at].passed == 0 || seen == segment.count) return;
      at = segment.next(at);
      place = buckets[at].place_of(tag, id);
    }
    for (uint32_t full = home; full != at; full = segment.next(full))
      if (buckets[full].passed != kPassedMax) --buckets[full].passed;
    buckets[at].remove(place);
    --segment.size;
    --size_;
    if (segment.is_sparse()) shrink(index);
  }

  // Every record, in no order; `visit(id)` must not change the table.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const Segment& segment : segments_) for_each_in(segment, visit);
  }

  // Some record, chosen by a random number; kNoBlock when the table is empty.
  BlockId some(uint64_t random) const {
    if (size_ == 0) return kNoBlock;
    for (uint64_t spot = random;;) {
      const Segment& segment = segments_[segment_of(spot)];
      if (segment.size != 0)
        for (uint32_t at = segment.home(spot); at < segment.count; ++at)
          if (const Bucket& bucket = segment.buckets()[at]; bucket.count != 0)
            return bucket.id(static_cast<uint32_t>(random % bucket.count));
      spot = segment.depth == 0 ? 0 : segment.first_spot + (uint64_t{1} << (64 - segment.depth));
    }
  }

  // Gives back the memory of at most `segments_max` segments. Returns true when nothing is left. For a table
  // that is not used any more.
  bool dismantle(size_t segments_max) {
    while (segments_max-- > 0 && !segments_.empty()) {
      size_ -= segments_.back().size;
      page_bytes_ -= segments_.back().memory.bytes();
      segments_.pop_back();
    }
    return segments_.empty();
  }

 private:
  static constexpr uint32_t kEntries = 11;  // of a bucket
  static constexpr BlockId kIdMask = (BlockId{1} << 28) - 1;
  static constexpr uint32_t kAwayMask = (1u << kEntries) - 1;
  static_assert(BlockPool::kIdsMax <= kIdMask);
  static constexpr unsigned kTagBits = 16;
  static constexpr uint8_t kPassedMax = 255;    // so many or more: it is not counted down any more
  static constexpr size_t kSegmentPages = 16;   // of one that is full-grown
  static constexpr size_t kHalfPages = 12;      // of one that was split off
  static constexpr uint32_t kFillMaxBent = 77;  // of a segment that is not evenly dense
  static constexpr uint32_t kBentDepth = 3;     // shallower segments are not evenly dense
  static constexpr unsigned kPlaceBits = 8;     // of a spot say where in its group it is
  static constexpr uint32_t kStaleBitsMax = 7;
  static_assert(kStaleBitsMax + kPlaceBits <= kTagBits);
  static constexpr uint32_t kNoHome = UINT32_MAX;
  static constexpr uint64_t kUnknown = UINT64_MAX;  // a spot that is read from the key, were it this one too

  struct alignas(64) Bucket {
    static constexpr uint32_t kPlaces = kEntries;
    uint16_t tags[kEntries];
    uint16_t count : 4;
    uint16_t away : kEntries;  // bit per entry: this is not its own bucket
    uint8_t passed;          // entries of this bucket and of those before it that went on because it was full
    uint8_t packed_ids[39];  // 28 bits each

    BlockId id(uint32_t place) const { return read(place) >> (place & 1) * 4 & kIdMask; }
    // Bit per entry with this tag.
    uint32_t matches(uint16_t tag) const {
      const uint32_t used = (1u << count) - 1;
#ifdef __SSE2__
      const __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
      const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(this));
      const __m128i second = _mm_load_si128(reinterpret_cast<const __m128i*>(this) + 1);
      const __m128i equal = _mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_cmpeq_epi16(second, wanted));
      return static_cast<uint32_t>(_mm_movemask_epi8(equal)) & used;
#else
      uint32_t found = 0;
      for (uint32_t place = 0; place < kEntries; ++place) found |= (tags[place] == tag ? 1u : 0u) << place;
      return found & used;
#endif
    }
    uint32_t place_of(uint16_t tag, BlockId wanted) const {
      for (uint32_t found = matches(tag); found != 0; found &= found - 1)
        if (const auto place = static_cast<uint32_t>(std::countr_zero(found)); id(place) == wanted)
          return place;
      return kEntries;
    }
    // Places behind the last entry have no bits of a number.
    void add(uint16_t tag, BlockId id, bool is_away) {
      tags[count] = tag;
      write(count, read(count) | id << (count & 1) * 4);
      away = static_cast<uint16_t>(away | (is_away ? 1u : 0u) << count) & kAwayMask;
      ++count;
    }
    void remove(uint32_t place) {
      const uint32_t last = --count;
      const BlockId moved = id(last);
      tags[place] = tags[last];
      write(place, (read(place) & ~(kIdMask << (place & 1) * 4)) | moved << (place & 1) * 4);
      write(last, read(last) & ~(kIdMask << (last & 1) * 4));
      const uint32_t bit = away >> last & 1;
      away = static_cast<uint16_t>((away & ~(1u << place)) | bit << place) & ((1u << last) - 1);
    }

    // All numbers at once; what stands behind the last means nothing.
    void unpack(BlockId* ids) const {
      for (uint32_t pair = 0; pair < kEntries / 2; ++pair) {
        uint64_t bits;
        std::memcpy(&bits, packed_ids + pair * 7, sizeof(bits));
        ids[2 * pair] = static_cast<BlockId>(bits) & kIdMask;
        ids[2 * pair + 1] = static_cast<BlockId>(bits >> 28) & kIdMask;
      }
      std::memcpy(&ids[kEntries - 1], packed_ids + kEntries / 2 * 7, sizeof(BlockId));
      ids[kEntries - 1] &= kIdMask;
    }
    // Nothing but these entries, which are its own; behind them there are zeros.
    void fill(uint32_t entries, const uint16_t* from_tags, const BlockId* ids) {
      std::memcpy(tags, from_tags, sizeof(tags));
      count = entries & 15;
      away = 0;
      passed = 0;
      for (uint32_t pair = 0; pair < kEntries / 2; ++pair) {
        const uint64_t bits = ids[2 * pair] | uint64_t{ids[2 * pair + 1]} << 28;
        std::memcpy(packed_ids + pair * 7, &bits, sizeof(bits));
      }
      std::memcpy(packed_ids + kEntries / 2 * 7, &ids[kEntries - 1], sizeof(BlockId));
    }

   private:
    uint32_t read(uint32_t place) const {  // with four bits of a neighbour
      uint32_t bits;
      std::memcpy(&bits, packed_ids + place * 7 / 2, sizeof(bits));
      return bits;
    }
    void write(uint32_t place, uint32_t bits) {
      std::memcpy(packed_ids + place * 7 / 2, &bits, sizeof(bits));
    }
  };
  static_assert(sizeof(Bucket) == 64);

  struct Segment {
    Pages memory;
    uint64_t first_spot = 0;  // its leading bits are those that all spots share
    uint32_t count = 0;       // buckets: 2^group_bits groups of three or four
    uint32_t fill_max = 0;    // entries
    uint32_t size = 0;
    uint8_t depth = 0;          // so many
    uint8_t home_shift = 0;     // 64 - kPlaceBits - group_bits: see home
    uint8_t group_buckets = 0;  // 3 or 4
    uint8_t tag_from = 0;       // tags are the bits from here on; at most kStaleBitsMax lie before group_end

    Bucket* buckets() const { return static_cast<Bucket*>(memory.base()); }
    // The bits behind the depth are the number of the group, those behind them say where in it.
    uint32_t home(uint64_t spot) const {
      return static_cast<uint32_t>((spot << depth) >> home_shift) * group_buckets >> kPlaceBits;
    }
    uint16_t tag(uint64_t spot) const { return static_cast<uint16_t>((spot << tag_from) >> (64 - kTagBits)); }
    uint32_t next(uint32_t at) const { return at + 1 == count ? 0 : at + 1; }
    unsigned group_end() const { return depth + 64 - kPlaceBits - home_shift; }
    // Of an entry that lies in its own bucket, as far as group and tag tell.
    uint64_t spot(uint32_t at, uint16_t tag) const {
      return first_spot | uint64_t{at / group_buckets} << (64 - group_end()) |
             (uint64_t{tag} << (64 - kTagBits)) >> tag_from;
    }
    // The bucket of an entry that lies in `at` because it was full, as were more behind it: `passed` in front
    // of `at` can be it. The tag tells the end of the group's number, and the place in the group; kNoHome
    // where that leaves several.
    uint32_t only_home(uint32_t at, uint16_t tag, uint32_t passed) const {
      const unsigned stale_bits = group_end() - tag_from;
      const uint32_t repeats = uint32_t{group_buckets} << stale_bits;
      const uint32_t end = uint32_t{tag} >> (kTagBits - kPlaceBits - stale_bits);
      const uint32_t away = at + repeats - 1 - (end * group_buckets >> kPlaceBits);
      const uint32_t back = 1 + (group_buckets == 4 ? away & (repeats - 1)
                                                    : (away >> stale_bits) % 3 << stale_bits |
                                                          (away & ((1u << stale_bits) - 1)));
      return back <= at && passed < back + repeats ? at - back : kNoHome;
    }
    size_t pages() const { return count * sizeof(Bucket) / Pages::kPageBytes; }
    bool is_sparse() const { return pages() > 1 && size < count; }
  };

 public:
  class Probe {
   public:
    BlockId found() const { return found_; }

   private:
    friend IdTable;
    Probe(BlockId found, Spot spot, uint16_t tag = 0, Segment* segment = nullptr, Bucket* room = nullptr)
        : found_(found), spot_(spot), tag_(tag), segment_(segment), room_(room) {}
    BlockId found_;
    Spot spot_;
    uint16_t tag_;
    Segment* segment_;
    Bucket* room_;  // null: it has to be looked for
  };

 private:
  using Deal = BucketDeal<Bucket, kDealNarrow>;
  struct Lifted {
    uint64_t spot;  // as far as it is known
    BlockId id;
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

  static uint64_t bits(Spot spot) { return static_cast<uint64_t>(spot); }

  uint32_t segment_of(uint64_t spot) const {
    return directory_[directory_bits_ == 0 ? 0 : spot >> (64 - directory_bits_)];
  }

  const Bucket* home_of(Spot spot) const {
    const Segment& segment = segments_[segment_of(bits(spot))];
    return segment.buckets() + segment.home(bits(spot));
  }
  static void prefetch(const Bucket* bucket) {
    // GCC 12 takes a function that only prefetches for one without effect and drops the calls.
    asm volatile("" : : "r"(bucket));
    __builtin_prefetch(bucket);
  }

  template <class Visit>
  void each_likely(uint64_t spot, Visit visit) const {
    const Segment& segment = segments_[segment_of(spot)];
    if (segment.size == 0) return;
    const uint16_t tag = segment.tag(spot);
    const Bucket* const buckets = segment.buckets();
    uint32_t at = segment.home(spot);
    for (uint32_t seen = 0; seen < segment.count; ++seen) {
      const Bucket& bucket = buckets[at];
      for (uint32_t found = bucket.matches(tag); found != 0; found &= found - 1)
        if (visit(bucket.id(static_cast<uint32_t>(std::countr_zero(found))))) return;
      if (bucket.passed == 0) return;
      at = segment.next(at);
    }
  }

  template <class Visit>
  static void for_each_in(const Segment& segment, Visit visit) {
    for (uint32_t at = 0; at < segment.count; ++at) {
      const Bucket& bucket = segment.buckets()[at];
      for (uint32_t place = 0; place < bucket.count; ++place) visit(bucket.id(place));
    }
  }

  // The segment has room.
  static void put(Segment& segment, uint64_t spot, BlockId id) {
    Bucket* const buckets = segment.buckets();
    const uint32_t home = segment.home(spot);
    uint32_t at = home;
    while (buckets[at].count == kEntries) {
      if (buckets[at].passed != kPassedMax) ++buckets[at].passed;
      at = segment.next(at);
    }
    buckets[at].add(segment.tag(spot), id, at != home);
    ++segment.size;
  }

  static size_t pages_for(size_t entries) {  // a power of two, at a load of 0.5 or less
    return std::bit_ceil((entries * 2 / kEntries + 1) * sizeof(Bucket) / Pages::kPageBytes + 1);
  }
  static size_t next_pages(size_t pages) { return pages + std::max<size_t>(1, std::bit_floor(pages) / 2); }

  void make_room(uint32_t index) {
    Segment& segment = segments_[index];
    const size_t pages = segment.pages();
    // Skewed keys would deepen the directory without end: past this depth a segment grows instead.
    const uint32_t depth_max = static_cast<uint32_t>(std::bit_width(segments_.size())) + 3;
    if (pages >= kSegmentPages && segment.depth < depth_max) return split(index);
    if (pages != 0) return grow(segment, next_pages(pages));
    lay_out(segment, zeroed(first_pages_));
    segment.tag_from = static_cast<uint8_t>(segment.group_end());
  }

  // Where there is no memory for a smaller layout, the segment stays as it is.
  void shrink(uint32_t index) noexcept {
    Segment& segment = segments_[index];
    const size_t pages = pages_for(segment.size);
    const unsigned group_end = segment.depth + group_bits_in(pages);
    Pages fresh;
    try {
      lift(segment, group_end > segment.tag_from);  // else tags say all that the new ones will
      fresh = zeroed(pages);
    } catch (const std::bad_alloc&) {
      return;
    }
    segment.tag_from = static_cast<uint8_t>(group_end);
    lay_out(segment, std::move(fresh));
    for (const Lifted& entry : lifted_) put(segment, entry.spot, entry.id);
  }

  // What follows asks for all its memory before it changes anything.

  void grow(Segment& segment, size_t pages) {
    const unsigned group_end = segment.depth + group_bits_in(pages);
    const bool has_stale_tags = is_stale(segment, group_end);
    if (buckets_in(pages) == segment.count * 2 || has_stale_tags) {
      lift(segment, has_stale_tags);
      Pages fresh = zeroed(pages);
      if (has_stale_tags) segment.tag_from = static_cast<uint8_t>(group_end);
      lay_out(segment, std::move(fresh));
      for (const Lifted& entry : lifted_) put(segment, entry.spot, entry.id);
      return;
    }
    lift_away(segment);
    const uint32_t count = segment.count;
    extend(segment, pages);
    shape(segment, pages);
    deal_out(segment.buckets(), count, segment);
    put_lifted(segment, segment);
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
    try {
      if (!split_evenly(lower, upper)) lift_out(lower, upper);
    } catch (...) {
      segments_.pop_back();
      throw;
    }
    // The directory cells of the old segment are one run; its upper half now names the new one.
    const size_t run = size_t{1} << (directory_bits_ - lower.depth);
    const size_t first = upper.first_spot >> (64 - directory_bits_);
    std::fill_n(directory_.begin() + static_cast<ptrdiff_t>(first), run, fresh);
  }

  // Splits bucket by bucket, where tags still say enough of every spot and both halves will hold what they
  // get.
  bool split_evenly(Segment& lower, Segment& upper) {
    if (lower.pages() != kSegmentPages || is_stale(lower, lower.group_end() + 1)) return false;
    lift_away(lower);
    begin_upper(lower, upper);
    size_t low = 0;
    for (uint32_t at = 0; at < lower.count / 2; ++at) {
      const Bucket& bucket = lower.buckets()[at];
      low += bucket.count - static_cast<uint32_t>(std::popcount(uint32_t{bucket.away}));
    }
    for (const Lifted& away : lifted_) low += away.spot < upper.first_spot ? 1 : 0;
    const size_t half_max = fill_max(buckets_in(kHalfPages), upper.depth);
    if (low > half_max || lower.size - low > half_max) return false;
    lay_out(upper, zeroed(kHalfPages));
    const uint32_t half = lower.count / 2;
    lower.depth = upper.depth;
    shape(lower, kHalfPages);
    deal_out(lower.buckets() + half, half, upper);
    deal_out(lower.buckets(), half, lower);
    put_lifted(lower, upper);
    cut(lower, kHalfPages);
    return true;
  }

  // Splits entry by entry, whatever they are.
  void lift_out(Segment& lower, Segment& upper) {
    const size_t pages = lower.pages();
    const unsigned group_end = lower.group_end() + 1;
    const bool has_stale_tags = is_stale(lower, group_end);
    lift(lower, has_stale_tags);
    begin_upper(lower, upper);
    const size_t low =
        static_cast<size_t>(std::count_if(lifted_.begin(), lifted_.end(), [&upper](const Lifted& entry) {
          return entry.spot < upper.first_spot;
        }));
    Pages for_upper = zeroed(pages_after_split(lifted_.size() - low, upper.depth, pages));
    Pages for_lower = zeroed(pages_after_split(low, upper.depth, pages));
    if (has_stale_tags) lower.tag_from = upper.tag_from = static_cast<uint8_t>(group_end);
    lower.depth = upper.depth;
    lay_out(upper, std::move(for_upper));
    lay_out(lower, std::move(for_lower));
    put_lifted(lower, upper);
  }

  static void begin_upper(const Segment& lower, Segment& upper) {
    upper.first_spot = lower.first_spot | uint64_t{1} << (63 - lower.depth);
    upper.depth = static_cast<uint8_t>(lower.depth + 1);
    upper.tag_from = lower.tag_from;
  }

  // Skewed keys may leave one half with all of it.
  static size_t pages_after_split(size_t entries, uint32_t depth, size_t pages_max) {
    size_t pages = kHalfPages;
    while (pages < pages_max && entries >= fill_max(buckets_in(pages), depth)) pages = next_pages(pages);
    return pages;
  }

  void put_lifted(Segment& lower, Segment& upper) {
    for (const Lifted& entry : lifted_)
      put(entry.spot < upper.first_spot ? lower : upper, entry.spot, entry.id);
  }

  // Moves the entries in so many buckets that are their own to `to`, which was laid out anew for them, maybe
  // around them: with half as many more buckets in twice as many groups, or a third more in as many. Those
  // that find them full go to lifted_.
  void deal_out(const Bucket* from, uint32_t count, Segment& to) {
    const unsigned stale_bits = to.group_end() - to.tag_from;
    const auto spare = [&](uint32_t at, uint16_t tag, BlockId id) {
      lifted_.push_back({to.spot(at, tag), id});
    };
    to.size = to.group_buckets == 4
                  ? Deal::template deal<3>(from, count / 3, to.buckets(), stale_bits, spare)
                  : Deal::template deal<2>(from, count / 2, to.buckets(), stale_bits, spare);
  }

  // Whether tags say too little where so many bits lead to the group.
  static bool is_stale(const Segment& segment, unsigned group_end) {
    return group_end > segment.tag_from + kStaleBitsMax;
  }

  // A copy of the segment's entries into lifted_: with whole spots where `read_keys`, else with what is known
  // of them.
  void lift(const Segment& segment, bool read_keys) {
    constexpr size_t kAhead = 16;
    std::vector<Lifted>& lifted = lifted_;
    lifted.resize(segment.size);
    Lifted* to = lifted.data();
    for (uint32_t at = 0; at < segment.count; ++at) {
      const Bucket& bucket = segment.buckets()[at];
      for (uint32_t place = 0; place < bucket.count; ++place)
        *to++ = {segment.spot(at, bucket.tags[place]), bucket.id(place)};
      for (uint32_t away = read_keys ? 0 : bucket.away; away != 0; away &= away - 1) {
        Lifted& entry = *(to - bucket.count + std::countr_zero(away));
        entry.spot = kUnknown;
        key_of_.prefetch(entry.id);
      }
    }
    for (size_t i = 0; i < lifted.size(); ++i) {
      if (read_keys && i + kAhead < lifted.size()) key_of_.prefetch(lifted[i + kAhead].id);
      if (read_keys || lifted[i].spot == kUnknown) lifted[i].spot = bend(key_of_(lifted[i].id));
    }
  }

  // Only the entries that are not in their own buckets; room for all. Each went by every bucket from its own
  // on, and of those its tag leaves one, nearly always.
  void lift_away(const Segment& segment) {
    constexpr uint32_t kAhead = 16;
    const Bucket* const buckets = segment.buckets();
    std::vector<uint32_t>& passed = passed_;
    passed.resize(segment.count);
    uint32_t run = segment.count;  // so many neighbours in front were passed: all, until one was not
    for (uint32_t at = 0; at < segment.count; ++at) {
      __builtin_prefetch(buckets + at + kAhead);
      passed[at] = run;
      run = (run + 1) & (buckets[at].passed == 0 ? 0 : UINT32_MAX);
    }
    std::vector<uint32_t>& found = away_;
    found.resize(segment.size + 16);
    const size_t count = Deal::find_away(buckets, segment.count, found.data());
    std::vector<Lifted>& lifted = lifted_;
    lifted.reserve(segment.size);
    lifted.resize(count);
    size_t unsure = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t at = found[i] / 16, place = found[i] % 16;
      const uint16_t tag = buckets[at].tags[place];
      const BlockId id = buckets[at].id(place);
      const uint32_t home = segment.only_home(at, tag, passed[at]);
      lifted[i] = {home == kNoHome ? kUnknown : segment.spot(home, tag), id};
      if (home != kNoHome) [[likely]]
        continue;
      key_of_.prefetch(id);
      ++unsure;
    }
    if (unsure == 0) return;
    for (Lifted& away : lifted)
      if (away.spot == kUnknown) away.spot = bend(key_of_(away.id));
  }

  // Throws std::bad_alloc.
  static Pages zeroed(size_t pages) {
    Pages fresh;
    fresh.renew(pages);
    return fresh;
  }
  // Gives the segment these pages, with nothing in them.
  void lay_out(Segment& segment, Pages fresh) noexcept {
    page_bytes_ += fresh.bytes();
    page_bytes_ -= segment.memory.bytes();
    const size_t pages = fresh.pages();
    segment.memory = std::move(fresh);
    shape(segment, pages);
  }
  // Keeps what is in them. After a cut that failed there are enough already.
  void extend(Segment& segment, size_t pages) {
    const size_t before = segment.memory.bytes();
    if (pages > segment.memory.pages()) segment.memory.resize(pages);
    page_bytes_ += segment.memory.bytes() - before;
  }
  void cut(Segment& segment, size_t pages) noexcept {
    const size_t before = segment.memory.bytes();
    try {
      segment.memory.resize(pages);
    } catch (const std::bad_alloc&) {
      return;  // the system is out of mappings: the pages stay
    }
    page_bytes_ -= before - segment.memory.bytes();
  }

  static void shape(Segment& segment, size_t pages) {
    segment.count = buckets_in(pages);
    segment.group_buckets = group_buckets_in(pages);
    segment.home_shift = static_cast<uint8_t>(64 - kPlaceBits - group_bits_in(pages));
    // Invariant: group and tag leave no bit out between them. A half that needs fewer groups than the whole
    // had (skewed keys) would; the bits in front of a tag are known wherever it is.
    segment.tag_from = static_cast<uint8_t>(std::min<unsigned>(segment.tag_from, segment.group_end()));
    segment.fill_max = fill_max(segment.count, segment.depth);
    segment.size = 0;
  }

  // Entries of a segment of so many buckets.
  static uint32_t fill_max(uint32_t buckets, uint32_t depth) {
    return buckets * kEntries * (depth < kBentDepth ? kFillMaxBent : kFillMax) / 128;
  }
  // A segment has 2^i or 3 * 2^i pages.
  static uint32_t buckets_in(size_t pages) {
    return static_cast<uint32_t>(pages * Pages::kPageBytes / sizeof(Bucket));
  }
  static uint8_t group_buckets_in(size_t pages) { return std::has_single_bit(pages) ? 4 : 3; }
  static unsigned group_bits_in(size_t pages) {
    return static_cast<unsigned>(std::countr_zero(buckets_in(pages) / group_buckets_in(pages)));
  }

  KeyOf key_of_;
  std::vector<uint32_t> directory_;  // leading bits of a spot -> index in segments_
  uint32_t directory_bits_ = 0;
  size_t first_pages_ = 1;  // of a segment with its first entry
  std::vector<Segment> segments_;
  size_t size_ = 0;
  size_t page_bytes_ = 0;
  static inline thread_local std::vector<Lifted> lifted_;
  static inline thread_local std::vector<uint32_t> away_, passed_;
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
