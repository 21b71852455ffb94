// Fixed-size nodes by number, in chunks that never move, with a free list. Number 0 is no node.
//
// Why not a vector: it copies everything to grow. Why not malloc: buckets that grow at the same pace leave
// holes of sizes that nobody wants any more (see pages.hpp); nodes of one size fit any hole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "pages.hpp"

namespace kvindexer {

// A node may have several parts, each kind in memory of its own: whoever reads one of them only reads from as
// few pages as may be.
template <class... Parts>
class NodePool {
  static_assert(((std::is_trivially_copyable_v<Parts> && Pages::kPageBytes % alignof(Parts) == 0) && ...));
  template <size_t kPart>
  using PartOf = std::tuple_element_t<kPart, std::tuple<Parts...>>;

 public:
  template <size_t kPart>
  PartOf<kPart>& part(uint32_t number) {
    const Pages& pages = chunks_[number >> kChunkBits][kPart];
    return static_cast<PartOf<kPart>*>(pages.base())[number & (kChunk - 1)];
  }
  template <size_t kPart>
  const PartOf<kPart>& part(uint32_t number) const {
    return const_cast<NodePool*>(this)->template part<kPart>(number);
  }
  PartOf<0>& at(uint32_t number) { return part<0>(number); }
  const PartOf<0>& at(uint32_t number) const { return part<0>(number); }

  // Node 0 is there to be looked at, all zero.
  NodePool() {
    add_chunk();
    --room_;
  }

  // A node with whatever it held when it was given back. Throws std::bad_alloc, and then nothing has changed.
  uint32_t take() {
    reserve(1);
    --room_;
    if (free_.empty()) return next_++;
    const uint32_t number = free_.back();
    free_.pop_back();
    return number;
  }

  // From now on so many can be taken, whatever memory there is then. Throws std::bad_alloc.
  void reserve(size_t nodes) {
    while (__builtin_expect(room_ < nodes, 0)) add_chunk();
  }

  void give(uint32_t number) noexcept {
    try {
      free_.push_back(number);
      ++room_;
    } catch (const std::bad_alloc&) {  // nobody has it any more
    }
  }

  size_t bytes() const {
    return chunks_.size() * kChunk * (sizeof(Parts) + ...) + free_.capacity() * sizeof(uint32_t);
  }

  // Moves the memory out, for a caller that gives it back in slices. The pool is not used any more.
  void release_into(std::vector<Pages>& pages) {
    for (Chunk& chunk : chunks_)
      for (Pages& part : chunk) pages.push_back(std::move(part));
    chunks_.clear();
  }

 private:
  static constexpr uint32_t kChunkBits = 8;
  static constexpr uint32_t kChunk = 1u << kChunkBits;
  static_assert(((kChunk * sizeof(Parts) % Pages::kPageBytes == 0) && ...));
  using Chunk = std::array<Pages, sizeof...(Parts)>;

  [[gnu::noinline, gnu::cold]] void add_chunk() {
    constexpr size_t kPages[] = {kChunk * sizeof(Parts) / Pages::kPageBytes...};
    Chunk chunk;
    for (size_t i = 0; i < chunk.size(); ++i) {
      if (chunks_.empty())  // of most pools there is no more
        chunk[i].resize(kPages[i]);
      else
        chunk[i].renew(kPages[i]);
    }
    chunks_.push_back(std::move(chunk));
    room_ += kChunk;
  }

  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 1;
  size_t room_ = 0;  // nodes that can be taken without another chunk
};

}  // namespace kvindexer
