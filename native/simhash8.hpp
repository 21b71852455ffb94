// SimHashes of eight blocks of 16 tokens at once, a lane a block: about a third of the time of one by one.
//
// Needs AVX-512 with DQ (64-bit products; Skylake servers, Zen 4, and later). Elsewhere content_hashes goes
// block by block. Written with the compiler's vectors: GCC 12 takes its own intrinsics for uninitialised
// reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVINDEXER_SIMHASH8 1

namespace kvindexer {

inline bool has_simhash8() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }

// `tokens`: eight blocks of 16, one behind the other.
[[gnu::target("avx512f,avx512dq")]] inline void simhash8(const uint8_t* tokens, uint64_t* hashes) {
  using Lanes = uint64_t __attribute__((vector_size(64)));
  Lanes words[16];
  Lanes largest = {};
  for (int i = 0; i < 16; ++i) {
    Lanes word;
    for (int block = 0; block < 8; ++block) {
      uint32_t token;
      std::memcpy(&token, tokens + 64 * block + 4 * i, sizeof token);
      word[block] = token;
    }
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
  std::memcpy(hashes, &carry, sizeof carry);
}

}  // namespace kvindexer

#endif
