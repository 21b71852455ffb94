// The two scans over a NearTable that a search spends its time in: of words, and of records.
//
// A scan is given many buckets at once, each with the queries that ask there. It exists four times: with
// AVX-512 VPOPCNTDQ (Ice Lake, Zen 4 and later), where a cache line is compared in four instructions, with
// AVX2, where it takes thirty (or, for many who ask at one bucket, some forty for all that lies there), with
// POPCNT, and in portable C++. The choice is made when an index is made.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "near_nodes.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVINDEXER_NEAR_X86 1
#endif

namespace kvindexer {

struct WordScan {
  Asked asked;
  const WordHead* heads;
  const WordPool& pool;
  const uint32_t* words;  // by query: the word that a record with its SimHash would have
};

struct RecordScan {
  Asked asked;
  const Bucket* buckets;
  const RecordPool& records;
  const WordPool& pool;
};

// Forced inline: GCC 12 drops calls of functions that only prefetch. Each step reads what an earlier one
// fetched.
[[gnu::always_inline]] inline void prefetch_ahead(const WordScan& scan, const Visit* visit) {
  const WordHead* const head = scan.heads + visit[kScanAhead].bucket;
  __builtin_prefetch(head);
  __builtin_prefetch(head->words + WordHead::kWords - 1);
  uint32_t number = scan.heads[visit[10].bucket].next_number;
  __builtin_prefetch(&scan.pool.at(number));
  number = scan.pool.at(scan.heads[visit[5].bucket].next_number).next_number;
  __builtin_prefetch(&scan.pool.at(number));
}

[[gnu::always_inline]] inline void prefetch_ahead(const RecordScan& scan, const Visit* visit) {
  __builtin_prefetch(scan.buckets + visit[kScanAhead].bucket);
  const Bucket& bucket = scan.buckets[visit[8].bucket];
  for (uint32_t j = 0; j < Bucket::kInline && j * 8 < bucket.size; ++j)
    __builtin_prefetch(scan.records.simhashes(bucket.nodes[j]));
}

[[gnu::always_inline]] inline void scan_words(const WordScan& scan, std::vector<Candidate>& out) {
  for (size_t i = 0; i + kScanAhead < scan.asked.visits.size(); ++i) {
    prefetch_ahead(scan, &scan.asked.visits[i]);
    const Visit& visit = scan.asked.visits[i];
    const WordHead& head = scan.heads[visit.bucket];
    const uint32_t* words = head.words;
    uint32_t count = head.count, number = head.next_number;
    while (true) {
      for (uint32_t j = visit.begin; j < scan.asked.visits[i + 1].begin; ++j) {
        const Ask ask = scan.asked.asks[j];
        const int limit = static_cast<int>(ask.distance_max());
        for (uint32_t lane = 0; lane < count; ++lane)
          if (__builtin_popcount(words[lane] ^ scan.words[ask.query()]) <= limit)
            out.push_back({ask.query(), visit.bucket, words[lane]});
      }
      if (number == 0) break;
      const WordNode& node = scan.pool.at(number);
      words = node.words;
      count = WordNode::kWords;
      number = node.next_number;
    }
  }
}

[[gnu::always_inline]] inline void scan_records(const RecordScan& scan, std::vector<Candidate>& out) {
  for (size_t i = 0; i + kScanAhead < scan.asked.visits.size(); ++i) {
    prefetch_ahead(scan, &scan.asked.visits[i]);
    const Visit& visit = scan.asked.visits[i];
    const Bucket& bucket = scan.buckets[visit.bucket];
    for (uint32_t first = 0; first < bucket.size; first += 8) {
      const uint64_t* const simhashes = scan.records.simhashes(node_number(bucket, first / 8, scan.pool));
      const uint32_t lanes = std::min<uint32_t>(8, bucket.size - first);
      for (uint32_t j = visit.begin; j < scan.asked.visits[i + 1].begin; ++j)
        for (uint32_t lane = 0; lane < lanes; ++lane)
          if (static_cast<unsigned>(
                  __builtin_popcountll(simhashes[lane] ^ scan.asked.queries[scan.asked.asks[j].query()])) <=
              scan.asked.distance_max)
            out.push_back({scan.asked.asks[j].query(), visit.bucket, first + lane});
    }
  }
}

inline void scan_words_portable(const WordScan& scan, std::vector<Candidate>& out) { scan_words(scan, out); }
inline void scan_records_portable(const RecordScan& scan, std::vector<Candidate>& out) {
  scan_records(scan, out);
}

#ifdef KVINDEXER_NEAR_X86

#define KVINDEXER_TARGET_POPCNT [[gnu::target("popcnt")]]
#define KVINDEXER_TARGET_AVX2 [[gnu::target("avx2"), gnu::always_inline]]
#define KVINDEXER_TARGET_AVX512 [[gnu::target("avx512f,avx512vpopcntdq")]]

KVINDEXER_TARGET_POPCNT inline void scan_words_popcnt(const WordScan& scan, std::vector<Candidate>& out) {
  scan_words(scan, out);
}
KVINDEXER_TARGET_POPCNT inline void scan_records_popcnt(const RecordScan& scan, std::vector<Candidate>& out) {
  scan_records(scan, out);
}

// Out of line, so that the scans keep their registers: a hit is rare.
[[gnu::noinline]] inline void add_words(std::vector<Candidate>& out, uint32_t query, uint32_t bucket,
                                        const uint32_t* words, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) out.push_back({query, bucket, words[std::countr_zero(lanes)]});
}
[[gnu::noinline]] inline void add_records(std::vector<Candidate>& out, uint32_t query, uint32_t bucket,
                                          uint32_t first, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1)
    out.push_back({query, bucket, first + static_cast<uint32_t>(std::countr_zero(lanes))});
}

