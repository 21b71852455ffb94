// Capacity and sweeping: how the index stays within its bounds, a slice at a time.
#include <algorithm>

#include "prefix_index.hpp"

namespace kvindexer {

namespace {

constexpr size_t kSample = 1024;       // entries whose age is looked at to find the oldest sixteenth
constexpr size_t kEvictRun = 32;       // records in a row that are looked at for one that may go
constexpr size_t kEvictJumpsMax = 64;  // in vain, until the age is chosen anew
constexpr size_t kTries = 8;           // to meet a record of the context by chance
constexpr Tick kListedFor = 6'000;     // behind the last question by a hash alone: ten minutes
constexpr uint64_t kRunSample = 256;
constexpr size_t kGraveVisits = 4096;  // what taking one segment apart counts for
constexpr size_t kSweptAtOnce = 128;   // records, before what they counted for is looked at

}  // namespace

// Undoes all that a record means elsewhere and frees it.
void PrefixIndex::forget(Context& context, BlockId id) {
  list_behind(context, id);
  const uint64_t prefix = pool_[id].prefix;
  if (touched_ && gone_.size() == gone_.capacity()) gone_.reserve(2 * gone_.size() + 64);
  die(context, pool_[id]);
  if (touched_) gone_.emplace_back(context.id, prefix);  // from here on nothing fails
  sets_.for_each(pool_[id].holders, [&](uint32_t slot) {
    --context.slots[slot].blocks;
    context.slots[slot].digest -= mix64(prefix);
    if (!aliases_.is_empty()) aliases_.set(prefix, context.id, slot, 0);
  });
  free_record(context, id);
  remains_ = true;  // its other names
}

// -- capacity

// Before an entry is added to a context where there is no room for one.
void PrefixIndex::make_room(Context& context) {
  if (context.records >= limits_.prefixes_per_context_max)
    evict(context.eviction, &context, statistics_.evicted);
  if (pool_.size() >= limits_.prefixes_max) evict(eviction_, nullptr, statistics_.evicted_in_all);
}

// Makes room for at least one entry, and not many more, of the context or, when that is null, of all: a
// threshold is taken from a sample (as Redis approximates LRU, but the sample picks the age, not the victim),
// and the entries that it condemns go in runs of neighbouring records, a few with every insertion, so that
// what comes next finds neighbouring numbers free. Exact up to kSample entries. Counts those that were
// evicted: records of a dropped context make room too.
void PrefixIndex::evict(Eviction& eviction, Context* only, uint64_t& evicted) {
  Victims victims;
  for (size_t jumps = 0; victims.count == 0; ++jumps) {
    if (eviction.left == 0 || jumps == kEvictJumpsMax) {
      choose_age(eviction, only);
      jumps = 0;
    }
    find_victims(eviction, only, victims);
    if (victims.count == 0) eviction.at = some_record(only);
  }
  // The last goes first, as it may follow the one before it.
  while (victims.count != 0) {
    const BlockId id = victims.ids[--victims.count];
    Context* const context = find_context(sets_.context(pool_[id].holders));
    if (context == nullptr) {
      bury(id);
      continue;
    }
    forget(*context, id);
    --eviction.left;
    ++evicted;
  }
}

// Up to Victims::kMax of the next records that may go, and those of dropped contexts; none where kEvictRun in
// a row may not. The lines of their names are fetched.
void PrefixIndex::find_victims(Eviction& eviction, const Context* only, Victims& victims) {
  for (size_t spared = 0; spared < kEvictRun && victims.count < Victims::kMax; ++spared) {
    if (victims.alive == eviction.left) break;
    const BlockRecord* const record = pool_.peek(eviction.at);
    if (record == nullptr) break;
    const BlockId id = eviction.at++;
    if (record->holders == kEmptySet) continue;
    const uint32_t number = sets_.context(record->holders);
    if (only != nullptr && number != only->id) continue;
    const bool is_alive = only != nullptr || find_context(number) != nullptr;
    if (is_alive && record->last_seen > eviction.up_to) continue;
    victims.ids[victims.count++] = id;
    victims.alive += is_alive ? 1 : 0;
    if (record->owners != kEmptySet) names_.prefetch(record->name);
    spared = 0;
  }
}

// Any record of the context, or of all, each as likely as the others: all numbers are tried, as most are of a
// context that is full. One that has few of them makes do with one of the first kRunSample of any run, though
// runs that are longer than others are met too seldom then.
BlockId PrefixIndex::some_record(const Context* only) {
  const auto next_random = [this] { return mix64(random_ += 0x9E3779B97F4A7C15u); };
  size_t tries = only == nullptr || only->records < pool_.end() / kTries ? 0 : kTries;
  while (only == nullptr || tries-- != 0) {
    const auto id = static_cast<BlockId>(next_random() % pool_.end());
    const BlockRecord* const record = pool_.peek(id);
    if (record != nullptr && record->holders != kEmptySet &&
        (only == nullptr || sets_.context(record->holders) == only->id))
      return id;
  }
  const uint64_t random = next_random();
  BlockId id = only->listed.some(random);
  for (uint64_t further = random % kRunSample; further != 0 && is_unlisted(id + 1); --further) ++id;
  return id;
}

void PrefixIndex::choose_age(Eviction& eviction, const Context* only) {
  std::vector<std::pair<Tick, BlockId>> seen;
  const auto see = [&](BlockId id) { seen.emplace_back(Tick{pool_[id].last_seen}, id); };
  const size_t records = only == nullptr ? pool_.size() : only->records;
  if (records > kSample) {
    for (size_t i = 0; i < kSample; ++i) see(some_record(only));
  } else if (only == nullptr) {
    uint64_t cursor = 0;
    pool_.walk(cursor, [&](BlockId id, const BlockRecord* record) {
      if (record != nullptr && record->holders != kEmptySet) see(id);
      return true;
    });
  } else {
    only->listed.for_each([&](BlockId id) {
      see(id);
      for (; is_unlisted(id + 1); ++id) see(id + 1);
    });
  }
  const size_t rank = std::max<size_t>(1, seen.size() / 16) - 1;
  std::nth_element(seen.begin(), seen.begin() + static_cast<ptrdiff_t>(rank), seen.end());
  eviction.up_to = seen[rank].first;
  eviction.at = seen[rank].second;
  eviction.left = std::max<size_t>(1, records / 16);
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
  try {
    while (swept.visited < visits_max && !swept.pass_done) sweep_stage(now, visits_max, swept);
  } catch (...) {  // no more memory: what this pass has not met may lie behind it, so another one begins
    in_pass_ = false;
    remains_ = true;
    throw;
  }
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
      swept.visited += sweep_records(now, std::min(left, kSweptAtOnce), swept);
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
      if (touched_)
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
    if (id % kAhead == 0) prefetch_leavers(id);
  });
}

