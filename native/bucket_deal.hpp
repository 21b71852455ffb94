// Moves the entries of a table's buckets (id_table.hpp) to more of them, a bucket at a time.
//
// Runs of kRun neighbouring buckets become runs of kRun + 1, in the same order. So the entries of a bucket go
// to two neighbours, by a bound on what their tags say, and at any time one bucket is being filled, from at
// most two. Entries that are away from their bucket stay out: the caller has them.
//
// With AVX-512 VBMI2 (Ice Lake, Zen 4, and later) a bucket is read, parted and written in registers;
// elsewhere entry by entry, without a branch by what they are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVINDEXER_DEAL512 1
#endif

namespace kvindexer {

template <class Bucket, bool kNarrow>
class BucketDeal {
 public:
  static constexpr uint32_t kEntries = Bucket::kPlaces;
  static constexpr uint32_t kTagBits = 16;
  static constexpr uint32_t kPlaceBits = 8;

  // In place, too: `to` may be `from`. `stale_bits` of a tag stand in front of those that say where in its
  // new run an entry belongs. Calls `spare(at, tag, id)` for each that finds its bucket full, `at` counted
  // from `to`. Returns how many are there now.
  template <uint32_t kRun, class Spare>
  static uint32_t deal(const Bucket* from, uint32_t runs, Bucket* to, unsigned stale_bits, Spare spare) {
#ifdef KVINDEXER_DEAL512
    if (!kNarrow && is_wide()) return deal_wide<kRun>(from, runs, to, stale_bits, spare);
#endif
    return deal_narrow<kRun>(from, runs, to, stale_bits, spare);
  }

  // Where the entries are that are away from their bucket: 16 times the bucket, and the place in it. `to` has
  // room for 16 more than there are. Returns how many there are.
  static size_t find_away(const Bucket* buckets, uint32_t count, uint32_t* to) {
#ifdef KVINDEXER_DEAL512
    if (!kNarrow && is_wide()) return find_away_wide(buckets, count, to);
#endif
    return find_away_narrow(buckets, count, to);
  }

 private:
  static size_t find_away_narrow(const Bucket* buckets, uint32_t count, uint32_t* to) {
    uint32_t* const begin = to;
    for (uint32_t at = 0; at < count; ++at)
      for (uint32_t away = buckets[at].away; away != 0; away &= away - 1)
        *to++ = at * 16 + static_cast<uint32_t>(std::countr_zero(away));
    return static_cast<size_t>(to - begin);
  }

  template <uint32_t kRun, class Spare>
  static uint32_t deal_narrow(const Bucket* from, uint32_t runs, Bucket* to, unsigned stale_bits,
                              Spare spare) {
    uint32_t dealt = 0;
    for (uint32_t run = runs; run-- > 0;) {
      Bucket buckets[kRun];
      std::memcpy(buckets, from + run * kRun, sizeof(buckets));
      uint32_t at = run * (kRun + 1);
      const auto lay_down = [&](const Hand& hand) {
        for (uint32_t place = kEntries; place < hand.count; ++place)
          spare(at, hand.tags[place], hand.ids[place]);
        const uint32_t count = std::min(hand.count, kEntries);
        to[at++].fill(count, hand.tags, hand.ids);
        dealt += count;
      };
      Hand hands[kRun + 1];
      for (uint32_t place = 0; place < kRun; ++place) {
        part(buckets[place], stale_bits, bound<kRun>(place), hands[place], hands[place + 1]);
        lay_down(hands[place]);
      }
      lay_down(hands[kRun]);
    }
    return dealt;
  }

  // Entries on their way to a bucket, and room for one that is not meant.
  struct Hand {
    uint32_t count = 0;
    uint16_t tags[2 * kEntries + 1] = {};
    uint32_t ids[2 * kEntries + 1] = {};
  };

