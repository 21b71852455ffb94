// The prefix index: context -> prefix hash -> holder slots. The contract is the docstring of app/index/prefix_index.py;
// this text says how it is kept.
//
// A slot is one (source, tier, group) of a context, a bit in that context's holder sets. Tables, all segmented_table.hpp:
//   prefixes     one a context: prefix hash -> set of slots, last seen          16 bytes an entry
//   names        one: engine hash -> prefix hash, set of slots that name it so  20 bytes; sources whose engines agree share it
//   copies       one: (engine hash, slot) -> copies beyond the first            nearly empty
//   aliases      one: (prefix, slot) -> names beyond the first                  nearly empty
//   marks        one a context: speculative (prefix, source) -> deadline
//
// What is dead is masked at once and swept later. A cleared slot goes into its context's dead mask; a name counts only
// while its slot lives, the prefix is there, has not expired and is held by that slot. So clear, drop and expiry cost
// nothing when they happen, and `sweep` (bounded, resumed by key) takes the remains away. A slot's bit is used again
// only after a whole pass that began behind its death.
//
// A match hashes a few blocks ahead of the one that it probes: the cache misses of the probes lie in the shadow of the hash
// chain, and at the first hole no more than kAhead hashes were for nothing. It follows the depth of every source by the
// symmetric difference between the holder sets of neighbouring blocks, which is empty nearly always.
//
// One thread. Nothing here reads a clock: `now` is an argument, in ticks, and never goes backwards.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "holder_sets.hpp"
#include "segmented_table.hpp"
#include "xxh64.hpp"

namespace kvindexer {

using Tick = uint32_t;
inline constexpr size_t kTiers = 4;

struct Limits {
  Tick ttl = 0;  // 0: entries do not expire
  size_t contexts_max = 1000;
  size_t prefixes_per_context_max = 10'000'000;
  size_t orphan_blocks_max = 65'536;
  size_t speculative_blocks_max = 262'144;
};

// Canonical extra keys of the blocks of one call: block i has bytes[ends[i-1], ends[i]); blocks behind the last have none.
struct ExtraKeys {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> ends;

  std::span<const uint8_t> of(size_t block) const {
    if (block >= ends.size()) return {};
    const uint32_t begin = block == 0 ? 0 : ends[block - 1];
    return {bytes.data() + begin, ends[block] - begin};
  }
};

// The prefix hashes of a token array, in order.
class HashChain {
 public:
  HashChain(uint64_t seed, const uint8_t* tokens, size_t block_bytes, const ExtraKeys* extra)
      : hash_(seed), tokens_(tokens), block_bytes_(block_bytes), extra_(extra) {}

  uint64_t next() {
    const std::span<const uint8_t> extra = extra_ == nullptr ? std::span<const uint8_t>{} : extra_->of(block_);
    if (extra.empty()) {
      hash_ = xxh64(tokens_, block_bytes_, hash_);
    } else {
      joined_.assign(tokens_, tokens_ + block_bytes_);
      joined_.insert(joined_.end(), extra.begin(), extra.end());
      hash_ = xxh64(joined_.data(), joined_.size(), hash_);
    }
    tokens_ += block_bytes_;
    ++block_;
    return hash_;
  }

 private:
  uint64_t hash_;
  const uint8_t* tokens_;
  size_t block_bytes_;
  const ExtraKeys* extra_;
  size_t block_ = 0;
  std::vector<uint8_t> joined_;
};

// Hashes that were computed elsewhere, in order.
class HashList {
 public:
  explicit HashList(const uint8_t* hashes) : at_(hashes) {}
  uint64_t next() {
    const uint64_t hash = xxh64_detail::load<uint64_t>(at_);
    at_ += 8;
    return hash;
  }

 private:
  const uint8_t* at_;
};

struct Place {  // where blocks lie, without the context
  uint32_t source;
  uint32_t tier;
  uint32_t group;
  bool operator==(const Place&) const = default;
};

struct Stored {
  uint64_t stored = 0, orphans = 0, unknown = 0;
};
struct Removed {
  uint64_t removed = 0, unknown = 0;
};
struct Swept {
  uint64_t visited = 0, expired = 0;
  bool pass_done = false;
};
struct Row {  // of a match; depths in blocks: tiers 0..t for t = 0..3, then any tier or a speculative mark
  uint32_t source;
  std::array<uint32_t, kTiers + 1> depths;
};
struct Holder {
  uint32_t source, tier, group;
};
struct Statistics {
  uint64_t contexts = 0, prefixes = 0, holder_sets = 0, engine_keys = 0, copies = 0, orphan_blocks = 0;
  uint64_t speculative_blocks = 0, bytes = 0, expired = 0, evicted = 0, contexts_evicted = 0, orphans_dropped = 0;
  uint64_t orphans_expired = 0, speculative_refused = 0;
};

class PrefixIndex {
 public:
  explicit PrefixIndex(const Limits& limits) : limits_(limits) {}
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // -- contexts and sources

  // Makes a context; returns its number and that of the context that had to go for it, if any.
  std::pair<uint32_t, std::optional<uint32_t>> add_context(uint64_t seed, uint32_t block_size) {
    std::optional<uint32_t> evicted;
    if (contexts_.size() >= limits_.contexts_max) {
      const auto oldest = std::min_element(contexts_.begin(), contexts_.end(), [](const auto& a, const auto& b) {
        return a.second->last_used < b.second->last_used;
      });
      evicted = oldest->first;
      drop_context(oldest->first);
      ++statistics_.contexts_evicted;
    }
    auto context = std::make_unique<Context>();
    context->id = ++context_count_;
    context->seed = seed;
    context->block_bytes = size_t{block_size} * 4;
    context->last_used = ++uses_;
    const uint32_t id = context->id;
    contexts_.emplace(id, std::move(context));
    return {id, evicted};
  }

