// The records of all prefixes, numbered, in chunks that never move.
//
// Why. Blocks that an engine stores together get neighbouring numbers, so whoever walks along a chain finds
// the next block in the next record: no probe of a hash table, no cache miss that the hardware does not
// foresee. The hash tables (id_table.hpp) hold numbers only, which is what makes them cheap to grow.
//
// A record carries the name that its first engine gave it; names by other engines' hashes lie in a table of
// their own (prefix_index.hpp). Numbers of freed records are used again, last freed first: an engine evicts a
// chain from its tail, so the next chain gets ascending numbers again. A chunk without records goes back to
// the system.
//
// Cost: 28 bytes a record, no gaps but those of freed ones; a new chunk is one system call (about 10 us).
#pragma once

#include <cstdint>
#include <vector>

#include "holder_sets.hpp"
#include "pages.hpp"

namespace kvindexer {

using Tick = uint32_t;
using BlockId = uint32_t;
inline constexpr BlockId kNoBlock = 0;

#pragma pack(push, 1)
struct BlockRecord {
  uint64_t prefix;            // the prefix hash
  uint64_t name;              // mix64(engine hash): means something while `owners` is not empty
  SetId holders;              // kEmptySet: the record is free
  SetId owners;               // the slots that name the prefix by `name`
  Tick last_seen : 30;        // in ticks of 100 ms: enough for three years
  uint32_t is_plain : 1;      // the fuzzy index has been told of it (content_feed.hpp)
  uint32_t has_namesake : 1;  // `name` may be found elsewhere too; once set it stays with the name

  bool is_expired(Tick now, Tick ttl) const { return ttl != 0 && now - last_seen >= ttl; }
};
#pragma pack(pop)

class BlockPool {
 public:
  static constexpr uint32_t kChunk = 2048;  // records: 14 pages of 4 KiB without a byte left over
  static constexpr uint64_t kIdsMax = (uint64_t{1} << 28) - 1;

  size_t size() const { return size_; }
  size_t bytes() const {
    return mapped_ * kChunkPages * Pages::kPageBytes + chunks_.capacity() * sizeof(Chunk);
  }
  bool is_full() const { return size_ + kChunk >= kIdsMax; }
  BlockId end() const { return static_cast<BlockId>(bases_.size() * kChunk); }  // numbers are below

  BlockRecord& operator[](BlockId id) const { return bases_[id / kChunk][id % kChunk]; }

  // The record with this number if it lies in memory; whether it is free is for the caller to see.
  BlockRecord* peek(BlockId id) const {
    const size_t chunk = id / kChunk;
    return chunk < bases_.size() && bases_[chunk] != nullptr ? &bases_[chunk][id % kChunk] : nullptr;
  }

  void prefetch(BlockId id) const { __builtin_prefetch(&(*this)[id]); }

  // All zero but for what the caller fills in at once: a record in use has holders.
  BlockId add() {
    if (open_.empty()) open_chunk();
    const uint32_t number = open_.back();
    Chunk& chunk = chunks_[number];
    uint32_t place;
    if (chunk.freed != kNone) {
      place = chunk.freed;
      chunk.freed = static_cast<uint32_t>(bases_[number][place].prefix);
    } else {
      place = chunk.used++;
    }
    bases_[number][place] = BlockRecord{};
    ++chunk.live;
    ++size_;
    if (chunk.live == capacity(number)) {
      chunk.is_open = false;
      open_.pop_back();
    }
    return number * kChunk + place;
  }

  void free(BlockId id) {
    const uint32_t number = id / kChunk;
    Chunk& chunk = chunks_[number];
    BlockRecord& record = bases_[number][id % kChunk];
    record = BlockRecord{};
    record.prefix = chunk.freed;
    chunk.freed = id % kChunk;
    --size_;
    if (--chunk.live == 0 && open_.size() > 1) return close_chunk(number);
    if (!chunk.is_open) {
      chunk.is_open = true;
      open_.push_back(number);
    }
  }

  // The first number of the next chunk.
  static BlockId chunk_after(BlockId id) { return (id / kChunk + 1) * kChunk; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr size_t kChunkPages = kChunk * sizeof(BlockRecord) / Pages::kPageBytes;
  static_assert(kChunk * sizeof(BlockRecord) % Pages::kPageBytes == 0);

  struct Chunk {
    Pages memory;
    uint32_t freed = kNone;  // place of the last freed record; its `prefix` is the place of the one before it
    uint32_t used = 0;       // places behind these were never used
    uint32_t live = 0;
    bool is_open = false;  // listed in open_
  };

  // Number 0 means no record: the first place of the first chunk is never given out.
  static uint32_t capacity(uint32_t number) { return number == 0 ? kChunk - 1 : kChunk; }

  void open_chunk() {
    uint32_t number;
    if (unmapped_.empty()) {
      number = static_cast<uint32_t>(chunks_.size());
      chunks_.emplace_back();
      bases_.push_back(nullptr);
    } else {
      number = unmapped_.back();
      unmapped_.pop_back();
    }
    Chunk& chunk = chunks_[number];
    chunk.memory.renew(kChunkPages);
    bases_[number] = static_cast<BlockRecord*>(chunk.memory.base());
    chunk.freed = kNone;
    chunk.used = number == 0 ? 1 : 0;
    chunk.is_open = true;
    open_.push_back(number);
    ++mapped_;
  }

  void close_chunk(uint32_t number) {
    Chunk& chunk = chunks_[number];
    if (chunk.is_open) std::erase(open_, number);
    chunk.is_open = false;
    chunk.memory.resize(0);
    bases_[number] = nullptr;
    unmapped_.push_back(number);
    --mapped_;
  }

  std::vector<Chunk> chunks_;
  std::vector<BlockRecord*> bases_;  // of the chunks, null where none lies in memory
  std::vector<uint32_t> open_;       // chunks with room, the one in use last
  std::vector<uint32_t> unmapped_;
  size_t size_ = 0;
  size_t mapped_ = 0;
};

}  // namespace kvindexer
