// Contexts, sources and events: how what engines say becomes names and holders.
#include <algorithm>
#include <map>

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
  auto context = std::make_unique<Context>();
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
    plain = context.prefixes.find(chain_from)->is_plain;
  }
  Frame frame{place,
              {engine_hashes.begin(), engine_hashes.end()},
              hash_blocks(context, chain_from, blocks, tokens, extra),
              {}};
  frame.tokens = tokens;
  frame.plain = plain_blocks(plain, extra, blocks);
  frame.restating = !parent && blocks > 1;
  frame.owner = owner;
  return {store_frames(context, std::move(frame), now, count_copies), 0, 0};
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
    Frame frame{place, {engine_hash}, {named->prefix}, {}};
    frame.owner = owner;
    result.stored += store_frames(use(named->context->id), std::move(frame), now, count_copies);
  }
  return result;
}

Stored PrefixIndex::store_prefixes(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                                   std::span<const uint64_t> prefixes, std::span<const uint64_t> copies,
                                   std::span<const ContentHash> contents, Tick now, bool count_copies,
                                   uint32_t owner) {
  orphans_.expire(now, limits_.ttl);
  Frame frame{place, {engine_hashes.begin(), engine_hashes.end()}, {prefixes.begin(), prefixes.end()}, {}};
  frame.copies.assign(copies.begin(), copies.end());
  frame.contents.assign(contents.begin(), contents.end());
  frame.owner = owner;
  return {store_frames(use(id), std::move(frame), now, count_copies), 0, 0};
}

// What the source calls `engine_hash`: in one context or, when that is null, in any; of several slots that
// name it so, the preferred place comes first, then the others by tier, group and context.
std::optional<PrefixIndex::Named> PrefixIndex::resolve(uint32_t source, uint64_t engine_hash, Tick now,
                                                       const Context* only, const Place* preferred) {
  std::optional<Named> best;
  std::array<uint32_t, 4> best_rank{};
  for (const Name* name = names_.find(mix64(engine_hash)); name != nullptr; name = names_.next_equal(name)) {
    Context* const context = find_context(sets_.context(name->owners));
    if (context == nullptr || (only != nullptr && context != only)) continue;
    const LocalSource* const local = context->find_source(source);
    if (local == nullptr) continue;
    for (const uint32_t number : local->slots) {
      const Slot& slot = context->slots[number];
      const bool is_preferred =
          preferred != nullptr && slot.tier == preferred->tier && slot.group == preferred->group;
      const std::array<uint32_t, 4> rank{is_preferred ? 0u : 1u, slot.tier, slot.group, context->id};
      if ((best && rank >= best_rank) || !sets_.contains(name->owners, number)) continue;
      if (!holds(*context, number, name->prefix, now)) continue;
      best = Named{context, name->prefix};
      best_rank = rank;
    }
  }
  return best;
}

std::vector<uint64_t> PrefixIndex::hash_blocks(const Context& context, uint64_t chain_from, size_t blocks,
                                               const uint8_t* tokens, const ExtraKeys& extra) const {
  HashChain chain(chain_from, tokens, context.block_bytes, extra.ends.empty() ? nullptr : &extra);
  std::vector<uint64_t> prefixes(blocks);
  for (uint64_t& prefix : prefixes) prefix = chain.next();
  return prefixes;
}

// How many leading blocks have no extra keys, on top of a parent that is plain or not.
size_t PrefixIndex::plain_blocks(bool parent, const ExtraKeys& extra, size_t blocks) {
  size_t plain = 0;
  while (parent && plain < blocks && extra.of(plain).empty()) ++plain;
  return plain;
}