// The bits that are set in each byte, by a table of the sixteen nibbles (Mula's method).
KVINDEXER_TARGET_AVX2 inline __m256i bits_of_bytes(__m256i bytes) {
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                         0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
  const __m256i low = _mm256_set1_epi8(15);
  return _mm256_add_epi8(_mm256_shuffle_epi8(table, _mm256_and_si256(bytes, low)),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)));
}
// A bit for each of 8 words, where it differs from the pattern in fewer than `limit` bits.
KVINDEXER_TARGET_AVX2 inline uint32_t words_below(__m256i words, __m256i pattern, __m256i limit) {
  const __m256i bytes = bits_of_bytes(_mm256_xor_si256(words, pattern));
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1));
  const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, sums))));
}
// The same for 4 SimHashes.
KVINDEXER_TARGET_AVX2 inline uint32_t simhashes_below(__m256i simhashes, __m256i pattern, __m256i limit) {
  const __m256i bytes = bits_of_bytes(_mm256_xor_si256(simhashes, pattern));
  const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(limit, sums))));
}

// Where many ask at a bucket, its words are laid out anew for them: 32 at a time, a vector for each of their
// eight nibbles. Then an ask takes a shuffle and an addition a nibble, with the sixteen distances from its
// own nibble for a table, where words as they lie take three times as long.
inline constexpr uint32_t kAsksLaidOut = 4;  // from here on it pays

struct NibbleDistances {
  alignas(16) uint8_t from[16][16];
};
inline constexpr NibbleDistances kNibbleDistances = [] {
  NibbleDistances distances{};
  for (unsigned a = 0; a < 16; ++a)
    for (unsigned b = 0; b < 16; ++b) distances.from[a][b] = static_cast<uint8_t>(std::popcount(a ^ b));
  return distances;
}();

inline constexpr uint32_t kLanes = 32;
constexpr uint32_t word_of_lane(uint32_t lane) { return lane % 16 / 4 * 8 + lane / 16 * 4 + lane % 4; }
inline constexpr std::array<uint32_t, kLanes + 1> kLanesUsed = [] {  // by so many words
  std::array<uint32_t, kLanes + 1> used{};
  for (uint32_t count = 0; count <= kLanes; ++count)
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      used[count] |= static_cast<uint32_t>(word_of_lane(lane) < count) << lane;
  return used;
}();

