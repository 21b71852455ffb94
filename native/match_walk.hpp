// One walk along the blocks of a prompt: how deep does every source hold it, on which tiers?
//
// Most chains lie in neighbouring records (numbered_pool.hpp), so the block after a found one is looked for
// there and the hash table is not asked; one that follows its parent's record is found in no other way.
// Hashes that are no chain, each on the one before it, may so be missed. Where there is no neighbour, hashing
// runs kAhead blocks before probing, so that the cache misses of the probes lie in the shadow of the hash
// chain (of 8, 16 and 24 blocks, 8 was fastest: 11.1, 12.1 and 12.3 us for 256 blocks of which each is
// probed, in an index of 2M). Depths are followed by the symmetric difference between the holder sets of
// neighbouring blocks, which is nearly always empty: a walk costs the same with one holder and with a
// thousand. Where all blocks have the same holders, as most found prompts have, nobody is followed at all:
// the rows are written from the set.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "context.hpp"
#include "holder_sets.hpp"

namespace kvindexer {

struct Row {  // of a match; depths in blocks: tiers 0..t for t = 0..3, then any tier or a speculative mark
  uint32_t source;
  std::array<uint32_t, kTiers + 1> depths;
};
class MatchWalk {
 public:
  static constexpr size_t kAhead = 8;

  MatchWalk(HolderSets& sets, Tick ttl) : sets_(sets), ttl_(ttl) {}

  // A row for each source that holds (or is marked for) the first block, valid until the next match;
  // `hashes.next()` gives the prefix hashes in order. Entries of the longest confirmed depth are seen now.
  template <class Hashes>
  std::span<const Row> match(Context& context, Hashes& hashes, size_t blocks, Tick now) {
    return context.marks.size() == 0 ? walk<false>(context, hashes, blocks, now)
                                     : walk<true>(context, hashes, blocks, now);
  }

 private:
  struct Walker {  // one source during one match
    uint64_t query = 0;
    std::array<uint32_t, kTiers> held{};  // slots of each tier that hold the current block
    std::array<uint32_t, kTiers + 1> depths{};
    uint32_t open = 0;  // levels open..kTiers-1 have no hole so far
    bool open_with_marks = false;
    size_t marked_at = 0;  // block number + 1

    uint32_t fastest() const {
      uint32_t tier = 0;
      while (tier < kTiers && held[tier] == 0) ++tier;
      return tier;
    }
  };

  template <bool kMarks, class Hashes>
  std::span<const Row> walk(Context& context, Hashes& hashes, size_t blocks, Tick now) {
    std::array<uint64_t, kAhead> ring;
    size_t hashed = 0;
    BlockId id = kNoBlock;
    bool in_order = true;  // the last block lay behind the one before it, or there was none
    SetId set = kEmptySet;
    bool alike = !kMarks;   // all blocks so far have the same holders, and nobody is followed yet
    size_t open = 0;        // sources with a level without a hole; while `alike`, the holders' slots
    size_t open_marks = 0;  // the same when marks count
    size_t block = 0;
    if constexpr (kMarks) begin(context);
    for (; block < blocks; ++block) {
      const size_t ahead = in_order ? block + 1 : std::min(blocks, block + kAhead);
      for (; hashed < ahead; ++hashed) {
        ring[hashed % kAhead] = hashes.next();
        if (!in_order) context.listed.prefetch(ring[hashed % kAhead]);
      }
      const uint64_t prefix = ring[block % kAhead];
      const BlockId neighbour = context.behind(sets_, id, prefix);
      in_order = block == 0 || neighbour != kNoBlock;
      id = neighbour != kNoBlock ? neighbour : context.listed.find(prefix);
      BlockRecord* const record = id == kNoBlock ? nullptr : &context.pool[id];
      const SetId here = record == nullptr || record->is_expired(now, ttl_) ? kEmptySet : record->holders;
      if (here != set) {
        if (alike && block == 0) {
          open = sets_.size_minus(here, context.dead);
        } else if (alike && here == kEmptySet) {
          break;
        } else {
          if (alike) open = follow_first(context, set);
          alike = false;
          follow(context, set, here, block, open);
        }
        set = here;
      }
      if (open != 0 && record->last_seen != now) record->last_seen = now;
      if constexpr (kMarks) follow_marks(context, prefix, block, now, open_marks);
      if (open == 0 && (!kMarks || open_marks == 0)) break;
    }
    if (alike) return list_alike(context, set, open, static_cast<uint32_t>(block));
    make_room(walking_.size());
    size_t listed = 0;
    for (const uint32_t local : walking_) {
      Walker& walker = walkers_[local];
      for (uint32_t level = walker.open; level < kTiers; ++level)
        walker.depths[level] = static_cast<uint32_t>(block);
      if (!kMarks)
        walker.depths[kTiers] = walker.depths[kTiers - 1];
      else if (walker.open_with_marks)
        walker.depths[kTiers] = static_cast<uint32_t>(block);
      rows_[listed++] = {context.sources[local].source, walker.depths};
    }
    return {rows_.data(), listed};
  }

