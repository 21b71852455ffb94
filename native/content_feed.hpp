// What tells the fuzzy index of the blocks that the prefix index begins and ceases to hold.
//
// Only plain blocks are told: blocks whose tokens came with them, and on whose whole chain no block has extra
// keys (a salt, an image). An entry that is told carries a bit for it, and with that bit goes what its
// children may be: a descendant of a salted root has no extra keys of its own.
//
// Neighbours are handed over together, because the fuzzy index is fast only with many blocks at once; but a
// birth and a death never change places, so that what lies in the fuzzy index after `flush` is what the
// prefix index holds. Every call of the prefix index ends with one. Cost: the tokens of a new block are
// copied, eight blocks at a time, which are hashed together: they need not lie side by side, nor be there at
// the end of the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fuzzy_index.hpp"

namespace kvindexer {

class ContentFeed {
 public:
  explicit ContentFeed(FuzzyIndex* index) : index_(index) {
    if (index == nullptr) return;
    for (std::vector<uint64_t>* told : {&born_, &died_}) told->reserve(kBlocksMax);
    known_.reserve(kBlocksMax);
  }

  FuzzyIndex* index() const { return index_; }
  bool takes(uint32_t context) const { return index_ != nullptr && index_->has_context(context); }

  // Before a birth or a death, of a context that it `takes`: all that these need memory for.
  void expect_birth(uint32_t context, size_t bytes) {
    if (!died_.empty() || context != context_ || born_.size() == kBlocksMax) flush();
    context_ = context;
    tokens_.reserve(kHashedTogether * bytes);
  }
  void expect_death(uint32_t context) {
    if (!born_.empty() || context != context_ || died_.size() == kBlocksMax) flush();
    context_ = context;
  }
  // `tokens` are those of the block.
  void born(uint64_t prefix, const uint8_t* tokens, size_t bytes) noexcept {
    born_.push_back(prefix);
    tokens_.insert(tokens_.end(), tokens, tokens + bytes);
    if (born_.size() - known_.size() == kHashedTogether) hash();
  }
  // The same with what is known of the tokens, in place of them.
  void born(uint64_t prefix, const Content& content) noexcept {
    hash();
    born_.push_back(prefix);
    known_.push_back(content);
  }
  void died(uint64_t prefix) noexcept { died_.push_back(prefix); }
  // Where there is no memory for it, the next one does it. Of a context that has gone since nothing is left
  // to be told.
  void flush() {
    if (born_.empty() && died_.empty()) return;
    if (takes(context_)) {
      hash();
      if (!born_.empty()) index_->insert(context_, born_, known_);
      if (!died_.empty()) index_->remove(context_, died_);
    }
    born_.clear();
    known_.clear();
    tokens_.clear();
    died_.clear();
  }

 private:
  static constexpr size_t kBlocksMax = 4096;
  static constexpr size_t kHashedTogether = 8;

  void hash() {
    if (tokens_.empty()) return;
    const size_t known = known_.size();
    known_.resize(born_.size());
    index_->hash(context_, tokens_.data(), std::span(known_).subspan(known));
    tokens_.clear();
  }

  FuzzyIndex* index_;  // null: nothing is told
  uint32_t context_ = 0;
  std::vector<uint64_t> born_, died_;  // one of them is empty
  std::vector<Content> known_;         // what is known of the tokens of what is born
  std::vector<uint8_t> tokens_;        // of the others
};

}  // namespace kvindexer