  // What the bits behind the stale ones are, at least, in an entry that goes to the second of its two.
  template <uint32_t kRun>
  static constexpr uint16_t bound(uint32_t place) {
    return static_cast<uint16_t>((((place + 1) << kPlaceBits) + kRun) / (kRun + 1)
                                 << (kTagBits - kPlaceBits));
  }

  static uint32_t own_entries(const Bucket& bucket) {  // bit per entry
    return ((1u << bucket.count) - 1) & ~uint32_t{bucket.away};
  }

  static void part(const Bucket& bucket, unsigned stale_bits, uint32_t bound, Hand& here, Hand& behind) {
    uint32_t ids[kEntries];
    bucket.unpack(ids);
    const uint32_t own = own_entries(bucket);
    uint32_t to_here = here.count, to_behind = behind.count;
    for (uint32_t place = 0; place < kEntries; ++place) {
      const uint16_t tag = bucket.tags[place];
      const uint32_t is_own = own >> place & 1;
      const uint32_t is_behind = static_cast<uint16_t>(tag << stale_bits) >= bound ? 1 : 0;
      here.tags[to_here] = tag;
      here.ids[to_here] = ids[place];
      behind.tags[to_behind] = tag;
      behind.ids[to_behind] = ids[place];
      to_here += is_own & ~is_behind;
      to_behind += is_own & is_behind;
    }
    for (Hand* hand : {&here, &behind}) {  // what was written for the other
      const uint32_t end = hand == &here ? to_here : to_behind;
      hand->count = end;
      hand->tags[end] = 0;
      hand->ids[end] = 0;
    }
  }

#ifdef KVINDEXER_DEAL512
#define KVINDEXER_TARGET_VBMI2 gnu::target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")
  // Only forms with a mask, and the compiler's operators: GCC 12 takes the others for uninitialised reads.
  static constexpr size_t kIdsFrom = 25;  // byte of a bucket
  static bool is_wide() {
    static const bool is = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                           __builtin_cpu_supports("avx512vbmi2");
    return is;
  }

  [[KVINDEXER_TARGET_VBMI2]] static size_t find_away_wide(const Bucket* buckets, uint32_t count,
                                                          uint32_t* to) {
    using Lanes = uint32_t __attribute__((vector_size(64)));
    const Lanes places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint32_t* const begin = to;
    for (uint32_t at = 0; at < count; ++at) {
      const uint32_t away = buckets[at].away;
      _mm512_storeu_si512(
          to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(away), (__m512i)(places + at * 16)));
      to += __builtin_popcount(away);
    }
    return static_cast<size_t>(to - begin);
  }

  using Quads = uint64_t __attribute__((vector_size(64)));

  struct Wide {  // entries, zeros behind them
    __m256i tags;
    __m512i ids;
    uint32_t count;
  };

  struct Moves {  // of bytes
    alignas(64) uint8_t unpack[64] = {};
    alignas(64) uint8_t pack[64] = {};
    constexpr Moves() {
      for (uint32_t place = 0; place < kEntries; ++place)
        for (uint32_t byte = 0; byte < 4; ++byte)
          unpack[4 * place + byte] = static_cast<uint8_t>(kIdsFrom + place * 7 / 2 + byte);
      for (uint32_t byte = 0; byte < sizeof(Bucket) - kIdsFrom; ++byte)
        pack[kIdsFrom + byte] = static_cast<uint8_t>(byte / 7 * 8 + byte % 7);
    }
  };

  [[KVINDEXER_TARGET_VBMI2, gnu::always_inline]] static inline Wide keep(uint32_t which, __m256i tags,
                                                                         __m512i ids) {
    return {_mm256_maskz_compress_epi16(static_cast<__mmask16>(which), tags),
            _mm512_maskz_compress_epi32(static_cast<__mmask16>(which), ids),
            static_cast<uint32_t>(__builtin_popcount(which))};
  }

