// JSON arrays of token ids as digit_scan.hpp reads them, with AVX2: 64 bytes are looked at by two registers,
// and four numbers are read at once.
//
// A number is read from its end: the eight bytes before its comma are loaded, and whatever stands before the
// last that is no digit is cleared, so neither where it begins nor white space before it needs to be known.
// What is more than seven digits long, or begins with a zero, goes to `read_run`, one by one.
//
// Exact for the same reason as there; what is refused is not wrong, only for another parser. Where the
// processor has no AVX2 (`has_avx2`) digit_scan.hpp reads token ids too. Cost: docs/performance-notes.md.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "digit_scan.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define KVINDEXER_DIGIT_SCAN_AVX2 1
#include <immintrin.h>

namespace kvindexer::wire {

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}

// Where the numbers of a piece of text end, as NumberEnds finds them.
struct PieceEnds {
  std::array<uint32_t, NumberEnds::kPieceBytes / 2 + 8> places;
  size_t count = 0;
  uint64_t after_digit = 0;  // 1: the byte before the next block is a digit
};

[[gnu::target("avx2,bmi,popcnt")]] inline bool find_ends_avx2(const uint8_t* piece, const uint8_t* end,
                                                              PieceEnds& ends) {
  size_t count = 0;
  uint64_t after_digit = ends.after_digit;
  for (size_t from = 0; from < NumberEnds::kPieceBytes && piece + from < end; from += kBlockBytes) {
    const size_t left = static_cast<size_t>(end - piece) - from;
    const uint8_t* block = piece + from;
    uint8_t padded[kBlockBytes];
    if (left < kBlockBytes) {
      std::memset(padded, ' ', sizeof(padded));
      std::memcpy(padded, block, left);
      block = padded;
    }
    uint64_t digits = 0, commas = 0, spaces = 0;
    for (size_t at = 0; at < kBlockBytes; at += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + at));
      const __m256i offset = _mm256_sub_epi8(bytes, _mm256_set1_epi8('0'));
      const __m256i digit = _mm256_cmpeq_epi8(_mm256_min_epu8(offset, _mm256_set1_epi8(9)), offset);
      const __m256i comma = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(','));
      const __m256i space =
          _mm256_or_si256(_mm256_or_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(' ')),
                                          _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\n'))),
                          _mm256_or_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\r')),
                                          _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\t'))));
      digits |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(digit))} << at;
      commas |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(comma))} << at;
      spaces |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(space))} << at;
    }
    uint64_t found = ~digits & (digits << 1 | after_digit);
    // The last number ends at the bracket and not at a comma.
    if (left < kBlockBytes) found &= (uint64_t{1} << left) - 1;
    if (found != commas || (digits | commas | spaces) != ~uint64_t{0}) return false;
    after_digit = digits >> 63;
    const size_t numbers = static_cast<size_t>(std::popcount(found));
    // Eight are written whether there are as many or not; the next block writes over what is too much.
    for (size_t i = 0; i < numbers; i += 8) {
      for (size_t k = 0; k < 8; ++k, found &= found - 1) {
        ends.places[count + i + k] = static_cast<uint32_t>(from + std::countr_zero(found));
      }
    }
    count += numbers;
  }
  ends.count = count;
  ends.after_digit = after_digit;
  return true;
}

// The four numbers that end before `stops`, each with eight bytes of text before it, into `out`; false when
// one of them has to be looked at by itself.
[[gnu::target("avx2,bmi,popcnt")]] inline bool read_four_avx2(const uint8_t* piece, const uint32_t* places,
                                                              uint8_t* out) {
  const auto before = [piece](uint32_t place) {
    long long bytes;
    std::memcpy(&bytes, piece + place - 8, sizeof(bytes));
    return bytes;
  };
  const __m256i text =
      _mm256_set_epi64x(before(places[3]), before(places[2]), before(places[1]), before(places[0]));
  __m256i values = _mm256_xor_si256(text, _mm256_set1_epi8('0'));
  // All that stands before the digits, which are at the end.
  __m256i others = _mm256_cmpeq_epi8(_mm256_max_epu8(values, _mm256_set1_epi8(10)), values);
  others = _mm256_or_si256(others, _mm256_srli_epi64(others, 8));
  others = _mm256_or_si256(others, _mm256_srli_epi64(others, 16));
  others = _mm256_or_si256(others, _mm256_srli_epi64(others, 32));
  // The byte before all but the last digit is the last of the others: then the first digit is no zero.
  const __m256i first = _mm256_andnot_si256(others, _mm256_slli_epi64(others, 8));
  const __m256i zeros = _mm256_and_si256(first, _mm256_cmpeq_epi8(values, _mm256_setzero_si256()));
  const __m256i leading = _mm256_slli_epi64(zeros, 8);  // a zero that is the last byte is a number
  const __m256i full = _mm256_cmpeq_epi64(others, _mm256_setzero_si256());
  const __m256i odd = _mm256_or_si256(leading, full);
  if (!_mm256_testz_si256(odd, odd)) return false;
  values = _mm256_andnot_si256(others, values);
  const __m256i pairs = _mm256_maddubs_epi16(values, _mm256_set1_epi16(0x010a));
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00010064));
  const __m256i eights =
      _mm256_add_epi64(_mm256_mul_epu32(fours, _mm256_set1_epi64x(10'000)), _mm256_srli_epi64(fours, 32));
  const __m256i packed = _mm256_permutevar8x32_epi32(eights, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
  return true;
}

// scan_digits for numbers of 4 bytes.
[[gnu::target("avx2,bmi,popcnt")]] inline bool scan_tokens_avx2(Span text, uint8_t* out, size_t& count) {
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return false;
  const uint8_t* const end = text.data() + text.size() - 1;
  if (static_cast<uint8_t>(end[-1] - '0') > 9) return false;
  const uint8_t* start = text.data() + 1;  // of the number that is next, or of white space before it
  const uint8_t* const slack = end - std::min(kDigitsSlack, text.size() - 1);
  uint8_t* written = out;
  PieceEnds ends;
  for (const uint8_t* piece = start; piece < end; piece += NumberEnds::kPieceBytes) {
    if (!find_ends_avx2(piece, end, ends)) return false;
    for (size_t i = 0; i < ends.count;) {
      const uint8_t* const stop = piece + ends.places[i];
      if (i + 4 <= ends.count && stop - text.data() >= 8 && read_four_avx2(piece, &ends.places[i], written)) {
        start = piece + ends.places[i + 3] + 1;
        written += 4 * sizeof(uint32_t);
        i += 4;
        continue;
      }
      while (*start <= ' ') ++start;
      uint32_t number;
      if (!read_run(start, static_cast<size_t>(stop - start), start <= slack, number)) return false;
      std::memcpy(written, &number, sizeof(number));
      written += sizeof(number);
      start = stop + 1;
      ++i;
    }
  }
  while (*start <= ' ') ++start;
  uint32_t number;
  if (!read_run(start, static_cast<size_t>(end - start), false, number)) return false;
  std::memcpy(written, &number, sizeof(number));
  count = static_cast<size_t>(written - out) / sizeof(number) + 1;
  return true;
}

}  // namespace kvindexer::wire

#endif