class LaidOut {
 public:
  // Half of the lanes each. Lanes that are not used may hold anything.
  KVINDEXER_TARGET_AVX2 LaidOut(const void* first, const void* second, uint32_t used) : used_(used) {
    const __m256i* const front = static_cast<const __m256i*>(first);
    const __m256i* const back = static_cast<const __m256i*>(second);
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i a = _mm256_shuffle_epi8(_mm256_load_si256(front), by_byte);
    const __m256i b = _mm256_shuffle_epi8(_mm256_load_si256(front + 1), by_byte);
    const __m256i c = _mm256_shuffle_epi8(_mm256_load_si256(back), by_byte);
    const __m256i d = _mm256_shuffle_epi8(_mm256_load_si256(back + 1), by_byte);
    const __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    split(0, _mm256_unpacklo_epi64(ab_low, cd_low));
    split(2, _mm256_unpackhi_epi64(ab_low, cd_low));
    split(4, _mm256_unpacklo_epi64(ab_high, cd_high));
    split(6, _mm256_unpackhi_epi64(ab_high, cd_high));
  }

  // A bit for each lane whose word differs from the pattern in at most so many bits.
  KVINDEXER_TARGET_AVX2 uint32_t near(uint32_t pattern, uint32_t distance_max) const {
    // Where the table for a nibble begins: in each byte.
    uint32_t even = (pattern & 0x0F0F0F0F) << 4, odd = pattern & 0xF0F0F0F0;
    const __m256i a = _mm256_add_epi8(distances(0, first_byte(even)), distances(1, first_byte(odd)));
    const __m256i b = _mm256_add_epi8(distances(2, second_byte(even)), distances(3, second_byte(odd)));
    even >>= 16;
    odd >>= 16;
    const __m256i c = _mm256_add_epi8(distances(4, first_byte(even)), distances(5, first_byte(odd)));
    const __m256i d = _mm256_add_epi8(distances(6, second_byte(even)), distances(7, second_byte(odd)));
    const __m256i sum = _mm256_add_epi8(_mm256_add_epi8(a, b), _mm256_add_epi8(c, d));
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(distance_max + 1));
    return used_ & static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(limit, sum)));
  }

 private:
  KVINDEXER_TARGET_AVX2 void split(unsigned nibble, __m256i bytes) {
    const __m256i low = _mm256_set1_epi8(15);
    nibbles_[nibble] = _mm256_and_si256(bytes, low);
    nibbles_[nibble + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
  }
  // An instruction each, where a compiler that sees what they come from shifts and masks.
  [[gnu::always_inline]] static uint64_t first_byte(uint32_t from) {
    uint64_t byte;
    asm("movzbl %b1, %k0" : "=r"(byte) : "q"(from));
    return byte;
  }
  [[gnu::always_inline]] static uint64_t second_byte(uint32_t from) {
    uint64_t byte;
    asm("movzbl %h1, %k0" : "=R"(byte) : "Q"(from));
    return byte;
  }
  KVINDEXER_TARGET_AVX2 __m256i distances(unsigned nibble, size_t table_from) const {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(kNibbleDistances.from[0] + table_from)));
    return _mm256_shuffle_epi8(table, nibbles_[nibble]);
  }

  __m256i nibbles_[8];
  uint32_t used_;
};

[[gnu::noinline]] inline void add_lanes(std::vector<Candidate>& out, uint32_t query, uint32_t bucket,
                                        uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1)
    out.push_back({query, bucket, word_of_lane(static_cast<uint32_t>(std::countr_zero(lanes)))});
}

