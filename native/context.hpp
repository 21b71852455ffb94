// One context of the index, (model, LoRA adapter, block size), and what its tables hold.
//
// A slot is one (source, tier, group): a bit in the context's holder sets. Clearing a slot retires it: its
// bit goes into `dead`, which masks it everywhere at once, and is used again only when a sweep has removed
// every trace of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "block_pool.hpp"
#include "claims.hpp"
#include "holder_sets.hpp"
#include "id_table.hpp"
#include "segmented_table.hpp"
#include "xxh64.hpp"

namespace kvindexer {

inline constexpr size_t kTiers = 4;

struct Place {  // where blocks lie, without the context
  uint32_t source;
  uint32_t tier;
  uint32_t group;
  bool operator==(const Place&) const = default;
};

struct Mark {    // a source is expected to hold a prefix soon
  uint64_t key;  // mix64(prefix hash): whoever announces may send any
  uint32_t local;
  Tick deadline;  // never 0
  uint64_t epoch;
  bool empty() const { return deadline == 0; }
};

struct Surplus {  // copies or names of a slot beyond the first
  uint64_t key;
  uint32_t context;
  uint32_t slot;
  uint64_t count;
  bool empty() const { return count == 0; }
};

// Counts that are nearly always 0, so only the others are kept.
class SurplusTable {
 public:
  uint64_t get(uint64_t key, uint32_t context, uint32_t slot) {
    const Surplus* found = find(key, context, slot);
    return found == nullptr ? 0 : found->count;
  }
  void set(uint64_t key, uint32_t context, uint32_t slot, uint64_t count) {
    Surplus* found = find(key, context, slot);
    if (found == nullptr) {
      if (count != 0) table_.insert(Surplus{key, context, slot, count});
    } else if (count == 0) {
      table_.erase(found);
    } else {
      found->count = count;
    }
  }
  // The next `set` to more than 0, if it is that of this key, needs no memory.
  void make_way(uint64_t key) { table_.make_way(key); }
  bool is_empty() const { return table_.size() == 0; }
  bool has(uint64_t key) { return table_.find(key) != nullptr; }
  SegmentedTable<Surplus>& table() { return table_; }
  const SegmentedTable<Surplus>& table() const { return table_; }

 private:
  Surplus* find(uint64_t key, uint32_t context, uint32_t slot) {
    if (is_empty()) return nullptr;
    for (Surplus* at = table_.find(key); at != nullptr; at = table_.next_equal(at))
      if (at->context == context && at->slot == slot) return at;
    return nullptr;
  }

  SegmentedTable<Surplus> table_;
};

struct Slot {
  uint32_t local = 0;  // index in Context::sources
  uint32_t source = 0;
  uint32_t group = 0;
  uint8_t tier = 0;
  bool live = false;
  uint64_t blocks = 0;
  uint64_t retired_in = 0;  // number of the sweep pass
  uint64_t digest = 0;  // sum of mix64 of the prefixes that it holds: the same in whatever order they came
};

struct Eviction {  // of what was seen longest ago, under way
  BlockId at = kNoBlock;
  Tick up_to = 0;   // entries not seen since go ...
  size_t left = 0;  // ... until so many are gone
};

struct Victims {  // of an eviction: what goes in one go
  static constexpr size_t kMax = 64;
  std::array<BlockId, kMax> ids;
  size_t count = 0;
  size_t alive = 0;  // of these, that are not of a dropped context
};

struct LocalSource {
  uint32_t source = 0;
  bool live = false;
  uint64_t mark_epoch = 0;      // marks of earlier epochs are dead
  std::vector<uint32_t> slots;  // live ones
};

using PrefixTable = IdTable<PrefixOf>;

struct Context {
  static constexpr size_t kPrefetchBytes = 512;  // of the records behind the one that is looked at

  explicit Context(BlockPool& pool) : pool(pool), listed(PrefixOf{&pool}) {}

  BlockPool& pool;  // of all contexts
  uint32_t id = 0;
  uint64_t seed = 0;
  size_t block_bytes = 0;  // of a block's token ids
  uint64_t last_used = 0;
  size_t records = 0;  // prefixes that have one
  PrefixTable listed;  // of those that do not follow the one before them, all; of the others, some
  SegmentedTable<Mark> marks;
  ClaimTable claims;
  std::vector<Slot> slots;
  std::vector<uint32_t> free_slots;
  std::vector<uint32_t> retired_slots;
  std::vector<uint64_t> dead;  // bit per retired slot
  std::vector<LocalSource> sources;
  std::vector<uint32_t> free_sources;
  std::unordered_map<uint32_t, uint32_t> source_at;  // source -> index in sources
  Eviction eviction;

