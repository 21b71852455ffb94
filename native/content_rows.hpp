// Contents as they travel in a snapshot: rows out of a fuzzy index that changes while it is read, and into
// another.
//
// A walk goes through the backlog, then the buckets, and gives each content with all its prefixes, once or
// (where something moved meanwhile) more often, which does no harm. What is stored or removed after the walk
// began is noted in order, and the notes since the rows before come before the next rows. So all rows, taken
// in one after the other, are the contents at the instant of the last of them, without the walk and the index
// knowing of each other.
//
// The buckets come in an order that spreads them (the bits of their numbers reversed): taken in as they come
// into a table that grows, they fill it evenly. A chain of prefixes goes out in parts and keeps its order in
// a table that it is taken into; in a backlog there are no chains, and no order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "content_backlog.hpp"

namespace kvindexer {

struct ContentRow {
  enum Kind : uint32_t {
    kStored,   // the prefix has this content
    kFurther,  // so has this one: behind the row before in the chain of the content
    kBehind,   // where the chain goes on: told before, or gone since
    kCrowded,  // of a content that only exact matches find: its SimHash is not known
    kBehindCrowded,
    kRemoved,
  };
  static constexpr size_t kBytes = 32;

  uint32_t context = 0;
  uint32_t kind = kStored;
  uint64_t prefix = 0;
  uint64_t simhash = 0, content = 0;
  bool operator==(const ContentRow&) const = default;
};

struct ContentCursor {  // of a walk through one context
  struct Chain {        // what is left of one
    uint64_t simhash, content;
    uint64_t last;  // the prefix that was given last
    bool crowded;
  };

  ContentBacklog::Cursor backlog;
  unsigned bits = 0;  // a step is what has so many leading bits in common; 0: the buckets have not been begun
  uint32_t step = 0;
  uint32_t within = 0;  // of the bits behind those, where in the step it stands
  bool in_crowded = false, crowded_done = false;
  uint64_t crowded_from = 0;  // key of the chains that have no record
  std::vector<Chain> chains;

  // The leading bits of the step.
  uint32_t leading() const {
    uint32_t reversed = 0;
    for (unsigned i = 0; i < bits; ++i) reversed |= (step >> i & 1) << (bits - 1 - i);
    return reversed;
  }
};

}  // namespace kvindexer