  [[KVINDEXER_TARGET_VBMI2, gnu::always_inline]] static inline void write(Bucket* to, const Wide& wide,
                                                                          __m512i pack) {
    const Quads ids = (Quads)wide.ids;
    const Quads pairs = (ids & 0xFFFFFFFFu) | ids >> 32 << 28;
    const __m512i packed = _mm512_maskz_permutexvar_epi8(~uint64_t{0} << kIdsFrom, pack, (__m512i)pairs);
    const __m512i line = packed | _mm512_maskz_broadcast_i64x4(0x0F, wide.tags);
    _mm512_store_si512(
        to, _mm512_mask_set1_epi16(line, __mmask32{1} << kEntries, static_cast<short>(wide.count)));
  }

  template <uint32_t kRun, class Spare>
  [[KVINDEXER_TARGET_VBMI2]] static uint32_t deal_wide(const Bucket* from, uint32_t runs, Bucket* to,
                                                       unsigned stale_bits, Spare spare) {
    static constexpr Moves kMoves;
    const __m512i unpack = _mm512_load_si512(kMoves.unpack);
    const __m512i pack = _mm512_load_si512(kMoves.pack);
    const __m512i odd = _mm512_maskz_set1_epi32(0xAAAA, 4);
    const __m512i id_bits = _mm512_maskz_set1_epi32(0xFFFF, (1 << 28) - 1);
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(stale_bits));
    uint32_t dealt = 0;
    for (uint32_t run = runs; run-- > 0;) {
      __m512i lines[kRun];
      uint32_t own[kRun];
      for (uint32_t place = 0; place < kRun; ++place) {
        const Bucket& bucket = from[run * kRun + place];
        lines[place] = _mm512_load_si512(&bucket);
        own[place] = own_entries(bucket);
      }
      uint32_t at = run * (kRun + 1);
      Wide held = {_mm256_setzero_si256(), _mm512_setzero_si512(), 0};
#pragma GCC unroll 3
      for (uint32_t place = 0; place < kRun; ++place, ++at) {
        const __m512i line = lines[place];
        const __m256i tags = _mm512_maskz_extracti64x4_epi64(0xF, line, 0);
        const __m512i shifted = _mm512_maskz_permutexvar_epi8(~uint64_t{0}, unpack, line);
        const __m512i ids = _mm512_maskz_srlv_epi32(0xFFFF, shifted, odd) & id_bits;
        const uint32_t is_behind = _mm256_cmpge_epu16_mask(
            _mm256_sll_epi16(tags, shift), _mm256_set1_epi16(static_cast<short>(bound<kRun>(place))));
        const Wide here = keep(own[place] & ~is_behind, tags, ids);
        const auto after = static_cast<__mmask16>(0xFFFFu << held.count);
        held.tags = _mm256_mask_expand_epi16(held.tags, after, here.tags);
        held.ids = _mm512_mask_expand_epi32(held.ids, after, here.ids);
        if (held.count + here.count > kEntries) [[unlikely]] {
          constexpr __mmask16 kAll = (1u << kEntries) - 1;
          uint16_t spare_tags[16];
          uint32_t spare_ids[16];
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(spare_tags), here.tags);
          _mm512_storeu_si512(spare_ids, here.ids);
          for (uint32_t i = kEntries - held.count; i < here.count; ++i)
            spare(at, spare_tags[i], spare_ids[i]);
          held.tags = _mm256_maskz_mov_epi16(kAll, held.tags);
          held.ids = _mm512_maskz_mov_epi32(kAll, held.ids);
        }
        held.count = std::min(held.count + here.count, kEntries);
        write(to + at, held, pack);
        dealt += held.count;
        held = keep(own[place] & is_behind, tags, ids);
      }
      write(to + at, held, pack);
      dealt += held.count;
    }
    return dealt;
  }
#undef KVINDEXER_TARGET_VBMI2
#endif
};

}  // namespace kvindexer