// Puts down the words that are near to the lower halves of the queries that ask, by their places among these.
// Up to eight words behind the first 32 are compared as they lie.
KVINDEXER_TARGET_AVX2 inline void ask_laid_out(const uint32_t* words, uint32_t count, const uint64_t* queries,
                                               const Ask* ask, const Ask* end, uint32_t bucket,
                                               std::vector<Candidate>& out) {
  if (count > 8) {
    const LaidOut laid_out(words, words + kLanes / 2, kLanesUsed[std::min(count, kLanes)]);
    for (const Ask* each = ask; each < end; ++each) {
      const uint32_t near =
          laid_out.near(static_cast<uint32_t>(queries[each->query()]), each->distance_max());
      if (__builtin_expect(near != 0, 0)) add_lanes(out, each->query(), bucket, near);
    }
    if (count <= kLanes) return;
  }
  const uint32_t first = count > 8 ? kLanes : 0;
  const __m256i rest = _mm256_load_si256(reinterpret_cast<const __m256i*>(words + first));
  const uint32_t used = (1u << (count - first)) - 1;
  for (const Ask* each = ask; each < end; ++each) {
    const __m256i pattern = _mm256_set1_epi32(static_cast<int>(queries[each->query()]));
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(each->distance_max()) + 1);
    const uint32_t near = used & words_below(rest, pattern, limit);
    if (__builtin_expect(near != 0, 0)) add_records(out, each->query(), bucket, first, near);
  }
}
inline constexpr uint32_t kLaidOutMax = kLanes + 8;

// The first lane of a head or a node is no word: it says where words go on.
[[gnu::noinline]] inline void add_lanes(std::vector<Candidate>& out, uint32_t query, uint32_t bucket,
                                        const WordHead& head, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1)
    out.push_back(
        {query, bucket, head.words[word_of_lane(static_cast<uint32_t>(std::countr_zero(lanes))) - 1]});
}
[[gnu::noinline]] inline void add_lanes(std::vector<Candidate>& out, uint32_t query, uint32_t bucket,
                                        const WordNode& first, const WordNode& second, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const uint32_t i = word_of_lane(static_cast<uint32_t>(std::countr_zero(lanes)));
    out.push_back({query, bucket, i < kLanes / 2 ? first.words[i - 1] : second.words[i - kLanes / 2 - 1]});
  }
}
inline constexpr uint32_t kNodeUsed = kLanesUsed[1 + WordNode::kWords] & ~kLanesUsed[1];
inline constexpr uint32_t kNodesUsed = kNodeUsed | (kLanesUsed[kLanes] & ~kLanesUsed[kLanes / 2 + 1]);

// All words of a bucket, for all who ask there.
KVINDEXER_TARGET_AVX2 inline void scan_laid_out(const WordScan& scan, const Visit& visit, const Ask* ask,
                                                const Ask* end, std::vector<Candidate>& out) {
  const uint32_t* const patterns = scan.words;
  const WordHead& head = scan.heads[visit.bucket];
  if (head.count < 8) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(&head));
    const uint32_t used = (2u << head.count) - 2;
    for (const Ask* each = ask; each < end; ++each) {
      const __m256i pattern = _mm256_set1_epi32(static_cast<int>(patterns[each->query()]));
      const __m256i limit = _mm256_set1_epi32(static_cast<int>(each->distance_max()) + 1);
      const uint32_t near = used & words_below(words, pattern, limit);
      if (__builtin_expect(near != 0, 0)) add_words(out, each->query(), visit.bucket, head.words - 1, near);
    }
  } else {
    const LaidOut laid_out(&head, head.words + kLanes / 2 - 1, kLanesUsed[1 + head.count] & ~kLanesUsed[1]);
    for (const Ask* each = ask; each < end; ++each) {
      const uint32_t near = laid_out.near(patterns[each->query()], each->distance_max());
      if (__builtin_expect(near != 0, 0)) add_lanes(out, each->query(), visit.bucket, head, near);
    }
  }
  for (uint32_t number = head.next_number; number != 0;) {
    const WordNode& first = scan.pool.at(number);
    const WordNode& second = scan.pool.at(first.next_number);  // node 0 where there is none
    const LaidOut laid_out(&first, &second, first.next_number == 0 ? kNodeUsed : kNodesUsed);
    for (const Ask* each = ask; each < end; ++each) {
      const uint32_t near = laid_out.near(patterns[each->query()], each->distance_max());
      if (__builtin_expect(near != 0, 0)) add_lanes(out, each->query(), visit.bucket, first, second, near);
    }
    number = second.next_number;
  }
}

