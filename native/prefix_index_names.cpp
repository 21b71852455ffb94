// Records and their names, one at a time.
#include <algorithm>
#include <array>

#include "prefix_index.hpp"

namespace kvindexer {

// What the source calls `engine_hash`: in one context or, when that is null, in any; of several slots that
// name it so, the preferred place comes first, then the others by tier, group and the context's seed, which
// is the same in every process.
std::optional<PrefixIndex::Named> PrefixIndex::resolve(uint32_t source, uint64_t engine_hash, Tick now,
                                                       const Context* only, const Place* preferred) {
  std::optional<Named> best;
  std::array<uint64_t, 4> best_rank{};
  each_name(mix64(engine_hash), [&](const Naming& name) {
    const SetId owners = owners_of(name);
    Context* const context = find_context(sets_.context(owners));
    if (context == nullptr || (only != nullptr && context != only)) return false;
    const LocalSource* const local = context->find_source(source);
    if (local == nullptr) return false;
    const BlockId id = record_of(name);
    for (const uint32_t number : local->slots) {
      const Slot& slot = context->slots[number];
      const bool is_preferred =
          preferred != nullptr && slot.tier == preferred->tier && slot.group == preferred->group;
      const std::array<uint64_t, 4> rank{is_preferred ? 0u : 1u, slot.tier, slot.group, context->seed};
      if ((best && rank >= best_rank) || !sets_.contains(owners, number)) continue;
      if (!holds(number, id, now)) continue;
      best = Named{context, pool_[id].prefix, id};
      best_rank = rank;
    }
    return false;
  });
  return best;
}

// -- records

// A new record, which takes over the reference to its holders. There is room for it.
BlockId PrefixIndex::add_record(Context& context, uint64_t prefix, BlockId parent, SetReferences holders,
                                Tick last_seen) {
  const BlockId id = pool_.add();
  BlockRecord& record = pool_[id];
  record.prefix = prefix;
  record.holders = holders.id();
  record.last_seen = last_seen;
  record.follows = may_follow(parent, id);
  try {
    if (!record.follows || lists_all_) list(context, id);
  } catch (...) {
    pool_.free(id);
    throw;
  }
  holders.take();
  ++context.records;
  return id;
}

// The record of any prefix of the context. One that follows the record before it is found through that one
// only: whoever asks for a prefix without its parent has all of them listed first. list_all did that
// beforehand, a slice at a time, or this is a long call.
BlockId PrefixIndex::find(Context& context, uint64_t prefix) {
  const BlockId id = context.listed.find(prefix);
  if (id != kNoBlock || context.unlisted() == 0) return id;
  list_all(SIZE_MAX, asked_by_hash_);
  return context.listed.find(prefix);
}

BlockId PrefixIndex::find_live(Context& context, uint64_t prefix, Tick now) {
  const BlockId id = find(context, prefix);
  return id != kNoBlock && !pool_[id].is_expired(now, limits_.ttl) ? id : kNoBlock;
}

bool PrefixIndex::list_all(size_t visits_max, Tick now) {
  asked_by_hash_ = now;
  if (!lists_all_) list_cursor_ = 0;
  lists_all_ = true;
  size_t visits = 0;
  return pool_.walk(list_cursor_, [&](BlockId id, const BlockRecord* record) {
    if (record != nullptr && record->holders != kEmptySet && !record->is_listed)
      if (Context* const context = find_context(sets_.context(record->holders))) list(*context, id);
    return ++visits < visits_max;
  });
}

// From now on the record is found by its prefix alone.
void PrefixIndex::list(Context& context, BlockId id) {
  context.listed.insert(uint64_t{pool_[id].prefix}, id);
  pool_[id].is_listed = true;
}

// From now on it is found behind the one that it follows.
void PrefixIndex::unlist(Context& context, BlockId id) {
  context.listed.erase(pool_[id].prefix, id);
  pool_[id].is_listed = false;
}

// Before a record goes: what follows it can be found without it. Throws std::bad_alloc, and then nothing has
// changed.
void PrefixIndex::list_behind(Context& context, BlockId id) {
  BlockRecord* const next = pool_.peek(id + 1);
  if (next == nullptr || !next->follows) return;
  if (!next->is_listed) list(context, id + 1);
  next->follows = false;
}

// Behind list_behind and, where anybody knows of the record, die.
void PrefixIndex::free_record(Context& context, BlockId id) {
  unname(id);
  sets_.release(pool_[id].holders);
  if (pool_[id].is_listed) context.listed.erase(pool_[id].prefix, id);
  --context.records;
  pool_.free(id);
}

// The slot holds the prefix from now on, beside those that did: `holders` are all of them.
void PrefixIndex::hold(Context& context, uint32_t slot, BlockId id, SetReferences holders) {
  BlockRecord& record = pool_[id];
  const SetId before = record.holders;
  record.holders = holders.take();
  sets_.release(before);
  ++context.slots[slot].blocks;
  context.slots[slot].digest += mix64(record.prefix);
}

// Takes away the name that lies in a record.
void PrefixIndex::unname(BlockId id) {
  BlockRecord& record = pool_[id];
  if (record.owners == kEmptySet) return;
  names_.erase(record.name, id);
  uncount(record.name, record.owners, kEmptySet);
  sets_.release(record.owners);
  record.owners = kEmptySet;
}

void PrefixIndex::replace(SetId& set, SetId by) {
  sets_.retain(by);
  sets_.release(set);
  set = by;
}

// -- names

// For whoever goes through names that lie among the other names, or will (`are_new`): fetches what is needed
// of the tables for kAhead names at once, up to twice as far from `at` on; `fetched` says how far it came.
void PrefixIndex::prefetch_names(std::span<const uint64_t> engine_hashes, bool are_new, size_t at,
                                 size_t& fetched) const {
  if (fetched > at && fetched - at != kAhead) return;
  const size_t first = std::max(fetched, at);
  fetched = std::min(engine_hashes.size(), at + 2 * kAhead);
  for (size_t i = first; i < fetched; ++i) {
    const uint64_t key = mix64(engine_hashes[i]);
    if (are_new) names_.prefetch(key);
    other_names_.prefetch(key);
  }
  for (size_t i = at; i < std::min(fetched, at + kAhead); ++i)
    other_names_.prefetch_record(mix64(engine_hashes[i]));
}

// The name that this prefix, whose record is `id`, has by this key, whoever owns it. Should the slot call
// another prefix so, that ends: the newest wins.
PrefixIndex::Naming PrefixIndex::find_own_name(Context& context, uint32_t slot, uint64_t key, BlockId id,
                                               Tick now) {
  if (id != kNoBlock) {
    const BlockRecord& record = pool_[id];
    if (record.owners != kEmptySet && record.name == key && !record.has_namesake) return {id, kNoOtherName};
  }
  Naming same, wrong;
  do {
    same = wrong = {};
    each_name(key, [&](const Naming& name) {
      if (sets_.context(owners_of(name)) != context.id) return false;
      const BlockId named = record_of(name);
      if (named != kNoBlock && named == id)
        same = name;
      else if (named == kNoBlock || owns(name, context, slot))
        wrong = name;
      return static_cast<bool>(wrong);
    });
    if (wrong && record_of(wrong) == kNoBlock)
      drop_other(wrong.other);  // its prefix may come back into the same record, and must not bring it back
    else if (wrong)
      disown(context, slot, wrong, record_of(wrong), now);  // the tables have moved
  } while (wrong);
  return same;
}

// The name of a prefix that is gone.
void PrefixIndex::drop_other(OtherNameId id) {
  const OtherName& name = other_names_[id];
  const uint64_t key = name.key;
  const SetId owners = name.owners;
  touch(key);
  uncount(key, owners, kEmptySet);
  other_names_.erase(id);
  sets_.release(owners);
}

// A new name of the record's prefix, which takes over the reference to its owners.
void PrefixIndex::add_name(BlockId id, uint64_t key, SetReferences owners) {
  bool has_namesake = other_names_.mark_namesakes(key);
  names_.each(key, [&](BlockId namesake) {
    pool_[namesake].has_namesake = has_namesake = true;
    return false;
  });
  BlockRecord& record = pool_[id];
  if (record.owners != kEmptySet) {
    other_names_.insert(key, id, record.prefix, owners.id(), has_namesake);
    owners.take();
    return;
  }
  names_.insert(key, id);
  record.name = key;
  record.owners = owners.take();
  record.has_namesake = has_namesake;
}

void PrefixIndex::set_owners(const Naming& name, SetId owners) {
  if (name.id != kNoBlock)
    pool_[name.id].owners = owners;
  else
    other_names_[name.other].owners = owners;
}

// Adds the slot to the owners of the name, or of a new one when there is none.
void PrefixIndex::own(Context& context, uint32_t slot, const Naming& name, BlockId id, uint64_t key) {
  const SetId owners = name ? owners_of(name) : kEmptySet;
  SetReferences more(sets_, sets_.with(owners, context.id, slot));
  if (!name) return add_name(id, key, std::move(more));
  set_owners(name, more.take());
  sets_.release(owners);
}

// The slot loses a name with all its copies and, when that was its last one for the prefix, the prefix, whose
// record is `id`, or kNoBlock.
void PrefixIndex::disown(Context& context, uint32_t slot, const Naming& name, BlockId id, Tick now) {
  const bool in_record = name.id != kNoBlock;
  const uint64_t key = in_record ? pool_[name.id].name : other_names_[name.other].key;
  const bool is_held = holds(slot, id, now);
  const uint64_t prefix = is_held ? pool_[id].prefix : 0;
  const uint64_t others = is_held ? aliases_.get(prefix, context.id, slot) : 0;
  const bool leaves = is_held && others == 0;
  SetReferences fewer_owners(sets_, sets_.without(owners_of(name), slot));
  SetReferences fewer_holders(sets_, leaves ? sets_.without(pool_[id].holders, slot) : kEmptySet);
  const bool dies = leaves && fewer_holders.id() == kEmptySet;
  touch(key);
  if (dies) {
    list_behind(context, id);
    die(context, pool_[id]);
  } else if (leaves) {
    owners_.drop(context.claims, prefix, [slot](uint32_t claimant) { return claimant == slot; });
  }

  copies_.set(key, context.id, slot, 0);  // from here on nothing fails
  const SetId owners = owners_of(name);
  set_owners(name, fewer_owners.take());
  sets_.release(owners);
  if (fewer_owners.id() == kEmptySet && in_record) names_.erase(key, name.id);
  if (fewer_owners.id() == kEmptySet && !in_record) other_names_.erase(name.other);
  if (others != 0) return aliases_.set(prefix, context.id, slot, others - 1);
  if (!leaves) return;
  --context.slots[slot].blocks;
  context.slots[slot].digest -= mix64(prefix);
  if (dies) return free_record(context, id);
  const SetId holders = pool_[id].holders;
  pool_[id].holders = fewer_holders.take();
  sets_.release(holders);
}

// The owners that are not among those that are `left` have no copies of a name any more.
void PrefixIndex::uncount(uint64_t key, SetId owners, SetId left) {
  if (copies_.is_empty()) return;
  sets_.for_each(owners, [&](uint32_t slot) {
    if (left == kEmptySet || !sets_.contains(left, slot)) copies_.set(key, sets_.context(owners), slot, 0);
  });
}

}  // namespace kvindexer
