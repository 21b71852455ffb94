// What can be reused of a prompt whose prefix differs: contents by context, asked for at any token offset.
//
// A window is block_size tokens of a query, named by its token offset. Three coarse questions; the caller
// filters what they answer (who holds it, who is excluded) in between:
//   exact   which windows, at every offset, are stored contents. rsync rolls a weak hash over the windows to
//   look
//           before it hashes; the SimHash rolls here already and finds the bucket, and XXH64 of 16 tokens
//           costs 8 ns, so every window is hashed outright and a match is a match of the 64-bit content hash.
//   near    what lies within a Hamming distance of the windows at given offsets
//   select  which windows to report: they must not overlap and the sum of their weights is the largest
//   possible
//
// Bounds. A window has at most `matches_max` matches, best first; what is dropped for it is counted.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fuzzy_context.hpp"

namespace kvindexer {

struct FuzzyMatch {
  uint32_t offset;  // of the window, in tokens
  uint16_t distance;
  uint16_t exact;  // 1: the content hashes agree
  uint64_t prefix;
};

struct FuzzyStatistics {
  uint64_t contexts = 0;
  uint64_t blocks = 0;   // entries, doomed ones too
  uint64_t chained = 0;  // of them: beyond the first with their content
  uint64_t doomed = 0;   // removed, not swept yet
  uint64_t crowded = 0;  // contents that near matches do not find
  uint64_t bytes = 0;
  uint64_t matches_dropped = 0;  // since start
};

class FuzzyIndex {
 public:
  // `scans` counts in native_scans(): 0 is the fastest, and numbers past the end mean the last.
  FuzzyIndex(size_t shingle, size_t scans)
      : shingle_(shingle), scans_(&native_scans()[std::min(scans, native_scans().size() - 1)]) {}
  FuzzyIndex(const FuzzyIndex&) = delete;

  // Does nothing when the context is there. Throws std::invalid_argument for a block size that has no
  // SimHash.
  void add_context(uint32_t id, size_t block_size) {
    if (block_size < shingle_ || block_size - shingle_ >= Votes::kVotesMax)
      throw std::invalid_argument("block size must be between the shingle and 65535 tokens");
    if (!contexts_.contains(id))
      contexts_.emplace(id, std::make_unique<FuzzyContext>(block_size, shingle_, *scans_));
  }
  void drop_context(uint32_t id) {
    const auto found = contexts_.find(id);
    if (found == contexts_.end()) return;
    graveyard_.push_back(std::move(found->second));
    contexts_.erase(found);
  }
  bool has_context(uint32_t id) const { return contexts_.contains(id); }
  size_t block_size(uint32_t id) const { return contexts_.at(id)->block_size(); }

  // What `insert` wants to know of blocks, from their tokens.
  std::vector<ContentHash> hashes(uint32_t id, const uint8_t* tokens, size_t blocks) const {
    std::vector<ContentHash> found(blocks);
    content_hashes(tokens, blocks, block_size(id), shingle_, found.data());
    return found;
  }
  // See FuzzyContext::insert.
  size_t insert(uint32_t id, std::span<const uint64_t> prefixes, std::span<const ContentHash> hashes) {
    bury();
    return contexts_.at(id)->insert(prefixes, hashes);
  }
  void remove(uint32_t id, std::span<const uint64_t> prefixes) {
    bury();
    contexts_.at(id)->remove(prefixes);
  }
  // For tests and dumps.
  std::vector<uint64_t> prefixes(uint32_t id) { return contexts_.at(id)->prefixes(); }

  std::vector<FuzzyMatch> exact(uint32_t id, const uint8_t* tokens, size_t count, size_t matches_max);
  // Offsets are such that offset + block_size <= count.
  std::vector<FuzzyMatch> near(uint32_t id, const uint8_t* tokens, size_t count,
                               std::span<const uint32_t> offsets, unsigned distance_max, size_t matches_max);
  static std::vector<uint32_t> select(std::span<const uint32_t> weights, size_t block_size);

  FuzzyStatistics statistics() const;

 private:
  struct Near {
    uint64_t content;
    uint64_t prefix;
    uint32_t distance;
    bool exact;
    // Best first; the same whatever order they were found in.
    bool operator<(const Near& other) const {
      if (exact != other.exact) return exact;
      if (distance != other.distance) return distance < other.distance;
      return prefix < other.prefix;
    }
  };

  std::vector<uint64_t> simhashes_at(const FuzzyContext& context, const uint8_t* tokens, size_t count,
                                     std::span<const uint32_t> offsets) const;
  void report(FuzzyContext& context, uint32_t offset, const std::vector<Near>& found, size_t matches_max,
              std::vector<FuzzyMatch>& matches);
  void bury() {
    if (!graveyard_.empty() && graveyard_.back()->dismantle()) graveyard_.pop_back();
  }