  void drop_context(uint32_t id) {
    const auto found = contexts_.find(id);
    if (found == contexts_.end()) return;
    for (const LocalSource& local : found->second->sources)
      if (local.live) std::erase(sources_.at(local.source), id);
    drop_orphans([id](const Orphan& orphan) { return orphan.context == id; });
    marks_ -= found->second->marks.size();
    graveyard_.push_back(std::move(found->second));
    contexts_.erase(found);
    remains_ = true;
  }

  void touch_context(uint32_t id) { use(id); }

  size_t context_size(uint32_t id) const {
    const auto found = contexts_.find(id);
    return found == contexts_.end() ? 0 : found->second->prefixes.size();
  }

  uint32_t add_source() {
    sources_.try_emplace(++source_count_);
    return source_count_;
  }
  bool has_source(uint32_t source) const { return sources_.contains(source); }

  void drop_source(uint32_t source) {
    clear(source, std::nullopt, std::nullopt);
    for (uint32_t id : sources_.at(source)) {
      Context& context = *contexts_.at(id);
      const uint32_t local = context.source_at.at(source);
      context.sources[local].live = false;
      context.free_sources.push_back(local);
      context.source_at.erase(source);
    }
    sources_.erase(source);
  }

  // -- events

  Stored store(Place place, uint32_t context_id, std::span<const uint64_t> engine_hashes,
               std::optional<uint64_t> parent, const uint8_t* tokens, ExtraKeys extra, Tick now, bool count_copies) {
    expire_orphans(now);
    Context& context = use(context_id);
    Stored result;
    uint64_t chain_from = context.seed;
    if (parent) {
      const std::optional<uint64_t> known = parent_prefix(context, place, *parent, now);
      if (!known) {
        result.orphans = keep_orphan(place, context, engine_hashes, *parent, tokens, std::move(extra), now);
        return result;
      }
      chain_from = *known;
    }
    Frame frame{place, std::vector<uint64_t>(engine_hashes.begin(), engine_hashes.end()), {}, {}};
    hash_blocks(frame, context, chain_from, tokens, extra);
    result.stored = store_frames(context, std::move(frame), now, count_copies);
    return result;
  }

  Stored place(Place place, std::span<const uint64_t> engine_hashes, Tick now, bool count_copies) {
    expire_orphans(now);
    Stored result;
    for (const uint64_t engine_hash : engine_hashes) {
      const std::optional<std::pair<uint32_t, uint64_t>> found = find_name(place.source, engine_hash, now);
      if (!found) {
        ++result.unknown;
        continue;
      }
      Frame frame{place, {engine_hash}, {found->second}, {}};
      result.stored += store_frames(use(found->first), std::move(frame), now, count_copies);
    }
    return result;
  }

  Removed remove(Place place, std::span<const uint64_t> engine_hashes, Tick now) {
    expire_orphans(now);
    Removed result;
    for (size_t i = 0; i < engine_hashes.size(); ++i) {
      if (i + kAhead < engine_hashes.size()) names_.prefetch(mix64(engine_hashes[i + kAhead]));
      uint64_t removed = remove_name(place, engine_hashes[i], now);
      if (removed == 0 && remove_from_orphan(place, engine_hashes[i])) removed = 1;
      result.removed += removed;
      result.unknown += removed == 0 ? 1 : 0;
    }
    return result;
  }

  void clear(uint32_t source, std::optional<uint32_t> tier, std::optional<uint32_t> only_context) {
    for (uint32_t id : sources_.at(source)) {
      if (only_context && *only_context != id) continue;
      Context& context = *contexts_.at(id);
      LocalSource& local = context.sources[context.source_at.at(source)];
      std::erase_if(local.slots, [&](uint32_t slot) {
        if (tier && context.slots[slot].tier != *tier) return false;
        retire(context, slot);
        return true;
      });
      if (!tier || *tier == 0) ++local.mark_epoch;
    }
    remains_ = true;
    if (const auto waiting = orphan_blocks_of_.find(source); waiting != orphan_blocks_of_.end())
      drop_orphans([&](const Orphan& orphan) {
        return orphan.place.source == source && (!tier || orphan.place.tier == *tier) &&
               (!only_context || orphan.context == *only_context);
      });
  }

  // -- queries

  void match_tokens(uint32_t context_id, const uint8_t* tokens, size_t blocks, const ExtraKeys* extra, Tick now,
                    std::vector<Row>& rows) {
    Context& context = use(context_id);
    HashChain chain(context.seed, tokens, context.block_bytes, extra);
    match(context, chain, blocks, now, rows);
  }

  void match_hashes(uint32_t context_id, const uint8_t* hashes, size_t blocks, Tick now, std::vector<Row>& rows) {
    HashList list(hashes);
    match(use(context_id), list, blocks, now, rows);
  }

  size_t block_bytes(uint32_t context_id) const { return contexts_.at(context_id)->block_bytes; }

  uint64_t add_speculative(uint32_t context_id, uint32_t source, const uint8_t* hashes, size_t blocks, Tick ttl,
                           Tick now) {
    assert(ttl > 0 && "a mark that is born dead would be an empty entry");
    Context& context = use(context_id);
    const uint32_t local = local_source(context, source);
    HashList list(hashes);
    uint64_t added = 0;
    for (size_t i = 0; i < blocks; ++i) {
      const uint64_t prefix = list.next();
      if (const PrefixEntry* entry = find_live(context, prefix, now); entry && is_held_by(context, *entry, local))
        continue;
      if (Mark* mark = find_mark(context, prefix, local)) {
        const bool was_live = mark->epoch == context.sources[local].mark_epoch && mark->deadline > now;
        mark->deadline = was_live ? std::max(mark->deadline, now + ttl) : now + ttl;
        mark->epoch = context.sources[local].mark_epoch;
      } else if (marks_ >= limits_.speculative_blocks_max) {
        ++statistics_.speculative_refused;
        continue;
      } else {
        context.marks.insert(Mark{prefix, local, now + ttl, context.sources[local].mark_epoch});
        ++marks_;
      }
      ++added;
    }
    return added;
  }

