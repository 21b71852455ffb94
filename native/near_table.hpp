// Records by SimHash: finds every one within Hamming distance d <= 8 of a query without looking at all.
//
// Multi-index hashing (Norouzi, Punjani and Fleet, "Fast Search in Hamming Space with Multi-Index Hashing",
// CVPR 2012). The 64 bits are cut in three chunks A, B, C of 21, 21 and 22 bits, and there is a table for
// each. Were chunk i at a distance above r[i] for every i, the sum would be at least the sum of r[i] + 1; so
// with that sum d + 1 (r = 2, 2, 2 for d = 8), whatever is within d is within r[i] in some chunk i, and
// looking there finds all. A table is addressed by some leading bits of its chunk only: being within r[i] in
// the chunk implies being within r[i] in part of it.
//
// What keeps it small: a record is stored once, in its bucket of table A (24 bytes and its share of a
// half-empty node). Tables B and C hold one 32-bit word each, a reference and a filter in one:
//   [leading bits of chunk A] [bits of the own chunk behind those of the bucket] [leading bits of the third]
//   [1]
// A word carries some 30 bits of the SimHash beside those of the bucket that it lies in; one word in a
// thousand gets as far as its bucket of A, which is then searched. Words do not say where in that bucket the
// record lies, so records move in it freely, and equal words are as good as each other.
//
// How it grows (linear hashing, Litwin 1980, in the order of the leading bits): buckets are split one after
// the other, the same one in all three tables. Those before `frontier` have one bit of depth more than those
// from it on; when all are split it begins anew. So there is never a second table to search, and memory
// follows the number of records. A word has the next bits of its own chunk for that, and those of chunk A;
// where they are used up (`kLayouts`) words are made anew from the records, for a piece of the buckets at a
// time and before those are split: see `collect`.
//
// What keeps it fast: queries are asked together. Region by region of a table, the buckets near to any query
// are listed with the queries that ask there (a counting sort in the first-level cache), and every bucket is
// read once for all of them.
//
// Not thread-safe. Lab notes in docs/fuzzy-match.md.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "near_nodes.hpp"
#include "near_scans.hpp"
#include "visit_plan.hpp"

namespace kvindexer {

inline constexpr unsigned kNearDistanceMax = 8;

struct RecordPlace {
  uint32_t bucket;
  uint32_t slot;
};

// Which bits of a SimHash the words of a bucket have: so many leading ones of chunk A, then those of the own
// chunk from `own_from` on to the same place, then leading ones of the third chunk; 32 in all. Good for
// buckets of own_from up to chunk_a - 1 leading bits, and for the last split of those.
struct WordLayout {
  unsigned own_from;
  unsigned chunk_a;
  unsigned own() const { return chunk_a - own_from; }
  unsigned third() const { return 32 - chunk_a - own(); }
};
inline constexpr std::array<WordLayout, 4> kLayouts = {{{6, 11}, {11, 14}, {14, 17}, {17, 20}}};

inline const WordLayout& layout_of(unsigned bits) {
  size_t i = 0;
  while (i + 1 < kLayouts.size() && bits >= kLayouts[i + 1].own_from) ++i;
  return kLayouts[i];
}

class NearTable {
 public:
  static constexpr unsigned kBitsMin = 6;
  static constexpr unsigned kBitsMax = 20;

  NearTable(unsigned bits, const NearScans& scans) : bits_(bits), find_alike_(scans.find_alike) {
    assert(bits >= kBitsMin && bits <= kBitsMax && "a chunk has 21 bits, a region 64 buckets");
    levels_[0].resize(bits);
    layouts_ = {layout_of(bits), layout_of(bits + 1)};
  }

  // Buckets from `frontier` on are addressed by so many leading bits, those before it by one more.
  unsigned bits() const { return bits_; }
  uint32_t frontier() const { return frontier_; }
  size_t buckets() const { return (size_t{1} << bits_) + frontier_; }
  size_t size() const { return size_; }
  size_t bytes() const;

