// What eight blocks of 16 tokens are known by, a lane a block: about a third of the time of one by one.
//
// The tokens are turned round once, eight bytes at a time: lane b of column k holds tokens 2k and 2k + 1 of
// block b. XXH64 takes the columns as they are, the SimHash each half of them.
//
// Needs AVX-512 with DQ (64-bit products; Skylake servers, Zen 4, and later). Elsewhere content_hashes goes
// block by block. Written with the compiler's vectors: GCC 12 takes its own intrinsics for uninitialised
// reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "xxh64.hpp"

#if defined(__x86_64__) && (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12))
#define KVINDEXER_CONTENT_HASH8 1

namespace kvindexer {

inline bool has_content_hash8() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
}

namespace content_hash8_detail {

using Lanes = uint64_t __attribute__((vector_size(64)));

// What is in row i, lane j goes to row j, lane i.
[[gnu::target("avx512f,avx512dq"), gnu::always_inline]] inline void transpose(Lanes* rows) {
  Lanes pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i : {0, 1, 4, 5}) {
    fours[i] = __builtin_shufflevector(pairs[i], pairs[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    fours[i + 2] = __builtin_shufflevector(pairs[i], pairs[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

[[gnu::target("avx512f,avx512dq"), gnu::always_inline]] inline Lanes rotated(Lanes lanes, int bits) {
  return lanes << bits | lanes >> (64 - bits);
}

// See xxh64, for 64 bytes and seed 0.
[[gnu::target("avx512f,avx512dq"), gnu::always_inline]] inline Lanes xxh64_of(const Lanes* columns) {
  using namespace xxh64_detail;
  constexpr uint64_t kSeeds[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
  constexpr int kTurns[4] = {1, 7, 12, 18};
  Lanes lanes[4], hash = {};
  for (int i = 0; i < 4; ++i) {
    lanes[i] = rotated(columns[i] * kPrime2 + kSeeds[i], 31) * kPrime1;
    lanes[i] = rotated(columns[4 + i] * kPrime2 + lanes[i], 31) * kPrime1;
    hash += rotated(lanes[i], kTurns[i]);
  }
  for (const Lanes& lane : lanes) hash = (hash ^ rotated(lane * kPrime2, 31) * kPrime1) * kPrime1 + kPrime4;
  hash += 64;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

// See Votes (simhash.hpp), for 16 words.
[[gnu::target("avx512f,avx512dq"), gnu::always_inline]] inline Lanes simhash_of(const Lanes* columns) {
  Lanes words[16];
  Lanes largest = {};
  for (int i = 0; i < 16; ++i) {
    Lanes word = i % 2 == 0 ? columns[i / 2] & 0xFFFFFFFFu : columns[i / 2] >> 32;
    word += 0x9E3779B97F4A7C15u;  // see splitmix64 (simhash.hpp)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    words[i] = word ^ (word >> 31);
    largest = words[i] > largest ? words[i] : largest;
  }
  // Bit-sliced counters, as Votes has them: plane + a + b = plane + 2 * carry.
  Lanes planes[5] = {};
  Lanes eights[2];
  const auto add = [](Lanes& plane, const Lanes& a, const Lanes& b, Lanes& carry) {
    carry = (plane & a) | ((plane ^ a) & b);
    plane = plane ^ a ^ b;
  };
  for (int half = 0; half < 2; ++half) {
    const Lanes* const word = words + 8 * half;
    Lanes twos[4], fours[2];
    for (int i = 0; i < 4; ++i) add(planes[0], word[2 * i], word[2 * i + 1], twos[i]);
    for (int i = 0; i < 2; ++i) add(planes[1], twos[2 * i], twos[2 * i + 1], fours[i]);
    add(planes[2], fours[0], fours[1], eights[half]);
  }
  planes[3] = eights[0] ^ eights[1];
  planes[4] = eights[0] & eights[1];
  // Votes::majority for 16 votes: adds the largest again, then 32 - 9, and keeps what is carried out.
  Lanes twice = largest, carry = {};
  for (int p = 0; p < 5; ++p) {
    const Lanes sum = planes[p] ^ twice;
    twice = planes[p] & twice;
    carry = p == 3 ? sum & carry : sum | carry;
  }
  return carry;
}

}  // namespace content_hash8_detail

// `tokens`: eight blocks of 16, one behind the other.
[[gnu::target("avx512f,avx512dq")]] inline void content_hash8(const uint8_t* tokens, uint64_t* simhashes,
                                                              uint64_t* hashes) {
  using namespace content_hash8_detail;
  Lanes columns[8];
  std::memcpy(columns, tokens, sizeof columns);
  transpose(columns);
  const Lanes simhash = simhash_of(columns);
  std::memcpy(simhashes, &simhash, sizeof simhash);
  const Lanes hash = xxh64_of(columns);
  std::memcpy(hashes, &hash, sizeof hash);
}

}  // namespace kvindexer

#endif
