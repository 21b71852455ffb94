// Capacity and sweeping: how the index stays within its bounds, a slice at a time.
#include <algorithm>

#include "prefix_index.hpp"

namespace kvindexer {

namespace {

constexpr size_t kSample = 1024;       // entries whose age is looked at to find the oldest sixteenth
constexpr size_t kEvictionsMax = 64;   // in one go
constexpr size_t kEvictRun = 32;       // records in a row that are looked at for one that may go
constexpr size_t kEvictJumpsMax = 64;  // in vain, until the age is chosen anew
constexpr size_t kTries = 8;           // to meet a record of the context by chance
constexpr Tick kListedFor = 6'000;     // behind the last question by a hash alone: ten minutes
constexpr uint64_t kRunSample = 256;
constexpr size_t kGraveVisits = 4096;  // what taking one segment apart counts for

}  // namespace

// Undoes all that a record means elsewhere and frees it.
void PrefixIndex::forget(Context& context, BlockId id) {
  list_behind(context, id);
  const uint64_t prefix = pool_[id].prefix;
  const SetId holders = pool_[id].holders;
  sets_.for_each(holders, [&](uint32_t slot) {
    --context.slots[slot].blocks;
    context.slots[slot].digest -= mix64(prefix);
    if (!aliases_.is_empty()) aliases_.set(prefix, context.id, slot, 0);
  });
  sets_.release(holders);
  if (exporting_) gone_.emplace_back(context.id, prefix);
  die(context, pool_[id]);
  unname(id);
  free_record(context, id);
  remains_ = true;  // its other names
}

// -- capacity

// Evicts at least one of the least recently seen entries, and not many more: a threshold is taken from a
// sample (as Redis approximates LRU, but the sample picks the age, not the victim), and the entries that it
// condemns go in runs of neighbouring records, a few with every insertion, so that what comes next finds
// neighbouring numbers free. Exact up to kSample entries.
void PrefixIndex::evict(Context& context) {
  size_t evicted = 0;
  size_t jumps = 0;
  while (evicted == 0) {
    if (context.evict_left == 0 || jumps++ == kEvictJumpsMax) {
      choose_victims(context);
      jumps = 0;
    }
    for (size_t looked_at = 0; looked_at < kEvictRun && evicted < kEvictionsMax && context.evict_left != 0;
         ++looked_at) {
      const BlockRecord* const record = pool_.peek(context.evict_at);
      if (record == nullptr) break;
      if (record->holders != kEmptySet && sets_.context(record->holders) == context.id &&
          record->last_seen <= context.evict_up_to) {
        forget(context, context.evict_at);
        --context.evict_left;
        ++evicted;
        looked_at = 0;
      }
      ++context.evict_at;
    }
    if (evicted == 0) context.evict_at = some_record(context);
  }
  statistics_.evicted += evicted;
}

// Any record of the context, each as likely as the others: all numbers are tried, as most are of a context
// that is full. One that has few of them makes do with one of the first kRunSample of any run, though runs
// that are longer than others are met too seldom then.
BlockId PrefixIndex::some_record(const Context& context) {
  const auto next_random = [this] { return mix64(random_ += 0x9E3779B97F4A7C15u); };
  for (size_t tries = context.records < pool_.end() / kTries ? 0 : kTries; tries != 0; --tries) {
    const auto id = static_cast<BlockId>(next_random() % pool_.end());
    const BlockRecord* const record = pool_.peek(id);
    if (record != nullptr && record->holders != kEmptySet && sets_.context(record->holders) == context.id)
      return id;
  }
  const uint64_t random = next_random();
  BlockId id = context.listed.some(random);
  for (uint64_t further = random % kRunSample; further != 0 && is_unlisted(id + 1); --further) ++id;
  return id;
}

void PrefixIndex::choose_victims(Context& context) {
  std::vector<std::pair<Tick, BlockId>> seen;
  if (context.records <= kSample) {
    context.listed.for_each([&](BlockId id) {
      seen.emplace_back(Tick{pool_[id].last_seen}, id);
      for (; is_unlisted(id + 1); ++id) seen.emplace_back(Tick{pool_[id + 1].last_seen}, id + 1);
    });
  } else {
    for (size_t i = 0; i < kSample; ++i) {
      const BlockId id = some_record(context);
      seen.emplace_back(Tick{pool_[id].last_seen}, id);
    }
  }
  const size_t rank = std::max<size_t>(1, seen.size() / 16) - 1;
  std::nth_element(seen.begin(), seen.begin() + static_cast<ptrdiff_t>(rank), seen.end());
  context.evict_up_to = seen[rank].first;
  context.evict_at = seen[rank].second;
  context.evict_left = std::max<size_t>(1, context.records / 16);
}

// -- sweeping: a pass goes through graveyard, records, marks, claims, other names, copies, aliases

Swept PrefixIndex::sweep(Tick now, size_t visits_max) {
  Swept swept;
  orphans_.expire(now, limits_.ttl);
  if (!in_pass_) {
    if (lists_all_ && !limits_.lists_all && now - asked_by_hash_ >= kListedFor) {
      lists_all_ = false;
      remains_ = true;  // what is listed and need not be
    }
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
      if (sweep_graveyard()) enter_stage(Stage::kRecords);
      break;
    case Stage::kRecords:
      swept.visited += sweep_records(now, left, swept);
      if (sweep_cursor_ >= pool_.end()) enter_stage(Stage::kMarks);
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
      sweep_contexts(swept, Stage::kOtherNames, [&](Context& context, bool& done) {
        return context.claims.sweep(sweep_cursor_, done, left, [&](const Claim& claim) {
          if (owners_.is_live(claim)) return true;
          owners_.discount(claim);
          return false;
        });
      });
      break;
    case Stage::kOtherNames: {
      bool done = false;
      swept.visited += other_names_.sweep(sweep_cursor_, done, left,
                                          [&](OtherName& name) { return keep_name(name, now); });
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

// The records from `sweep_cursor_` on, used or not; those that follow others go before these.
size_t PrefixIndex::sweep_records(Tick now, size_t visits_max, Swept& swept) {
  return pool_.walk_back(sweep_cursor_, visits_max, [&](BlockId id, const BlockRecord& record) {
    if (record.holders == kEmptySet) return;
    if (!lists_all_ && record.follows && record.is_listed)
      if (Context* const context = find_context(sets_.context(record.holders))) unlist(*context, id);
    clean_record(id, now, swept);
  });
}

void PrefixIndex::clean_record(BlockId id, Tick now, Swept& swept) {
  BlockRecord& record = pool_[id];
  Context* const context = find_context(sets_.context(record.holders));
  if (context == nullptr) {  // dropped
    if (BlockRecord* const next = pool_.peek(id + 1); next != nullptr)
      next->follows = false;  // nothing follows a record that is not there
    unname(id);
    sets_.release(record.holders);
    pool_.free(id);
    return;
  }
  if (record.is_expired(now, limits_.ttl)) {
    forget(*context, id);
    ++swept.expired;
    ++statistics_.expired;
    return;
  }
  if (!context->retired_slots.empty() && sets_.intersects(record.holders, context->dead)) {
    SetId holders = record.holders;
    replace(holders, sets_.minus(holders, context->dead));
    record.holders = holders;
    owners_.drop(context->claims, record.prefix, [&](uint32_t slot) { return !context->slots[slot].live; });
  }
  if (record.holders == kEmptySet) return discard(*context, id);
  if (record.owners == kEmptySet || record.owners == record.holders) return;
  const SetId left = sets_.intersection_minus(record.owners, record.holders, context->dead);
  if (left == record.owners) return;
  uncount(record.name, record.owners, left);
  SetId owners = record.owners;
  replace(owners, left);
  record.owners = owners;
  if (owners == kEmptySet) names_.erase(record.name, id);
}

bool PrefixIndex::keep_name(OtherName& name, Tick now) {
  const SetId left = living_owners(name, now);
  if (left == name.owners) return true;
  uncount(name.key, name.owners, left);
  SetId owners = name.owners;
  replace(owners, left);
  name.owners = owners;
  return left != kEmptySet;
}

// The owners that live and still hold the prefix. Holders that are dead but not yet swept must not vouch for
// a dead owner.
SetId PrefixIndex::living_owners(const OtherName& name, Tick now) {
  Context* const context = find_context(sets_.context(name.owners));
  if (context == nullptr) return kEmptySet;
  const BlockId id = block_of(name);
  if (id == kNoBlock || pool_[id].is_expired(now, limits_.ttl)) return kEmptySet;
  const SetId holders = pool_[id].holders;
  if (holders == name.owners && context->retired_slots.empty()) return name.owners;
  return sets_.intersection_minus(name.owners, holders, context->dead);
}

// Takes a segment of a dropped context's tables apart; true when none is left. Its records go with the
// others' sweep.
bool PrefixIndex::sweep_graveyard() {
  if (graveyard_.empty()) return true;
  Context& context = *graveyard_.back();
  if (context.listed.dismantle(1) && context.marks.dismantle(1, [](const Mark&) {}) &&
      context.claims.dismantle(1, [&](const Claim& claim) { owners_.discount(claim); }))
    graveyard_.pop_back();
  return graveyard_.empty();
}

}  // namespace kvindexer
