// Records by SimHash: finds every one within Hamming distance d <= 8 of a query without looking at all.
//
// Multi-index hashing (Norouzi, Punjani and Fleet, "Fast Search in Hamming Space with Multi-Index Hashing",
// CVPR 2012). The 64 bits are cut in three chunks A, B, C of 21, 21 and 22 bits, and there is a table for
// each. Were chunk i at a distance above r[i] for every i, the sum would be at least the sum of r[i] + 1; so
// with that sum d + 1 (r = 2, 2, 2 for d = 8), whatever is within d is within r[i] in some chunk i, and
// looking there finds all. A table is addressed by the leading `bits` bits of its chunk only: being within
// r[i] in the chunk implies being within r[i] in part of it.
//
// What keeps it small: a record is stored once, in its bucket of table A (24 bytes and its share of a
// half-empty node). Tables B and C hold one 32-bit word each, which is a reference and a filter in one:
//   [bucket in A: `bits`] [leading bits of the third chunk: 31 - `bits`] [1]
// The bucket in A is the leading bits of chunk A, so a word carries 31 bits of the SimHash beside those of
// the bucket that it lies in; one word in a thousand gets as far as its bucket of A, which is then searched.
// Words do not say where in that bucket the record lies, so records move in it freely, and equal words are as
// good as each other.
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
#include "visit_plan.hpp"

namespace kvindexer {

inline constexpr unsigned kNearDistanceMax = 8;

struct RecordPlace {
  uint32_t bucket;
  uint32_t slot;
};

class NearTable {
 public:
  static constexpr unsigned kBitsMin = 6;
  static constexpr unsigned kBitsMax = 20;

  // `records` is shared by the tables of one index, so that one can move its records to another.
  NearTable(unsigned bits, RecordPool& records) : bits_(bits), records_(&records) {
    assert(bits >= kBitsMin && bits <= kBitsMax && "a chunk has 21 bits, a region 64 buckets");
    directory_.resize(pages_for(sizeof(Bucket)));
    for (Pages& heads : heads_) heads.resize(pages_for(sizeof(WordNode)));
  }

  unsigned bits() const { return bits_; }
  uint32_t buckets() const { return 1u << bits_; }
  size_t size() const { return size_; }
  size_t bytes() const { return directory_.bytes() + heads_[0].bytes() + heads_[1].bytes() + words_.bytes(); }
  uint32_t bucket_of(uint64_t simhash) const { return chunk(0, simhash, bits_); }
  uint32_t bucket_size(uint32_t bucket) const { return at(bucket).size; }

