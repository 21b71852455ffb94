// JSON arrays of plain non-negative integers, 64 bytes at a time: where numbers end is found for a whole
// block of text at once, so that one number does not have to be read before the next one is known to begin.
//
// Why that is exact. Every byte of a block is a digit, a comma, or white space, or the text is refused; and
// the bytes that follow a digit and are none must be the commas, all of them and nothing else, so between two
// commas there is one run of digits, with white space only before it. What is refused here (a sign, text,
// white space before a comma, a leading zero, a number out of range) is not wrong: the parser of wire.hpp
// reads it again from the start, and says what is wrong where something is.
//
// Cost for 4,096 token ids, 25 kB: docs/performance-notes.md. With SSE2, which every x86-64 has, or 8 bytes
// at a time in plain words elsewhere; both are held to the parser of wire.hpp by the tests.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "wire_cursor.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvindexer::wire {

// One bit a byte of a block of 64.
struct BlockMasks {
  uint64_t digits;
  uint64_t commas;
  uint64_t spaces;
};

inline constexpr size_t kBlockBytes = 64;

struct WordMasks {
  static constexpr uint64_t kEach = 0x0101010101010101;
  static constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;

  // The high bits of the bytes of `marks`, gathered.
  static uint64_t gather(uint64_t marks) { return ((marks >> 7 & kEach) * 0x0102040810204080) >> 56; }

  static uint64_t equal(uint64_t word, char wanted) {
    const uint64_t differs = word ^ kEach * static_cast<uint8_t>(wanted);
    return ~(((differs & kLow) + kLow) | differs);
  }

  static BlockMasks of(const uint8_t* block) {
    BlockMasks masks{0, 0, 0};
    for (size_t at = 0; at < kBlockBytes; at += 8) {
      uint64_t word;
      std::memcpy(&word, block + at, sizeof(word));
      const uint64_t offset = word ^ kEach * '0';
      const uint64_t beyond = ((offset & kLow) + kEach * (0x80 - 10)) | offset;
      masks.digits |= gather(~beyond) << at;
      masks.commas |= gather(equal(word, ',')) << at;
      masks.spaces |= gather(equal(word, ' ') | equal(word, '\n') | equal(word, '\r') | equal(word, '\t'))
                      << at;
    }
    return masks;
  }
};

#if defined(__SSE2__)
struct VectorMasks {
  static uint64_t bits(__m128i marks) { return static_cast<uint32_t>(_mm_movemask_epi8(marks)); }
  static __m128i equal(__m128i bytes, char wanted) { return _mm_cmpeq_epi8(bytes, _mm_set1_epi8(wanted)); }

  static BlockMasks of(const uint8_t* block) {
    BlockMasks masks{0, 0, 0};
    for (size_t at = 0; at < kBlockBytes; at += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + at));
      const __m128i offset = _mm_sub_epi8(bytes, _mm_set1_epi8('0'));
      masks.digits |= bits(_mm_cmpeq_epi8(_mm_min_epu8(offset, _mm_set1_epi8(9)), offset)) << at;
      masks.commas |= bits(equal(bytes, ',')) << at;
      masks.spaces |= bits(_mm_or_si128(_mm_or_si128(equal(bytes, ' '), equal(bytes, '\n')),
                                        _mm_or_si128(equal(bytes, '\r'), equal(bytes, '\t'))))
                      << at;
    }
    return masks;
  }
};
using FastMasks = VectorMasks;
#else
using FastMasks = WordMasks;
#endif

inline constexpr uint64_t kPowersOfTen[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

// `digits` (1 to 8) decimal digits; 8 bytes are read.
inline uint64_t read_digits(const uint8_t* at, size_t digits) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  value = (value - 0x3030303030303030) << (8 * (8 - digits));
  value = value * 10 + (value >> 8);
  return ((value & 0x000000ff000000ff) * 0x000f424000000064 +
          ((value >> 16) & 0x000000ff000000ff) * 0x0000271000000001) >>
         32;
}

// A run of digits may be read when so many bytes follow its beginning.
inline constexpr size_t kDigitsSlack = 24;

// A run of digits as a number; not `in_reach`, bytes behind the run must not be read. False for a leading
// zero and for a number that does not fit.
template <typename Number>
bool read_run(const uint8_t* at, size_t digits, bool in_reach, Number& number) {
  if (!in_reach) {
    uint8_t copy[kDigitsSlack] = {};
    if (digits > 20) return false;
    std::memcpy(copy, at, digits);
    return read_run(copy, digits, true, number);
  }
  uint64_t value;
  if (digits - 1 < 8) {
    value = read_digits(at, digits);
  } else if (digits - 1 < 16) {
    value = read_digits(at, 8) * kPowersOfTen[digits - 8] + read_digits(at + 8, digits - 8);
  } else if (digits - 1 < 20) {
    const uint64_t high = read_digits(at, 8) * kPowersOfTen[8] + read_digits(at + 8, 8);
    const uint64_t low = read_digits(at + 16, digits - 16);
    const uint64_t power = kPowersOfTen[digits - 16];
    if (digits == 20 && high > (std::numeric_limits<uint64_t>::max() - low) / power) return false;
    value = high * power + low;
  } else {
    return false;
  }
  if (*at == '0' && digits > 1) return false;
  number = static_cast<Number>(value);
  return number == value;
}

