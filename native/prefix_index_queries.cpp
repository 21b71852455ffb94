// Speculative marks, and what is asked but matches (match_walk.hpp).
#include <algorithm>
#include <cassert>
#include <map>

#include "prefix_index.hpp"

namespace kvindexer {

// -- speculative marks

uint64_t PrefixIndex::add_speculative(uint32_t id, uint32_t source, HashList hashes, size_t blocks, Tick ttl,
                                      Tick now) {
  assert(ttl > 0 && "a mark that is born dead would be an empty entry");
  Context& context = use(id);
  const uint32_t local = local_source(context, source);
  const LocalSource& of_source = context.sources[local];
  uint64_t marked = 0;
  BlockId held = kNoBlock;
  for (size_t i = 0; i < blocks; ++i) {
    const uint64_t prefix = hashes.next();
    held = context.find_child(sets_, held, prefix);
    if (held != kNoBlock && !pool_[held].is_expired(now, limits_.ttl) &&
        context.is_held_by(sets_, pool_[held], of_source))
      continue;
    if (Mark* const mark = context.find_mark(prefix, local)) {
      mark->deadline = context.is_live(*mark, now) ? std::max(mark->deadline, now + ttl) : now + ttl;
      mark->epoch = of_source.mark_epoch;
    } else if (marks_ < limits_.speculative_blocks_max) {
      context.marks.insert(Mark{mix64(prefix), local, now + ttl, of_source.mark_epoch});
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
  asked_by_hash_ = now;
  std::vector<Place> found;
  Context* const context = find_context(id);
  const BlockId record = context == nullptr ? kNoBlock : find_live(*context, prefix, now);
  if (record == kNoBlock) return found;
  sets_.for_each(pool_[record].holders, [&](uint32_t number) {
    const Slot& slot = context->slots[number];
    if (slot.live) found.push_back({slot.source, slot.tier, slot.group});
  });
  return found;
}

std::vector<Holding> PrefixIndex::holdings(uint32_t id, std::span<const uint64_t> prefixes, Tick now) {
  asked_by_hash_ = now;
  std::vector<Holding> found;
  Context* const context = find_context(id);
  if (context == nullptr) return found;
  for (uint32_t i = 0; i < prefixes.size(); ++i) {
    if (i + kAhead < prefixes.size()) context->listed.prefetch(prefixes[i + kAhead]);
    const BlockId record = find_live(*context, prefixes[i], now);
    if (record == kNoBlock) continue;
    sets_.for_each(pool_[record].holders, [&](uint32_t number) {
      const Slot& slot = context->slots[number];
      if (!slot.live) return;
      const uint32_t source = slot.source;
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
    const BlockId id = record_of(name);
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
      const Place place{slot.source, slot.tier, slot.group};
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
    now.prefixes += context->records;
    now.bytes += sizeof(Context) + context->listed.bytes() + context->marks.bytes() +
                 context->claims.bytes() + context->slots.capacity() * sizeof(Slot) +
                 context->sources.capacity() * sizeof(LocalSource);
  }
  for (const auto& context : graveyard_)
    now.bytes += context->listed.bytes() + context->marks.bytes() + context->claims.bytes();
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