// Of candidates by the lower halves of their SimHashes, from `begin` on: those by the whole.
[[gnu::noinline, gnu::target("popcnt")]] inline void keep_near(const RecordScan& scan, const Bucket& bucket,
                                                               uint32_t first, size_t begin,
                                                               std::vector<Candidate>& out) {
  size_t kept = begin;
  for (size_t i = begin; i < out.size(); ++i) {
    const uint32_t slot = first + out[i].word_or_slot;
    const uint64_t simhash = scan.records.simhashes(node_number(bucket, slot / 8, scan.pool))[slot & 7];
    const int distance = __builtin_popcountll(simhash ^ scan.asked.queries[out[i].query]);
    if (static_cast<unsigned>(distance) <= scan.asked.distance_max)
      out[kept++] = {out[i].query, out[i].bucket, slot};
  }
  out.resize(kept);
}

// All records of a bucket, for all who ask there: by the lower halves of their SimHashes first.
KVINDEXER_TARGET_AVX2 inline void scan_laid_out(const RecordScan& scan, const Visit& visit, const Ask* ask,
                                                const Ask* end, std::vector<Candidate>& out) {
  const Bucket& bucket = scan.buckets[visit.bucket];
  alignas(32) uint32_t words[kLaidOutMax];
  for (uint32_t first = 0, now; first < bucket.size; first += now) {
    const uint32_t left = bucket.size - first;
    now = left <= kLaidOutMax ? left : kLanes;
    for (uint32_t slot = 0; slot < now; slot += 8) {
      const uint64_t* const simhashes =
          scan.records.simhashes(node_number(bucket, (first + slot) / 8, scan.pool));
      const __m256 front = _mm256_load_ps(reinterpret_cast<const float*>(simhashes));
      const __m256 back = _mm256_load_ps(reinterpret_cast<const float*>(simhashes + 4));
      const __m256i lower = _mm256_castps_si256(_mm256_shuffle_ps(front, back, 0x88));
      _mm256_store_si256(reinterpret_cast<__m256i*>(words + slot), _mm256_permute4x64_epi64(lower, 0xD8));
    }
    const size_t begin = out.size();
    ask_laid_out(words, now, scan.asked.queries, ask, end, visit.bucket, out);
    if (out.size() != begin) keep_near(scan, bucket, first, begin, out);
  }
}

// A cache line of words: those in `used` lanes.
struct WordLine {
  const void* base;
  uint32_t used;
  const uint32_t* words;  // of lane 0
};
// Of a head, in its first line.
inline constexpr uint32_t kFront = 15;

KVINDEXER_TARGET_AVX2 inline void scan_line(const WordScan& scan, const Visit& visit, const Ask* end,
                                            const WordLine& line, std::vector<Candidate>& out) {
  const __m256i front = _mm256_load_si256(static_cast<const __m256i*>(line.base));
  const __m256i back = _mm256_load_si256(static_cast<const __m256i*>(line.base) + 1);
  for (const Ask* ask = scan.asked.asks.data() + visit.begin; ask < end; ++ask) {
    const __m256i pattern = _mm256_set1_epi32(static_cast<int>(scan.words[ask->query()]));
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(ask->distance_max()) + 1);
    const uint32_t near =
        line.used & (words_below(front, pattern, limit) | words_below(back, pattern, limit) << 8);
    if (__builtin_expect(near != 0, 0)) add_words(out, ask->query(), visit.bucket, line.words, near);
  }
}