  std::vector<Holder> holders(uint32_t context_id, uint64_t prefix, Tick now) {
    std::vector<Holder> found;
    const auto at = contexts_.find(context_id);
    if (at == contexts_.end()) return found;
    Context& context = *at->second;
    if (const PrefixEntry* entry = find_live(context, prefix, now))
      sets_.for_each(entry->holders, [&](uint32_t number) {
        const Slot& slot = context.slots[number];
        if (slot.live) found.push_back({context.sources[slot.local].source, slot.tier, slot.group});
      });
    return found;
  }

  std::array<uint64_t, kTiers> blocks_by_tier(uint32_t source) const {
    std::array<uint64_t, kTiers> blocks{};
    for (uint32_t id : sources_.at(source)) {
      const Context& context = *contexts_.at(id);
      for (uint32_t slot : context.sources[context.source_at.at(source)].slots)
        blocks[context.slots[slot].tier] += context.slots[slot].blocks;
    }
    return blocks;
  }

  uint64_t orphan_blocks(uint32_t source) const {
    const auto found = orphan_blocks_of_.find(source);
    return found == orphan_blocks_of_.end() ? 0 : found->second;
  }

  std::vector<std::pair<uint32_t, uint64_t>> orphan_drops() {
    return {std::exchange(orphan_drops_, {})};
  }

  Statistics statistics() const {
    Statistics now = statistics_;
    now.contexts = contexts_.size();
    now.bytes = sets_.bytes() + names_.bytes() + copies_.bytes() + aliases_.bytes();
    for (const auto& [id, context] : contexts_) {
      now.prefixes += context->prefixes.size();
      now.bytes += sizeof(Context) + context->prefixes.bytes() + context->marks.bytes() +
                   context->slots.capacity() * sizeof(Slot) + context->sources.capacity() * sizeof(LocalSource);
    }
    for (const auto& context : graveyard_) now.bytes += context->prefixes.bytes() + context->marks.bytes();
    now.holder_sets = sets_.size();
    now.engine_keys = names_.size();
    now.copies = copies_.size();
    now.orphan_blocks = orphan_blocks_;
    now.speculative_blocks = marks_;
    return now;
  }

  // -- time

  // Takes away what is dead or expired, looking at about `visits_max` entries; goes on where the last call ended.
  Swept sweep(Tick now, size_t visits_max) {
    Swept swept;
    expire_orphans(now);
    if (at_start_of_pass()) {
      if (!remains_ && limits_.ttl == 0 && marks_ == 0) {
        swept.pass_done = true;
        return swept;
      }
      ++pass_;
      remains_ = false;
    }
    while (swept.visited < visits_max && !swept.pass_done) sweep_stage(now, visits_max, swept);
    return swept;
  }

 private:
  static constexpr size_t kAhead = 8;
  static constexpr size_t kGraveVisits = 4096;  // what taking one segment apart counts for

  struct PrefixEntry {
    uint64_t key;
    SetId holders;
    Tick last_seen;
    bool empty() const { return holders == kEmptySet; }
  };
#pragma pack(push, 1)
  struct Name {
    uint64_t key;  // mix64(engine hash): engines may count 1, 2, 3
    uint64_t prefix;
    SetId owners;
    bool empty() const { return owners == kEmptySet; }
  };
#pragma pack(pop)
  struct Surplus {  // copies or names of a slot beyond the first
    uint64_t key;
    uint32_t context;
    uint32_t slot;
    uint64_t surplus;
    bool empty() const { return surplus == 0; }
  };
  struct Mark {
    uint64_t key;
    uint32_t local;
    Tick deadline;  // never 0
    uint64_t epoch;
    bool empty() const { return deadline == 0; }
  };

  struct Slot {
    uint32_t local = 0;  // index in Context::sources
    uint32_t tier = 0;
    uint32_t group = 0;
    bool live = false;
    uint64_t blocks = 0;
    uint64_t retired_in = 0;  // number of the sweep pass
  };
  struct LocalSource {
    uint32_t source = 0;
    bool live = false;
    uint64_t mark_epoch = 0;
    std::vector<uint32_t> slots;  // live ones
  };
  struct Context {
    uint32_t id = 0;
    uint64_t seed = 0;
    size_t block_bytes = 0;
    uint64_t last_used = 0;
    SegmentedTable<PrefixEntry> prefixes;
    SegmentedTable<Mark> marks;
    std::vector<Slot> slots;
    std::vector<uint32_t> free_slots;
    std::vector<uint32_t> retired_slots;
    std::vector<uint64_t> dead;  // bit per retired slot
    std::vector<LocalSource> sources;
    std::vector<uint32_t> free_sources;
    std::unordered_map<uint32_t, uint32_t> source_at;  // source -> index in sources
    uint64_t evict_cursor = 0;
    Tick evict_up_to = 0;   // entries not seen since are evicted ...
    size_t evict_left = 0;  // ... until so many are gone
  };
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
  };
  using OrphanList = std::list<Orphan>;
  struct Frame {  // blocks being stored, one after the other, with their hashes
    Place place;
    std::vector<uint64_t> engine_hashes;
    std::vector<uint64_t> prefixes;
    std::vector<bool> living;  // empty: all
    size_t next = 0;
    std::optional<uint32_t> slot = {};  // made with the first block that is stored
  };

  // ---- slots

  Context& use(uint32_t id) {
    Context& context = *contexts_.at(id);
    context.last_used = ++uses_;
    return context;
  }

  uint32_t local_source(Context& context, uint32_t source) {
    const auto found = context.source_at.find(source);
    if (found != context.source_at.end()) return found->second;
    uint32_t local;
    if (context.free_sources.empty()) {
      local = static_cast<uint32_t>(context.sources.size());
      context.sources.emplace_back();
    } else {
      local = context.free_sources.back();
      context.free_sources.pop_back();
    }
    context.sources[local].source = source;
    context.sources[local].live = true;
    ++context.sources[local].mark_epoch;
    context.source_at.emplace(source, local);
    sources_.at(source).push_back(context.id);
    return local;
  }