  // A bucket's name: a 1 and its leading bits. Good until the next split.
  uint32_t bucket_of(uint64_t simhash) const { return bucket_at(0, simhash); }
  uint32_t bucket_size(uint32_t bucket) const { return at(bucket).size; }
  // Calls visit(bucket) for the one or two whose first `bits` bits are these.
  template <class Visit>
  void for_buckets(uint32_t leading, Visit visit) const {
    if (leading >= frontier_) return visit(1u << bits_ | leading);
    visit(2u << bits_ | 2 * leading);
    visit(2u << bits_ | (2 * leading + 1));
  }

  // Where a record with a SimHash lies, or would. Good until the next split.
  struct Spot {
    Bucket* bucket;
    WordHead* heads[2];  // of tables B and C
    uint32_t words[2];   // that it has there
  };
  [[gnu::always_inline]] Spot spot_of(uint64_t simhash) const {
    Spot spot;
    for (unsigned table = 0; table < 3; ++table) {
      const auto [level, index] = address_at(table, simhash);
      if (table == 0) {
        spot.bucket = levels_[level].buckets() + index;
        continue;
      }
      spot.heads[table - 1] = levels_[level].words(table) + index;
      spot.words[table - 1] = word_of(table, simhash, layouts_[level]);
    }
    return spot;
  }

  Spot spot_of(RecordPlace place) const {
    return spot_of(node_of(at(place.bucket), place.slot).simhash[place.slot & 7]);
  }