[[gnu::target("avx2")]] inline void scan_words_avx2(const WordScan& scan, std::vector<Candidate>& out) {
  const Visit* const last = scan.asked.visits.data() + scan.asked.visits.size() - kScanAhead;
  const Ask* const asks = scan.asked.asks.data();
  for (const Visit* visit = scan.asked.visits.data(); visit < last; ++visit) {
    prefetch_ahead(scan, visit);
    const Ask* const end = asks + visit[1].begin;
    if (visit[1].begin - visit->begin >= kAsksLaidOut) {
      scan_laid_out(scan, *visit, asks + visit->begin, end, out);
      continue;
    }
    const WordHead& head = scan.heads[visit->bucket];
    const uint32_t used = static_cast<uint32_t>((uint64_t{2} << head.count) - 2);
    scan_line(scan, *visit, end, {&head, used & 0xFFFF, head.words - 1}, out);
    if (head.count > kFront)
      scan_line(scan, *visit, end, {head.words + kFront, used >> 16, head.words + kFront}, out);
    for (uint32_t number = head.next_number; number != 0; number = scan.pool.at(number).next_number) {
      const WordNode& node = scan.pool.at(number);
      scan_line(scan, *visit, end, {&node, 0xFFFE, node.words - 1}, out);
    }
  }
}

[[gnu::target("avx2")]] inline void scan_records_avx2(const RecordScan& scan, std::vector<Candidate>& out) {
  const Visit* const last = scan.asked.visits.data() + scan.asked.visits.size() - kScanAhead;
  const Ask* const asks = scan.asked.asks.data();
  const __m256i limit = _mm256_set1_epi64x(scan.asked.distance_max + 1);
  for (const Visit* visit = scan.asked.visits.data(); visit < last; ++visit) {
    prefetch_ahead(scan, visit);
    const Ask* const end = asks + visit[1].begin;
    if (visit[1].begin - visit->begin >= kAsksLaidOut) {
      scan_laid_out(scan, *visit, asks + visit->begin, end, out);
      continue;
    }
    const Bucket& bucket = scan.buckets[visit->bucket];
    for (uint32_t first = 0; first < bucket.size; first += 8) {
      const uint64_t* const simhashes = scan.records.simhashes(node_number(bucket, first / 8, scan.pool));
      const __m256i front = _mm256_load_si256(reinterpret_cast<const __m256i*>(simhashes));
      const __m256i back = _mm256_load_si256(reinterpret_cast<const __m256i*>(simhashes + 4));
      const uint32_t used = bucket.size - first >= 8 ? 0xFF : (1u << (bucket.size - first)) - 1;
      for (const Ask* ask = asks + visit->begin; ask < end; ++ask) {
        const __m256i pattern = _mm256_set1_epi64x(static_cast<long long>(scan.asked.queries[ask->query()]));
        const uint32_t near =
            used & (simhashes_below(front, pattern, limit) | simhashes_below(back, pattern, limit) << 4);
        if (__builtin_expect(near != 0, 0)) add_records(out, ask->query(), visit->bucket, first, near);
      }
    }
  }
}