  std::optional<uint32_t> find_slot(const Context& context, const Place& place) const {
    const auto found = context.source_at.find(place.source);
    if (found == context.source_at.end()) return std::nullopt;
    for (uint32_t slot : context.sources[found->second].slots)
      if (context.slots[slot].tier == place.tier && context.slots[slot].group == place.group) return slot;
    return std::nullopt;
  }

  uint32_t slot_of(Context& context, const Place& place) {
    if (const std::optional<uint32_t> found = find_slot(context, place)) return *found;
    uint32_t number;
    if (context.free_slots.empty()) {
      number = static_cast<uint32_t>(context.slots.size());
      context.slots.emplace_back();
      if (context.dead.size() * 64 <= number) context.dead.push_back(0);
    } else {
      number = context.free_slots.back();
      context.free_slots.pop_back();
    }
    const uint32_t local = local_source(context, place.source);
    context.slots[number] = Slot{local, place.tier, place.group, true, 0, 0};
    context.sources[local].slots.push_back(number);
    return number;
  }

  void retire(Context& context, uint32_t number) {
    Slot& slot = context.slots[number];
    slot.live = false;
    slot.retired_in = pass_;
    context.dead[number / 64] |= uint64_t{1} << (number % 64);
    context.retired_slots.push_back(number);
  }

  // ---- entries and names

  bool is_expired(const PrefixEntry& entry, Tick now) const {
    return limits_.ttl != 0 && now - entry.last_seen >= limits_.ttl;
  }

  PrefixEntry* find_live(Context& context, uint64_t prefix, Tick now) const {
    PrefixEntry* entry = context.prefixes.find(prefix);
    return entry != nullptr && !is_expired(*entry, now) ? entry : nullptr;
  }

  bool holds(Context& context, uint32_t slot, uint64_t prefix, Tick now) const {
    const PrefixEntry* entry = find_live(context, prefix, now);
    return entry != nullptr && sets_.contains(entry->holders, slot);
  }

  bool is_held_by(const Context& context, const PrefixEntry& entry, uint32_t local) const {
    const std::vector<uint32_t>& slots = context.sources[local].slots;
    return std::any_of(slots.begin(), slots.end(), [&](uint32_t slot) { return sets_.contains(entry.holders, slot); });
  }

  // Undoes all that an entry means elsewhere; the caller takes it out of the table (or fills it anew).
  void forget(Context& context, const PrefixEntry& entry) {
    sets_.for_each(entry.holders, [&](uint32_t slot) {
      --context.slots[slot].blocks;
      if (aliases_.size() != 0) set_surplus(aliases_, entry.key, context.id, slot, 0);
    });
    sets_.release(entry.holders);
    remains_ = true;  // its names
  }

  static Surplus* find_surplus(SegmentedTable<Surplus>& table, uint64_t key, uint32_t context, uint32_t slot) {
    if (table.size() == 0) return nullptr;
    for (Surplus* at = table.find(key); at != nullptr; at = table.next_equal(at))
      if (at->context == context && at->slot == slot) return at;
    return nullptr;
  }

  static void set_surplus(SegmentedTable<Surplus>& table, uint64_t key, uint32_t context, uint32_t slot,
                          uint64_t surplus) {
    Surplus* found = find_surplus(table, key, context, slot);
    if (found == nullptr) {
      if (surplus != 0) table.insert(Surplus{key, context, slot, surplus});
    } else if (surplus == 0) {
      table.erase(found);
    } else {
      found->surplus = surplus;
    }
  }

  static uint64_t surplus_of(SegmentedTable<Surplus>& table, uint64_t key, uint32_t context, uint32_t slot) {
    const Surplus* found = find_surplus(table, key, context, slot);
    return found == nullptr ? 0 : found->surplus;
  }

  // The prefix that `parent` names for the source in this context: in the same slot, else by tier and group.
  std::optional<uint64_t> parent_prefix(Context& context, const Place& place, uint64_t parent, Tick now) {
    const auto source_at = context.source_at.find(place.source);
    if (source_at == context.source_at.end()) return std::nullopt;
    std::optional<uint64_t> best;
    std::array<uint64_t, 3> best_rank{};
    const uint64_t key = mix64(parent);
    for (Name* name = names_.find(key); name != nullptr; name = names_.next_equal(name)) {
      if (sets_.context(name->owners) != context.id) continue;
      for (uint32_t number : context.sources[source_at->second].slots) {
        const Slot& slot = context.slots[number];
        const bool same = slot.tier == place.tier && slot.group == place.group;
        const std::array<uint64_t, 3> rank{same ? 0u : 1u, slot.tier, slot.group};
        if ((best && rank >= best_rank) || !sets_.contains(name->owners, number)) continue;
        if (!holds(context, number, name->prefix, now)) continue;
        best = name->prefix;
        best_rank = rank;
      }
    }
    return best;
  }

  // (context, prefix) that the source names so in any context: by tier, group, context.
  std::optional<std::pair<uint32_t, uint64_t>> find_name(uint32_t source, uint64_t engine_hash, Tick now) {
    std::optional<std::pair<uint32_t, uint64_t>> best;
    std::array<uint64_t, 3> best_rank{};
    for (Name* name = names_.find(mix64(engine_hash)); name != nullptr; name = names_.next_equal(name)) {
      const auto found = contexts_.find(sets_.context(name->owners));
      if (found == contexts_.end()) continue;
      Context& context = *found->second;
      const auto source_at = context.source_at.find(source);
      if (source_at == context.source_at.end()) continue;
      for (uint32_t number : context.sources[source_at->second].slots) {
        const Slot& slot = context.slots[number];
        const std::array<uint64_t, 3> rank{slot.tier, slot.group, context.id};
        if ((best && rank >= best_rank) || !sets_.contains(name->owners, number)) continue;
        if (!holds(context, number, name->prefix, now)) continue;
        best = {context.id, name->prefix};
        best_rank = rank;
      }
    }
    return best;
  }