  [[gnu::always_inline]] void prefetch(uint64_t simhash) const {
    __builtin_prefetch(&at(bucket_of(simhash)));
  }
  [[gnu::always_inline]] void prefetch_simhashes(const Bucket& bucket) const {
    for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j)
      __builtin_prefetch(records_.simhashes(bucket.nodes[j]));
  }
  [[gnu::always_inline]] void prefetch_records(uint64_t simhash) const {
    prefetch_simhashes(at(bucket_of(simhash)));
  }
  [[gnu::always_inline]] void prefetch_swept(uint32_t number) const {
    const Bucket& bucket = at(number);
    for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j) {
      __builtin_prefetch(node_of(bucket, 8 * j).prefix);
      __builtin_prefetch(node_of(bucket, 8 * j).simhash);
    }
  }

  // For an insertion, one behind the other: the first lines, those that it writes, and the rest of what
  // may_contain reads.
  [[gnu::always_inline]] void prefetch_spot(const Spot& spot) const {
    __builtin_prefetch(spot.bucket, 1);
    for (const WordHead* head : spot.heads) prefetch_head(head);
  }
  [[gnu::always_inline]] void prefetch_tail(const Spot& spot) const {
    // The wrong node where the next one is new or not named here: seldom, and a branch would cost more.
    const uint32_t last = std::min(spot.bucket->size / 8, Bucket::kInline - 1);
    const RecordNode node = const_cast<RecordPool&>(records_).at(spot.bucket->nodes[last]);
    __builtin_prefetch(node.simhash, 1);
    __builtin_prefetch(node.content, 1);
    __builtin_prefetch(node.prefix, 1);
    __builtin_prefetch(&words_.at(spot.heads[0]->next_number));
  }
  [[gnu::always_inline]] void prefetch_words(const Spot& spot) const {  // behind the first
    for (const WordHead* head : spot.heads) __builtin_prefetch(&words_.at(head->next_number), 1);
  }
  [[gnu::always_inline]] void prefetch_more_words(const Spot& spot) const {
    __builtin_prefetch(&words_.at(words_.at(spot.heads[0]->next_number).next_number));
  }

  // False when no record has this SimHash; seldom true when none has. Table B knows in half the cache lines
  // of A.
  bool may_contain(const Spot& spot) const {
    const WordHead& head = *spot.heads[0];
    // Node 0 stands where there is no other: whether there is one nobody could foretell.
    const WordNode* node = &words_.at(head.next_number);
    if (has_word(head, *node, spot.words[0])) return true;
    while (node->next_number != 0) {
      node = &words_.at(node->next_number);
      if (has_word(head, *node, spot.words[0])) return true;
    }
    return false;
  }
  std::optional<RecordPlace> find(uint64_t simhash, uint64_t content) const;
  // Throws std::bad_alloc, and then nothing has changed.
  void insert(const Record& record) { insert(record, spot_of(record.simhash)); }
  void insert(const Record& record, const Spot& spot);
  void erase(RecordPlace place);
  Record record(RecordPlace place) const {
    const RecordNode node = node_of(at(place.bucket), place.slot);
    return {node.simhash[place.slot & 7], node.content[place.slot & 7], node.prefix[place.slot & 7]};
  }
  uint64_t prefix(RecordPlace place) const {
    return node_of(at(place.bucket), place.slot).prefix[place.slot & 7];
  }
  void set_prefix(RecordPlace place, uint64_t prefix) {
    node_of(at(place.bucket), place.slot).prefix[place.slot & 7] = prefix;
  }

  // Splits up to so many buckets at the frontier, in each of the tables: each in one go, however much lies
  // there. What they need is fetched from memory some buckets ahead. Fewer at the end of a doubling, and
  // where words are to be made anew, which is done in their stead: whoever wants more calls again. Not with
  // kBitsMax bits. Throws std::bad_alloc, and then some of them are split.
  void split(size_t buckets);

  // See NearSearch (near_search.hpp), which this is all of.
  template <class Hit>
  void search(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans,
              Hit hit) const;

  void release_into(std::vector<Pages>& pages) {
    for (Level& level : levels_) {
      pages.push_back(std::move(level.directory));
      for (Pages& heads : level.heads) pages.push_back(std::move(heads));
    }
    words_.release_into(pages);
    records_.release_into(pages);
  }

 private:
  friend class NearSearch;
  // One that names records, and one of either table for the words, twice where they are collected.
  static constexpr size_t kWordNodesPerInsertion = 5;

  // Of the buckets, by their leading bits, of which one is collected at a time: the more, the more time it
  // takes and the less memory.
  uint32_t pieces() const { return bits_ < 14 ? 16 : 32; }
  using Radii = std::array<int, 3>;

  struct Level {                 // the buckets of one number of leading bits
    Pages directory;             // table A
    std::array<Pages, 2> heads;  // tables B and C: the first node of every bucket

    void resize(unsigned bits) {
      for (Pages& pages : heads) pages.resize(pages_for(size_t{1} << bits, sizeof(WordHead)));
      directory.resize(pages_for(size_t{1} << bits, sizeof(Bucket)));  // last: it tells that all are there
    }
    Bucket* buckets() const { return static_cast<Bucket*>(directory.base()); }
    WordHead* words(unsigned table) const { return static_cast<WordHead*>(heads[table - 1].base()); }
  };

  static constexpr size_t pages_for(size_t entries, size_t entry_bytes) {
    return (entries * entry_bytes + Pages::kPageBytes - 1) / Pages::kPageBytes;
  }
  // The leading `bits` bits of a chunk.
  static uint32_t chunk(unsigned table, uint64_t simhash, unsigned bits) {
    return bits == 0 ? 0 : static_cast<uint32_t>((simhash << (21 * table)) >> (64 - bits));
  }
  // The word of a record with this SimHash in table 1 or 2.
  static uint32_t word_of(unsigned table, uint64_t simhash, const WordLayout& layout) {
    const uint32_t own = chunk(table, simhash, layout.chunk_a) & ((1u << layout.own()) - 1);
    return chunk(0, simhash, layout.chunk_a) << (32 - layout.chunk_a) | own << layout.third() |
           chunk(3 - table, simhash, layout.third());
  }
  static Radii radii_of(unsigned distance_max) {
    Radii radii;
    for (unsigned i = 0; i < 3; ++i)
      radii[i] = static_cast<int>((distance_max + 1) / 3 + (i < (distance_max + 1) % 3 ? 1 : 0)) - 1;
    return radii;
  }

  struct Address {
    uint32_t level, index;
  };
  // Without a branch: which level it is nobody could foretell.
  [[gnu::always_inline]] Address address_at(unsigned table, uint64_t simhash) const {
    const uint32_t fine = chunk(table, simhash, bits_ + 1);
    const uint32_t level = fine / 2 < frontier_ ? 1 : 0;
    return {level, fine >> (1 - level)};
  }
  uint32_t bucket_at(unsigned table, uint64_t simhash) const {
    const Address address = address_at(table, simhash);
    return 1u << (bits_ + address.level) | address.index;
  }
  // The bucket of table A that a word of a bucket of so many bits leads to.
  uint32_t bucket_of_word(uint32_t word) const {
    const uint32_t fine = word >> (31 - bits_);
    return fine / 2 < frontier_ ? 2u << bits_ | fine : 1u << bits_ | fine / 2;
  }
  unsigned bits_of(uint32_t bucket) const { return bits_ + (bucket >> (bits_ + 1)); }
  const Level& level_of(uint32_t bucket) const { return levels_[bucket >> (bits_ + 1)]; }
  uint32_t index_of(uint32_t bucket) const { return bucket & ((1u << bits_of(bucket)) - 1); }

  Bucket& at(uint32_t bucket) const { return level_of(bucket).buckets()[index_of(bucket)]; }
  WordHead& head(unsigned table, uint32_t bucket) const {
    return level_of(bucket).words(table)[index_of(bucket)];
  }
  RecordNode node_of(const Bucket& bucket, uint32_t slot) const {
    return const_cast<RecordPool&>(records_).at(node_number(bucket, slot / 8, words_));
  }

  // Whether some word there is this one; words that are there no more may count, and what else lies there.
  [[gnu::always_inline]] static bool has_word(const WordHead& head, const WordNode& node, uint32_t word) {
    using Words [[gnu::vector_size(16), gnu::may_alias]] = uint32_t;
    using Halves [[gnu::vector_size(16)]] = uint64_t;
    const auto* const heads = reinterpret_cast<const Words*>(&head);
    const auto* const nodes = reinterpret_cast<const Words*>(&node);
    Words equal = {};
    for (size_t i = 0; i < sizeof head / sizeof(Words); ++i) equal |= heads[i] == word;
    for (size_t i = 0; i < sizeof node / sizeof(Words); ++i) equal |= nodes[i] == word;
    const auto halves = reinterpret_cast<Halves>(equal);
    return (halves[0] | halves[1]) != 0;
  }
  void append(Bucket& bucket, const Record& record);
  void append_node(Bucket& bucket, uint32_t index);
  void drop_node(Bucket& bucket, uint32_t index);
  [[gnu::always_inline]] static void prefetch_head(const WordHead* head) {
    __builtin_prefetch(head, 1);
    __builtin_prefetch(head->words + WordHead::kWords - 1, 1);
  }
  void add_word(WordHead& head, uint32_t word);
  void erase_word(WordHead& head, uint32_t word);

  [[gnu::always_inline]] void prefetch_split(size_t bucket, unsigned step) const;
  void split_run(size_t buckets);
  void reserve_split();
  void split_one();
  void split_words(unsigned table);
  void split_records();
  void drop_words(WordHead& head);
  void fill(WordHead& head, std::span<const uint32_t> words);
  void raise();

  // Whether the splits of this doubling take words that were collected.
  bool makes_words() const { return layouts_[0].own_from != layouts_[1].own_from; }
  bool is_collected(unsigned table, uint64_t simhash) const {
    const uint32_t bucket = chunk(table, simhash, bits_);
    return (bucket < collected_end_) & (bucket >= frontier_) & (chunk(0, simhash, bits_) < collected_);
  }
  WordHead& half_of(unsigned table, uint64_t simhash) const {
    return levels_[1].words(table)[chunk(table, simhash, bits_ + 1)];
  }
  uint32_t buckets_collected() const { return (1u << bits_) / pieces(); }
  void collect(size_t buckets);
  void collect_from(std::span<const Bucket> buckets);
  void add_collected(unsigned table, Alike& alike);

  unsigned first_table(uint64_t simhash, uint64_t difference, const Radii& radii) const {
    for (unsigned table = 0; table < 3; ++table)
      if (std::popcount(chunk(table, difference, bits_of(bucket_at(table, simhash)))) <= radii[table])
        return table;
    return 3;
  }

  unsigned bits_;
  FindAlike find_alike_;
  uint32_t frontier_ = 0;
  std::array<Level, 2> levels_;  // of `bits_` bits, and of one more
  std::array<WordLayout, 2> layouts_;
  RecordPool records_;
  WordPool words_;
  size_t size_ = 0;
  size_t pages_discarded_ = 0;  // of levels_[0]
  // New words lie with the halves already of the buckets from `frontier_` up to this one, for all records
  // before bucket `collected_` of table A.
  uint32_t collected_end_ = 0;
  uint32_t collected_ = 0;
  std::vector<uint32_t> taken_words_, sorted_words_[2];  // of a split
};