// Stores the blocks of a frame and of every orphan that they release, depth first.
uint64_t PrefixIndex::store_frames(Context& context, Frame first, Tick now, bool count_copies) {
  uint64_t stored = 0;
  const bool told = contents_.takes(context.id);
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
      const bool count = count_copies && !frame.restating && frame.copies.empty();
      const StoredBlock kept = store_block(context, *frame.slot, engine_hash, prefix, now, count);
      if (!kept.was_named) frame.restating = false;
      if (told && !kept.entry->is_plain) tell(context, frame, block, *kept.entry);
      if (told && frame.owner != 0) owners_.claim(context.claims, prefix, *frame.slot, frame.owner);
      if (!frame.copies.empty()) {
        touch(mix64(engine_hash));
        copies_.set(mix64(engine_hash), context.id, *frame.slot, frame.copies[block] - 1);
      }
      ++stored;
    }
    if (!orphans_.is_empty())
      release_waiters(context, frame.place.source, engine_hash, prefix, block < frame.plain, frames);
  }
  contents_.flush();
  return stored;
}

// Pushes a frame for each orphan that waits for this block, the oldest on top. A block that came without
// tokens may be known to be `plain` from before.
void PrefixIndex::release_waiters(Context& context, uint32_t source, uint64_t engine_hash, uint64_t prefix,
                                  bool plain, std::vector<Frame>& frames) {
  for (Orphan& orphan : orphans_.take_waiting(source, context.id, engine_hash)) {
    std::vector<uint64_t> prefixes =
        hash_blocks(context, prefix, orphan.engine_hashes.size(), orphan.tokens.data(), orphan.extra);
    const PrefixEntry* const entry = plain ? nullptr : context.prefixes.find(prefix);
    Frame frame{orphan.place, std::move(orphan.engine_hashes), std::move(prefixes), std::move(orphan.living)};
    frame.own_tokens = std::move(orphan.tokens);
    frame.tokens = frame.own_tokens.data();
    frame.plain = plain_blocks(plain || (entry != nullptr && entry->is_plain), orphan.extra,
                               frame.engine_hashes.size());
    frame.owner = orphan.owner;
    frames.push_back(std::move(frame));
  }
}

// Tells the fuzzy index of a block that it does not have, should it be plain.
void PrefixIndex::tell(const Context& context, const Frame& frame, size_t block, PrefixEntry& entry) {
  const uint64_t prefix = frame.prefixes[block];
  if (block < frame.plain)
    contents_.born(context.id, prefix, frame.tokens + block * context.block_bytes, context.block_bytes);
  else if (!frame.contents.empty() && !frame.contents[block].is_none())
    contents_.born(context.id, prefix, frame.contents[block]);
  else
    return;
  entry.is_plain = true;
}

PrefixIndex::StoredBlock PrefixIndex::store_block(Context& context, uint32_t slot, uint64_t engine_hash,
                                                  uint64_t prefix, Tick now, bool count_copies) {
  const uint64_t key = mix64(engine_hash);
  Name* const name = find_own_name(context, slot, key, prefix, now);
  PrefixEntry* entry = context.prefixes.find(prefix);
  if (entry != nullptr && entry->is_expired(now, limits_.ttl)) {
    forget(context, *entry);
    context.prefixes.erase(entry);
    ++statistics_.expired;
    entry = nullptr;
  }
  const bool held = entry != nullptr && sets_.contains(entry->holders, slot);
  const bool owned = name != nullptr && sets_.contains(name->owners, slot);
  if (!held || !owned || count_copies) touch(key);
  if (held && owned) {
    if (count_copies) copies_.set(key, context.id, slot, copies_.get(key, context.id, slot) + 1);
  } else {
    if (owned) copies_.set(key, context.id, slot, 0);  // the name outlived its prefix: counted anew
    if (held)
      aliases_.set(prefix, context.id, slot, aliases_.get(prefix, context.id, slot) + 1);
    else
      entry = hold(context, slot, entry, prefix, now);
    if (!owned) own(context, slot, name, key, prefix);
  }
  entry->last_seen = now;
  if (marks_ != 0) confirm(context, prefix, context.slots[slot].local);
  return {entry, held && owned};
}

