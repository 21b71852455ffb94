// The records of all prefixes. A record carries the name that its first engine gave it; names by other
// engines' hashes lie in a table of their own (other_names.hpp).
#pragma once

#include <cstdint>

#include "holder_sets.hpp"
#include "numbered_pool.hpp"

namespace kvindexer {

using Tick = uint32_t;
using BlockId = RecordId;
inline constexpr BlockId kNoBlock = kNoRecord;

#pragma pack(push, 1)
struct BlockRecord {
  uint64_t prefix;            // the prefix hash
  uint64_t name;              // mix64(engine hash): means something while `owners` is not empty
  SetId holders : 31;         // kEmptySet: the record is free
  uint32_t is_listed : 1;     // found by its prefix in its context's table
  SetId owners : 31;          // the slots that name the prefix by `name`
  uint32_t follows : 1;       // its parent lies in the record before it: found behind that one
  Tick last_seen : 30;        // in ticks of 100 ms: enough for three years
  uint32_t is_plain : 1;      // the fuzzy index has been told of it (content_feed.hpp)
  uint32_t has_namesake : 1;  // `name` may be found elsewhere too; once set it stays with the name

  bool is_expired(Tick now, Tick ttl) const { return ttl != 0 && now - last_seen >= ttl; }
};
#pragma pack(pop)

using BlockPool = NumberedPool<BlockRecord>;

}  // namespace kvindexer