inline size_t NearTable::bytes() const {
  size_t pages = levels_[0].directory.pages() - pages_discarded_;
  for (const Pages& heads : levels_[0].heads) pages += heads.pages();
  if (const size_t halves = 2 * size_t{frontier_})  // of the rest nothing has been touched
    pages += pages_for(halves, sizeof(Bucket));
  if (const size_t halves = 2 * size_t{std::max(frontier_, collected_end_)})
    pages += 2 * pages_for(halves, sizeof(WordHead));
  return pages * Pages::kPageBytes + records_.bytes() + words_.bytes();
}

// -- records

inline std::optional<RecordPlace> NearTable::find(uint64_t simhash, uint64_t content) const {
  const uint32_t number = bucket_of(simhash);
  const Bucket& bucket = at(number);
  for (uint32_t first = 0; first < bucket.size; first += 8) {
    const RecordNode node = node_of(bucket, first);
    const uint32_t lanes = std::min<uint32_t>(8, bucket.size - first);
    for (uint32_t lane = 0; lane < lanes; ++lane)
      if (node.simhash[lane] == simhash && node.content[lane] == content)
        return RecordPlace{number, first + lane};
  }
  return std::nullopt;
}

inline void NearTable::insert(const Record& record, const Spot& spot) {
  records_.reserve(1);
  words_.reserve(kWordNodesPerInsertion);  // from here on nothing fails
  append(*spot.bucket, record);
  for (size_t i = 0; i < 2; ++i) add_word(*spot.heads[i], spot.words[i]);
  ++size_;
  if (__builtin_expect(collected_end_ != 0, 0))
    for (unsigned table = 1; table < 3; ++table)
      if (is_collected(table, record.simhash))
        add_word(half_of(table, record.simhash), word_of(table, record.simhash, layouts_[1]));
}

