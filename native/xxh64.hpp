// XXH64 (Yann Collet's specification, doc/xxhash_spec.md of the xxHash project), for inputs of any length.
//
// The chain h[i] = XXH64(block i, seed = h[i-1]) is bound by the latency of one hash, about 80 cycles for 64
// bytes, which leaves most issue slots free: the index probes its table in that shadow (see
// prefix_index.hpp).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvindexer {

static_assert(std::endian::native == std::endian::little, "hashes are defined over little-endian bytes");

namespace xxh64_detail {

inline constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
inline constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
inline constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
inline constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
inline constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

template <class Word>
inline Word load(const uint8_t* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

inline uint64_t round(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

inline uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace xxh64_detail

// For a length that is known where this is written: half as many instructions.
[[gnu::always_inline]] inline uint64_t xxh64_inlined(const uint8_t* input, size_t length, uint64_t seed) {
  using namespace xxh64_detail;
  const uint8_t* const end = input + length;
  uint64_t hash;
  if (length >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    do {
      for (int lane = 0; lane < 4; ++lane) lanes[lane] = round(lanes[lane], load<uint64_t>(input + 8 * lane));
      input += 32;
    } while (end - input >= 32);
    hash =
        std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (uint64_t lane : lanes) hash = merge(hash, lane);
  } else {
    hash = seed + kPrime5;
  }
  hash += length;
  for (; end - input >= 8; input += 8)
    hash = std::rotl(hash ^ round(0, load<uint64_t>(input)), 27) * kPrime1 + kPrime4;
  if (end - input >= 4) {
    hash = std::rotl(hash ^ (load<uint32_t>(input) * kPrime1), 23) * kPrime2 + kPrime3;
    input += 4;
  }
  for (; input < end; ++input) hash = std::rotl(hash ^ (*input * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

inline uint64_t xxh64(const uint8_t* input, size_t length, uint64_t seed) {
  return xxh64_inlined(input, length, seed);
}

// A bijection of 64 bits (the finaliser of MurmurHash3): spreads keys that others chose, such as engine
// hashes.
inline uint64_t mix64(uint64_t key) {
  key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCDu;
  key = (key ^ (key >> 33)) * 0xC4CEB9FE1A85EC53u;
  return key ^ (key >> 33);
}

// The key that mix64 makes this of.
inline uint64_t unmix64(uint64_t mixed) {
  mixed = (mixed ^ (mixed >> 33)) * 0x9CB4B2F8129337DBu;
  mixed = (mixed ^ (mixed >> 33)) * 0x4F74430C22A54005u;
  return mixed ^ (mixed >> 33);
}

}  // namespace kvindexer