// Where a record went those before it mostly go too, and their names lie anywhere: the lines of the kAhead
// behind the next ones are fetched at once.
void PrefixIndex::prefetch_leavers(BlockId id) const {
  if (const BlockRecord* const gone = pool_.peek(id); gone != nullptr && gone->holders != kEmptySet) return;
  for (BlockId ahead = id - kAhead; ahead > id - 2 * kAhead; --ahead)
    if (const BlockRecord* const next = pool_.peek(ahead); next != nullptr && next->owners != kEmptySet)
      names_.prefetch(next->name);
}

void PrefixIndex::clean_record(BlockId id, Tick now, Swept& swept) {
  BlockRecord& record = pool_[id];
  Context* const context = find_context(sets_.context(record.holders));
  if (context == nullptr) return bury(id);
  if (record.is_expired(now, limits_.ttl)) {
    swept.visited += sets_.words(record.holders).size() / 2;  // each holder's books are kept
    forget(*context, id);
    ++swept.expired;
    ++statistics_.expired;
    return;
  }
  if (!context->retired_slots.empty() && sets_.intersects(record.holders, context->dead)) {
    if (!is_held(*context, record)) {
      list_behind(*context, id);
      die(*context, record);
      return free_record(*context, id);
    }
    owners_.drop(context->claims, record.prefix, [&](uint32_t slot) { return !context->slots[slot].live; });
    SetId holders = record.holders;
    replace(holders, sets_.minus(holders, context->dead));
    record.holders = holders;
  }
  if (record.owners == kEmptySet || record.owners == record.holders) return;
  const SetId left = sets_.intersection_minus(record.owners, record.holders, context->dead);
  if (left == record.owners) return;
  uncount(record.name, record.owners, left);
  SetId owners = record.owners;
  replace(owners, left);
  record.owners = owners;
  if (owners == kEmptySet) names_.erase(record.name, id);
}

// Frees a record of a context that was dropped.
void PrefixIndex::bury(BlockId id) {
  if (BlockRecord* const next = pool_.peek(id + 1); next != nullptr)
    next->follows = false;  // nothing follows a record that is not there
  unname(id);
  sets_.release(pool_[id].holders);
  pool_.free(id);
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