inline void NearTable::append(Bucket& bucket, const Record& record) {
  if (bucket.size % 8 == 0) append_node(bucket, bucket.size / 8);
  const uint32_t slot = bucket.size++;
  const RecordNode node = node_of(bucket, slot);
  node.simhash[slot & 7] = record.simhash;
  node.content[slot & 7] = record.content;
  node.prefix[slot & 7] = record.prefix;
}

inline void NearTable::erase(RecordPlace place) {
  Bucket& bucket = at(place.bucket);
  const uint32_t last = bucket.size - 1;
  const RecordNode node = node_of(bucket, place.slot);
  const uint64_t simhash = node.simhash[place.slot & 7];
  for (unsigned table = 1; table < 3; ++table) {
    const uint32_t of_word = bucket_at(table, simhash);
    erase_word(head(table, of_word), word_of(table, simhash, layouts_[of_word >> (bits_ + 1)]));
    if (is_collected(table, simhash))
      erase_word(half_of(table, simhash), word_of(table, simhash, layouts_[1]));
  }
  const RecordNode from = node_of(bucket, last);
  node.simhash[place.slot & 7] = from.simhash[last & 7];
  node.content[place.slot & 7] = from.content[last & 7];
  node.prefix[place.slot & 7] = from.prefix[last & 7];
  bucket.size = last;
  if (last % 8 == 0) drop_node(bucket, last / 8);
  --size_;
}

inline void NearTable::append_node(Bucket& bucket, uint32_t index) {
  const uint32_t fresh = records_.take();
  if (index < Bucket::kInline) {
    bucket.nodes[index] = fresh;
    return;
  }
  WordNode* before = nullptr;
  uint32_t number = bucket.more;
  for (index -= Bucket::kInline; index >= WordNode::kWords; index -= WordNode::kWords) {
    before = &words_.at(number);
    number = before->next_number;
  }
  if (number == 0) {
    number = words_.take();
    words_.at(number) = {};
    if (before == nullptr)
      bucket.more = number;
    else
      before->next_number = number;
  }
  words_.at(number).words[index] = fresh;
}

inline void NearTable::drop_node(Bucket& bucket, uint32_t index) {
  records_.give(node_number(bucket, index, words_));
  if (index < Bucket::kInline) return;
  WordNode* before = nullptr;
  uint32_t number = bucket.more;
  for (index -= Bucket::kInline; index >= WordNode::kWords; index -= WordNode::kWords) {
    before = &words_.at(number);
    number = before->next_number;
  }
  if (index != 0) return;
  words_.give(number);
  if (before == nullptr)
    bucket.more = 0;
  else
    before->next_number = 0;
}

