// Fixed-size nodes by number, in chunks that never move, with a free list. Number 0 is no node.
//
// Why not a vector: it copies everything to grow. Why not malloc: buckets that grow at the same pace leave
// holes of sizes that nobody wants any more (see pages.hpp); nodes of one size fit any hole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "pages.hpp"

namespace kvindexer {

template <class Node>
class NodePool {
  static_assert(std::is_trivially_copyable_v<Node> && Pages::kPageBytes % alignof(Node) == 0);

 public:
  Node& at(uint32_t number) {
    return static_cast<Node*>(chunks_[number >> kChunkBits].base())[number & (kChunk - 1)];
  }
  const Node& at(uint32_t number) const { return const_cast<NodePool*>(this)->at(number); }

  // Node 0 is there to be looked at, all zero.
  NodePool() { add_chunk(); }

  // A zeroed node. Throws std::bad_alloc, and then nothing has changed.
  uint32_t take() {
    if (!free_.empty()) {
      const uint32_t number = free_.back();
      free_.pop_back();
      at(number) = Node{};
      return number;
    }
    if (next_ >> kChunkBits == chunks_.size()) add_chunk();
    return next_++;
  }

  void give(uint32_t number) { free_.push_back(number); }

  size_t bytes() const {
    return chunks_.size() * kChunk * sizeof(Node) + free_.capacity() * sizeof(uint32_t);
  }

  // Moves the memory out, for a caller that gives it back in slices. The pool is not used any more.
  void release_into(std::vector<Pages>& pages) {
    for (Pages& chunk : chunks_) pages.push_back(std::move(chunk));
    chunks_.clear();
  }

 private:
  static constexpr uint32_t kChunkBits = 8;
  static constexpr uint32_t kChunk = 1u << kChunkBits;
  static_assert(kChunk * sizeof(Node) % Pages::kPageBytes == 0);

  void add_chunk() {
    Pages chunk;
    constexpr size_t kPages = kChunk * sizeof(Node) / Pages::kPageBytes;
    if (chunks_.empty())  // of most pools there is no more
      chunk.resize(kPages);
    else
      chunk.renew(kPages);
    chunks_.push_back(std::move(chunk));
  }

  std::vector<Pages> chunks_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 1;
};

}  // namespace kvindexer