  [[gnu::always_inline]] void prefetch(uint64_t simhash) const {
    __builtin_prefetch(&at(bucket_of(simhash)), 1);
    for (unsigned table = 1; table < 3; ++table)
      __builtin_prefetch(heads(table) + chunk(table, simhash, bits_), 1);
  }
  [[gnu::always_inline]] void prefetch_records(uint64_t simhash) const {
    const Bucket& bucket = at(bucket_of(simhash));
    for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j)
      __builtin_prefetch(records_->at(bucket.nodes[j]).simhash);
    prefetch_tail(simhash);
  }
  [[gnu::always_inline]] void prefetch_bucket(uint32_t number) const {
    if (number >= buckets()) return;
    const Bucket& bucket = at(number);
    for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j) {
      __builtin_prefetch(records_->at(bucket.nodes[j]).simhash);
      __builtin_prefetch(records_->at(bucket.nodes[j]).content);
      __builtin_prefetch(records_->at(bucket.nodes[j]).prefix);
    }
  }
  [[gnu::always_inline]] void prefetch_prefixes(uint32_t number) const {
    if (number >= buckets()) return;
    const Bucket& bucket = at(number);
    for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j)
      __builtin_prefetch(records_->at(bucket.nodes[j]).prefix);
  }
  [[gnu::always_inline]] void prefetch_tail(uint64_t simhash) const {
    const Bucket& bucket = at(bucket_of(simhash));
    const uint32_t last = bucket.size / 8;
    if (last < Bucket::kInline && bucket.size % 8 != 0) {
      __builtin_prefetch(records_->at(bucket.nodes[last]).content, 1);
      __builtin_prefetch(records_->at(bucket.nodes[last]).prefix, 1);
    }
  }

  // For an insertion, after `prefetch`: first the lines that it writes, then the rest of what may_contain
  // reads.
  [[gnu::always_inline]] void prefetch_insertion(uint64_t simhash) const {
    prefetch_tail(simhash);
    prefetch_words(simhash);
  }
  [[gnu::always_inline]] void prefetch_words(uint64_t simhash) const {
    __builtin_prefetch(&words_.at(heads(1)[chunk(1, simhash, bits_)].next));
  }
  [[gnu::always_inline]] void prefetch_more_words(uint64_t simhash) const {
    __builtin_prefetch(&words_.at(words_.at(heads(1)[chunk(1, simhash, bits_)].next).next));
  }

  // False when no record has this SimHash; seldom true when none has. Table B knows in half the cache lines
  // of A.
  bool may_contain(uint64_t simhash) const {
    const uint32_t word = word_of(1, simhash);
    const WordNode* node = heads(1) + chunk(1, simhash, bits_);
    while (true) {
      uint32_t equal = 0;
      for (const uint32_t other : node->words) equal |= other == word ? 1 : 0;
      if (equal != 0 || node->next == 0) return equal != 0;
      node = &words_.at(node->next);
    }
  }
  std::optional<RecordPlace> find(uint64_t simhash, uint64_t content) const;
  void insert(const Record& record);
  void erase(RecordPlace place);
  Record record(RecordPlace place) const {
    const RecordNode& node = node_of(at(place.bucket), place.slot);
    return {node.simhash[place.slot & 7], node.content[place.slot & 7], node.prefix[place.slot & 7]};
  }
  uint64_t prefix(RecordPlace place) const {
    return node_of(at(place.bucket), place.slot).prefix[place.slot & 7];
  }
  void set_prefix(RecordPlace place, uint64_t prefix) {
    node_of(at(place.bucket), place.slot).prefix[place.slot & 7] = prefix;
  }

  // Takes all records of a bucket out. Their words stay behind in B and C and lead nowhere: only for a table
  // whose buckets are emptied one after the other, never to be filled again.
  void take_bucket(uint32_t bucket, std::vector<Record>& out);

  // See NearSearch (near_search.hpp), which this is all of.
  template <class Hit>
  void search(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans,
              Hit hit) const;

  void release_into(std::vector<Pages>& pages) {
    pages.push_back(std::move(directory_));
    for (Pages& heads : heads_) pages.push_back(std::move(heads));
    words_.release_into(pages);
  }

 private:
  friend class NearSearch;
  using Radii = std::array<int, 3>;
  size_t pages_for(size_t entry_bytes) const {
    return (buckets() * entry_bytes + Pages::kPageBytes - 1) / Pages::kPageBytes;
  }
  // The leading `bits` bits of a chunk.
  static uint32_t chunk(unsigned table, uint64_t simhash, unsigned bits) {
    return bits == 0 ? 0 : static_cast<uint32_t>((simhash << (21 * table)) >> (64 - bits));
  }
  // The word in table 1 or 2 of a record with this SimHash.
  uint32_t word_of(unsigned table, uint64_t simhash) const {
    const unsigned rest = std::min(31 - bits_, 21u);
    return chunk(0, simhash, bits_) << (32 - bits_) | chunk(3 - table, simhash, rest) << 1 | 1;
  }
  static Radii radii_of(unsigned distance_max) {
    Radii radii;
    for (unsigned i = 0; i < 3; ++i)
      radii[i] = static_cast<int>((distance_max + 1) / 3 + (i < (distance_max + 1) % 3 ? 1 : 0)) - 1;
    return radii;
  }

  const Bucket& at(uint32_t bucket) const { return static_cast<const Bucket*>(directory_.base())[bucket]; }
  Bucket& at(uint32_t bucket) { return static_cast<Bucket*>(directory_.base())[bucket]; }
  WordNode* heads(unsigned table) const { return static_cast<WordNode*>(heads_[table - 1].base()); }
  RecordNode& node_of(const Bucket& bucket, uint32_t slot) const {
    return records_->at(node_number(bucket, slot / 8, words_));
  }

  void append_node(Bucket& bucket, uint32_t index);
  void drop_node(Bucket& bucket, uint32_t index);
  void add_word(WordNode& head, uint32_t word);
  void erase_word(WordNode& head, uint32_t word);

  const Bucket* buckets_of_a() const { return static_cast<const Bucket*>(directory_.base()); }
  unsigned first_table(uint64_t difference, const Radii& radii) const {
    for (unsigned table = 0; table < 3; ++table)
      if (std::popcount(chunk(table, difference, bits_)) <= radii[table]) return table;
    return 3;
  }

  unsigned bits_;
  RecordPool* records_;
  Pages directory_;
  std::array<Pages, 2> heads_;  // tables B and C: the first node of every bucket
  WordPool words_;
  size_t size_ = 0;
};

