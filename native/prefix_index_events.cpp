// Contexts, sources and events: how what engines say becomes names and holders.
#include <algorithm>
#include <map>
#include <new>

#include "prefix_index.hpp"

namespace kvindexer {

// -- contexts and sources

std::pair<uint32_t, std::optional<uint32_t>> PrefixIndex::add_context(uint64_t seed, uint32_t block_size) {
  std::optional<uint32_t> evicted;
  if (contexts_.size() >= limits_.contexts_max) {
    evicted = std::min_element(contexts_.begin(), contexts_.end(), [](const auto& a, const auto& b) {
                return a.second->last_used < b.second->last_used;
              })->first;
    drop_context(*evicted);
    ++statistics_.contexts_evicted;
  }
  auto context = std::make_unique<Context>(pool_);
  context->id = ++context_count_;
  context->seed = seed;
  context->block_bytes = size_t{block_size} * 4;
  context->last_used = ++uses_;
  contexts_.emplace(context_count_, std::move(context));
  return {context_count_, evicted};
}

void PrefixIndex::drop_context(uint32_t id) {
  const auto found = contexts_.find(id);
  for (const LocalSource& local : found->second->sources)
    if (local.live) std::erase(sources_.at(local.source), id);
  orphans_.drop_if([id](const Orphan& orphan) { return orphan.context == id; });
  marks_ -= found->second->marks.size();
  graveyard_.push_back(std::move(found->second));
  contexts_.erase(found);
  remains_ = true;
}

uint32_t PrefixIndex::add_source() {
  sources_.try_emplace(++source_count_);
  return source_count_;
}

void PrefixIndex::drop_source(uint32_t source) {
  clear(source, std::nullopt, std::nullopt);
  for (const uint32_t id : sources_.at(source)) contexts_.at(id)->drop_source(source);
  sources_.erase(source);
}

uint32_t PrefixIndex::local_source(Context& context, uint32_t source) {
  const auto found = context.source_at.find(source);
  if (found != context.source_at.end()) return found->second;
  sources_.at(source).push_back(context.id);
  return context.add_source(source);
}

uint32_t PrefixIndex::slot_of(Context& context, const Place& place) {
  if (const std::optional<uint32_t> found = context.find_slot(place)) return *found;
  return context.add_slot(local_source(context, place.source), place);
}

void PrefixIndex::clear(uint32_t source, std::optional<uint32_t> tier, std::optional<uint32_t> only_context) {
  for (const uint32_t id : sources_.at(source)) {
    if (only_context && *only_context != id) continue;
    Context& context = *contexts_.at(id);
    LocalSource& local = context.sources[context.source_at.at(source)];
    std::erase_if(local.slots, [&](uint32_t slot) {
      if (tier && context.slots[slot].tier != *tier) return false;
      context.retire(slot, pass_);
      return true;
    });
    if (!tier || *tier == 0) ++local.mark_epoch;
  }
  remains_ = true;
  if (orphans_.blocks_of(source) == 0) return;
  orphans_.drop_if([&](const Orphan& orphan) {
    return orphan.place.source == source && (!tier || orphan.place.tier == *tier) &&
           (!only_context || orphan.context == *only_context);
  });
}

// -- storing

Stored PrefixIndex::store(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                          std::optional<uint64_t> parent, const uint8_t* tokens, ExtraKeys extra, Tick now,
                          bool count_copies, uint32_t owner) {
  orphans_.expire(now, limits_.ttl);
  Context& context = use(id);
  const size_t blocks = engine_hashes.size();
  uint64_t chain_from = context.seed;
  bool plain = true;
  BlockId before = kNoBlock;
  if (parent) {
    const std::optional<Named> named = resolve(place.source, *parent, now, &context, &place);
    if (!named) {
      const uint64_t waiting = orphans_.add(Orphan{0,
                                                   now,
                                                   place,
                                                   id,
                                                   *parent,
                                                   {engine_hashes.begin(), engine_hashes.end()},
                                                   {},
                                                   {tokens, tokens + blocks * context.block_bytes},
                                                   std::move(extra),
                                                   owner});
      return {0, waiting, 0};
    }
    chain_from = named->prefix;
    plain = pool_[named->id].is_plain;
    before = named->id;
  }
  HashChain chain(chain_from, tokens, context.block_bytes, extra.ends.empty() ? nullptr : &extra);
  hashed_.resize(blocks);
  Frame frame{
      .place = place, .engine_hashes = engine_hashes, .prefixes = hashed_, .chain = &chain, .hashed = 0};
  frame.tokens = tokens;
  frame.plain = plain_blocks(plain, extra, blocks);
  frame.before = before;
  frame.restating = !parent && blocks > 1;
  frame.owner = owner;
  return {store_frame(context, std::move(frame), now, count_copies), 0, 0};
}

Stored PrefixIndex::place(const Place& place, std::span<const uint64_t> engine_hashes, Tick now,
                          bool count_copies, uint32_t owner) {
  orphans_.expire(now, limits_.ttl);
  Stored result;
  for (const uint64_t engine_hash : engine_hashes) {
    const std::optional<Named> named = resolve(place.source, engine_hash, now, nullptr, nullptr);
    if (!named) {
      ++result.unknown;
      continue;
    }
    Frame frame{.place = place, .engine_hashes = {&engine_hash, 1}, .prefixes = {&named->prefix, 1}};
    frame.owner = owner;
    result.stored += store_frame(use(named->context->id), std::move(frame), now, count_copies);
  }
  return result;
}

Stored PrefixIndex::store_prefixes(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                                   std::span<const uint64_t> prefixes, std::span<const uint64_t> copies,
                                   Tick now, bool count_copies, uint32_t owner) {
  orphans_.expire(now, limits_.ttl);
  Frame frame{.place = place, .engine_hashes = engine_hashes, .prefixes = prefixes, .copies = copies};
  frame.owner = owner;
  return {store_frame(use(id), std::move(frame), now, count_copies), 0, 0};
}

Stored PrefixIndex::store_hashed(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                                 std::optional<uint64_t> chain_from, std::span<const uint64_t> prefixes,
                                 std::vector<Content> contents, Tick now, bool count_copies, uint32_t owner) {
  orphans_.expire(now, limits_.ttl);
  Context& context = use(id);
  Frame frame{.place = place, .engine_hashes = engine_hashes, .prefixes = prefixes};
  BlockId parent = chain_from ? context.find_live(*chain_from, now, limits_.ttl) : kNoBlock;
  if (parent != kNoBlock && !is_held(context, pool_[parent])) parent = kNoBlock;  // gone, and not swept yet
  if (!chain_from || (parent != kNoBlock && pool_[parent].is_plain)) frame.plain = contents.size();
  frame.contents = std::move(contents);
  frame.before = parent;
  frame.restating = !chain_from && engine_hashes.size() > 1;
  frame.owner = owner;
  return {store_frame(context, std::move(frame), now, count_copies), 0, 0};
}

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
    const BlockId id = name.id != kNoBlock ? name.id : context->prefixes.find(name.other->prefix);
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

void PrefixIndex::hash_blocks(const Context& context, uint64_t chain_from, size_t blocks,
                              const uint8_t* tokens, const ExtraKeys& extra,
                              std::vector<uint64_t>& prefixes) const {
  HashChain chain(chain_from, tokens, context.block_bytes, extra.ends.empty() ? nullptr : &extra);
  prefixes.resize(blocks);
  for (uint64_t& prefix : prefixes) prefix = chain.next();
}

// How many leading blocks have no extra keys, on top of a parent that is plain or not.
size_t PrefixIndex::plain_blocks(bool parent, const ExtraKeys& extra, size_t blocks) {
  size_t plain = 0;
  while (parent && plain < blocks && extra.of(plain).empty()) ++plain;
  return plain;
}

// Stores the blocks of a frame and of every orphan that they release, depth first.
uint64_t PrefixIndex::store_frame(Context& context, Frame first, Tick now, bool count_copies) {
  uint64_t stored = 0;
  const bool told = contents_.takes(context.id);
  std::vector<Frame> frames;
  frames.push_back(std::move(first));
  while (!frames.empty()) {
    Frame& frame = frames.back();
    if (is_quiet(frame)) stored += store_run(context, frame, now, count_copies, told);
    if (frame.next == frame.engine_hashes.size()) {
      frames.pop_back();
      continue;
    }
    const size_t block = frame.next++;
    prefix_at(frame, frame.prefixes.size() - 1);
    if (frame.is_living(block)) {
      store_block(context, frame, now, count_copies, told);
      ++stored;
    }
    if (!orphans_.is_empty())
      release_waiters(context, frame.place.source, frame.engine_hashes[block], frame.prefixes[block],
                      block < frame.plain, frames);
  }
  contents_.flush();
  return stored;
}

// Stores the next blocks of a quiet frame up to one that takes more than these two ways; returns how many.
size_t PrefixIndex::store_run(Context& context, Frame& frame, Tick now, bool count_copies, bool told) {
  const size_t begin = frame.next;
  if (!frame.slot) frame.slot = slot_of(context, frame.place);
  for (size_t at = begin; at < frame.engine_hashes.size(); at = frame.next) {
    store_known(context, frame, now, count_copies, told);
    if (frame.next < frame.engine_hashes.size()) store_new(context, frame, now, told);
    if (frame.next == at) break;
  }
  return frame.next - begin;
}

// The next blocks that lie one behind the other, as they do when they were stored together, each under the
// name by which it comes now. All of them take the same step from one set of slots to another, nearly always.
void PrefixIndex::store_known(Context& context, Frame& frame, Tick now, bool count_copies, bool told) {
  const uint32_t slot = *frame.slot;
  SetId holders = kEmptySet, more_holders = kEmptySet, owners = kEmptySet, more_owners = kEmptySet;
  bool held = false;
  uint32_t moved = 0;
  uint64_t digest = 0;
  const auto settle = [&] {
    sets_.retain(more_holders, moved);
    sets_.retain(more_owners, moved);
    sets_.release(holders, moved);
    sets_.release(owners, moved);
    context.slots[slot].blocks += moved;
    moved = 0;
  };
  for (; frame.next < frame.engine_hashes.size(); ++frame.next) {
    const size_t block = frame.next;
    const uint64_t prefix = prefix_at(frame, block);
    const BlockId id = context.behind(sets_, frame.before, prefix);
    if (id == kNoBlock) break;
    BlockRecord& record = pool_[id];
    if (record.name != mix64(frame.engine_hashes[block]) || record.has_namesake) break;
    if (record.is_expired(now, limits_.ttl) || (told && block < frame.plain && !record.is_plain)) break;
    if (record.holders != holders || record.owners != owners) {
      if (record.owners == kEmptySet) break;
      settle();
      holders = record.holders;
      owners = record.owners;
      held = sets_.contains(holders, slot);
      if (held != sets_.contains(owners, slot)) break;
      if (!held) {
        more_holders = sets_.with(holders, context.id, slot);
        more_owners = sets_.with(owners, context.id, slot);
      }
    }
    if (!held) {
      record.holders = more_holders;
      record.owners = more_owners;
      ++moved;
      digest += mix64(prefix);
      frame.restating = false;
    } else if (count_copies && !frame.restating) {
      break;
    }
    record.last_seen = now;
    frame.before = id;
    frame.in_order = true;
  }
  settle();
  context.slots[slot].digest += digest;
}

// The next blocks whose prefixes and names are new. What their insertion needs of the tables is fetched while
// the blocks before them are inserted.
void PrefixIndex::store_new(Context& context, Frame& frame, Tick now, bool told) {
  struct Ahead {
    PrefixTable::Spot prefix;
    NameTable::Spot name;
    uint64_t key;
  };
  std::array<Ahead, kAhead> ring;
  Slot& slot = context.slots[*frame.slot];
  const size_t begin = frame.next;
  const size_t end = frame.engine_hashes.size();
  const SetId alone = sets_.with(kEmptySet, context.id, *frame.slot);
  const auto references = static_cast<uint32_t>(2 * (end - begin));
  sets_.retain(alone, references);
  for (size_t fetched = begin; frame.next < end; ++frame.next) {
    const size_t block = frame.next;
    // Of the first block it is not known yet whether it is new.
    const size_t ahead = block == begin ? block + 1 : std::min(end, block + kAhead);
    for (; fetched < ahead; ++fetched) {
      const uint64_t key = mix64(frame.engine_hashes[fetched]);
      Ahead& next = ring[fetched % kAhead];
      next = {PrefixTable::spot_of(prefix_at(frame, fetched)), NameTable::spot_of(key), key};
      context.prefixes.prefetch(next.prefix);
      names_.prefetch(next.name);
    }
    const Ahead& at = ring[block % kAhead];
    const uint64_t prefix = frame.prefixes[block];
    if (context.prefixes.find(prefix, at.prefix) != kNoBlock) break;
    if (names_.find(at.key, at.name) != kNoBlock) break;
    if (other_names_.size() != 0 && other_names_.find(at.key) != nullptr) break;
    if (context.prefixes.size() >= limits_.prefixes_per_context_max) evict(context);
    if (pool_.is_full()) throw std::bad_alloc();
    const BlockId id = pool_.add();
    BlockRecord& record = pool_[id];
    record.prefix = prefix;
    record.name = at.key;
    record.holders = record.owners = alone;
    record.last_seen = now;
    context.prefixes.insert(at.prefix, id);
    names_.insert(at.name, id);
    ++slot.blocks;
    slot.digest += mix64(prefix);
    if (told && block < frame.plain) tell(context, frame, block, record);
    frame.before = id;
    frame.in_order = frame.restating = false;
  }
  sets_.release(alone, references - static_cast<uint32_t>(2 * (frame.next - begin)));
}

// Pushes a frame for each orphan that waits for this block, the oldest on top. A block that came without
// tokens may be known to be `plain` from before.
void PrefixIndex::release_waiters(Context& context, uint32_t source, uint64_t engine_hash, uint64_t prefix,
                                  bool plain, std::vector<Frame>& frames) {
  for (Orphan& orphan : orphans_.take_waiting(source, context.id, engine_hash)) {
    const BlockId before = context.prefixes.find(prefix);
    const bool parent = plain || (before != kNoBlock && pool_[before].is_plain);
    Frame frame{.place = orphan.place};
    frame.orphan = std::move(orphan);
    frame.engine_hashes = frame.orphan.engine_hashes;
    hash_blocks(context, prefix, frame.engine_hashes.size(), frame.orphan.tokens.data(), frame.orphan.extra,
                frame.own_prefixes);
    frame.prefixes = frame.own_prefixes;
    frame.tokens = frame.orphan.tokens.data();
    frame.plain = plain_blocks(parent, frame.orphan.extra, frame.engine_hashes.size());
    frame.before = before;
    frame.owner = frame.orphan.owner;
    frames.push_back(std::move(frame));
  }
}

// The block that comes next in a frame (`next` is past it already).
void PrefixIndex::store_block(Context& context, Frame& frame, Tick now, bool count_copies, bool told) {
  const size_t block = frame.next - 1;
  const uint64_t key = mix64(frame.engine_hashes[block]);
  const uint64_t prefix = frame.prefixes[block];
  if (!frame.slot) frame.slot = slot_of(context, frame.place);
  BlockId id = find_next(context, frame);
  const bool count = count_copies && !frame.restating && frame.copies.empty();
  if (!store_name(context, *frame.slot, key, prefix, id, now, count)) frame.restating = false;
  frame.before = id;
  if (!frame.copies.empty()) {
    touch(key);
    copies_.set(key, context.id, *frame.slot, frame.copies[block] - 1);
  }
  BlockRecord& record = pool_[id];
  record.last_seen = now;
  if (told && block < frame.plain && !record.is_plain) tell(context, frame, block, record);
  if (told && frame.owner != 0) owners_.claim(context.claims, prefix, *frame.slot, frame.owner);
  if (marks_ != 0) confirm(context, prefix, context.slots[*frame.slot].local);
}

// The record of a frame's next block, kNoBlock when its prefix is new. Tables are asked only where the block
// does not lie behind the one before it; then what the next kAhead blocks need of them is fetched early.
BlockId PrefixIndex::find_next(Context& context, Frame& frame) {
  const size_t block = frame.next - 1;
  BlockId id = context.behind(sets_, frame.before, frame.prefixes[block]);
  const bool was_in_order = frame.in_order;
  if (id == kNoBlock) {
    id = context.prefixes.find(frame.prefixes[block]);
    frame.in_order = block == 0 && id != kNoBlock;
  } else {
    frame.in_order = true;
  }
  if (frame.in_order) return id;
  const size_t end = std::min(frame.prefixes.size(), block + 1 + kAhead);
  for (size_t ahead = was_in_order ? block + 1 : block + kAhead; ahead < end; ++ahead) {
    context.prefixes.prefetch(frame.prefixes[ahead]);
    names_.prefetch(mix64(frame.engine_hashes[ahead]));
  }
  return id;
}

// The slot names the prefix by `key`, once more when `count_copies`; `id` is the prefix's record, kNoBlock
// when there is none, and becomes the one that there is then. Tells whether the slot named it so before.
bool PrefixIndex::store_name(Context& context, uint32_t slot, uint64_t key, uint64_t prefix, BlockId& id,
                             Tick now, bool count_copies) {
  if (id != kNoBlock && pool_[id].is_expired(now, limits_.ttl)) {
    context.prefixes.erase(prefix, id);
    forget(context, id);
    ++statistics_.expired;
    id = kNoBlock;
  }
  const Naming name = find_own_name(context, slot, key, prefix, id, now);
  const bool held = id != kNoBlock && sets_.contains(pool_[id].holders, slot);
  const bool owned = name && sets_.contains(owners_of(name), slot);
  if (!held || !owned || count_copies) touch(key);
  if (held && owned) {
    if (count_copies) copies_.set(key, context.id, slot, copies_.get(key, context.id, slot) + 1);
    return true;
  }
  if (owned) copies_.set(key, context.id, slot, 0);  // the name outlived its prefix: counted anew
  if (held)
    aliases_.set(prefix, context.id, slot, aliases_.get(prefix, context.id, slot) + 1);
  else
    hold(context, slot, id, prefix, now);
  if (!owned) own(context, slot, name, id, key);
  return false;
}

// -- records

// A new record; takes over the caller's reference to `holders`. May evict others.
BlockId PrefixIndex::add_record(Context& context, uint64_t prefix, SetId holders, Tick last_seen) {
  if (context.prefixes.size() >= limits_.prefixes_per_context_max) evict(context);
  if (pool_.is_full()) throw std::bad_alloc();
  const BlockId id = pool_.add();
  BlockRecord& record = pool_[id];
  record.prefix = prefix;
  record.holders = holders;
  record.last_seen = last_seen;
  context.prefixes.insert(prefix, id);
  return id;
}

// Adds the slot to the holders; `id` is kNoBlock when the prefix is new, and becomes its record.
void PrefixIndex::hold(Context& context, uint32_t slot, BlockId& id, uint64_t prefix, Tick now) {
  if (id == kNoBlock) {
    const SetId alone = sets_.with(kEmptySet, context.id, slot);
    sets_.retain(alone);
    id = add_record(context, prefix, alone, now);
  } else {
    SetId holders = pool_[id].holders;
    replace(holders, sets_.with(holders, context.id, slot));
    pool_[id].holders = holders;
  }
  ++context.slots[slot].blocks;
  context.slots[slot].digest += mix64(prefix);
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

// Takes a record that nobody holds any more out of everything.
void PrefixIndex::discard(Context& context, BlockId id) {
  die(context, pool_[id]);
  context.prefixes.erase(pool_[id].prefix, id);
  unname(id);
  pool_.free(id);
}

void PrefixIndex::replace(SetId& set, SetId by) {
  sets_.retain(by);
  sets_.release(set);
  set = by;
}

// -- names

// The name (engine hash, prefix) of this context, whoever owns it; `id` is the prefix's record. Should the
// slot call another prefix so, that ends: the newest wins.
PrefixIndex::Naming PrefixIndex::find_own_name(Context& context, uint32_t slot, uint64_t key, uint64_t prefix,
                                               BlockId id, Tick now) {
  if (id != kNoBlock) {
    const BlockRecord& record = pool_[id];
    if (record.owners != kEmptySet && record.name == key && !record.has_namesake) return {id, nullptr};
  }
  Naming same, older;
  do {
    same = older = {};
    each_name(key, [&](const Naming& name) {
      if (sets_.context(owners_of(name)) != context.id) return false;
      const uint64_t named = name.id != kNoBlock ? pool_[name.id].prefix : name.other->prefix;
      if (named == prefix)
        same = name;
      else if (owns(name, context, slot))
        older = name;
      return static_cast<bool>(older);
    });
    if (older) disown(context, slot, older, now);  // the tables have moved
  } while (older);
  return same;
}

// A new name of the record's prefix; takes over the caller's reference to `owners`.
void PrefixIndex::add_name(BlockId id, uint64_t key, SetId owners) {
  bool has_namesake = false;
  names_.each(key, [&](BlockId namesake) {
    pool_[namesake].has_namesake = has_namesake = true;
    return false;
  });
  BlockRecord& record = pool_[id];
  if (record.owners != kEmptySet) {
    other_names_.insert(OtherName{key, record.prefix, owners});
    return;
  }
  record.name = key;
  record.owners = owners;
  record.has_namesake = has_namesake || (other_names_.size() != 0 && other_names_.find(key) != nullptr);
  names_.insert(key, id);
}

void PrefixIndex::set_owners(const Naming& name, SetId owners) {
  if (name.id != kNoBlock)
    pool_[name.id].owners = owners;
  else
    name.other->owners = owners;
}

// Adds the slot to the owners of the name, or of a new one when there is none.
void PrefixIndex::own(Context& context, uint32_t slot, const Naming& name, BlockId id, uint64_t key) {
  SetId owners = name ? owners_of(name) : kEmptySet;
  const SetId more = sets_.with(owners, context.id, slot);
  if (name) {
    replace(owners, more);
    return set_owners(name, owners);
  }
  sets_.retain(more);
  add_name(id, key, more);
}

// The slot loses a name with all its copies and, when that was its last one for the prefix, the prefix.
void PrefixIndex::disown(Context& context, uint32_t slot, const Naming& name, Tick now) {
  const bool in_record = name.id != kNoBlock;
  const uint64_t key = in_record ? pool_[name.id].name : name.other->key;
  const uint64_t prefix = in_record ? pool_[name.id].prefix : name.other->prefix;
  touch(key);
  copies_.set(key, context.id, slot, 0);
  SetId owners = owners_of(name);
  replace(owners, sets_.without(owners, slot));
  set_owners(name, owners);
  if (owners == kEmptySet && in_record) names_.erase(key, name.id);
  if (owners == kEmptySet && !in_record) other_names_.erase(name.other);

  const BlockId id = in_record ? name.id : context.prefixes.find(prefix);
  if (!holds(slot, id, now)) return;
  if (const uint64_t others = aliases_.get(prefix, context.id, slot); others != 0)
    return aliases_.set(prefix, context.id, slot, others - 1);
  --context.slots[slot].blocks;
  context.slots[slot].digest -= mix64(prefix);
  SetId holders = pool_[id].holders;
  replace(holders, sets_.without(holders, slot));
  pool_[id].holders = holders;
  owners_.drop(context.claims, prefix, [slot](uint32_t claimant) { return claimant == slot; });
  if (holders == kEmptySet) discard(context, id);
}

// The owners that are not among those that are `left` have no copies of a name any more.
void PrefixIndex::uncount(uint64_t key, SetId owners, SetId left) {
  if (copies_.is_empty()) return;
  sets_.for_each(owners, [&](uint32_t slot) {
    if (left == kEmptySet || !sets_.contains(left, slot)) copies_.set(key, sets_.context(owners), slot, 0);
  });
}

// -- removing

Removed PrefixIndex::remove(const Place& place, std::span<const uint64_t> engine_hashes, Tick now) {
  orphans_.expire(now, limits_.ttl);
  Removal removal{.place = place};
  Removed result;
  for (size_t i = 0; i < engine_hashes.size(); ++i) {
    prefetch_removal(removal, engine_hashes, i);
    uint64_t removed = remove_name(removal, mix64(engine_hashes[i]), now);
    if (removed == 0 && orphans_.kill(place, engine_hashes[i])) removed = 1;
    result.removed += removed;
    result.unknown += removed == 0 ? 1 : 0;
  }
  contents_.flush();
  return result;
}

// Three cache misses wait for a removal, each at an address that the one before it gives: the place in the
// table of names, the record, the place in the table of prefixes. They are fetched kAhead blocks one after
// the other. Where records are found beside the last one, the tables are wanted only when nobody else holds
// the blocks.
void PrefixIndex::prefetch_removal(const Removal& removal, std::span<const uint64_t> engine_hashes,
                                   size_t block) const {
  const auto key = [&](size_t ahead) {
    return block + ahead < engine_hashes.size() ? mix64(engine_hashes[block + ahead]) : 0;
  };
  if (removal.step != 0) {
    if (!removal.discards || block + kAhead >= engine_hashes.size()) return;
    const uint64_t ahead = key(kAhead);
    const BlockRecord* const record =
        pool_.peek(removal.near + removal.step * static_cast<int32_t>(kAhead + 1));
    if (record == nullptr || record->name != ahead) return;
    names_.prefetch(ahead);
    return removal.context->prefixes.prefetch(record->prefix);
  }
  if (block + 3 * kAhead < engine_hashes.size()) names_.prefetch(key(3 * kAhead));
  if (block + 2 * kAhead < engine_hashes.size())
    if (const BlockId id = names_.likely(key(2 * kAhead)); id != kNoBlock) pool_.prefetch(id);
  if (block + kAhead >= engine_hashes.size() || removal.context == nullptr) return;
  if (const BlockId id = names_.likely(key(kAhead)); id != kNoBlock)
    removal.context->prefixes.prefetch(pool_[id].prefix);
}

// The names of this key that the place's slots own, in every context. Engines remove neighbours together,
// mostly from the tail, so the records beside the last one are looked at before the tables are.
void PrefixIndex::find_targets(Removal& removal, uint64_t key) {
  targets_.clear();
  const auto consider = [&](const Naming& name) {
    const SetId owners = owners_of(name);
    if (removal.context == nullptr || removal.context->id != sets_.context(owners)) {
      removal.context = find_context(sets_.context(owners));
      if (removal.context == nullptr) return false;
      removal.slot = removal.context->find_slot(removal.place);
    }
    if (removal.slot && sets_.contains(owners, *removal.slot))
      targets_.push_back({removal.context, *removal.slot, name});
    return false;
  };
  if (removal.near != kNoBlock)
    for (const BlockId id : {removal.near - 1, removal.near + 1}) {
      const BlockRecord* const record = pool_.peek(id);
      if (record == nullptr || record->owners == kEmptySet || record->name != key) continue;
      if (!record->has_namesake) return static_cast<void>(consider(Naming{id, nullptr}));
    }
  each_name(key, consider);
}

// Takes one copy away in every context where the place's slot names the hash; returns how many that were.
uint64_t PrefixIndex::remove_name(Removal& removal, uint64_t key, Tick now) {
  find_targets(removal, key);
  uint64_t removed = 0;
  for (auto [context, slot, name] : targets_) {
    if (name.other != nullptr && targets_.size() > 1) {  // the table may have moved
      name.other = other_names_.find(key);
      while (!owns(name, *context, slot)) name.other = other_names_.next_equal(name.other);
    }
    const BlockId id = name.id != kNoBlock ? name.id : context->prefixes.find(name.other->prefix);
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
      disown(*context, slot, name, now);
    removal.discards = id != kNoBlock && pool_.is_free(id);
    removed += held ? 1 : 0;
  }
  return removed;
}

// -- speculative marks

uint64_t PrefixIndex::add_speculative(uint32_t id, uint32_t source, HashList hashes, size_t blocks, Tick ttl,
                                      Tick now) {
  assert(ttl > 0 && "a mark that is born dead would be an empty entry");
  Context& context = use(id);
  const uint32_t local = local_source(context, source);
  const LocalSource& of_source = context.sources[local];
  uint64_t marked = 0;
  for (size_t i = 0; i < blocks; ++i) {
    const uint64_t prefix = hashes.next();
    const BlockId held = context.find_live(prefix, now, limits_.ttl);
    if (held != kNoBlock && context.is_held_by(sets_, pool_[held], of_source)) continue;
    if (Mark* const mark = context.find_mark(prefix, local)) {
      mark->deadline = context.is_live(*mark, now) ? std::max(mark->deadline, now + ttl) : now + ttl;
      mark->epoch = of_source.mark_epoch;
    } else if (marks_ < limits_.speculative_blocks_max) {
      context.marks.insert(Mark{prefix, local, now + ttl, of_source.mark_epoch});
      ++marks_;
    } else {
      ++statistics_.speculative_refused;
      continue;
    }
    ++marked;
  }
  return marked;
}

// The source holds the prefix now: what was expected of it has come true.
void PrefixIndex::confirm(Context& context, uint64_t prefix, uint32_t local) {
  if (Mark* const mark = context.find_mark(prefix, local)) {
    context.marks.erase(mark);
    --marks_;
  }
}

// -- queries

std::vector<Place> PrefixIndex::holders(uint32_t id, uint64_t prefix, Tick now) {
  std::vector<Place> found;
  Context* const context = find_context(id);
  const BlockId record = context == nullptr ? kNoBlock : context->find_live(prefix, now, limits_.ttl);
  if (record == kNoBlock) return found;
  sets_.for_each(pool_[record].holders, [&](uint32_t number) {
    const Slot& slot = context->slots[number];
    if (slot.live) found.push_back({context->sources[slot.local].source, slot.tier, slot.group});
  });
  return found;
}

std::vector<Holding> PrefixIndex::holdings(uint32_t id, std::span<const uint64_t> prefixes, Tick now) {
  std::vector<Holding> found;
  Context* const context = find_context(id);
  if (context == nullptr) return found;
  for (uint32_t i = 0; i < prefixes.size(); ++i) {
    if (i + kAhead < prefixes.size()) context->prefixes.prefetch(prefixes[i + kAhead]);
    const BlockId record = context->find_live(prefixes[i], now, limits_.ttl);
    if (record == kNoBlock) continue;
    sets_.for_each(pool_[record].holders, [&](uint32_t number) {
      const Slot& slot = context->slots[number];
      if (!slot.live) return;
      const uint32_t source = context->sources[slot.local].source;
      const size_t before = found.size();
      if (context->claims.size() != 0)
        for (const Claim* at = context->claims.find(prefixes[i]); at != nullptr;
             at = ClaimTable::next_equal(at))
          if (at->slot == number && owners_.is_live(*at)) found.push_back({i, source, at->owner});
      if (found.size() == before) found.push_back({i, source, 0});
    });
  }
  return found;
}

std::optional<uint64_t> PrefixIndex::prefix_of(uint32_t context_id, const Place& place, uint64_t engine_hash,
                                               Tick now) {
  const Context* const context = find_context(context_id);
  const std::optional<uint32_t> slot = context == nullptr ? std::nullopt : context->find_slot(place);
  std::optional<uint64_t> found;
  if (!slot) return found;
  each_name(mix64(engine_hash), [&](const Naming& name) {
    if (!owns(name, *context, *slot)) return false;
    const BlockId id = name.id != kNoBlock ? name.id : context->prefixes.find(name.other->prefix);
    if (!holds(*slot, id, now)) return false;
    const uint64_t prefix =
        pool_[id].prefix;  // a copy: records are packed, so no reference may point into one
    found = prefix;
    return true;
  });
  return found;
}

bool PrefixIndex::names(NameCursor& cursor, size_t names_max, Tick now, std::vector<NameRun>& runs) {
  std::map<std::array<uint32_t, 4>, NameRun> by_slot;
  size_t work = 0;  // a name that nobody owns any more costs something too
  const bool done = walk_names(cursor, [&](const ListedName& name) {
    ++work;
    Context* const context = find_context(sets_.context(name.owners));
    if (context == nullptr || name.holders == kEmptySet) return work < names_max;
    if (limits_.ttl != 0 && now - name.last_seen >= limits_.ttl) return work < names_max;
    sets_.for_each(name.owners, [&](uint32_t number) {
      const Slot& slot = context->slots[number];
      if (!slot.live || !sets_.contains(name.holders, number)) return;
      const Place place{context->sources[slot.local].source, slot.tier, slot.group};
      NameRun& run = by_slot[{place.source, context->id, place.tier, place.group}];
      run.place = place;
      run.context = context->id;
      run.engine_hashes.push_back(unmix64(name.key));
      run.prefixes.push_back(name.prefix);
      run.copies.push_back(1 + copies_.get(name.key, context->id, number));
      ++work;
    });
    return work < names_max;
  });
  for (auto& [_, run] : by_slot) runs.push_back(std::move(run));
  return done;
}

std::array<uint64_t, kTiers> PrefixIndex::blocks_by_tier(uint32_t source) const {
  std::array<uint64_t, kTiers> blocks{};
  for (const uint32_t id : sources_.at(source)) {
    const Context& context = *contexts_.at(id);
    for (const uint32_t slot : context.find_source(source)->slots)
      blocks[context.slots[slot].tier] += context.slots[slot].blocks;
  }
  return blocks;
}

Statistics PrefixIndex::statistics() const {
  Statistics now = statistics_;
  now.contexts = contexts_.size();
  now.bytes = sets_.bytes() + pool_.bytes() + names_.bytes() + other_names_.bytes() +
              copies_.table().bytes() + aliases_.table().bytes();
  for (const auto& [id, context] : contexts_) {
    now.prefixes += context->prefixes.size();
    now.bytes += sizeof(Context) + context->prefixes.bytes() + context->marks.bytes() +
                 context->claims.bytes() + context->slots.capacity() * sizeof(Slot) +
                 context->sources.capacity() * sizeof(LocalSource);
  }
  for (const auto& context : graveyard_)
    now.bytes += context->prefixes.bytes() + context->marks.bytes() + context->claims.bytes();
  now.holder_sets = sets_.size();
  now.engine_keys = names_.size() + other_names_.size();
  now.copies = copies_.table().size();
  now.orphan_blocks = orphans_.blocks();
  now.orphans_dropped = orphans_.dropped();
  now.orphans_expired = orphans_.expired();
  now.speculative_blocks = marks_;
  now.claims = owners_.claims();
  now.claims_refused = owners_.refused();
  return now;
}

}  // namespace kvindexer
