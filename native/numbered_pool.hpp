// Records of one kind, numbered from 1, in chunks that never move.
//
// Why. What is stored together gets neighbouring numbers, so whoever walks along finds the next one in the
// next record: no probe of a hash table, no cache miss that the hardware does not foresee. The hash tables
// (id_table.hpp) hold numbers only, which is what makes them cheap to grow.
//
// Numbers of freed records are used again, in ascending order, whatever the order in which they were freed:
// so what is stored together finds neighbours in freed room too. A chunk without records goes back to the
// system.
//
// Cost: what a record takes and a bit, no gaps but those of freed ones; a new chunk is one system call (about
// 10 us).
//
// A Record is trivially copyable and, when it is free, all zero.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pages.hpp"

namespace kvindexer {

using RecordId = uint32_t;
inline constexpr RecordId kNoRecord = 0;

template <class Record>
class NumberedPool {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  static constexpr uint32_t kChunk = 2048;  // records: whole pages without a byte left over
  static constexpr uint64_t kIdsMax = (uint64_t{1} << 28) - 1;
  static constexpr uint64_t kRecordsMax = kIdsMax - kChunk;

  size_t size() const { return size_; }
  size_t bytes() const {
    return mapped_ * kChunkPages * Pages::kPageBytes + chunks_.capacity() * sizeof(Chunk);
  }
  bool is_full() const { return size_ >= kRecordsMax; }
  RecordId end() const { return static_cast<RecordId>(bases_.size() * kChunk); }  // numbers are below

  Record& operator[](RecordId id) const { return bases_[id / kChunk][id % kChunk]; }

  // The record with this number if it lies in memory; whether it is free is for the caller to see.
  Record* peek(RecordId id) const {
    const size_t chunk = id / kChunk;
    return chunk < bases_.size() && bases_[chunk] != nullptr ? &bases_[chunk][id % kChunk] : nullptr;
  }

  void prefetch(RecordId id) const { __builtin_prefetch(&(*this)[id]); }

  // All zero: the caller fills it in at once, so that it does not look free. Throws std::bad_alloc, and then
  // there is none.
  RecordId add() {
    if (open_.empty()) open_chunk();
    const uint32_t number = open_.back();
    Chunk& chunk = chunks_[number];
    const uint32_t place = chunk.take();
    ++chunk.live;
    ++size_;
    if (chunk.live == capacity(number)) {
      chunk.is_open = false;
      open_.pop_back();
    }
    return number * kChunk + place;
  }

  void free(RecordId id) noexcept {
    const uint32_t number = id / kChunk;
    Chunk& chunk = chunks_[number];
    bases_[number][id % kChunk] = Record{};
    chunk.free[id % kChunk / 64] |= uint64_t{1} << id % 64;
    --size_;
    if (--chunk.live == 0 && open_.size() > 1) return close_chunk(number);
    if (!chunk.is_open) open_.push_back(number);
    chunk.is_open = true;
  }

  // From number `cursor` on (0 at first), until `visit(id, record)` says that it has had enough: free records
  // too, and null for a whole chunk that is not in memory. True when there is no more. The visit may free;
  // where it throws, the cursor stays.
  template <class Visit>  // bool(RecordId, Record*)
  bool walk(uint64_t& cursor, Visit visit) const {
    while (cursor < end()) {
      const auto id = static_cast<RecordId>(cursor);
      Record* const record = peek(id);
      const bool goes_on = visit(id, record);
      cursor = record == nullptr ? chunk_after(id) : id + 1;
      if (!goes_on) return false;
    }
    return true;
  }

  // The same for about `visits_max` numbers, the last of them first; returns how many were looked at.
  template <class Visit>  // void(RecordId, Record*)
  size_t walk_back(uint64_t& cursor, size_t visits_max, Visit visit) const {
    const uint64_t from = cursor;
    size_t visits = 0;
    while (cursor < end() && visits < visits_max) {
      const uint64_t chunk_end = chunk_after(static_cast<RecordId>(cursor));
      const bool is_here = bases_[cursor / kChunk] != nullptr;
      const uint64_t to = is_here ? std::min<uint64_t>(chunk_end, cursor + (visits_max - visits)) : chunk_end;
      visits += is_here ? to - cursor : 1;
      cursor = to;
    }
    for (uint64_t at = cursor; at > from;) {
      const auto id = static_cast<RecordId>(--at);
      if (Record* const record = peek(id); record != nullptr)
        visit(id, *record);
      else
        at = std::max<uint64_t>(from, id / kChunk * kChunk);
    }
    return visits;
  }

 private:
  static constexpr size_t kChunkPages = kChunk * sizeof(Record) / Pages::kPageBytes;
  static_assert(kChunk * sizeof(Record) % Pages::kPageBytes == 0);

  struct Chunk {
    Pages memory;
    std::array<uint64_t, kChunk / 64> free;  // bit per place
    uint32_t word = 0;                       // of `free`, that gave the last place
    uint32_t live = 0;
    bool is_open = false;  // listed in open_

    // The first free place from that word on, or from the beginning; there is one.
    uint32_t take() {
      while (free[word] == 0) word = (word + 1) % free.size();
      const auto bit = static_cast<uint32_t>(std::countr_zero(free[word]));
      free[word] &= free[word] - 1;
      return word * 64 + bit;
    }
  };

  // The first number of the next chunk.
  static RecordId chunk_after(RecordId id) { return (id / kChunk + 1) * kChunk; }

  // Number 0 means no record: the first place of the first chunk is never given out.
  static uint32_t capacity(uint32_t number) { return number == 0 ? kChunk - 1 : kChunk; }

  void open_chunk() {
    if (unmapped_.empty()) {
      if (bases_.size() == chunks_.size()) bases_.push_back(nullptr);
      open_.reserve(bases_.size());  // all of them, one day: what `free` does never fails
      unmapped_.reserve(bases_.size());
      chunks_.emplace_back();
      unmapped_.push_back(static_cast<uint32_t>(chunks_.size() - 1));
    }
    const uint32_t number = unmapped_.back();  // until there is memory for all of it
    Chunk& chunk = chunks_[number];
    chunk.memory.renew(kChunkPages);  // from here on nothing fails
    open_.push_back(number);
    unmapped_.pop_back();
    bases_[number] = static_cast<Record*>(chunk.memory.base());
    chunk.free.fill(UINT64_MAX);
    if (number == 0) chunk.free[0] &= ~uint64_t{1};
    chunk.word = 0;
    chunk.is_open = true;
    ++mapped_;
  }

  void close_chunk(uint32_t number) {
    unmapped_.push_back(number);
    Chunk& chunk = chunks_[number];
    if (chunk.is_open) std::erase(open_, number);
    chunk.is_open = false;
    chunk.memory.resize(0);
    bases_[number] = nullptr;
    --mapped_;
  }

  std::vector<Chunk> chunks_;
  std::vector<Record*> bases_;  // of the chunks, null where none lies in memory
  std::vector<uint32_t> open_;  // chunks with room, the one in use last
  std::vector<uint32_t> unmapped_;
  size_t size_ = 0;
  size_t mapped_ = 0;
};

}  // namespace kvindexer