// Where the numbers of a piece of text end, as far as the commas say. Finding the places first and reading
// the numbers then keeps the count of numbers in a block, which no branch predictor knows, out of the
// reading.
class NumberEnds {
 public:
  static constexpr size_t kPieceBytes = 2'048;

  // Of `piece` to `end` or kPieceBytes bytes. False for text that is refused.
  template <typename Masks>
  bool find(const uint8_t* piece, const uint8_t* end) {
    count_ = 0;
    for (size_t from = 0; from < kPieceBytes && piece + from < end; from += kBlockBytes) {
      const size_t left = static_cast<size_t>(end - piece) - from;
      BlockMasks masks;
      if (left >= kBlockBytes) {
        masks = Masks::of(piece + from);
      } else {
        uint8_t padded[kBlockBytes];
        std::memset(padded, ' ', sizeof(padded));
        std::memcpy(padded, piece + from, left);
        masks = Masks::of(padded);
      }
      uint64_t ends = ~masks.digits & (masks.digits << 1 | after_digit_);
      // The last number ends at the bracket and not at a comma.
      if (left < kBlockBytes) ends &= (uint64_t{1} << left) - 1;
      if (ends != masks.commas || (masks.digits | masks.commas | masks.spaces) != ~uint64_t{0}) return false;
      after_digit_ = masks.digits >> 63;
      const size_t found = static_cast<size_t>(std::popcount(ends));
      // Eight are written whether there are as many or not; the next block writes over what is too much.
      for (size_t i = 0; i < found; i += 8) {
        for (size_t k = 0; k < 8; ++k, ends &= ends - 1) {
          places_[count_ + i + k] = static_cast<uint32_t>(from + std::countr_zero(ends));
        }
      }
      count_ += found;
    }
    return true;
  }

  std::span<const uint32_t> places() const { return {places_.data(), count_}; }

 private:
  std::array<uint32_t, kPieceBytes / 2 + 8> places_;
  size_t count_ = 0;
  uint64_t after_digit_ = 0;  // 1: the byte before the next block is a digit
};

// Reads "[1,2, 3]", brackets included, into `out`, which has room for a number a comma and one more. False:
// the text is not for this one, and `out` holds nothing of use.
template <typename Masks, typename Number>
bool scan_digits(Span text, uint8_t* out, size_t& count) {
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return false;
  const uint8_t* const end = text.data() + text.size() - 1;
  if (static_cast<uint8_t>(end[-1] - '0') > 9) return false;
  const uint8_t* start = text.data() + 1;  // of the number that is next
  const uint8_t* const slack = end - std::min(kDigitsSlack, text.size() - 1);
  uint8_t* written = out;
  NumberEnds ends;
  for (const uint8_t* piece = start; piece < end; piece += NumberEnds::kPieceBytes) {
    if (!ends.find<Masks>(piece, end)) return false;
    for (const uint32_t place : ends.places()) {
      const uint8_t* const stop = piece + place;
      while (*start <= ' ') ++start;
      const size_t digits = static_cast<size_t>(stop - start);
      if (digits <= 8 && start <= slack) {
        const Number number = static_cast<Number>(read_digits(start, digits));
        if (*start == '0' && digits > 1) return false;
        std::memcpy(written, &number, sizeof(number));
      } else {
        Number number;
        if (!read_run(start, digits, start <= slack, number)) return false;
        std::memcpy(written, &number, sizeof(number));
      }
      written += sizeof(Number);
      start = stop + 1;
    }
  }
  while (*start <= ' ') ++start;
  Number number;
  if (!read_run(start, static_cast<size_t>(end - start), false, number)) return false;
  std::memcpy(written, &number, sizeof(number));
  count = static_cast<size_t>(written - out) / sizeof(number) + 1;
  return true;
}

// The commas of a text.
inline size_t count_commas(Span text) {
  const uint8_t* at = text.data();
  const uint8_t* const end = at + text.size();
  size_t count = 0;
#if defined(__SSE2__)
  while (end - at >= 16) {
    // 255 times, before a byte of the sums can be full.
    __m128i sums = _mm_setzero_si128();
    for (int i = 0; i < 255 && end - at >= 16; ++i, at += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
      sums = _mm_sub_epi8(sums, VectorMasks::equal(bytes, ','));
    }
    const __m128i halves = _mm_sad_epu8(sums, _mm_setzero_si128());
    count += static_cast<size_t>(_mm_cvtsi128_si64(halves)) +
             static_cast<size_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(halves, halves)));
  }
#endif
  return count + static_cast<size_t>(std::count(at, end, static_cast<uint8_t>(',')));
}

}  // namespace kvindexer::wire