  size_t shingle_;
  const NearScans* scans_;
  std::unordered_map<uint32_t, std::unique_ptr<FuzzyContext>> contexts_;
  std::vector<std::unique_ptr<FuzzyContext>> graveyard_;  // dropped, taken apart in slices
  uint64_t matches_dropped_ = 0;
};

inline std::vector<FuzzyMatch> FuzzyIndex::exact(uint32_t id, const uint8_t* tokens, size_t count,
                                                 size_t matches_max) {
  constexpr size_t kAhead = 16;
  FuzzyContext& context = *contexts_.at(id);
  const size_t block_bytes = context.block_size() * 4;
  const std::vector<uint64_t> simhashes =
      sliding_simhashes(tokens, count, context.block_size(), context.shingle());
  std::vector<FuzzyMatch> matches;
  for (size_t i = 0; i < simhashes.size(); ++i) {
    if (i + kAhead < simhashes.size()) context.prefetch(simhashes[i + kAhead]);
    if (i + kAhead / 2 < simhashes.size()) context.prefetch_records(simhashes[i + kAhead / 2]);
    const uint64_t content = xxh64(tokens + 4 * i, block_bytes, 0);
    const uint64_t prefix = context.find_exact(simhashes[i], content);
    if (prefix != 0)
      report(context, static_cast<uint32_t>(i), {{content, prefix, 0, true}}, matches_max, matches);
  }
  return matches;
}

inline std::vector<FuzzyMatch> FuzzyIndex::near(uint32_t id, const uint8_t* tokens, size_t count,
                                                std::span<const uint32_t> offsets, unsigned distance_max,
                                                size_t matches_max) {
  FuzzyContext& context = *contexts_.at(id);
  const std::vector<uint64_t> simhashes = simhashes_at(context, tokens, count, offsets);
  std::vector<uint64_t> contents(offsets.size());
  for (size_t i = 0; i < offsets.size(); ++i)
    contents[i] = xxh64(tokens + 4 * size_t{offsets[i]}, context.block_size() * 4, 0);

  std::vector<std::vector<Near>> found(offsets.size());
  const auto trim = [&](std::vector<Near>& list) {
    std::nth_element(list.begin(), list.begin() + static_cast<ptrdiff_t>(matches_max), list.end());
    matches_dropped_ += list.size() - matches_max;
    list.resize(matches_max);
  };
  context.search(simhashes, distance_max, [&](uint32_t query, unsigned distance, const Record& record) {
    std::vector<Near>& list = found[query];
    list.push_back({record.content, record.prefix, distance, record.content == contents[query]});
    if (list.size() >= 2 * matches_max + 16) trim(list);
  });
  std::vector<FuzzyMatch> matches;
  for (size_t i = 0; i < offsets.size(); ++i) {
    std::vector<Near>& list = found[i];
    if (context.crowded() != 0 &&
        std::none_of(list.begin(), list.end(), [](const Near& near) { return near.exact; }))
      if (const uint64_t prefix = context.find_exact(simhashes[i], contents[i]))
        list.push_back({contents[i], prefix, 0, true});
    if (list.size() > matches_max) trim(list);
    std::sort(list.begin(), list.end());
    report(context, offsets[i], list, matches_max, matches);
  }
  return matches;
}

inline std::vector<uint64_t> FuzzyIndex::simhashes_at(const FuzzyContext& context, const uint8_t* tokens,
                                                      size_t count, std::span<const uint32_t> offsets) const {
  const size_t block_size = context.block_size();
  std::vector<uint64_t> simhashes(offsets.size());
  if (offsets.size() * 4 > count) {  // a step of the window costs a quarter of a SimHash
    const std::vector<uint64_t> all = sliding_simhashes(tokens, count, block_size, shingle_);
    for (size_t i = 0; i < offsets.size(); ++i) simhashes[i] = all[offsets[i]];
  } else {
    for (size_t i = 0; i < offsets.size(); ++i)
      simhashes[i] = simhash(tokens + 4 * size_t{offsets[i]}, block_size, shingle_);
  }
  return simhashes;
}

inline void FuzzyIndex::report(FuzzyContext& context, uint32_t offset, const std::vector<Near>& found,
                               size_t matches_max, std::vector<FuzzyMatch>& matches) {
  size_t reported = 0;
  for (const Near& near : found)
    context.for_prefixes(near.prefix, near.content, [&](uint64_t prefix) {
      if (reported == matches_max) {
        ++matches_dropped_;
        return false;
      }
      matches.push_back(
          {offset, static_cast<uint16_t>(near.distance), static_cast<uint16_t>(near.exact), prefix});
      ++reported;
      return true;
    });
}

// weights[i] is what the window at offset i is worth, 0 when it is not to be chosen. Of equal sums, the one
// that takes the earlier window. Returns offsets, ascending.
inline std::vector<uint32_t> FuzzyIndex::select(std::span<const uint32_t> weights, size_t block_size) {
  std::vector<uint64_t> best(weights.size() + block_size, 0);  // [i]: with the windows from i on
  for (size_t i = weights.size(); i-- > 0;) {
    const uint64_t taken = weights[i] == 0 ? 0 : weights[i] + best[i + block_size];
    best[i] = std::max(best[i + 1], taken);
  }
  std::vector<uint32_t> chosen;
  for (size_t i = 0; i < weights.size();) {
    if (weights[i] != 0 && best[i] == weights[i] + best[i + block_size]) {
      chosen.push_back(static_cast<uint32_t>(i));
      i += block_size;
    } else {
      ++i;
    }
  }
  return chosen;
}

inline FuzzyStatistics FuzzyIndex::statistics() const {
  FuzzyStatistics now;
  now.contexts = contexts_.size();
  now.matches_dropped = matches_dropped_;
  for (const auto& [id, context] : contexts_) {
    now.blocks += context->size();
    now.chained += context->chained();
    now.doomed += context->doomed();
    now.crowded += context->crowded();
    now.bytes += context->bytes();
  }
  for (const auto& context : graveyard_) now.bytes += context->bytes();
  return now;
}

}  // namespace kvindexer