// The name (engine hash, prefix) of this context, whoever owns it. Should the slot call another prefix so,
// that ends: the newest wins.
PrefixIndex::Name* PrefixIndex::find_own_name(const Context& context, uint32_t slot, uint64_t key,
                                              uint64_t prefix, Tick now) {
  Name* same = nullptr;
  for (Name* name = names_.find(key); name != nullptr;) {
    if (name->prefix == prefix && sets_.context(name->owners) == context.id) {
      same = name;
    } else if (owns(*name, context, slot)) {
      disown(const_cast<Context&>(context), slot, name, now);
      same = nullptr;
      name = names_.find(key);  // the table has moved
      continue;
    }
    name = names_.next_equal(name);
  }
  return same;
}

// Adds the slot to the holders; `entry` is null when the prefix is new.
PrefixEntry* PrefixIndex::hold(Context& context, uint32_t slot, PrefixEntry* entry, uint64_t prefix,
                               Tick now) {
  ++context.slots[slot].blocks;
  context.slots[slot].digest += mix64(prefix);
  if (entry == nullptr) {
    if (context.prefixes.size() >= limits_.prefixes_per_context_max) evict(context);
    const SetId alone = sets_.with(kEmptySet, context.id, slot);
    sets_.retain(alone);
    return context.prefixes.insert(PrefixEntry{prefix, alone, now});
  }
  replace(entry->holders, sets_.with(entry->holders, context.id, slot));
  return entry;
}

// Adds the slot to the owners; `name` is null when it is new.
void PrefixIndex::own(Context& context, uint32_t slot, Name* name, uint64_t key, uint64_t prefix) {
  if (name == nullptr) {
    const SetId alone = sets_.with(kEmptySet, context.id, slot);
    sets_.retain(alone);
    names_.insert(Name{key, prefix, alone});
  } else {
    SetId owners = name->owners;
    replace(owners, sets_.with(owners, context.id, slot));
    name->owners = owners;
  }
}

// The slot loses a name with all its copies and, when that was its last one for the prefix, the prefix.
void PrefixIndex::disown(Context& context, uint32_t slot, Name* name, Tick now) {
  const uint64_t prefix = name->prefix;
  touch(name->key);
  copies_.set(name->key, context.id, slot, 0);
  SetId owners = name->owners;
  replace(owners, sets_.without(owners, slot));
  name->owners = owners;
  if (owners == kEmptySet) names_.erase(name);

  PrefixEntry* const entry = context.find_live(prefix, now, limits_.ttl);
  if (entry == nullptr || !sets_.contains(entry->holders, slot)) return;
  if (const uint64_t others = aliases_.get(prefix, context.id, slot); others != 0)
    return aliases_.set(prefix, context.id, slot, others - 1);
  --context.slots[slot].blocks;
  context.slots[slot].digest -= mix64(prefix);
  replace(entry->holders, sets_.without(entry->holders, slot));
  owners_.drop(context.claims, prefix, [slot](uint32_t claimant) { return claimant == slot; });
  if (entry->holders != kEmptySet) return;
  die(context, *entry);
  context.prefixes.erase(entry);
}

void PrefixIndex::replace(SetId& set, SetId by) {
  sets_.retain(by);
  sets_.release(set);
  set = by;
}

bool PrefixIndex::holds(Context& context, uint32_t slot, uint64_t prefix, Tick now) const {
  const PrefixEntry* entry = context.find_live(prefix, now, limits_.ttl);
  return entry != nullptr && sets_.contains(entry->holders, slot);
}

// -- removing

Removed PrefixIndex::remove(const Place& place, std::span<const uint64_t> engine_hashes, Tick now) {
  orphans_.expire(now, limits_.ttl);
  targets_.clear();
  Removed result;
  for (size_t i = 0; i < engine_hashes.size(); ++i) {
    prefetch_removal(engine_hashes, i);
    uint64_t removed = remove_name(place, engine_hashes[i], now);
    if (removed == 0 && orphans_.kill(place, engine_hashes[i])) removed = 1;
    result.removed += removed;
    result.unknown += removed == 0 ? 1 : 0;
  }
  contents_.flush();
  return result;
}

