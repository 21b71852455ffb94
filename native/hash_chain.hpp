// Prefix hashes: h[0] = XXH64(block 0, seed of the context), h[i] = XXH64(block i, seed = h[i-1]), where a
// block's bytes are its token ids as little-endian uint32 and then its canonical extra keys, if any.
// docs/api.md has test vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "xxh64.hpp"

namespace kvindexer {

// Canonical extra keys of the blocks of one call: block i has bytes[ends[i-1], ends[i]); blocks behind the
// last have none.
struct ExtraKeys {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> ends;

  std::span<const uint8_t> of(size_t block) const {
    if (block >= ends.size()) return {};
    const uint32_t begin = block == 0 ? 0 : ends[block - 1];
    return {bytes.data() + begin, ends[block] - begin};
  }
};

// The prefix hashes of a token array, in order.
class HashChain {
 public:
  HashChain(uint64_t seed, const uint8_t* tokens, size_t block_bytes, const ExtraKeys* extra)
      : hash_(seed), tokens_(tokens), block_bytes_(block_bytes), extra_(extra) {}

  uint64_t next() {
    const std::span<const uint8_t> extra =
        extra_ == nullptr ? std::span<const uint8_t>{} : extra_->of(block_);
    if (extra.empty()) {
      hash_ = block_bytes_ == kUsualBytes ? xxh64_inlined(tokens_, kUsualBytes, hash_)
                                          : xxh64(tokens_, block_bytes_, hash_);
    } else {
      joined_.assign(tokens_, tokens_ + block_bytes_);
      joined_.insert(joined_.end(), extra.begin(), extra.end());
      hash_ = xxh64(joined_.data(), joined_.size(), hash_);
    }
    prefetch();
    tokens_ += block_bytes_;
    ++block_;
    return hash_;
  }

 private:
  static constexpr size_t kUsualBytes = 64;  // of a block: 16 tokens
  static constexpr size_t kLineBytes = 64;
  // The tokens come in order, but the hardware's own prefetch ends with each page of them.
  static constexpr size_t kPrefetchBytes = 1024;

  // As far ahead as that, be it behind the last token: an address that is never read is no pointer.
  void prefetch() const {
    const uintptr_t ahead = reinterpret_cast<uintptr_t>(tokens_) + kPrefetchBytes;
    for (size_t line = 0; line < block_bytes_; line += kLineBytes)
      __builtin_prefetch(reinterpret_cast<const void*>(ahead + line));
  }

  uint64_t hash_;
  const uint8_t* tokens_;
  size_t block_bytes_;
  const ExtraKeys* extra_;
  size_t block_ = 0;
  std::vector<uint8_t> joined_;
};

// Hashes that were computed elsewhere, in order.
class HashList {
 public:
  explicit HashList(const uint8_t* hashes) : at_(hashes) {}
  uint64_t next() {
    const uint64_t hash = xxh64_detail::load<uint64_t>(at_);
    at_ += 8;
    return hash;
  }

 private:
  const uint8_t* at_;
};

}  // namespace kvindexer
