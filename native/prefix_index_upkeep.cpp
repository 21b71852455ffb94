// Capacity and sweeping: how the index stays within its bounds, a slice at a time.
#include <algorithm>

#include "prefix_index.hpp"

namespace kvindexer {

namespace {

constexpr size_t kSample = 1024;          // entries whose age is looked at to find the oldest sixteenth
constexpr size_t kEvictionsMax = 64;      // in one go
constexpr size_t kEvictVisitsMax = 4096;  // in one go
constexpr size_t kGraveVisits = 4096;     // what taking one segment apart counts for

}  // namespace

// Undoes all that an entry means elsewhere; the caller takes it out of the table.
void PrefixIndex::forget(Context& context, const PrefixEntry& entry) {
  sets_.for_each(entry.holders, [&](uint32_t slot) {
    --context.slots[slot].blocks;
    context.slots[slot].digest -= mix64(entry.key);
    if (!aliases_.is_empty()) aliases_.set(entry.key, context.id, slot, 0);
  });
  sets_.release(entry.holders);
  if (exporting_) gone_.emplace_back(context.id, entry.key);
  die(context, entry);
  remains_ = true;  // its names
}

// -- capacity

// Evicts at least one of the least recently seen entries, and not many more: a threshold is taken from a
// sample (as Redis approximates LRU, but the sample picks the age, not the victim), and the entries that it
// condemns go in the order of the table, a few with every insertion. Exact up to kSample entries. Cost: about
// 16 visits an eviction.
void PrefixIndex::evict(Context& context) {
  size_t evicted = 0;
  while (evicted == 0) {
    if (context.evict_left == 0) choose_victims(context);
    bool wrapped = false;
    context.prefixes.sweep(context.evict_cursor, wrapped, kEvictVisitsMax, [&](PrefixEntry& entry) {
      if (context.evict_left == 0 || evicted == kEvictionsMax || entry.last_seen > context.evict_up_to)
        return true;
      forget(context, entry);
      --context.evict_left;
      ++evicted;
      return false;
    });
    if (wrapped) context.evict_left = 0;  // what else was condemned has been seen again
  }
  statistics_.evicted += evicted;
}

void PrefixIndex::choose_victims(Context& context) {
  std::vector<Tick> seen;
  if (context.prefixes.size() <= kSample) {
    uint64_t cursor = 0;
    for (bool done = false; !done;)
      context.prefixes.sweep(cursor, done, kSample, [&](const PrefixEntry& entry) {
        seen.push_back(entry.last_seen);
        return true;
      });
    context.evict_cursor = 0;
  } else {
    for (size_t i = 0; i < kSample; ++i)
      seen.push_back(context.prefixes.seek(mix64(random_ += 0x9E3779B97F4A7C15u))->last_seen);
  }
  const size_t rank = std::max<size_t>(1, seen.size() / 16) - 1;
  std::nth_element(seen.begin(), seen.begin() + static_cast<ptrdiff_t>(rank), seen.end());
  context.evict_up_to = seen[rank];
  context.evict_left = std::max<size_t>(1, context.prefixes.size() / 16);
}

// -- sweeping: a pass goes through graveyard, prefixes, marks, claims, names, copies, aliases

Swept PrefixIndex::sweep(Tick now, size_t visits_max) {
  Swept swept;
  orphans_.expire(now, limits_.ttl);
  if (!in_pass_) {
    if (!remains_ && limits_.ttl == 0 && marks_ == 0) {
      swept.pass_done = true;
      return swept;
    }
    in_pass_ = true;
    ++pass_;
    remains_ = false;
    enter_stage(Stage::kGraveyard);
  }
  while (swept.visited < visits_max && !swept.pass_done) sweep_stage(now, visits_max, swept);
  in_pass_ = !swept.pass_done;
  contents_.flush();
  return swept;
}

void PrefixIndex::enter_stage(Stage stage) {
  stage_ = stage;
  sweep_context_ = 0;
  sweep_cursor_ = 0;
}

void PrefixIndex::sweep_stage(Tick now, size_t visits_max, Swept& swept) {
  const size_t left = visits_max - swept.visited;
  const auto sweep_surplus = [&](SurplusTable& surplus) {
    bool done = false;
    swept.visited += surplus.table().sweep(sweep_cursor_, done, left, [&](const Surplus& entry) {
      const Context* const context = find_context(entry.context);
      return context != nullptr && context->slots[entry.slot].live;
    });
    return done;
  };
  switch (stage_) {
    case Stage::kGraveyard:
      if (!graveyard_.empty()) swept.visited += kGraveVisits;
      if (sweep_graveyard()) enter_stage(Stage::kPrefixes);
      break;
    case Stage::kPrefixes:
      sweep_contexts(swept, Stage::kMarks, [&](Context& context, bool& done) {
        return context.prefixes.sweep(sweep_cursor_, done, left, [&](PrefixEntry& entry) {
          return keep_prefix(context, entry, now, swept);
        });
      });
      break;
    case Stage::kMarks:
      sweep_contexts(swept, Stage::kClaims, [&](Context& context, bool& done) {
        return context.marks.sweep(sweep_cursor_, done, left, [&](const Mark& mark) {
          const bool keep = context.is_live(mark, now);
          marks_ -= keep ? 0 : 1;
          return keep;
        });
      });
      break;
    case Stage::kClaims:
      sweep_contexts(swept, Stage::kNames, [&](Context& context, bool& done) {
        return context.claims.sweep(sweep_cursor_, done, left, [&](const Claim& claim) {
          if (owners_.is_live(claim)) return true;
          owners_.discount(claim);
          return false;
        });
      });
      break;
    case Stage::kNames: {
      bool done = false;
      swept.visited +=
          names_.sweep(sweep_cursor_, done, left, [&](Name& name) { return keep_name(name, now); });
      if (done) enter_stage(Stage::kCopies);
      break;
    }
    case Stage::kCopies:
      if (sweep_surplus(copies_)) enter_stage(Stage::kAliases);
      break;
    case Stage::kAliases:
      if (!sweep_surplus(aliases_)) break;
      // Every table has been seen since the pass began: bits that were dead before it are free. Not so for a
      // snapshot under way, which has written them: they wait for a later pass.
      if (exporting_)
        remains_ = true;
      else
        for (const auto& [id, context] : contexts_) context->reclaim(pass_);
      swept.pass_done = true;
      break;
  }
}

// One slice of the context where the sweep stands; the next stage behind the last context.
template <class Slice>
void PrefixIndex::sweep_contexts(Swept& swept, Stage next, Slice slice) {
  const auto at = contexts_.lower_bound(sweep_context_);
  if (at == contexts_.end()) return enter_stage(next);
  if (at->first != sweep_context_) sweep_cursor_ = 0;
  sweep_context_ = at->first;
  bool done = false;
  swept.visited += slice(*at->second, done);
  if (!done) return;
  ++sweep_context_;
  sweep_cursor_ = 0;
}

bool PrefixIndex::keep_prefix(Context& context, PrefixEntry& entry, Tick now, Swept& swept) {
  if (entry.is_expired(now, limits_.ttl)) {
    forget(context, entry);
    ++swept.expired;
    ++statistics_.expired;
    return false;
  }
  if (!context.retired_slots.empty() && sets_.intersects(entry.holders, context.dead)) {
    replace(entry.holders, sets_.minus(entry.holders, context.dead));
    owners_.drop(context.claims, entry.key, [&](uint32_t slot) { return !context.slots[slot].live; });
  }
  if (entry.holders != kEmptySet) return true;
  die(context, entry);
  return false;
}

bool PrefixIndex::keep_name(Name& name, Tick now) {
  const SetId left = living_owners(name, now);
  if (left == name.owners) return true;
  if (!copies_.is_empty())
    sets_.for_each(name.owners, [&](uint32_t slot) {
      if (left == kEmptySet || !sets_.contains(left, slot))
        copies_.set(name.key, sets_.context(name.owners), slot, 0);
    });
  SetId owners = name.owners;
  replace(owners, left);
  name.owners = owners;
  return left != kEmptySet;
}

// The owners that live and still hold the prefix. Holders that are dead but not yet swept must not vouch for
// a dead owner.
SetId PrefixIndex::living_owners(const Name& name, Tick now) {
  Context* const context = find_context(sets_.context(name.owners));
  if (context == nullptr) return kEmptySet;
  const PrefixEntry* const entry = context->find_live(name.prefix, now, limits_.ttl);
  if (entry == nullptr) return kEmptySet;
  if (entry->holders == name.owners && context->retired_slots.empty()) return name.owners;
  return sets_.intersection_minus(name.owners, entry->holders, context->dead);
}

// Takes a segment of a dropped context apart; true when none is left.
bool PrefixIndex::sweep_graveyard() {
  if (graveyard_.empty()) return true;
  Context& context = *graveyard_.back();
  if (context.prefixes.dismantle(1, [&](const PrefixEntry& entry) { sets_.release(entry.holders); }) &&
      context.marks.dismantle(1, [](const Mark&) {}) &&
      context.claims.dismantle(1, [&](const Claim& claim) { owners_.discount(claim); }))
    graveyard_.pop_back();
  return graveyard_.empty();
}

}  // namespace kvindexer