// -- words: what lies in the chain is full, so words come to and go from the head

inline void NearTable::add_word(WordHead& head, uint32_t word) {
  if (head.count == WordHead::kWords) {
    const uint32_t full = words_.take();
    WordNode& node = words_.at(full);
    node.next_number = head.next_number;
    head.next_number = full;
    head.count -= WordNode::kWords;
    std::copy_n(head.words + head.count, WordNode::kWords, node.words);
  }
  head.words[head.count++] = word;
}

inline void NearTable::erase_word(WordHead& head, uint32_t word) {
  uint32_t* found = std::find(head.words, head.words + head.count, word);
  if (found == head.words + head.count) {
    uint32_t number = head.next_number;
    do {
      assert(number != 0 && "every record has its word in both tables");
      WordNode& node = words_.at(number);
      found = std::find(node.words, node.words + WordNode::kWords, word);
      number = found == node.words + WordNode::kWords ? node.next_number : 0;
    } while (number != 0);
  }
  *found = head.words[--head.count];
  if (head.count != 0 || head.next_number == 0) return;
  const uint32_t emptied = head.next_number;
  const WordNode& node = words_.at(emptied);
  std::copy_n(node.words, WordNode::kWords, head.words);
  head.count = WordNode::kWords;
  head.next_number = node.next_number;
  words_.give(emptied);
}

// -- growth

inline void NearTable::split(size_t buckets) {
  if (buckets == 0) return;
  assert(bits_ < kBitsMax && "words have no bits for more");
  constexpr size_t kCollectedPerSplit = 8;
  if (frontier_ == 0 && levels_[1].directory.pages() == 0) levels_[1].resize(bits_ + 1);
  if (!makes_words()) return split_run(std::min(buckets, (size_t{1} << bits_) - frontier_));
  while (buckets != 0 && makes_words()) {
    if (collected_end_ == frontier_) {
      collected_end_ += buckets_collected();
      collected_ = 0;
    }
    const size_t left = ((size_t{1} << bits_) - collected_) / kCollectedPerSplit;
    if (left != 0) collect(kCollectedPerSplit * std::min(left, buckets));
    buckets -= std::min(left, buckets);
    const size_t run = std::min<size_t>(buckets, collected_end_ - frontier_);
    split_run(run);
    buckets -= run;
  }
}

inline void NearTable::split_run(size_t buckets) {
  constexpr size_t kSteps = 4;
  const size_t first = frontier_;
  const size_t end = first + buckets;
  for (size_t next = first; next < end + kSteps; ++next) {
    for (unsigned step = 0; step < kSteps; ++step)
      if (next >= first + step && next - step < end) prefetch_split(next - step, step);
    if (next >= first + kSteps) split_one();
  }
}

inline void NearTable::prefetch_split(size_t bucket, unsigned step) const {
  const Level& level = levels_[0];
  if (step == 0) {
    __builtin_prefetch(level.buckets() + bucket, 1);
    for (unsigned table = 1; table < 3; ++table) prefetch_head(level.words(table) + bucket);
    return;
  }
  for (unsigned table = 1; table < 3; ++table) {
    uint32_t number = level.words(table)[bucket].next_number;
    for (unsigned i = 1; i < step; ++i) number = words_.at(number).next_number;
    __builtin_prefetch(&words_.at(number), 1);
  }
  if (step != 1) return;
  const Bucket& records = level.buckets()[bucket];
  for (uint32_t j = 0; j < Bucket::kInline && j * 8 < records.size; ++j) {
    const RecordNode node = node_of(records, 8 * j);
    __builtin_prefetch(node.simhash);
    __builtin_prefetch(node.content);
    __builtin_prefetch(node.prefix);
  }
}