KVINDEXER_TARGET_AVX512 inline void scan_words_avx512(const WordScan& scan, std::vector<Candidate>& out) {
  const Visit* const last = scan.asked.visits.data() + scan.asked.visits.size() - kScanAhead;
  const Ask* const asks = scan.asked.asks.data();
  const uint32_t* const patterns = scan.words;
  for (const Visit* visit = scan.asked.visits.data(); visit < last; ++visit) {
    prefetch_ahead(scan, visit);
    const Ask* const end = asks + visit[1].begin;
    const WordHead& head = scan.heads[visit->bucket];
    const uint32_t used = static_cast<uint32_t>((uint64_t{2} << head.count) - 2);
    const __m512i front = _mm512_load_si512(&head), back = _mm512_load_si512(head.words + kFront);
    const __mmask16 front_used = static_cast<__mmask16>(used), back_used = static_cast<__mmask16>(used >> 16);
    for (const Ask* ask = asks + visit->begin; ask < end; ++ask) {
      const __m512i pattern = _mm512_set1_epi32(static_cast<int>(patterns[ask->query()]));
      const __m512i limit = _mm512_set1_epi32(static_cast<int>(ask->distance_max()));
      const __mmask16 near_front = _mm512_mask_cmple_epu32_mask(
          front_used, _mm512_popcnt_epi32(_mm512_xor_si512(front, pattern)), limit);
      const __mmask16 near_back = _mm512_mask_cmple_epu32_mask(
          back_used, _mm512_popcnt_epi32(_mm512_xor_si512(back, pattern)), limit);
      if (__builtin_expect((near_front | near_back) != 0, 0))
        add_words(out, ask->query(), visit->bucket, head.words - 1, near_front | uint32_t{near_back} << 16);
    }
    for (uint32_t number = head.next_number; number != 0;) {
      const WordNode& node = scan.pool.at(number);
      const __m512i words = _mm512_load_si512(&node);
      for (const Ask* ask = asks + visit->begin; ask < end; ++ask) {
        const __m512i pattern = _mm512_set1_epi32(static_cast<int>(patterns[ask->query()]));
        const __m512i limit = _mm512_set1_epi32(static_cast<int>(ask->distance_max()));
        const __mmask16 near = _mm512_mask_cmple_epu32_mask(
            0xFFFE, _mm512_popcnt_epi32(_mm512_xor_si512(words, pattern)), limit);
        if (__builtin_expect(near != 0, 0)) add_words(out, ask->query(), visit->bucket, node.words - 1, near);
      }
      number = node.next_number;
    }
  }
}

KVINDEXER_TARGET_AVX512 inline void scan_records_avx512(const RecordScan& scan, std::vector<Candidate>& out) {
  const Visit* const last = scan.asked.visits.data() + scan.asked.visits.size() - kScanAhead;
  const Ask* const asks = scan.asked.asks.data();
  const uint64_t* const queries = scan.asked.queries;
  const __m512i limit = _mm512_set1_epi64(scan.asked.distance_max);
  for (const Visit* visit = scan.asked.visits.data(); visit < last; ++visit) {
    prefetch_ahead(scan, visit);
    const Ask* const end = asks + visit[1].begin;
    const Bucket& bucket = scan.buckets[visit->bucket];
    for (uint32_t first = 0; first < bucket.size; first += 8) {
      const __m512i simhashes =
          _mm512_load_si512(scan.records.simhashes(node_number(bucket, first / 8, scan.pool)));
      const __mmask8 used =
          static_cast<__mmask8>(bucket.size - first >= 8 ? 0xFF : (1u << (bucket.size - first)) - 1);
      for (const Ask* ask = asks + visit->begin; ask < end; ++ask) {
        const __m512i pattern = _mm512_set1_epi64(static_cast<long long>(queries[ask->query()]));
        const __mmask8 near = _mm512_mask_cmple_epu64_mask(
            used, _mm512_popcnt_epi64(_mm512_xor_si512(simhashes, pattern)), limit);
        if (__builtin_expect(near != 0, 0)) add_records(out, ask->query(), visit->bucket, first, near);
      }
    }
  }
}

#endif

// Of up to four nodes, the SimHashes that have a pattern under a mask, for two patterns.
struct Patterns {
  uint64_t mask[2];
  uint64_t pattern[2];
};
struct SomeSimHashes {
  static constexpr uint32_t kNodes = 4;
  const uint64_t* nodes[kNodes];
  uint32_t count;  // of the records in them, from the front
};
// What has each of the patterns, until it is taken out. A few at a time are not worth the branches.
struct Alike {
  static constexpr uint32_t kTaken = 96;  // of one pattern, and then there may be no room for four nodes more
  uint64_t simhashes[2][kTaken + 8 * SomeSimHashes::kNodes];
  uint32_t count[2];
};
using FindAlike = void (*)(const SomeSimHashes& from, const Patterns& patterns, Alike& out);