  void change_owners(Name* name, SetId owners) {  // may erase the name
    sets_.retain(owners);
    sets_.release(name->owners);
    if (owners == kEmptySet)
      names_.erase(name);
    else
      name->owners = owners;
  }

  // The slot no longer holds the prefix.
  void release_prefix(Context& context, uint32_t slot, PrefixEntry* entry) {
    const SetId left = sets_.without(entry->holders, slot);
    sets_.retain(left);
    sets_.release(entry->holders);
    --context.slots[slot].blocks;
    if (left == kEmptySet)
      context.prefixes.erase(entry);
    else
      entry->holders = left;
  }

  // One name of the slot for the prefix is gone (already taken out of names_).
  void drop_name_of(Context& context, uint32_t slot, PrefixEntry* entry) {
    if (const uint64_t others = surplus_of(aliases_, entry->key, context.id, slot); others != 0)
      set_surplus(aliases_, entry->key, context.id, slot, others - 1);
    else
      release_prefix(context, slot, entry);
  }

  void store_block(Context& context, uint32_t slot, uint64_t engine_hash, uint64_t prefix, Tick now,
                   bool count_copies) {
    const uint64_t key = mix64(engine_hash);
    Name* same = nullptr;
    for (Name* name = names_.find(key); name != nullptr;) {
      if (name->prefix == prefix && sets_.context(name->owners) == context.id) {
        same = name;
      } else if (sets_.context(name->owners) == context.id && sets_.contains(name->owners, slot)) {
        disown(context, slot, name, now);  // newest wins
        same = nullptr;
        name = names_.find(key);  // the table has moved
        continue;
      }
      name = names_.next_equal(name);
    }

    PrefixEntry* entry = context.prefixes.find(prefix);
    if (entry != nullptr && is_expired(*entry, now)) {
      forget(context, *entry);
      context.prefixes.erase(entry);
      ++statistics_.expired;
      entry = nullptr;
    }
    const bool held = entry != nullptr && sets_.contains(entry->holders, slot);
    const bool owned = same != nullptr && sets_.contains(same->owners, slot);
    if (held && owned) {
      if (count_copies) set_surplus(copies_, key, context.id, slot, surplus_of(copies_, key, context.id, slot) + 1);
    } else {
      if (owned) set_surplus(copies_, key, context.id, slot, 0);  // a name that outlived its prefix: counted anew
      if (held)
        set_surplus(aliases_, prefix, context.id, slot, surplus_of(aliases_, prefix, context.id, slot) + 1);
      else
        entry = hold(context, slot, entry, prefix, now);
      if (same == nullptr) {
        const SetId owners = sets_.with(kEmptySet, context.id, slot);
        sets_.retain(owners);
        names_.insert(Name{key, prefix, owners});
      } else if (!owned) {
        change_owners(same, sets_.with(same->owners, context.id, slot));
      }
    }
    entry->last_seen = now;
    if (marks_ != 0) confirm(context, prefix, context.slots[slot].local);
  }

  // The slot loses a name, with all its copies.
  void disown(Context& context, uint32_t slot, Name* name, Tick now) {
    const uint64_t prefix = name->prefix;
    set_surplus(copies_, name->key, context.id, slot, 0);
    change_owners(name, sets_.without(name->owners, slot));
    PrefixEntry* entry = find_live(context, prefix, now);
    if (entry != nullptr && sets_.contains(entry->holders, slot)) drop_name_of(context, slot, entry);
  }

  PrefixEntry* hold(Context& context, uint32_t slot, PrefixEntry* entry, uint64_t prefix, Tick now) {
    ++context.slots[slot].blocks;
    if (entry == nullptr) {
      if (context.prefixes.size() >= limits_.prefixes_per_context_max) evict(context);
      const SetId alone = sets_.with(kEmptySet, context.id, slot);
      sets_.retain(alone);
      return context.prefixes.insert(PrefixEntry{prefix, alone, now});
    }
    const SetId more = sets_.with(entry->holders, context.id, slot);
    sets_.retain(more);
    sets_.release(entry->holders);
    entry->holders = more;
    return entry;
  }

  // Takes one copy away in every context where the place's slot names the hash; returns how many that were.
  uint64_t remove_name(const Place& place, uint64_t engine_hash, Tick now) {
    const uint64_t key = mix64(engine_hash);
    targets_.clear();
    for (const Name* name = names_.find(key); name != nullptr; name = names_.next_equal(const_cast<Name*>(name))) {
      const auto found = contexts_.find(sets_.context(name->owners));
      if (found == contexts_.end()) continue;
      const std::optional<uint32_t> slot = find_slot(*found->second, place);
      if (slot && sets_.contains(name->owners, *slot)) targets_.emplace_back(found->second.get(), *slot);
    }
    uint64_t removed = 0;
    for (const auto& [context, slot] : targets_) {
      Name* name = names_.find(key);
      while (sets_.context(name->owners) != context->id || !sets_.contains(name->owners, slot))
        name = names_.next_equal(name);
      const bool held = holds(*context, slot, name->prefix, now);
      const uint64_t more = surplus_of(copies_, key, context->id, slot);
      if (held && more != 0)
        set_surplus(copies_, key, context->id, slot, more - 1);
      else
        disown(*context, slot, name, now);
      removed += held ? 1 : 0;
    }
    return removed;
  }

  // ---- storing

  void hash_blocks(Frame& frame, const Context& context, uint64_t chain_from, const uint8_t* tokens,
                   const ExtraKeys& extra) {
    HashChain chain(chain_from, tokens, context.block_bytes, extra.ends.empty() ? nullptr : &extra);
    frame.prefixes.resize(frame.engine_hashes.size());
    for (uint64_t& prefix : frame.prefixes) prefix = chain.next();
  }