// All that the next bucket's split takes: it fails here, or not at all.
inline void NearTable::reserve_split() {
  const size_t nodes = levels_[0].buckets()[frontier_].size / 8 + 2;
  records_.reserve(nodes);
  size_t word_nodes = nodes / WordNode::kWords + 2;
  for (unsigned table = 1; table < 3 && !makes_words(); ++table) {
    const WordHead& whole = levels_[0].words(table)[frontier_];
    size_t words = whole.count;
    for (uint32_t number = whole.next_number; number != 0; number = words_.at(number).next_number)
      words += WordNode::kWords;
    word_nodes += words / WordNode::kWords;
    for (std::vector<uint32_t>* of_split : {&taken_words_, &sorted_words_[0], &sorted_words_[1]})
      of_split->reserve(words);
  }
  words_.reserve(word_nodes);
}

inline void NearTable::split_one() {
  reserve_split();
  for (unsigned table = 1; table < 3; ++table) {
    if (!makes_words()) {
      split_words(table);
      continue;
    }
    drop_words(levels_[0].words(table)[frontier_]);
    WordHead* const halves = levels_[1].words(table) + 2 * size_t{frontier_};
    for (size_t i = 0; i < 2; ++i)  // a page is touched here, and not by many insertions
      if (halves[i].count == 0) halves[i] = WordHead{};
  }
  split_records();
  ++frontier_;
  constexpr uint32_t kBuckets = Pages::kPageBytes / sizeof(Bucket),
                     kPages = sizeof(WordHead) / sizeof(Bucket);
  if (frontier_ % kBuckets == 0) {
    const size_t first = frontier_ / kBuckets - 1;
    levels_[0].directory.discard(first, 1);
    for (Pages& heads : levels_[0].heads) heads.discard(kPages * first, kPages);
    pages_discarded_ += 1 + 2 * kPages;
  }
  if (frontier_ == 1u << bits_) raise();
}

// Every bucket has been split: their halves are the buckets now.
inline void NearTable::raise() {
  levels_[0] = std::exchange(levels_[1], Level{});
  pages_discarded_ = 0;
  frontier_ = collected_end_ = collected_ = 0;
  ++bits_;
  layouts_ = {layout_of(bits_), layout_of(bits_ + 1)};
}

inline void NearTable::split_records() {
  Bucket& whole = levels_[0].buckets()[frontier_];
  Bucket* const halves = levels_[1].buckets() + 2 * size_t{frontier_};
  halves[0] = halves[1] = {};  // so that a page is touched here, and not by many insertions
  if (whole.size == 0) return;
  RecordNode last[2] = {};  // of the halves
  for (uint32_t first = 0; first < whole.size; first += 8) {
    const RecordNode from = node_of(whole, first);
    const uint32_t lanes = std::min<uint32_t>(8, whole.size - first);
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      const uint64_t simhash = from.simhash[lane];
      const size_t half = simhash >> (63 - bits_) & 1;
      const uint32_t slot = halves[half].size++;
      if (slot % 8 == 0) {
        append_node(halves[half], slot / 8);
        last[half] = node_of(halves[half], slot);
      }
      last[half].simhash[slot & 7] = simhash;
      last[half].content[slot & 7] = from.content[lane];
      last[half].prefix[slot & 7] = from.prefix[lane];
    }
  }
  for (uint32_t index = (whole.size + 7) / 8; index-- > 0;) drop_node(whole, index);
  whole = Bucket{};
}

inline void NearTable::drop_words(WordHead& head) {
  if (head.count == 0) return;  // its page may be untouched
  for (uint32_t number = head.next_number; number != 0;) {
    words_.give(number);
    number = words_.at(number).next_number;
  }
  head.next_number = 0;
  head.count = 0;
}

inline void NearTable::split_words(unsigned table) {
  WordHead& whole = levels_[0].words(table)[frontier_];
  taken_words_.assign(whole.words, whole.words + whole.count);
  for (uint32_t number = whole.next_number; number != 0; number = words_.at(number).next_number)
    taken_words_.insert(taken_words_.end(), words_.at(number).words,
                        words_.at(number).words + WordNode::kWords);
  drop_words(whole);
  const WordLayout& layout = layout_of(bits_);
  const unsigned shift = layout.third() + (layout.chunk_a - 1 - bits_);  // of the bit behind the bucket's own
  WordHead* const halves = levels_[1].words(table) + 2 * size_t{frontier_};
  for (std::vector<uint32_t>& words : sorted_words_) words.resize(taken_words_.size());
  // Every word goes to both, and counts in one: a branch would be wrong half the time.
  size_t zeros = 0, ones = 0;
  for (const uint32_t word : taken_words_) {
    sorted_words_[0][zeros] = sorted_words_[1][ones] = word;
    const uint32_t one = word >> shift & 1;
    ones += one;
    zeros += 1 - one;
  }
  fill(halves[0], std::span(sorted_words_[0]).first(zeros));
  fill(halves[1], std::span(sorted_words_[1]).first(ones));
}

