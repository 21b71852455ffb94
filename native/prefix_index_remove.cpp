// Removing: what engines say is gone.
#include <algorithm>
#include <array>

#include "prefix_index.hpp"

namespace kvindexer {

Removed PrefixIndex::remove(const Place& place, std::span<const uint64_t> engine_hashes, Tick now) {
  orphans_.expire(now, limits_.ttl);
  Removal removal{.place = place};
  Removed result;
  while (true) {
    const size_t named = remove_run(removal, engine_hashes, now);
    const size_t renamed = remove_renamed(removal, engine_hashes.subspan(named), now);
    result.removed += named + renamed;
    engine_hashes = engine_hashes.subspan(named + renamed);
    if (engine_hashes.empty()) break;
    if (named + renamed != 0) continue;
    prefetch_removal(removal, engine_hashes);
    uint64_t removed = remove_name(removal, mix64(engine_hashes.front()), now);
    if (removed == 0 && orphans_.kill(place, engine_hashes.front())) removed = 1;
    result.removed += removed;
    result.unknown += removed == 0 ? 1 : 0;
    engine_hashes = engine_hashes.subspan(1);
  }
  contents_.flush();
  return result;
}

// The next names, as long as each lies in the record beside the one before it and is the slot's only one for
// a block that it holds once. Nearly all of them take the same step from one set of slots to another. Returns
// how many went.
size_t PrefixIndex::remove_run(Removal& removal, std::span<const uint64_t> engine_hashes, Tick now) {
  if (removal.step == 0 || !removal.slot) return 0;
  Context& context = *removal.context;
  Slot& slot = context.slots[*removal.slot];
  HolderStep step(sets_);
  const auto named = [&](BlockId id, uint64_t key) -> BlockRecord* {
    BlockRecord* const record = pool_.peek(id);
    if (record == nullptr || record->name != key || record->owners == kEmptySet || record->has_namesake)
      return nullptr;
    return record->is_expired(now, limits_.ttl) || is_counted(context, key, record->prefix) ? nullptr
                                                                                            : record;
  };
  size_t at = 0;
  while (at < engine_hashes.size()) {
    const BlockId id = removal.near + removal.step;
    const uint64_t key = mix64(engine_hashes[at]);
    BlockRecord* const record = named(id, key);
    if (record == nullptr) break;
    if (!step.is_from(record->holders, record->owners)) {
      const SetId holders = record->holders, owners = record->owners;
      step.begin(holders, owners);
      if (sets_.context(owners) != context.id || !sets_.contains(owners, *removal.slot)) break;
      if (!sets_.contains(holders, *removal.slot)) break;
      const SetId left = sets_.without(holders, *removal.slot);
      step.lead_holders_to(left);
      step.lead_owners_to(left == kEmptySet ? kEmptySet : sets_.without(owners, *removal.slot));
    }
    if (step.holders() == kEmptySet) {
      size_t run = 1;
      for (; at + run < engine_hashes.size(); ++run) {
        const BlockRecord* const next =
            named(id + removal.step * static_cast<int32_t>(run), mix64(engine_hashes[at + run]));
        if (next == nullptr || !step.is_from(next->holders, next->owners)) break;
      }
      empty_run(removal, step, engine_hashes.subspan(at, run));
      at += run;
      continue;
    }
    touch(key);
    step.take();
    --slot.blocks;
    slot.digest -= mix64(record->prefix);
    record->holders = step.holders();
    record->owners = step.owners();
    if (step.owners() == kEmptySet) names_.erase(key, id);
    removal.near = id;
    ++at;
  }
  return at;
}

// The next names are those of records that nobody holds without the slot. The last record goes first, as it
// may follow the one before it. What the tables need is fetched for kAhead records at once.
void PrefixIndex::empty_run(Removal& removal, HolderStep& step, std::span<const uint64_t> engine_hashes) {
  struct Ahead {
    uint64_t key;
    PrefixTable::Spot in_prefixes;
    NameTable::Spot in_names;
  };
  std::array<Ahead, 2 * kAhead> ring;
  Context& context = *removal.context;
  Slot& slot = context.slots[*removal.slot];
  const size_t count = engine_hashes.size();
  const BlockId near = removal.near;
  const bool is_forward = removal.step > 0;
  const BlockId last = is_forward ? near + static_cast<BlockId>(count) : near - 1;
  list_behind(context, last);
  if (touched_)
    for (const uint64_t engine_hash : engine_hashes) touch(mix64(engine_hash));
  size_t fetched = 0;
  for (size_t at = 0; at < count; ++at) {
    if (at == 0 || fetched - at == kAhead) {
      const size_t first = fetched;
      for (const size_t end = std::min(count, at + 2 * kAhead); fetched < end; ++fetched) {
        const uint64_t key = mix64(engine_hashes[is_forward ? count - 1 - fetched : fetched]);
        const uint64_t prefix = pool_[last - static_cast<BlockId>(fetched)].prefix;
        ring[fetched % ring.size()] = {key, PrefixTable::spot_of(prefix), NameTable::spot_of(key)};
      }
      for (size_t i = first; i < fetched; ++i) {
        names_.prefetch(ring[i % ring.size()].in_names);
        if (pool_[last - static_cast<BlockId>(i)].is_listed)
          context.listed.prefetch(ring[i % ring.size()].in_prefixes);
      }
    }
    const Ahead& mine = ring[at % ring.size()];
    const BlockId id = last - static_cast<BlockId>(at);
    const BlockRecord& record = pool_[id];
    const uint64_t prefix = record.prefix;
    if (record.is_plain) {
      contents_.expect_death(context.id);  // from here on nothing fails
      contents_.died(prefix);
    }
    step.take();
    --slot.blocks;
    slot.digest -= mix64(prefix);
    if (record.is_listed) context.listed.erase(mine.in_prefixes, id);
    names_.erase(mine.in_names, id);
    --context.records;
    pool_.free(id);
  }
  removal.near = near + removal.step * static_cast<int32_t>(count);
}

// The same where each name lies among the other names.
size_t PrefixIndex::remove_renamed(Removal& removal, std::span<const uint64_t> engine_hashes, Tick now) {
  if (removal.step == 0 || !removal.slot) return 0;
  Context& context = *removal.context;
  Slot& slot = context.slots[*removal.slot];
  HolderStep step(sets_);
  size_t at = 0;
  for (size_t fetched = 0; at < engine_hashes.size(); ++at) {
    const BlockId id = removal.near + removal.step;
    BlockRecord* const record = pool_.peek(id);
    const uint64_t key = mix64(engine_hashes[at]);
    if (record == nullptr || record->holders == kEmptySet || record->name == key) break;
    prefetch_names(engine_hashes, false, at, fetched);
    if (record->is_expired(now, limits_.ttl) || is_counted(context, key, record->prefix)) break;
    const OtherNameId other = find_other(key, id);
    if (other == kNoOtherName) break;
    const SetId owners = other_names_[other].owners;
    if (!sets_.contains(owners, *removal.slot)) break;
    const SetId holders = record->holders;
    if (!step.is_from(holders, owners)) {
      step.begin(holders, owners);
      if (sets_.context(holders) != context.id || !sets_.contains(holders, *removal.slot)) break;
      step.lead_holders_to(sets_.without(holders, *removal.slot));
      step.lead_owners_to(sets_.without(owners, *removal.slot));
    }
    if (step.holders() == kEmptySet) {   // the record goes, and what is left of its own name
      step.begin(kEmptySet, kEmptySet);  // from sets that may be gone after this
      disown(context, *removal.slot, Naming{kNoBlock, other}, id, now);
    } else {
      touch(key);
      step.take();
      --slot.blocks;
      slot.digest -= mix64(record->prefix);
      record->holders = step.holders();
      other_names_[other].owners = step.owners();
      if (step.owners() == kEmptySet) other_names_.erase(other);
    }
    removal.near = id;
  }
  return at;
}

// Whether anybody has copies of the name, or of the prefix more names than one or owners.
inline bool PrefixIndex::is_counted(Context& context, uint64_t key, uint64_t prefix) {
  return (!copies_.is_empty() && copies_.has(key)) || (!aliases_.is_empty() && aliases_.has(prefix)) ||
         (context.claims.size() != 0 && context.claims.find(prefix) != nullptr);
}

// Three cache misses wait for the removal of a name that is no neighbour's, each at an address that the one
// before it gives: the place in the table of names, the record, the place in the table of prefixes. They are
// fetched kAhead blocks one after the other.
void PrefixIndex::prefetch_removal(const Removal& removal, std::span<const uint64_t> engine_hashes) const {
  if (removal.step != 0) return;
  const auto likely = [&](size_t ahead) {
    return ahead < engine_hashes.size() ? names_.likely(mix64(engine_hashes[ahead])) : kNoBlock;
  };
  if (3 * kAhead < engine_hashes.size()) names_.prefetch(mix64(engine_hashes[3 * kAhead]));
  if (const BlockId id = likely(2 * kAhead); id != kNoBlock) pool_.prefetch(id);
  if (removal.context == nullptr) return;
  if (const BlockId id = likely(kAhead); id != kNoBlock && pool_[id].is_listed)
    removal.context->listed.prefetch(pool_[id].prefix);
}

// The names of this key that the place's slots own, in every context. Engines remove neighbours together,
// mostly from the tail, so the records beside the last one are looked at before the tables are.
void PrefixIndex::find_targets(Removal& removal, uint64_t key) {
  targets_.clear();
  const auto consider = [&](const Naming& name) {
    const SetId owners = owners_of(name);
    if (removal.context == nullptr || removal.context->id != sets_.context(owners)) {
      removal.context = find_context(sets_.context(owners));
      removal.slot.reset();
      if (removal.context != nullptr) removal.slot = removal.context->find_slot(removal.place);
    }
    if (removal.slot && sets_.contains(owners, *removal.slot))
      targets_.push_back({removal.context, *removal.slot, name});
    return false;
  };
  if (removal.near != kNoBlock)
    for (const BlockId id : {removal.near - 1, removal.near + 1}) {
      const BlockRecord* const record = pool_.peek(id);
      if (record == nullptr || record->owners == kEmptySet || record->name != key) continue;
      if (!record->has_namesake) return static_cast<void>(consider(Naming{id, kNoOtherName}));
    }
  each_name(key, consider);
}

// Takes one copy away in every context where the place's slot names the hash; returns how many that were.
uint64_t PrefixIndex::remove_name(Removal& removal, uint64_t key, Tick now) {
  find_targets(removal, key);
  uint64_t removed = 0;
  for (auto [context, slot, name] : targets_) {
    const BlockId id = record_of(name);
    const bool held = holds(slot, id, now);
    const uint64_t more = copies_.get(key, context->id, slot);
    touch(key);
    if (id != kNoBlock) {
      const bool is_beside = removal.near != kNoBlock && (id == removal.near - 1 || id == removal.near + 1);
      removal.step = is_beside ? static_cast<int32_t>(id - removal.near) : 0;
      removal.near = id;
    }
    if (held && more != 0)
      copies_.set(key, context->id, slot, more - 1);
    else
      disown(*context, slot, name, id, now);
    removed += held ? 1 : 0;
  }
  return removed;
}

}  // namespace kvindexer
