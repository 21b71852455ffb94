// What a block's content is known by: its SimHash, and the XXH64 (seed 0) of its tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "content_hash8.hpp"
#include "simhash.hpp"
#include "xxh64.hpp"

namespace kvindexer {

struct Content {
  uint64_t simhash;
  uint64_t hash;
};
static_assert(sizeof(Content) == 16);

// Of `blocks` blocks that lie one behind the other.
inline void content_hashes(const uint8_t* tokens, size_t blocks, size_t block_size, size_t shingle,
                           Content* out) {
  const size_t block_bytes = block_size * 4;
  size_t i = 0;
#ifdef KVINDEXER_CONTENT_HASH8
  if (block_size == 16 && shingle == 1 && has_content_hash8())
    for (; i + 8 <= blocks; i += 8) {
      uint64_t simhashes[8], hashes[8];
      content_hash8(tokens + i * block_bytes, simhashes, hashes);
      for (size_t j = 0; j < 8; ++j) out[i + j] = {simhashes[j], hashes[j]};
    }
#endif
  for (; i < blocks; ++i) {
    const uint8_t* const block = tokens + i * block_bytes;
    out[i] = {simhash(block, block_size, shingle), xxh64(block, block_bytes, 0)};
  }
}

}  // namespace kvindexer