  // Stores the blocks of a frame and of every orphan that they release, depth first.
  uint64_t store_frames(Context& context, Frame first, Tick now, bool count_copies) {
    uint64_t stored = 0;
    std::vector<Frame> frames;
    frames.push_back(std::move(first));
    while (!frames.empty()) {
      Frame& frame = frames.back();
      if (frame.next == frame.engine_hashes.size()) {
        frames.pop_back();
        continue;
      }
      const size_t block = frame.next++;
      if (block + kAhead < frame.prefixes.size()) {
        context.prefixes.prefetch(frame.prefixes[block + kAhead]);
        names_.prefetch(mix64(frame.engine_hashes[block + kAhead]));
      }
      const uint64_t engine_hash = frame.engine_hashes[block];
      const uint64_t prefix = frame.prefixes[block];
      if (frame.living.empty() || frame.living[block]) {
        if (!frame.slot) frame.slot = slot_of(context, frame.place);
        store_block(context, *frame.slot, engine_hash, prefix, now, count_copies);
        ++stored;
      }
      if (!orphans_.empty()) release_waiters(context, frame.place.source, engine_hash, prefix, frames);
    }
    return stored;
  }

  // ---- orphans

  static uint64_t waiting_key(uint32_t source, uint32_t context, uint64_t engine_hash) {
    return mix64(engine_hash ^ mix64((uint64_t{source} << 32) | context));
  }

  // Returns the number of blocks that now wait.
  uint64_t keep_orphan(const Place& place, const Context& context, std::span<const uint64_t> engine_hashes,
                       uint64_t parent, const uint8_t* tokens, ExtraKeys extra, Tick now) {
    const size_t blocks = engine_hashes.size();
    if (blocks > limits_.orphan_blocks_max) {
      note_drop(place.source, blocks);
      return 0;
    }
    while (orphan_blocks_ + blocks > limits_.orphan_blocks_max) {
      note_drop(orphans_.front().place.source, orphans_.front().engine_hashes.size());
      unlink(orphans_.begin());
    }
    orphans_.push_back(Orphan{++arrivals_, now, place, context.id, parent,
                              std::vector<uint64_t>(engine_hashes.begin(), engine_hashes.end()),
                              std::vector<bool>(blocks, true),
                              std::vector<uint8_t>(tokens, tokens + blocks * context.block_bytes), std::move(extra)});
    const auto at = std::prev(orphans_.end());
    waiting_.emplace(waiting_key(place.source, context.id, parent), at);
    for (const uint64_t engine_hash : engine_hashes)
      orphaned_.emplace(waiting_key(place.source, 0, engine_hash), at);
    orphan_blocks_ += blocks;
    orphan_blocks_of_[place.source] += blocks;
    return blocks;
  }

  void note_drop(uint32_t source, uint64_t blocks) {
    statistics_.orphans_dropped += blocks;
    orphan_drops_.emplace_back(source, blocks);
  }

  template <class Map>
  static void erase_link(Map& map, uint64_t key, OrphanList::iterator orphan) {
    const auto [begin, end] = map.equal_range(key);
    map.erase(std::find_if(begin, end, [&](const auto& link) { return link.second == orphan; }));
  }

  // Takes an orphan out of the books.
  Orphan unlink(OrphanList::iterator at) {
    erase_link(waiting_, waiting_key(at->place.source, at->context, at->parent), at);
    for (const uint64_t engine_hash : at->engine_hashes)
      erase_link(orphaned_, waiting_key(at->place.source, 0, engine_hash), at);
    const size_t blocks = at->engine_hashes.size();
    orphan_blocks_ -= blocks;
    const auto of_source = orphan_blocks_of_.find(at->place.source);
    if ((of_source->second -= blocks) == 0) orphan_blocks_of_.erase(of_source);
    Orphan orphan = std::move(*at);
    orphans_.erase(at);
    return orphan;
  }

  template <class Matches>
  void drop_orphans(Matches matches) {
    for (auto at = orphans_.begin(); at != orphans_.end();) {
      const auto next = std::next(at);
      if (matches(*at)) unlink(at);
      at = next;
    }
  }

  void expire_orphans(Tick now) {
    while (limits_.ttl != 0 && !orphans_.empty() && now - orphans_.front().arrived_at >= limits_.ttl) {
      statistics_.orphans_expired += orphans_.front().engine_hashes.size();
      unlink(orphans_.begin());
    }
  }

  // Pushes a frame for each orphan that waits for this block, the oldest on top.
  void release_waiters(const Context& context, uint32_t source, uint64_t engine_hash, uint64_t prefix,
                       std::vector<Frame>& frames) {
    std::vector<OrphanList::iterator> ready;
    const auto [begin, end] = waiting_.equal_range(waiting_key(source, context.id, engine_hash));
    for (auto at = begin; at != end; ++at) {
      const Orphan& orphan = *at->second;
      if (orphan.place.source == source && orphan.context == context.id && orphan.parent == engine_hash)
        ready.push_back(at->second);
    }
    std::sort(ready.begin(), ready.end(), [](auto a, auto b) { return a->arrival > b->arrival; });
    for (const OrphanList::iterator at : ready) {
      Orphan orphan = unlink(at);
      Frame frame{orphan.place, std::move(orphan.engine_hashes), {}, std::move(orphan.living)};
      hash_blocks(frame, context, prefix, orphan.tokens.data(), orphan.extra);
      frames.push_back(std::move(frame));
    }
  }