// Puts words into an empty bucket.
inline void NearTable::fill(WordHead& head, std::span<const uint32_t> words) {
  while (words.size() > WordHead::kWords) {
    const uint32_t full = words_.take();
    WordNode& node = words_.at(full);
    std::copy_n(words.begin(), WordNode::kWords, node.words);
    node.next_number = head.next_number;
    head.next_number = full;
    words = words.subspan(WordNode::kWords);
  }
  std::copy(words.begin(), words.end(), head.words);
  head.count = static_cast<uint32_t>(words.size());
}

// Where words are to have other bits than they have, the records say them. To look up the record of each word
// would take a dozen cache lines a record. So all records are gone through, in the order of table A, for
// those of which the words lie in the next piece of the buckets of B or C; new words go to the halves that
// those buckets will be split in, which a cache holds. Once a piece is collected its buckets are split one by
// one, and their words are there. While that lasts, what is inserted or erased is so in both
// (`is_collected`). Table A is not split while a piece is collected.
inline void NearTable::collect(size_t buckets) {
  const size_t begin = collected_, end = begin + buckets;
  const size_t split = std::clamp<size_t>(frontier_, begin, end);  // before this one: halves
  try {
    if (split != begin) collect_from({levels_[1].buckets() + 2 * begin, 2 * (split - begin)});
    if (split != end) collect_from({levels_[0].buckets() + split, end - split});
  } catch (...) {  // no more memory: what is collected twice would be there twice, so the piece begins anew
    for (unsigned table = 1; table < 3; ++table)
      for (size_t half = 2 * size_t{frontier_}; half < 2 * size_t{collected_end_}; ++half)
        drop_words(levels_[1].words(table)[half]);
    collected_ = 0;
    throw;
  }
  collected_ = static_cast<uint32_t>(end);
}

inline void NearTable::collect_from(std::span<const Bucket> buckets) {
  constexpr size_t kAhead = 10;
  Patterns of_piece;
  Alike alike;
  alike.count[0] = alike.count[1] = 0;
  for (unsigned table = 1; table < 3; ++table) {
    const auto leading = [&](uint64_t bucket) { return bucket << (64 - 21 * table - bits_); };
    of_piece.mask[table - 1] = leading((1u << bits_) - buckets_collected());
    of_piece.pattern[table - 1] = leading(collected_end_ - buckets_collected());
  }
  for (size_t i = 0; i < buckets.size() + kAhead; ++i) {
    if (i < buckets.size()) prefetch_simhashes(buckets[i]);
    if (i < kAhead) continue;
    const Bucket& bucket = buckets[i - kAhead];
    for (uint32_t first = 0; first < bucket.size; first += 8 * SomeSimHashes::kNodes) {
      SomeSimHashes some;
      some.count = std::min<uint32_t>(8 * SomeSimHashes::kNodes, bucket.size - first);
      for (uint32_t slot = 0; slot < some.count; slot += 8)
        some.nodes[slot / 8] = records_.simhashes(node_number(bucket, (first + slot) / 8, words_));
      find_alike_(some, of_piece, alike);
      for (unsigned table = 1; table < 3; ++table)
        if (alike.count[table - 1] >= Alike::kTaken) add_collected(table, alike);
    }
  }
  for (unsigned table = 1; table < 3; ++table) add_collected(table, alike);
}

inline void NearTable::add_collected(unsigned table, Alike& alike) {
  const std::span<const uint64_t> simhashes(alike.simhashes[table - 1],
                                            std::exchange(alike.count[table - 1], 0));
  for (const uint64_t simhash : simhashes) prefetch_head(&half_of(table, simhash));
  for (const uint64_t simhash : simhashes)
    add_word(half_of(table, simhash), word_of(table, simhash, layouts_[1]));
}

}  // namespace kvindexer
