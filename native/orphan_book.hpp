// Stored events whose parent their source has not named yet, oldest first, until the parent comes.
//
// A block of an orphan is living until its removal is reported; a dead one still lends its hash to the chain
// behind it. Bounded by blocks: the oldest orphans make room for new ones, and that is reported (`drops`),
// because the picture of their source has a hole from then on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "context.hpp"
#include "hash_chain.hpp"
#include "xxh64.hpp"

namespace kvindexer {

struct Orphan {
  uint64_t arrival;
  Tick arrived_at;
  Place place;
  uint32_t context;
  uint64_t parent;
  std::vector<uint64_t> engine_hashes;
  std::vector<bool> living;
  std::vector<uint8_t> tokens;
  ExtraKeys extra;
  uint32_t owner;
  bool is_released = false;  // its parent has come, and it is on its way into the index
};

class OrphanBook {
 public:
  using Orphans = std::list<Orphan>;

  explicit OrphanBook(size_t blocks_max) : blocks_max_(blocks_max) {}

  bool is_empty() const { return orphans_.empty(); }
  uint64_t blocks() const { return blocks_; }
  uint64_t blocks_of(uint32_t source) const {
    const auto found = blocks_of_.find(source);
    return found == blocks_of_.end() ? 0 : found->second;
  }
  uint64_t dropped() const { return dropped_; }
  uint64_t expired() const { return expired_; }
  // (source, blocks) that had to make room since the last call.
  std::vector<std::pair<uint32_t, uint64_t>> take_drops() { return std::exchange(drops_, {}); }

  // Returns the number of blocks that now wait: all or, past the bound, none. Throws std::bad_alloc, and then
  // nothing has changed.
  uint64_t add(Orphan orphan) {
    const size_t blocks = orphan.engine_hashes.size();
    if (blocks > blocks_max_) {
      note_drop(orphan);
      return 0;
    }
    size_t oldest = 0, freed = 0;  // these have to make room
    for (auto at = orphans_.begin(); blocks_ - freed + blocks > blocks_max_; ++at, ++oldest)
      freed += at->engine_hashes.size();
    drops_.reserve(drops_.size() + oldest);
    orphan.arrival = ++arrivals_;
    orphan.living.assign(blocks, true);
    uint64_t& of_source = blocks_of_[orphan.place.source];
    orphans_.push_back(std::move(orphan));
    of_source += blocks;
    blocks_ += blocks;
    const auto at = std::prev(orphans_.end());
    try {
      by_parent_.emplace(key(at->place.source, at->context, at->parent), at);
      for (const uint64_t engine_hash : at->engine_hashes)
        by_block_.emplace(key(at->place.source, kAnyContext, engine_hash), at);
    } catch (...) {
      take(at);
      throw;
    }
    for (; oldest != 0; --oldest) {
      note_drop(orphans_.front());
      take(orphans_.begin());
    }
    return blocks;
  }

  // All that wait for this block and are not released yet, the youngest first.
  std::vector<Orphans::iterator> waiting(uint32_t source, uint32_t context, uint64_t engine_hash) {
    std::vector<Orphans::iterator> waiting;
    const auto [begin, end] = by_parent_.equal_range(key(source, context, engine_hash));
    for (auto at = begin; at != end; ++at)
      if (at->second->place.source == source && at->second->context == context &&
          at->second->parent == engine_hash && !at->second->is_released)
        waiting.push_back(at->second);
    std::sort(waiting.begin(), waiting.end(), [](auto a, auto b) { return a->arrival > b->arrival; });
    return waiting;
  }

  void take(Orphans::iterator at) {
    unlink(by_parent_, key(at->place.source, at->context, at->parent), at);
    for (const uint64_t engine_hash : at->engine_hashes)
      unlink(by_block_, key(at->place.source, kAnyContext, engine_hash), at);
    const size_t blocks = at->engine_hashes.size();
    blocks_ -= blocks;
    const auto of_source = blocks_of_.find(at->place.source);
    if ((of_source->second -= blocks) == 0) blocks_of_.erase(of_source);
    orphans_.erase(at);
  }

  // The oldest orphan of the place with such a living block loses it; false when there is none.
  bool kill(const Place& place, uint64_t engine_hash) {
    Orphan* oldest = nullptr;
    size_t oldest_block = 0;
    const auto [begin, end] = by_block_.equal_range(key(place.source, kAnyContext, engine_hash));
    for (auto at = begin; at != end; ++at) {
      Orphan& orphan = *at->second;
      if (orphan.place != place || (oldest != nullptr && oldest->arrival <= orphan.arrival)) continue;
      for (size_t block = 0; block < orphan.engine_hashes.size(); ++block) {
        if (orphan.engine_hashes[block] != engine_hash || !orphan.living[block]) continue;
        oldest = &orphan;
        oldest_block = block;
        break;
      }
    }
    if (oldest == nullptr) return false;
    oldest->living[oldest_block] = false;
    return true;
  }

  template <class Matches>
  void drop_if(Matches matches) {
    for (auto at = orphans_.begin(); at != orphans_.end();) {
      const auto next = std::next(at);
      if (matches(*at)) take(at);
      at = next;
    }
  }

  void expire(Tick now, Tick ttl) {
    while (ttl != 0 && !orphans_.empty() && now - orphans_.front().arrived_at >= ttl) {
      expired_ += orphans_.front().engine_hashes.size();
      take(orphans_.begin());
    }
  }

 private:
  using Links = std::unordered_multimap<uint64_t, Orphans::iterator>;
  static constexpr uint32_t kAnyContext = 0;

  static uint64_t key(uint32_t source, uint32_t context, uint64_t engine_hash) {
    return mix64(engine_hash ^ mix64((uint64_t{source} << 32) | context));
  }

  void note_drop(const Orphan& orphan) {
    drops_.emplace_back(orphan.place.source, orphan.engine_hashes.size());
    dropped_ += orphan.engine_hashes.size();
  }

  static void unlink(Links& links, uint64_t key, Orphans::iterator orphan) {
    const auto [begin, end] = links.equal_range(key);
    const auto found = std::find_if(begin, end, [&](const auto& link) { return link.second == orphan; });
    if (found != end) links.erase(found);  // there was no memory for one that is not
  }

  const size_t blocks_max_;
  Orphans orphans_;
  Links by_parent_, by_block_;
  std::unordered_map<uint32_t, uint64_t> blocks_of_;
  std::vector<std::pair<uint32_t, uint64_t>> drops_;
  size_t blocks_ = 0;
  uint64_t arrivals_ = 0, dropped_ = 0, expired_ = 0;
};

}  // namespace kvindexer