  // The rows of all that have a slot in the set, of which `slots` live; the first `depth` blocks lie in each.
  std::span<const Row> list_alike(const Context& context, SetId set, size_t slots, uint32_t depth) {
    if (row_of_.size() < context.sources.size()) row_of_.resize(context.sources.size());
    make_room(slots);
    std::array<Row, kTiers> of_tier{};
    for (uint32_t tier = 0; tier < kTiers; ++tier)
      std::fill(of_tier[tier].depths.begin() + tier, of_tier[tier].depths.end(), depth);
    const std::span<const uint64_t> words = sets_.words(set);
    const size_t first = sets_.first_word(set);
    Row* const rows = rows_.data();
    uint32_t* const row_of = row_of_.data();
    size_t listed = 0;
    for (size_t at = 0; at < words.size(); ++at) {
      const Slot* const slots_at = context.slots.data() + (first + at) * 64;
      for (uint64_t live = words[at] & ~context.dead[first + at]; live != 0; live &= live - 1) {
        const Slot& slot = slots_at[std::countr_zero(live)];
        const size_t row = row_of[slot.local];
        if (row < listed && rows[row].source == slot.source) {  // not the source's first slot
          std::fill(rows[row].depths.begin() + slot.tier, rows[row].depths.end(), depth);
          continue;
        }
        row_of[slot.local] = static_cast<uint32_t>(listed);
        rows[listed] = of_tier[slot.tier];
        rows[listed++].source = slot.source;
      }
    }
    return {rows, listed};
  }

  void make_room(size_t rows) {
    if (rows_.size() < rows) rows_.resize(rows);
  }

  void begin(const Context& context) {
    if (walkers_.size() < context.sources.size()) walkers_.resize(context.sources.size());
    walking_.clear();
    ++query_;
  }

  // Begins to follow the holders of the first block, of which it returns the number of sources.
  size_t follow_first(const Context& context, SetId first) {
    begin(context);
    size_t open = 0;
    follow(context, kEmptySet, first, 0, open);
    return open;
  }

  Walker& enter(uint32_t local) {
    Walker& walker = walkers_[local];
    if (walker.query != query_) {
      walker = Walker{};
      walker.query = query_;
      walker.open = kTiers;
      walking_.push_back(local);
    }
    return walker;
  }

  // From one holder set to the next: only sources whose slots differ are looked at.
  void follow(const Context& context, SetId from, SetId to, size_t block, size_t& open) {
    const size_t first = from == kEmptySet ? sets_.first_word(to)
                         : to == kEmptySet ? sets_.first_word(from)
                                           : std::min(sets_.first_word(from), sets_.first_word(to));
    const size_t end = std::max(sets_.first_word(from) + sets_.words(from).size(),
                                sets_.first_word(to) + sets_.words(to).size());
    changed_.clear();
    for (size_t word = first; word < end; ++word) {
      const uint64_t after = sets_.word_at(to, word);
      uint64_t difference = (sets_.word_at(from, word) ^ after) & ~context.dead[word];
      for (; difference != 0; difference &= difference - 1) {
        const unsigned bit = static_cast<unsigned>(std::countr_zero(difference));
        const Slot& slot = context.slots[word * 64 + bit];
        if (block != 0 && walkers_[slot.local].query != query_) continue;  // had nothing at the root
        Walker& walker = enter(slot.local);
        if (after >> bit & 1)
          ++walker.held[slot.tier];
        else
          --walker.held[slot.tier];
        changed_.push_back(slot.local);
      }
    }
    for (const uint32_t local : changed_) {
      Walker& walker = walkers_[local];
      const uint32_t fastest = walker.fastest();
      if (block == 0) {
        if (walker.open == kTiers && fastest != kTiers) ++open;
        walker.open = fastest;
        continue;
      }
      if (fastest <= walker.open) continue;
      for (uint32_t level = walker.open; level < fastest; ++level)
        walker.depths[level] = static_cast<uint32_t>(block);
      walker.open = fastest;
      if (fastest == kTiers) --open;
    }
  }

  void follow_marks(Context& context, uint64_t prefix, size_t block, Tick now, size_t& open_marks) {
    for (const Mark* mark = context.marks.find(mix64(prefix)); mark != nullptr;
         mark = context.marks.next_equal(mark)) {
      if (!context.is_live(*mark, now)) continue;
      if (block != 0 && walkers_[mark->local].query != query_) continue;
      enter(mark->local).marked_at = block + 1;
    }
    for (const uint32_t local : walking_) {
      Walker& walker = walkers_[local];
      const bool here = walker.marked_at == block + 1 || walker.fastest() != kTiers;
      if (block == 0) {
        walker.open_with_marks = here;
        open_marks += here ? 1 : 0;
      } else if (walker.open_with_marks && !here) {
        walker.open_with_marks = false;
        walker.depths[kTiers] = static_cast<uint32_t>(block);
        --open_marks;
      }
    }
  }

  HolderSets& sets_;
  const Tick ttl_;
  std::vector<Walker> walkers_;  // by local source
  std::vector<uint32_t> walking_, changed_;
  std::vector<uint32_t> row_of_;  // by local source, of some match; whether it is this one's, the row tells
  std::vector<Row> rows_;         // of the last match, and room for as many as any had
  uint64_t query_ = 0;
};

}  // namespace kvindexer
