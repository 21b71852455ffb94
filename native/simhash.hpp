// SimHash (Charikar 2002) of a block: 64 bits such that blocks that share most tokens differ in few of them.
//
// Every shingle of `shingle` consecutive tokens casts one vote a bit: the bits of its word. A bit of the
// SimHash is set where most votes are. There are no ties: when the number of votes is even, the largest word
// votes twice. With shingles of one token the order of the tokens does not count; with longer ones it does,
// and a changed token changes that many votes.
//
// Why not "a tie gives 0": with 16 votes a fifth of all bits are ties, three fifths of the bits are then 0,
// blocks crowd in the buckets of the index, and a query was measured to take 1.8 times as long. It would find
// one changed token of 16 within distance 8 a little more often: 82 % against 78 % (two changed tokens: 39 %
// against 38 %). When the largest word does not vote at all instead, it is 78 % and 32 %.
//
// The word of a shingle: word = 0, then word = splitmix64(word + token) for its tokens in order, where
// splitmix64 is the first output of Steele, Lea and Flood's generator (2014) from that state: all 64 bits are
// mixed. docs/fuzzy-match.md has test vectors.
//
// Votes are counted for all 64 bits at once, in bit-sliced counters (plane p holds bit p of 64 counters):
// eight words take 31 operations and a carry. Sixteen tokens cost about 40 ns, and one step of a sliding
// window 10 ns, where 64 separate counters cost 400. Counters 16 bits wide bound a block to kVotesMax votes.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvindexer {

inline uint64_t splitmix64(uint64_t state) {
  uint64_t word = state + 0x9E3779B97F4A7C15u;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// `tokens` are little-endian uint32, not necessarily aligned.
inline uint64_t shingle_word(const uint8_t* tokens, size_t shingle) {
  uint64_t word = 0;
  for (size_t i = 0; i < shingle; ++i) {
    uint32_t token;
    std::memcpy(&token, tokens + 4 * i, sizeof token);
    word = splitmix64(word + token);
  }
  return word;
}

// 64 counters of up to kVotesMax votes, bit-sliced.
class Votes {
 public:
  static constexpr size_t kVotesMax = 65'535;

  explicit Votes(size_t votes) : planes_(static_cast<unsigned>(std::bit_width(votes))), votes_(votes) {
    assert(votes >= 1 && votes <= kVotesMax && "a block has between 1 and 65535 votes");
  }

  void add(uint64_t word) { add_at(0, word); }

  void add8(const uint64_t* words) {
    uint64_t twos_a, twos_b, fours_a, fours_b, eights;
    add_carry(plane_[0], words[0], words[1], twos_a);
    add_carry(plane_[0], words[2], words[3], twos_b);
    add_carry(plane_[1], twos_a, twos_b, fours_a);
    add_carry(plane_[0], words[4], words[5], twos_a);
    add_carry(plane_[0], words[6], words[7], twos_b);
    add_carry(plane_[1], twos_a, twos_b, fours_b);
    add_carry(plane_[2], fours_a, fours_b, eights);
    add_at(3, eights);
  }

  // One word goes, another comes: a window slides.
  void replace(uint64_t old_word, uint64_t new_word) {
    uint64_t borrow = old_word & ~new_word;
    uint64_t carry = new_word & ~old_word;
    for (unsigned p = 0; p < planes_; ++p) {
      const uint64_t plane = plane_[p];
      plane_[p] = plane ^ (borrow | carry);
      borrow &= ~plane;
      carry &= plane;
    }
  }

  // Bit by bit: have most votes set it? `largest` is the largest of the words. Adds it where the votes are
  // even, then 2^planes - (votes / 2 + 1), and keeps what is carried out of the last plane.
  uint64_t majority(uint64_t largest) const {
    const size_t votes = votes_ | 1;
    const uint64_t addend = (uint64_t{1} << planes_) - (votes / 2 + 1);
    uint64_t twice = votes_ % 2 == 0 ? largest : 0;
    uint64_t carry = 0;
    for (unsigned p = 0; p < planes_; ++p) {
      const uint64_t plane = plane_[p] ^ twice;
      twice &= plane_[p];
      carry = (addend >> p & 1) != 0 ? plane | carry : plane & carry;
    }
    return carry;
  }

 private:
  // plane + a + b = plane + 2 * carry
  static void add_carry(uint64_t& plane, uint64_t a, uint64_t b, uint64_t& carry) {
    const uint64_t either = plane ^ a;
    carry = (plane & a) | (either & b);
    plane = either ^ b;
  }

  void add_at(unsigned p, uint64_t carry) {
    for (; p < planes_; ++p) {
      const uint64_t plane = plane_[p];
      plane_[p] = plane ^ carry;
      carry &= plane;
    }
  }

  uint64_t plane_[17] = {};
  unsigned planes_;
  size_t votes_;
};

// `block_size` tokens from `tokens`, 1 <= shingle <= block_size.
[[gnu::always_inline]] inline uint64_t simhash_of(const uint8_t* tokens, size_t block_size, size_t shingle) {
  assert(shingle >= 1 && shingle <= block_size && "a block has at least one shingle");
  const size_t count = block_size - shingle + 1;
  Votes votes(count);
  uint64_t largest = 0;
  uint64_t words[8];
  size_t i = 0;
  for (size_t group = 0; group < count / 8; ++group, i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) {
      words[lane] = shingle_word(tokens + 4 * (i + lane), shingle);
      largest = std::max(largest, words[lane]);
    }
    votes.add8(words);
  }
  for (const size_t whole = i; i - whole < count % 8; ++i) {
    const uint64_t word = shingle_word(tokens + 4 * i, shingle);
    largest = std::max(largest, word);
    votes.add(word);
  }
  return votes.majority(largest);
}

// The same; blocks of the usual size get code of their own, a fifth faster.
inline uint64_t simhash(const uint8_t* tokens, size_t block_size, size_t shingle) {
  return block_size == 16 && shingle == 1 ? simhash_of(tokens, 16, 1)
                                          : simhash_of(tokens, block_size, shingle);
}

// The SimHash of the window at every token offset: count - block_size + 1 of them, none when there are fewer
// tokens than a block has.
inline std::vector<uint64_t> sliding_simhashes(const uint8_t* tokens, size_t count, size_t block_size,
                                               size_t shingle) {
  if (count < block_size) return {};
  std::vector<uint64_t> words(count - shingle + 1);
  for (size_t i = 0; i < words.size(); ++i) words[i] = shingle_word(tokens + 4 * i, shingle);
  const size_t votes_count = block_size - shingle + 1;
  std::vector<uint64_t> hashes(count - block_size + 1);
  std::vector<size_t> falling(words.size());  // places of the window's words that no later one exceeds
  size_t first = 0, end = 0;
  Votes votes(votes_count);
  for (size_t i = 0; i < words.size(); ++i) {
    while (end > first && words[falling[end - 1]] <= words[i]) --end;
    falling[end++] = i;
    if (i < votes_count) {
      votes.add(words[i]);
      if (i + 1 < votes_count) continue;
    } else {
      votes.replace(words[i - votes_count], words[i]);
      if (falling[first] == i - votes_count) ++first;
    }
    hashes[i + 1 - votes_count] = votes.majority(words[falling[first]]);
  }
  return hashes;
}

}  // namespace kvindexer
