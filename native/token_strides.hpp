// Token ids of a msgpack array, four places at a time.
//
// Where a msgpack integer ends says its first byte, so each one has to be looked at before the next one is
// known to begin: a chain of dependent loads, which costs more than all the rest. So four readers walk the
// array at once, three of them from a guessed place: each steps forward until it is in step with the values,
// as good as always within a few bytes, and whether it was is known when the reader behind it arrives exactly
// at the place where it began counting. When it does not, or a value is not a plain token id (a negative or
// wide one, a float, null), the whole array is refused and read again one by one by the parser of wire.hpp,
// which says what is wrong where something is.
//
// Cost for 4,096 tokens: docs/performance-notes.md. Scratch is on the stack, for one slice of kSlice values
// at a time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "wire_cursor.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define KVINDEXER_TOKEN_STRIDES_SSSE3 1
#include <immintrin.h>
#endif

namespace kvindexer::wire {

// How a value of each first byte is read: its size in bytes, 0 when it is not for this reader, and how far
// the first 8 bytes are shifted left and then right.
struct Stride {
  uint8_t size;
  uint8_t left;
  uint8_t right;
};

inline constexpr std::array<Stride, 256> kStrides = [] {
  std::array<Stride, 256> strides{};
  for (size_t byte = 0; byte < 0x80; ++byte) strides[byte] = {1, 0, 56};
  strides[0xcc] = {2, 8, 56};
  strides[0xcd] = {3, 8, 48};
  strides[0xce] = {5, 8, 32};
  return strides;
}();

inline constexpr size_t kReadAhead = 8;  // bytes that a reader looks at
inline constexpr size_t kStrideMax = 5;
inline constexpr size_t kFallInSteps = 16;

#ifdef KVINDEXER_TOKEN_STRIDES_SSSE3
inline constexpr size_t kTripleBytes = 16;  // that are looked at for three values
inline constexpr size_t kWriteAhead = 4;    // and written beyond them

// The size of a value by its first byte, and which of the four sizes that is.
struct Sized {
  uint8_t size;
  uint8_t code;
};

inline constexpr uint8_t kNoToken = 0x80;  // the code of what is not for these readers
inline constexpr std::array<uint8_t, 4> kSizes{1, 2, 3, 5};

inline constexpr std::array<Sized, 256> kSized = [] {
  std::array<Sized, 256> all{};
  for (size_t byte = 0; byte < all.size(); ++byte) {
    all[byte] = {1, kNoToken};
    for (uint8_t code = 0; code < kSizes.size(); ++code)
      if (kStrides[byte].size == kSizes[code]) all[byte] = {kSizes[code], code};
  }
  return all;
}();

// By the codes of three values: where the bytes of each come from, the lowest first. A high bit gives a zero.
inline constexpr auto kTriples = [] {
  struct alignas(16) Places : std::array<uint8_t, 16> {};
  std::array<Places, 64> all{};
  for (size_t codes = 0; codes < all.size(); ++codes) {
    all[codes].fill(0x80);
    size_t from = 0;
    for (size_t value = 0; value < 3; ++value) {
      const size_t size = kSizes[codes >> (2 * value) & 3];
      // The first byte is the value itself only where it stands alone.
      for (size_t i = 0; i < std::max<size_t>(size - 1, 1); ++i)
        all[codes][value * 4 + i] = static_cast<uint8_t>(from + size - 1 - i);
      from += size;
    }
  }
  return all;
}();
#else
inline constexpr size_t kWriteAhead = 0;
#endif

// One of the readers.
struct Strider {
  const uint8_t* at;
  uint8_t* out;  // 4 bytes a value

  // The size of the value that was read; 0, and no step, at one that is not for this reader.
  size_t step() {
    uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    word = __builtin_bswap64(word);
    const Stride stride = kStrides[word >> 56];
    const uint32_t token = static_cast<uint32_t>(word << stride.left >> stride.right);
    std::memcpy(out, &token, sizeof(token));
    out += sizeof(token);
    at += stride.size;
    return stride.size;
  }

  // Goes forward until it is most likely at the beginning of a value.
  void fall_in() {
    for (size_t i = 0; i < kFallInSteps; ++i) at += std::max<size_t>(kStrides[*at].size, 1);
  }

  // Steps until `stop` or past it. False when it stands at a value that is not for it.
  bool walk_to(const uint8_t* stop, const uint8_t* room_end) {
    while (at < stop) {
      if (out == room_end || step() == 0) return false;
    }
    return true;
  }

  bool walk(size_t count) {
    for (; count != 0; --count) {
      if (step() == 0) return false;
    }
    return true;
  }
};

using Others = std::array<Strider, 3>;
using Began = std::array<const uint8_t*, 3>;  // where each of them begins to count

// All four step side by side, at most `steps_max` times, while none of them can come to where the next one
// began. False when a value is not for its reader; that of the last one may be past the array, so it says so
// in `last_fine` and that is all.
inline bool walk_together_plainly(Strider& first, Others& others, const Began& began, const uint8_t* last,
                                  size_t steps_max, bool& last_fine) {
  constexpr size_t kTogether = 8;
  constexpr size_t kReach = kTogether * kStrideMax;
  for (size_t steps = 0; steps + kTogether <= steps_max; steps += kTogether) {
    if (first.at + kReach > began[0] || others[0].at + kReach > began[1] ||
        others[1].at + kReach > began[2] || others[2].at + kReach > last) {
      break;
    }
    bool fine = true;
    for (size_t i = 0; i < kTogether; ++i) {
      fine &= first.step() != 0;
      fine &= others[0].step() != 0;
      fine &= others[1].step() != 0;
      last_fine &= others[2].step() != 0;
    }
    if (!fine) return false;
  }
  return true;
}

#ifdef KVINDEXER_TOKEN_STRIDES_SSSE3
// Reads three values: their sizes are looked up one after the other, and all their bytes are put in place by
// one shuffle. kNoToken in what it returns: one of them is not for this reader.
[[gnu::target("ssse3")]] inline uint32_t step_triple(Strider& reader) {
  const uint8_t* const at = reader.at;
  const Sized one = kSized[at[0]];
  const Sized two = kSized[at[one.size]];
  const size_t behind = size_t{one.size} + two.size;
  const Sized three = kSized[at[behind]];
  const size_t places = (one.code | two.code << 2 | three.code << 4) % kTriples.size();
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(kTriples[places].data()));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(reader.out), _mm_shuffle_epi8(bytes, shuffle));
  reader.out += 3 * sizeof(uint32_t);
  reader.at = at + behind + three.size;
  return one.code | two.code | three.code;
}