  const LocalSource* find_source(uint32_t source) const {
    const auto found = source_at.find(source);
    return found == source_at.end() ? nullptr : &sources[found->second];
  }

  // The source must be new here. Throws std::bad_alloc, and then it is.
  uint32_t add_source(uint32_t source) {
    if (free_sources.empty()) {
      free_sources.reserve(sources.size() + 1);  // all of them, one day: `drop_source` never fails
      free_sources.push_back(static_cast<uint32_t>(sources.size()));
      make_or_undo(sources, free_sources);
    }
    const uint32_t local = free_sources.back();  // until there is memory for all of it
    source_at.emplace(source, local);
    free_sources.pop_back();
    sources[local].source = source;
    sources[local].live = true;
    ++sources[local].mark_epoch;
    return local;
  }

  // The source's slots must have been retired.
  void drop_source(uint32_t source) noexcept {
    const auto at = source_at.find(source);
    sources[at->second].live = false;
    free_sources.push_back(at->second);
    source_at.erase(at);
  }

  std::optional<uint32_t> find_slot(const Place& place) const {
    const LocalSource* source = find_source(place.source);
    if (source == nullptr) return std::nullopt;
    for (const uint32_t slot : source->slots)
      if (slots[slot].tier == place.tier && slots[slot].group == place.group) return slot;
    return std::nullopt;
  }

  // Throws std::bad_alloc, and then there is none.
  uint32_t add_slot(uint32_t local, const Place& place) {
    if (free_slots.empty()) {
      if (dead.size() * 64 <= slots.size()) dead.push_back(0);
      free_slots.push_back(static_cast<uint32_t>(slots.size()));
      make_or_undo(slots, free_slots);
    }
    const uint32_t number = free_slots.back();
    sources[local].slots.push_back(number);  // from here on nothing fails
    free_slots.pop_back();
    slots[number] = Slot{local, place.source, place.group, static_cast<uint8_t>(place.tier), true, 0, 0, 0};
    return number;
  }

  // Takes the slot out of use; the caller takes it off its source's list.
  void retire(uint32_t number, uint64_t pass) {
    slots[number].live = false;
    slots[number].retired_in = pass;
    dead[number / 64] |= uint64_t{1} << (number % 64);
    retired_slots.push_back(number);
  }

  // Frees the bits of the slots that were retired before `pass` began.
  void reclaim(uint64_t pass) {
    free_slots.reserve(free_slots.size() + retired_slots.size());  // it fails here, or not at all
    std::erase_if(retired_slots, [&](uint32_t number) {
      if (slots[number].retired_in >= pass) return false;
      dead[number / 64] &= ~(uint64_t{1} << (number % 64));
      free_slots.push_back(number);
      return true;
    });
  }

  // One more, whose number is listed already, or neither.
  template <class Each>
  static void make_or_undo(std::vector<Each>& all, std::vector<uint32_t>& listed) {
    try {
      all.emplace_back();
    } catch (...) {
      listed.pop_back();
      throw;
    }
  }

  size_t unlisted() const { return records - listed.size(); }
  // The record of a prefix, whose parent's record is `parent`, kNoBlock when that has none.
  BlockId find_child(const HolderSets& sets, BlockId parent, uint64_t prefix) const {
    const BlockId neighbour = behind(sets, parent, prefix);
    return neighbour != kNoBlock ? neighbour : listed.find(prefix);
  }
  // The record behind `id` if it is that of the prefix, as it is when both were stored together.
  BlockId behind(const HolderSets& sets, BlockId id, uint64_t prefix) const {
    if (id == kNoBlock) return kNoBlock;
    const BlockRecord* const next = pool.peek(id + 1);
    if (next == nullptr || next->prefix != prefix || next->holders == kEmptySet) return kNoBlock;
    __builtin_prefetch(reinterpret_cast<const char*>(next) + kPrefetchBytes);
    return sets.context(next->holders) == this->id ? id + 1 : kNoBlock;
  }
  bool is_held_by(const HolderSets& sets, const BlockRecord& record, const LocalSource& source) const {
    return std::any_of(source.slots.begin(), source.slots.end(),
                       [&](uint32_t slot) { return sets.contains(record.holders, slot); });
  }
  bool is_live(const Mark& mark, Tick now) const {
    return mark.deadline > now && mark.epoch == sources[mark.local].mark_epoch;
  }
  Mark* find_mark(uint64_t prefix, uint32_t local) {
    for (Mark* mark = marks.find(mix64(prefix)); mark != nullptr; mark = marks.next_equal(mark))
      if (mark->local == local) return mark;
    return nullptr;
  }
};

}  // namespace kvindexer