  bool remove_from_orphan(const Place& place, uint64_t engine_hash) {
    if (orphans_.empty()) return false;
    Orphan* oldest = nullptr;
    size_t oldest_block = 0;
    const auto [begin, end] = orphaned_.equal_range(waiting_key(place.source, 0, engine_hash));
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

  // ---- speculative marks

  static Mark* find_mark(Context& context, uint64_t prefix, uint32_t local) {
    for (Mark* mark = context.marks.find(prefix); mark != nullptr; mark = context.marks.next_equal(mark))
      if (mark->local == local) return mark;
    return nullptr;
  }

  void confirm(Context& context, uint64_t prefix, uint32_t local) {
    if (Mark* mark = find_mark(context, prefix, local)) {
      context.marks.erase(mark);
      --marks_;
    }
  }

  // ---- matching

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

  template <class Hashes>
  void match(Context& context, Hashes& hashes, size_t blocks, Tick now, std::vector<Row>& rows) {
    if (context.marks.size() == 0)
      walk<false>(context, hashes, blocks, now);
    else
      walk<true>(context, hashes, blocks, now);
    for (const uint32_t local : walking_) {
      const Walker& walker = walkers_[local];
      rows.push_back({context.sources[local].source, walker.depths});
    }
  }

  template <bool kMarks, class Hashes>
  void walk(Context& context, Hashes& hashes, size_t blocks, Tick now) {
    if (walkers_.size() < context.sources.size()) walkers_.resize(context.sources.size());
    walking_.clear();
    ++query_;
    std::array<uint64_t, kAhead> ring;
    size_t hashed = 0;
    SetId set = kEmptySet;
    size_t open = 0;        // sources with a level without a hole
    size_t open_marks = 0;  // the same when marks count
    size_t block = 0;
    for (; block < blocks; ++block) {
      for (; hashed < blocks && hashed < block + kAhead; ++hashed) {
        const uint64_t ahead = hashes.next();
        ring[hashed % kAhead] = ahead;
        context.prefixes.prefetch(ahead);
      }
      const uint64_t prefix = ring[block % kAhead];
      PrefixEntry* const entry = find_live(context, prefix, now);
      const SetId here = entry == nullptr ? kEmptySet : entry->holders;
      if (here != set) {
        follow(context, set, here, block, open);
        set = here;
      }
      if (open != 0 && entry->last_seen != now) entry->last_seen = now;
      if constexpr (kMarks) follow_marks(context, prefix, block, now, open_marks);
      if (open == 0 && (!kMarks || open_marks == 0)) break;
    }
    for (const uint32_t local : walking_) {
      Walker& walker = walkers_[local];
      for (uint32_t level = walker.open; level < kTiers; ++level) walker.depths[level] = static_cast<uint32_t>(block);
      if (!kMarks)
        walker.depths[kTiers] = walker.depths[kTiers - 1];
      else if (walker.open_with_marks)
        walker.depths[kTiers] = static_cast<uint32_t>(block);
    }
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
    for (const Mark* mark = context.marks.find(prefix); mark != nullptr;
         mark = context.marks.next_equal(const_cast<Mark*>(mark))) {
      if (mark->deadline <= now || mark->epoch != context.sources[mark->local].mark_epoch) continue;
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

  // ---- capacity

  // Evicts at least one of the least recently seen entries, and not many more: a threshold is taken from a sample (as
  // Redis approximates LRU, but the sample picks the age, not the victim), and the entries that it condemns go in the
  // order of the table, a few with every insertion. Exact up to kSample entries. Cost: about 16 visits an eviction.
  void evict(Context& context) {
    constexpr size_t kSample = 1024, kEvictionsMax = 64, kVisitsMax = 4096;
    size_t evicted = 0;
    while (evicted == 0) {
      if (context.evict_left == 0) choose_victims(context, kSample);
      bool wrapped = false;
      context.prefixes.sweep(context.evict_cursor, wrapped, kVisitsMax, [&](PrefixEntry& entry) {
        if (context.evict_left == 0 || evicted == kEvictionsMax || entry.last_seen > context.evict_up_to) return true;
        forget(context, entry);
        --context.evict_left;
        ++evicted;
        return false;
      });
      if (wrapped) context.evict_left = 0;  // the rest of the condemned has been seen again
    }
    statistics_.evicted += evicted;
  }

  void choose_victims(Context& context, size_t sample_max) {
    std::vector<Tick> seen;
    if (context.prefixes.size() <= sample_max) {
      uint64_t cursor = 0;
      for (bool done = false; !done;)
        context.prefixes.sweep(cursor, done, sample_max, [&](PrefixEntry& entry) {
          seen.push_back(entry.last_seen);
          return true;
        });
      context.evict_cursor = 0;
    } else {
      for (size_t i = 0; i < sample_max; ++i)
        seen.push_back(context.prefixes.seek(random_ = mix64(random_ + 0x9E3779B97F4A7C15u))->last_seen);
    }
    const size_t rank = std::max<size_t>(1, seen.size() / 16) - 1;
    std::nth_element(seen.begin(), seen.begin() + static_cast<ptrdiff_t>(rank), seen.end());
    context.evict_up_to = seen[rank];
    context.evict_left = std::max<size_t>(1, context.prefixes.size() / 16);
  }

  // ---- sweeping: a pass goes through graveyard, prefixes, marks, names, copies, aliases

  enum class Stage { kGraveyard, kPrefixes, kMarks, kNames, kCopies, kAliases };

  bool at_start_of_pass() const { return stage_ == Stage::kGraveyard && sweep_cursor_ == 0; }

  void next_stage(Stage stage) {
    stage_ = stage;
    sweep_context_ = 0;
    sweep_cursor_ = 0;
  }

  void sweep_stage(Tick now, size_t visits_max, Swept& swept) {
    const size_t left = visits_max - swept.visited;
    bool done = false;
    switch (stage_) {
      case Stage::kGraveyard:
        sweep_cursor_ = 1;
        swept.visited += kGraveVisits;
        if (sweep_graveyard()) next_stage(Stage::kPrefixes);
        break;
      case Stage::kPrefixes:
        sweep_contexts(swept, Stage::kMarks, [&](Context& context, bool& context_done) {
          return context.prefixes.sweep(sweep_cursor_, context_done, left, [&](PrefixEntry& entry) {
            return keep_prefix(context, entry, now, swept);
          });
        });
        break;
      case Stage::kMarks:
        sweep_contexts(swept, Stage::kNames, [&](Context& context, bool& context_done) {
          return context.marks.sweep(sweep_cursor_, context_done, left, [&](const Mark& mark) {
            const bool keep = mark.deadline > now && mark.epoch == context.sources[mark.local].mark_epoch;
            marks_ -= keep ? 0 : 1;
            return keep;
          });
        });
        break;
      case Stage::kNames:
        swept.visited += names_.sweep(sweep_cursor_, done, left, [&](Name& name) { return keep_name(name, now); });
        if (done) next_stage(Stage::kCopies);
        break;
      case Stage::kCopies:
        swept.visited += copies_.sweep(sweep_cursor_, done, left, [&](Surplus& entry) { return is_live(entry); });
        if (done) next_stage(Stage::kAliases);
        break;
      case Stage::kAliases:
        swept.visited += aliases_.sweep(sweep_cursor_, done, left, [&](Surplus& entry) { return is_live(entry); });
        if (!done) break;
        finish_pass();
        swept.pass_done = true;
        next_stage(Stage::kGraveyard);
        break;
    }
  }

  // One slice of the context where the sweep stands; the next stage behind the last context.
  template <class Slice>
  void sweep_contexts(Swept& swept, Stage next, Slice slice) {
    const auto at = contexts_.lower_bound(sweep_context_);
    if (at == contexts_.end()) return next_stage(next);
    if (at->first != sweep_context_) sweep_cursor_ = 0;
    sweep_context_ = at->first;
    bool done = false;
    swept.visited += slice(*at->second, done);
    if (done) {
      ++sweep_context_;
      sweep_cursor_ = 0;
    }
  }

  bool keep_prefix(Context& context, PrefixEntry& entry, Tick now, Swept& swept) {
    if (is_expired(entry, now)) {
      forget(context, entry);
      ++swept.expired;
      ++statistics_.expired;
      return false;
    }
    if (context.retired_slots.empty() || !sets_.intersects(entry.holders, context.dead)) return true;
    const SetId left = sets_.minus(entry.holders, context.dead);
    sets_.retain(left);
    sets_.release(entry.holders);
    entry.holders = left;
    return left != kEmptySet;
  }

  // A name keeps the owners that live and still hold its prefix.
  bool keep_name(Name& name, Tick now) {
    const auto found = contexts_.find(sets_.context(name.owners));
    SetId left = kEmptySet;
    if (found != contexts_.end()) {
      Context& context = *found->second;
      if (const PrefixEntry* entry = find_live(context, name.prefix, now)) {
        // Holders that are dead but not yet swept must not vouch for a dead owner.
        const SetId owners = sets_.minus(name.owners, context.dead);
        sets_.retain(owners);
        left = sets_.intersection(owners, entry->holders);
        sets_.retain(left);
        sets_.release(owners);
      }
    }
    if (left == name.owners) {
      sets_.release(left);  // retained once too often
      return true;
    }
    if (copies_.size() != 0)
      sets_.for_each(name.owners, [&](uint32_t slot) {
        if (!sets_.contains(left, slot)) set_surplus(copies_, name.key, sets_.context(name.owners), slot, 0);
      });
    sets_.release(name.owners);
    name.owners = left;
    return left != kEmptySet;
  }

  bool is_live(const Surplus& entry) const {
    const auto found = contexts_.find(entry.context);
    return found != contexts_.end() && found->second->slots[entry.slot].live;
  }

  // Takes a few segments of dropped contexts apart; true when none is left.
  bool sweep_graveyard() {
    if (graveyard_.empty()) return true;
    Context& context = *graveyard_.back();
    const bool done = context.prefixes.dismantle(1, [&](const PrefixEntry& entry) { sets_.release(entry.holders); }) &&
                      context.marks.dismantle(1, [](const Mark&) {});
    if (done) graveyard_.pop_back();
    return graveyard_.empty();
  }

  // Every table has been seen since the pass began: bits that were dead before it are free.
  void finish_pass() {
    for (const auto& [id, context] : contexts_)
      std::erase_if(context->retired_slots, [&, &context = context](uint32_t slot) {
        if (context->slots[slot].retired_in >= pass_) return false;
        context->dead[slot / 64] &= ~(uint64_t{1} << (slot % 64));
        context->free_slots.push_back(slot);
        return true;
      });
  }

  Limits limits_;
  std::map<uint32_t, std::unique_ptr<Context>> contexts_;  // ordered: a sweep goes through them by number
  std::unordered_map<uint32_t, std::vector<uint32_t>> sources_;  // source -> contexts where it has been seen
  uint32_t context_count_ = 0;
  uint32_t source_count_ = 0;
  uint64_t uses_ = 0;
  HolderSets sets_;
  SegmentedTable<Name> names_;
  SegmentedTable<Surplus> copies_;
  SegmentedTable<Surplus> aliases_;
  size_t marks_ = 0;

  OrphanList orphans_;  // oldest first
  std::unordered_multimap<uint64_t, OrphanList::iterator> waiting_;   // by parent
  std::unordered_multimap<uint64_t, OrphanList::iterator> orphaned_;  // by block
  std::unordered_map<uint32_t, uint64_t> orphan_blocks_of_;
  std::vector<std::pair<uint32_t, uint64_t>> orphan_drops_;
  size_t orphan_blocks_ = 0;
  uint64_t arrivals_ = 0;

  std::vector<Walker> walkers_;
  std::vector<uint32_t> walking_, changed_;
  std::vector<std::pair<Context*, uint32_t>> targets_;
  uint64_t query_ = 0;

  std::vector<std::unique_ptr<Context>> graveyard_;
  Stage stage_ = Stage::kGraveyard;
  uint32_t sweep_context_ = 0;
  uint64_t sweep_cursor_ = 0;
  uint64_t pass_ = 1;
  bool remains_ = false;  // something died since the pass under way began
  uint64_t random_ = 0x9E3779B97F4A7C15u;
  Statistics statistics_;
};

}  // namespace kvindexer