// Two cache misses wait for each removal, the second at an address that the first one gives: names are
// fetched 2 * kAhead blocks ahead, their prefixes kAhead blocks ahead, in the context where the last removal
// was.
void PrefixIndex::prefetch_removal(std::span<const uint64_t> engine_hashes, size_t block) {
  if (block + 2 * kAhead < engine_hashes.size()) names_.prefetch(mix64(engine_hashes[block + 2 * kAhead]));
  if (block + kAhead >= engine_hashes.size() || targets_.empty()) return;
  if (const Name* const name = names_.find(mix64(engine_hashes[block + kAhead])))
    targets_.front().first->prefixes.prefetch(name->prefix);
}

// Takes one copy away in every context where the place's slot names the hash; returns how many that were.
uint64_t PrefixIndex::remove_name(const Place& place, uint64_t engine_hash, Tick now) {
  const uint64_t key = mix64(engine_hash);
  targets_.clear();
  for (const Name* name = names_.find(key); name != nullptr; name = names_.next_equal(name)) {
    Context* const context = find_context(sets_.context(name->owners));
    if (context == nullptr) continue;
    const std::optional<uint32_t> slot = context->find_slot(place);
    if (slot && sets_.contains(name->owners, *slot)) targets_.emplace_back(context, *slot);
  }
  uint64_t removed = 0;
  for (const auto& [context, slot] : targets_) {
    Name* name = names_.find(key);
    while (!owns(*name, *context, slot)) name = names_.next_equal(name);
    const bool held = holds(*context, slot, name->prefix, now);
    const uint64_t more = copies_.get(key, context->id, slot);
    touch(key);
    if (held && more != 0)
      copies_.set(key, context->id, slot, more - 1);
    else
      disown(*context, slot, name, now);
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
    const PrefixEntry* const entry = context.find_live(prefix, now, limits_.ttl);
    if (entry != nullptr && context.is_held_by(sets_, *entry, of_source)) continue;
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
  const PrefixEntry* const entry =
      context == nullptr ? nullptr : context->find_live(prefix, now, limits_.ttl);
  if (entry == nullptr) return found;
  sets_.for_each(entry->holders, [&](uint32_t number) {
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
    const PrefixEntry* const entry = context->find_live(prefixes[i], now, limits_.ttl);
    if (entry == nullptr) continue;
    sets_.for_each(entry->holders, [&](uint32_t number) {
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

bool PrefixIndex::names(uint64_t& cursor, size_t names_max, Tick now, std::vector<NameRun>& runs) {
  std::map<std::array<uint32_t, 4>, NameRun> by_slot;
  size_t work = 0;  // a name that nobody owns any more costs something too
  const bool done = names_.walk(cursor, [&](const Name& name) {
    ++work;
    Context* const context = find_context(sets_.context(name.owners));
    const PrefixEntry* const entry =
        context == nullptr ? nullptr : context->find_live(name.prefix, now, limits_.ttl);
    if (entry == nullptr) return work < names_max;
    sets_.for_each(name.owners, [&](uint32_t number) {
      const Slot& slot = context->slots[number];
      if (!slot.live || !sets_.contains(entry->holders, number)) return;
      const Place place{context->sources[slot.local].source, slot.tier, slot.group};
      NameRun& run = by_slot[{place.source, context->id, place.tier, place.group}];
      run.place = place;
      run.context = context->id;
      run.engine_hashes.push_back(unmix64(name.key));
      const uint64_t prefix = name.prefix;  // a copy: names are packed, so no reference may point into one
      run.prefixes.push_back(prefix);
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
  now.bytes = sets_.bytes() + names_.bytes() + copies_.table().bytes() + aliases_.table().bytes();
  for (const auto& [id, context] : contexts_) {
    now.prefixes += context->prefixes.size();
    now.bytes += sizeof(Context) + context->prefixes.bytes() + context->marks.bytes() +
                 context->claims.bytes() + context->slots.capacity() * sizeof(Slot) +
                 context->sources.capacity() * sizeof(LocalSource);
  }
  for (const auto& context : graveyard_)
    now.bytes += context->prefixes.bytes() + context->marks.bytes() + context->claims.bytes();
  now.holder_sets = sets_.size();
  now.engine_keys = names_.size();
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
