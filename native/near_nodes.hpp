// What a NearTable is made of, in whole cache lines, and what a search asks of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "node_pool.hpp"

namespace kvindexer {

struct Record {
  uint64_t simhash;
  uint64_t content;  // XXH64 of the token bytes
  uint64_t prefix;
};

// Eight records, field by field, in two parts: a search reads SimHashes only.
struct alignas(64) SimHashNode {
  uint64_t simhash[8];
};
struct alignas(64) NamesNode {
  uint64_t content[8];
  uint64_t prefix[8];
};
struct RecordNode {  // one, wherever its parts lie
  uint64_t* simhash;
  uint64_t* content;
  uint64_t* prefix;
};

// What tables B and C keep of the records of one bucket (see NearTable): the first words in two lines that
// lie side by side, which most buckets make do with, and those beyond in a chain of nodes, all of them full.
struct alignas(128) WordHead {
  static constexpr uint32_t kWords = 31;
  uint32_t next_number : 27;  // 0: none
  uint32_t count : 5;
  uint32_t words[kWords];
};
struct alignas(64) WordNode {
  static constexpr uint32_t kWords = 15;
  uint32_t next_number;  // 0: none
  uint32_t words[kWords];
};
static_assert(sizeof(WordHead) == 128 && sizeof(WordNode) == 64);

// The records of a bucket of table A lie in slots 0..size-1, eight a node; the node of slot / 8 is named here
// or, from the seventh on, in a chain of WordNodes that starts at `more`.
struct alignas(32) Bucket {
  static constexpr uint32_t kInline = 6;
  uint32_t nodes[kInline];
  uint32_t more;
  uint32_t size;
};

class RecordPool : public NodePool<SimHashNode, NamesNode> {
 public:
  RecordNode at(uint32_t number) {
    NamesNode& names = part<1>(number);
    return {part<0>(number).simhash, names.content, names.prefix};
  }
  const uint64_t* simhashes(uint32_t number) const { return part<0>(number).simhash; }
};
using WordPool = NodePool<WordNode>;

inline uint32_t node_number(const Bucket& bucket, uint32_t index, const WordPool& words) {
  if (index < Bucket::kInline) return bucket.nodes[index];
  index -= Bucket::kInline;
  const WordNode* node = &words.at(bucket.more);
  for (; index >= WordNode::kWords; index -= WordNode::kWords) node = &words.at(node->next_number);
  return node->words[index];
}

// A query at a bucket: its number, and how far a word there may be from its own for the sum to be near.
// Four bytes: a region's lists are to stay in a first-level cache of 32 KiB.
struct Ask {
  static constexpr unsigned kQueryBits = 24;
  uint32_t bits;  // the distance in the leading ones

  static Ask of(uint32_t query, uint32_t distance_max) { return {distance_max << kQueryBits | query}; }
  uint32_t query() const { return bits & ((1u << kQueryBits) - 1); }
  uint32_t distance_max() const { return bits >> kQueryBits; }
};
inline constexpr size_t kQueriesMax = size_t{1} << Ask::kQueryBits;

// The queries that ask at a bucket are asks[begin] up to the next visit's begin. A list of visits ends with
// kScanAhead that only mark the end and are there to be looked ahead at.
struct Visit {
  uint32_t bucket;
  uint32_t begin;
};

// What a scan lets through. From table A: the slot of a record in `bucket` that is near. From B and C: a word
// whose bits are near, which names a bucket of A.
struct Candidate {
  uint32_t query;
  uint32_t bucket;
  uint32_t word_or_slot;
};

struct Asked {
  std::span<const Visit> visits;
  std::span<const Ask> asks;
  const uint64_t* queries;  // SimHashes
  unsigned distance_max;
};

inline constexpr size_t kScanAhead = 16;

}  // namespace kvindexer