inline void find_alike_portable(const SomeSimHashes& from, const Patterns& patterns, Alike& out) {
  for (unsigned which = 0; which < 2; ++which) {
    uint32_t count = out.count[which];
    for (uint32_t i = 0; i < from.count; ++i) {
      const uint64_t simhash = from.nodes[i / 8][i % 8];
      out.simhashes[which][count] = simhash;
      count += (simhash & patterns.mask[which]) == patterns.pattern[which] ? 1 : 0;
    }
    out.count[which] = count;
  }
}
#ifdef KVINDEXER_NEAR_X86
[[gnu::target("avx2")]] inline void find_alike_avx2(const SomeSimHashes& from, const Patterns& patterns,
                                                    Alike& out) {
  for (unsigned which = 0; which < 2; ++which) {
    const __m256i mask = _mm256_set1_epi64x(static_cast<long long>(patterns.mask[which]));
    const __m256i pattern = _mm256_set1_epi64x(static_cast<long long>(patterns.pattern[which]));
    uint32_t lanes = 0;  // of four nodes, so that a branch for the few there are is taken seldom
    for (uint32_t first = 0; first < from.count; first += 4) {
      const __m256i simhashes =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(from.nodes[first / 8] + first % 8));
      const __m256i alike = _mm256_cmpeq_epi64(_mm256_and_si256(simhashes, mask), pattern);
      lanes |= static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(alike))) << first;
    }
    lanes &= static_cast<uint32_t>((uint64_t{1} << from.count) - 1);
    uint32_t count = out.count[which];
    for (; lanes != 0; lanes &= lanes - 1) {
      const uint32_t lane = static_cast<uint32_t>(std::countr_zero(lanes));
      out.simhashes[which][count++] = from.nodes[lane / 8][lane % 8];
    }
    out.count[which] = count;
  }
}
[[gnu::target("avx512f,popcnt")]] inline void find_alike_avx512(const SomeSimHashes& from,
                                                                const Patterns& patterns, Alike& out) {
  uint32_t count[2] = {out.count[0], out.count[1]};
  for (uint32_t first = 0; first < from.count; first += 8) {
    const __m512i simhashes = _mm512_load_si512(from.nodes[first / 8]);
    const uint32_t left = from.count - first;
    const auto used = static_cast<__mmask8>(left < 8 ? (1u << left) - 1 : 0xFF);
    for (unsigned which = 0; which < 2; ++which) {
      const __m512i mask = _mm512_set1_epi64(static_cast<long long>(patterns.mask[which]));
      const __m512i pattern = _mm512_set1_epi64(static_cast<long long>(patterns.pattern[which]));
      const __mmask8 alike = _mm512_mask_cmpeq_epi64_mask(used, _mm512_and_si512(simhashes, mask), pattern);
      _mm512_storeu_si512(out.simhashes[which] + count[which], _mm512_maskz_compress_epi64(alike, simhashes));
      count[which] += static_cast<uint32_t>(std::popcount(static_cast<unsigned>(alike)));
    }
  }
  std::copy_n(count, 2, out.count);
}
#endif

struct NearScans {
  void (*words)(const WordScan&, std::vector<Candidate>&);
  void (*records)(const RecordScan&, std::vector<Candidate>&);
  FindAlike find_alike;
};

// All that this machine runs, the fastest first.
inline std::span<const NearScans> native_scans() {
  static constexpr NearScans kScans[] = {
#ifdef KVINDEXER_NEAR_X86
      {scan_words_avx512, scan_records_avx512, find_alike_avx512},
      {scan_words_avx2, scan_records_avx2, find_alike_avx2},
      {scan_words_popcnt, scan_records_popcnt, find_alike_portable},
#endif
      {scan_words_portable, scan_records_portable, find_alike_portable},
  };
  size_t first = 0;
#ifdef KVINDEXER_NEAR_X86
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vpopcntdq")) first = 1;
  if (first == 1 && !__builtin_cpu_supports("avx2")) first = 2;
  if (first == 2 && !__builtin_cpu_supports("popcnt")) first = 3;
#endif
  return std::span<const NearScans>(kScans).subspan(first);
}

}  // namespace kvindexer