// -- records

inline std::optional<RecordPlace> NearTable::find(uint64_t simhash, uint64_t content) const {
  const uint32_t number = bucket_of(simhash);
  const Bucket& bucket = at(number);
  for (uint32_t first = 0; first < bucket.size; first += 8) {
    const RecordNode& node = node_of(bucket, first);
    const uint32_t lanes = std::min<uint32_t>(8, bucket.size - first);
    for (uint32_t lane = 0; lane < lanes; ++lane)
      if (node.simhash[lane] == simhash && node.content[lane] == content)
        return RecordPlace{number, first + lane};
  }
  return std::nullopt;
}

inline void NearTable::insert(const Record& record) {
  Bucket& bucket = at(bucket_of(record.simhash));
  if (bucket.size % 8 == 0) append_node(bucket, bucket.size / 8);
  const uint32_t slot = bucket.size++;
  RecordNode& node = node_of(bucket, slot);
  node.simhash[slot & 7] = record.simhash;
  node.content[slot & 7] = record.content;
  node.prefix[slot & 7] = record.prefix;
  for (unsigned table = 1; table < 3; ++table)
    add_word(heads(table)[chunk(table, record.simhash, bits_)], word_of(table, record.simhash));
  ++size_;
}

inline void NearTable::erase(RecordPlace place) {
  Bucket& bucket = at(place.bucket);
  const uint32_t last = bucket.size - 1;
  RecordNode& node = node_of(bucket, place.slot);
  const uint64_t simhash = node.simhash[place.slot & 7];
  for (unsigned table = 1; table < 3; ++table)
    erase_word(heads(table)[chunk(table, simhash, bits_)], word_of(table, simhash));
  const RecordNode& from = node_of(bucket, last);
  node.simhash[place.slot & 7] = from.simhash[last & 7];
  node.content[place.slot & 7] = from.content[last & 7];
  node.prefix[place.slot & 7] = from.prefix[last & 7];
  bucket.size = last;
  if (last % 8 == 0) drop_node(bucket, last / 8);
  --size_;
}

inline void NearTable::take_bucket(uint32_t number, std::vector<Record>& out) {
  Bucket& bucket = at(number);
  for (uint32_t slot = 0; slot < bucket.size; ++slot) out.push_back(record({number, slot}));
  for (uint32_t index = (bucket.size + 7) / 8; index-- > 0;) drop_node(bucket, index);
  size_ -= bucket.size;
  bucket.size = 0;
}

inline void NearTable::append_node(Bucket& bucket, uint32_t index) {
  const uint32_t fresh = records_->take();
  if (index < Bucket::kInline) {
    bucket.nodes[index] = fresh;
    return;
  }
  uint32_t* link = &bucket.more;
  for (index -= Bucket::kInline; index >= WordNode::kWords; index -= WordNode::kWords)
    link = &words_.at(*link).next;
  if (*link == 0) {
    const uint32_t taken = words_.take();
    *link = taken;
  }
  words_.at(*link).words[index] = fresh;
}

inline void NearTable::drop_node(Bucket& bucket, uint32_t index) {
  records_->give(node_number(bucket, index, words_));
  if (index < Bucket::kInline) return;
  uint32_t* link = &bucket.more;
  for (index -= Bucket::kInline; index >= WordNode::kWords; index -= WordNode::kWords)
    link = &words_.at(*link).next;
  if (index != 0) return;
  words_.give(*link);
  *link = 0;
}

// -- words: the first node of a bucket is the one that is not full

inline void NearTable::add_word(WordNode& head, uint32_t word) {
  uint32_t lane = words_in(head);
  if (lane == WordNode::kWords) {
    const uint32_t full = words_.take();
    words_.at(full) = head;
    head = WordNode{};
    head.next = full;
    lane = 0;
  }
  head.words[lane] = word;
}

inline void NearTable::erase_word(WordNode& head, uint32_t word) {
  const uint32_t last = words_in(head) - 1;
  for (WordNode* node = &head;; node = &words_.at(node->next)) {
    uint32_t* const found = std::find(node->words, node->words + WordNode::kWords, word);
    if (found == node->words + WordNode::kWords) {
      assert(node->next != 0 && "every record has its word in both tables");
      continue;
    }
    *found = head.words[last];
    head.words[last] = 0;
    break;
  }
  if (last == 0 && head.next != 0) {
    const uint32_t emptied = head.next;
    head = words_.at(emptied);
    words_.give(emptied);
  }
}

}  // namespace kvindexer