// As walk_together_plainly, three values a step.
[[gnu::target("ssse3")]] inline bool walk_together_ssse3(Strider& first, Others& others, const Began& began,
                                                         const uint8_t* last, size_t steps_max,
                                                         bool& last_fine) {
  constexpr size_t kTogether = 9;
  constexpr size_t kReach = kTogether * kStrideMax + kTripleBytes;
  uint32_t codes = 0, last_codes = 0;
  for (size_t steps = 0; steps + kTogether <= steps_max; steps += kTogether) {
    if (first.at + kReach > began[0] || others[0].at + kReach > began[1] ||
        others[1].at + kReach > began[2] || others[2].at + kReach > last) {
      break;
    }
    for (size_t i = 0; i < kTogether; i += 3) {
      codes |= step_triple(first);
      codes |= step_triple(others[0]);
      codes |= step_triple(others[1]);
      last_codes |= step_triple(others[2]);
    }
    if ((codes & kNoToken) != 0) return false;
  }
  last_fine = (last_codes & kNoToken) == 0;
  return true;
}
#endif

inline constexpr size_t kSlice = 4'096;
inline constexpr size_t kProbed = 128;  // values that say how long one is about
inline constexpr size_t kSliceMin = 768;

// `count` values, kSliceMin to kSlice, at the cursor. False: refused, and the cursor is where it was.
inline bool stride_slice(Cursor& cursor, size_t count, uint8_t* out) {
  constexpr size_t kRoom = kSlice / 2 * sizeof(uint32_t) + kWriteAhead;  // of one reader
  std::array<uint8_t, 3 * kRoom> scratch;
  const uint8_t* const last = cursor.end - kReadAhead;
  Strider first{cursor.at, out};
  if (!first.walk(kProbed)) return false;
  const size_t quarter = static_cast<size_t>(first.at - cursor.at) * (count - kProbed) / kProbed / 4;
  // The last reader must not be the first to arrive, so the others get a little less.
  const size_t distance = quarter - quarter / 24;
  if (static_cast<size_t>(last - first.at) < 3 * distance + kFallInSteps * kStrideMax) return false;
  Others others;
  Began began;
  for (size_t i = 0; i < 3; ++i) {
    others[i] = {first.at + (i + 1) * distance, scratch.data() + i * kRoom};
    others[i].fall_in();
    began[i] = others[i].at;
  }
  bool last_fine = true;
#ifdef KVINDEXER_TOKEN_STRIDES_SSSE3
  const auto walk_together = __builtin_cpu_supports("ssse3") ? walk_together_ssse3 : walk_together_plainly;
#else
  const auto walk_together = walk_together_plainly;
#endif
  if (!walk_together(first, others, began, last, count / 2, last_fine)) return false;
  const uint8_t* const out_end = out + count * sizeof(uint32_t);
  if (!first.walk_to(began[0], out_end) || first.at != began[0]) return false;
  for (size_t i = 0; i < 2; ++i) {
    const uint8_t* const begin = scratch.data() + i * kRoom;
    if (!others[i].walk_to(began[i + 1], begin + kRoom) || others[i].at != began[i + 1]) return false;
    const size_t size = static_cast<size_t>(others[i].out - begin);
    if (size > static_cast<size_t>(out_end - first.out)) return false;
    std::memcpy(first.out, begin, size);
    first.out += size;
  }
  // What the last reader has is taken when it stopped inside of the array; else the end is read once more.
  const uint8_t* const begin = scratch.data() + 2 * kRoom;
  const size_t size = static_cast<size_t>(others[2].out - begin);
  first.at = began[2];
  if (size <= static_cast<size_t>(out_end - first.out) && last_fine) {
    std::memcpy(first.out, begin, size);
    first.out += size;
    first.at = others[2].at;
  }
  while (first.out != out_end) {
    if (first.at > last || first.step() == 0) return false;
  }
  cursor.at = first.at;
  return true;
}

// Reads up to `count` values at the cursor, 4 bytes each, and says how many: the parser of wire.hpp reads on.
inline size_t stride_tokens(Cursor& cursor, size_t count, uint8_t* out) {
  size_t done = 0;
  // Behind as many values as a reader looks ahead in bytes, there is nothing left to look at.
  while (count - done >= kSliceMin + kReadAhead && cursor.left() > kReadAhead + kProbed * kStrideMax) {
    const size_t values = std::min(count - done - kReadAhead, kSlice);
    if (!stride_slice(cursor, values, out + done * sizeof(uint32_t))) break;
    done += values;
  }
  return done;
}

}  // namespace kvindexer::wire
