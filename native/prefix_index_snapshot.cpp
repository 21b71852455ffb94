// The index out and in, a frame at a time, consistent though it changes between the frames.
//
// A walk through the records, and then through the other names, writes every name once; so blocks that were
// stored together are restored together. Whatever changes meanwhile is noted by its key and written again at
// the end, with the words that everything written of this key before is void; prefixes that expire or are
// evicted are noted too, and each frame begins with those that went since the frame before it. Slots that die
// need no note: the directory, taken with the last frame, does not list them, and their bits are not used
// again while a snapshot is under way. So all frames and the directory together are the index at the instant
// of the last frame, but for one thing: `last_seen` is that of the moment when a name was written, so a match
// that comes later while the snapshot is written is forgotten by it.
//
// A frame (all columns little-endian):
//   count, then (context u32, prefix u64)           prefixes that are gone, names and all
//   count, then key u64                             keys of which only what follows is true
//   count, then (context u32, count, slot u32 ...)  sets of slots
//   count, then columns: key u64, prefix u64, set u32, last_seen u32
//                        (beside the set: whether the prefix is the child of that of the row before)
//   count, then (name u32, slot u32, copies u64)    names with more than one copy; copies beyond the first
// or, where there is a fuzzy index, of its contents (content_rows.hpp):
//   kContents, count, then columns: context u32, kind u32, prefix u64, simhash u64, content u64
// or of its claims (claims.hpp):
//   kClaims, count, then (context u32, prefix u64)  prefixes of whose claims only what follows is true
//   count, then columns: context u32, slot u32, owner u32, prefix u64
// A content may come before the names of its prefix, and a prefix may go and come back while the frames are
// read. So contents are put together on their own, and when all is read, those stay whose prefix is there.
// Claims wait until then, and are taken in one after the other where their slot holds their prefix.
#include <algorithm>
#include <cassert>
#include <unordered_map>

#include "prefix_index.hpp"
#include "snapshot_frame.hpp"

namespace kvindexer {

namespace {
constexpr uint32_t kContents = 0xFFFFFFFF;  // no frame has so many prefixes that are gone
constexpr uint32_t kClaims = 0xFFFFFFFE;    // nor so many
constexpr uint32_t kNoContext = 0;          // contexts are numbered from 1
constexpr uint32_t kFollows = 1u << 31;     // beside the number of a set
}  // namespace

void PrefixIndex::export_begin() {
  export_end();
  std::optional<SegmentedTable<Touched>> touched(std::in_place);
  owners_.begin_notes();  // from here on nothing fails
  touched_ = std::move(touched);
}

void PrefixIndex::export_end() {
  touched_.reset();
  export_cursor_ = {};
  claim_cursor_ = {};
  gone_ = {};
  owners_.end_notes();
  if (contents_.index() != nullptr) contents_.index()->export_end();
}

std::vector<uint8_t> PrefixIndex::export_contents(size_t rows_max, bool& done) {
  std::vector<ContentRow> rows;
  done = true;
  if (FuzzyIndex* const index = contents_.index()) {
    if (!index->is_exporting()) index->export_begin();
    rows = index->export_rows(rows_max, done);
  }
  FrameWriter out;
  out.u32(kContents);
  out.u32(static_cast<uint32_t>(rows.size()));
  for (const ContentRow& row : rows) out.u32(row.context);
  for (const ContentRow& row : rows) out.u32(row.kind);
  for (const ContentRow& row : rows) out.u64(row.prefix);
  for (const ContentRow& row : rows) out.u64(row.simhash);
  for (const ContentRow& row : rows) out.u64(row.content);
  return out.bytes();
}

std::vector<uint8_t> PrefixIndex::export_claims(size_t claims_max, bool& done) {
  struct Row {
    uint32_t context, slot, owner;
    uint64_t prefix;
  };
  std::vector<std::pair<uint32_t, uint64_t>> voids;
  std::vector<Row> rows;
  const auto list = [&](const Context& context, const Claim& claim) {
    if (context.slots[claim.slot].live && owners_.is_live(claim))
      rows.push_back({context.id, claim.slot, claim.owner, claim.key});
  };
  std::unordered_map<const ClaimTable*, Context*> of_table;
  for (const auto& [id, context] : contexts_) of_table.emplace(&context->claims, context.get());
  const size_t notes_left = owners_.take_notes(claims_max, [&](const ClaimNote& note) {
    const auto found = of_table.find(note.table);
    if (found == of_table.end()) return;  // the context is gone
    Context& context = *found->second;
    voids.emplace_back(context.id, note.key);
    for (const Claim* at = context.claims.find(note.key); at != nullptr; at = ClaimTable::next_equal(at))
      list(context, *at);
  });
  size_t walked = 0;
  auto at = contexts_.lower_bound(claim_cursor_.context);
  for (; at != contexts_.end() && walked < claims_max; ++at) {
    if (at->first != claim_cursor_.context) claim_cursor_ = {at->first, 0};
    const bool is_over = at->second->claims.walk(claim_cursor_.key, [&](const Claim& claim) {
      list(*at->second, claim);
      return ++walked < claims_max;
    });
    if (!is_over) break;
    claim_cursor_ = {at->first + 1, 0};
  }
  done = at == contexts_.end() && notes_left == 0;

  FrameWriter out;
  out.u32(kClaims);
  out.u32(static_cast<uint32_t>(voids.size()));
  for (const auto& [context, prefix] : voids) {
    out.u32(context);
    out.u64(prefix);
  }
  out.u32(static_cast<uint32_t>(rows.size()));
  for (const Row& row : rows) out.u32(row.context);
  for (const Row& row : rows) out.u32(row.slot);
  for (const Row& row : rows) out.u32(row.owner);
  for (const Row& row : rows) out.u64(row.prefix);
  return out.bytes();
}

std::vector<std::pair<uint32_t, uint32_t>> PrefixIndex::owners_at(uint32_t id, const Place& place,
                                                                  std::span<const uint64_t> prefixes) {
  std::vector<std::pair<uint32_t, uint32_t>> found;
  Context* const context = find_context(id);
  if (context == nullptr || context->claims.size() == 0) return found;
  const std::optional<uint32_t> slot = context->find_slot(place);
  if (!slot) return found;
  for (uint32_t i = 0; i < prefixes.size(); ++i)
    for (const Claim* at = context->claims.find(prefixes[i]); at != nullptr; at = ClaimTable::next_equal(at))
      if (at->slot == *slot && owners_.is_live(*at)) found.emplace_back(i, at->owner);
  return found;
}

PrefixIndex::ListedName PrefixIndex::listed(const OtherName& name) const {
  const BlockId id = block_of(name);
  if (id == kNoBlock) return {name.key, 0, name.owners, kEmptySet, 0};
  return {name.key, pool_[id].prefix, name.owners, pool_[id].holders, pool_[id].last_seen};
}

std::vector<uint8_t> PrefixIndex::export_names(size_t names_max, bool& done) {
  std::vector<ListedName> found;
  done = walk_names(export_cursor_, [&](const ListedName& name) {
    found.push_back(name);
    return found.size() < names_max;
  });
  return frame_of({}, found);
}

std::vector<uint8_t> PrefixIndex::export_changes(size_t keys_max, size_t& keys_left) {
  std::vector<uint64_t> keys;
  uint64_t cursor = 0;
  bool done = false;
  assert(touched_ && "an export has begun");
  touched_->sweep(cursor, done, keys_max, [&](const Touched& touched) {
    keys.push_back(uint64_t{touched.key});  // a copy: the entry is packed
    return false;
  });
  keys_left = touched_->size();
  std::vector<ListedName> found;
  for (const uint64_t key : keys)
    each_name(key, [&](const Naming& name) {
      found.push_back(name.id != kNoBlock ? listed(name.id) : listed(other_names_[name.other]));
      return false;
    });
  return frame_of(keys, found);
}

std::vector<SlotRow> PrefixIndex::slots() const {
  std::vector<SlotRow> rows;
  for (const auto& [id, context] : contexts_)
    for (uint32_t number = 0; number < context->slots.size(); ++number) {
      const Slot& slot = context->slots[number];
      if (slot.live)
        rows.push_back({id, number, slot.source, slot.tier, slot.group, slot.blocks, slot.digest});
    }
  return rows;
}

std::vector<uint8_t> PrefixIndex::frame_of(std::span<const uint64_t> void_keys,
                                           std::span<const ListedName> found) {
  struct Row {
    uint64_t key, prefix;
    uint32_t set;
    Tick last_seen;
    bool follows;
  };
  std::vector<Row> rows;
  BlockId last = kNoBlock;          // of the row before
  std::vector<SetReferences> sets;  // until the frame is written
  std::unordered_map<SetId, uint32_t> set_at;
  rows.reserve(found.size());
  for (const ListedName& name : found) {
    const Context* const context = find_context(sets_.context(name.owners));
    const BlockId before = std::exchange(last, kNoBlock);
    if (context == nullptr || name.holders == kEmptySet) continue;
    const bool all = name.holders == name.owners && context->retired_slots.empty();
    SetReferences owners(
        sets_, all ? name.owners : sets_.intersection_minus(name.owners, name.holders, context->dead));
    if (owners.id() == kEmptySet) continue;
    const auto [at, is_new] = set_at.try_emplace(owners.id(), static_cast<uint32_t>(sets.size()));
    if (is_new) sets.push_back(std::move(owners));
    const bool follows = name.follows && before + 1 == name.id;
    last = name.id;
    rows.push_back({name.key, name.prefix, at->second, name.last_seen, follows});
  }

  FrameWriter out;
  out.u32(static_cast<uint32_t>(gone_.size()));
  for (const auto& [context, prefix] : gone_) {
    out.u32(context);
    out.u64(prefix);
  }
  gone_.clear();
  out.u32(static_cast<uint32_t>(void_keys.size()));
  for (const uint64_t key : void_keys) out.u64(key);
  out.u32(static_cast<uint32_t>(sets.size()));
  for (const SetReferences& set : sets) {
    std::vector<uint32_t> slots;
    sets_.for_each(set.id(), [&](uint32_t slot) { slots.push_back(slot); });
    out.u32(sets_.context(set.id()));
    out.u32(static_cast<uint32_t>(slots.size()));
    for (const uint32_t slot : slots) out.u32(slot);
  }
  out.u32(static_cast<uint32_t>(rows.size()));
  for (const Row& row : rows) out.u64(row.key);
  for (const Row& row : rows) out.u64(row.prefix);
  for (const Row& row : rows) out.u32(row.set | (row.follows ? kFollows : 0));
  for (const Row& row : rows) out.u32(row.last_seen);

  std::vector<std::array<uint64_t, 3>> surplus;
  if (!copies_.is_empty())
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!copies_.has(rows[i].key)) continue;
      const SetId owners = sets[rows[i].set].id();
      sets_.for_each(owners, [&](uint32_t slot) {
        if (const uint64_t more = copies_.get(rows[i].key, sets_.context(owners), slot); more != 0)
          surplus.push_back({i, slot, more});
      });
    }
  out.u32(static_cast<uint32_t>(surplus.size()));
  for (const auto& [row, slot, more] : surplus) {
    out.u32(static_cast<uint32_t>(row));
    out.u32(static_cast<uint32_t>(slot));
    out.u64(more);
  }
  return out.bytes();
}

// -- in

uint32_t PrefixIndex::import_slot(uint32_t context, const Place& place) {
  return slot_of(*contexts_.at(context), place);
}

bool PrefixIndex::import_frame(std::span<const uint8_t> bytes, const SlotMap& slots, const Aging& aging,
                               bool takes_contents) {
  FrameReader in(bytes);
  const uint32_t kind = FrameReader(bytes).u32();
  asked_by_hash_ = aging.now;
  if (!lists_all_) list_all(SIZE_MAX, aging.now);
  if (kind == kContents) return import_contents(in, slots, takes_contents);
  if (kind == kClaims) return import_claims(in, slots);
  for (size_t left = in.count(12); left != 0; --left) {
    const uint32_t old_context = in.u32();
    const uint64_t prefix = in.u64();
    const auto context = slots.contexts.find(old_context);
    if (context == slots.contexts.end()) continue;
    Context& known = *contexts_.at(context->second);
    if (const BlockId id = find(known, prefix); id != kNoBlock) forget(known, id);
  }
  for (size_t left = in.count(8); left != 0; --left) disown_all(in.u64());

  ImportedSets imported{*this, std::vector<Imported>(in.count(8))};
  for (Imported& set : imported.sets) {
    const uint32_t old_context = in.u32();
    for (size_t left = in.count(4); left != 0; --left) {
      const uint32_t old_slot = in.u32();
      const auto slot = slots.slots.find({old_context, old_slot});
      if (slot == slots.slots.end()) continue;
      set.context = contexts_.at(slots.contexts.at(old_context)).get();
      set.renamed.emplace(old_slot, slot->second);
      const SetId more = sets_.with(set.id, set.context->id, slot->second);
      sets_.retain(more);
      sets_.release(std::exchange(set.id, more));
    }
  }
  return import_names(in, imported.sets, aging) && in.is_whole() && in.is_at_end();
}

PrefixIndex::ImportedSets::~ImportedSets() {
  for (const Imported& set : sets) {
    index.sets_.for_each(set.id, [&](uint32_t slot) {
      set.context->slots[slot].blocks += set.blocks;
      set.context->slots[slot].digest += set.digest;
    });
    index.sets_.release(set.id);
  }
}

bool PrefixIndex::import_contents(FrameReader& in, const SlotMap& slots, bool taken) {
  in.u32();
  std::vector<ContentRow> rows(in.count(ContentRow::kBytes));
  for (ContentRow& row : rows) {
    const auto context = slots.contexts.find(in.u32());
    row.context = context == slots.contexts.end() ? kNoContext : context->second;
  }
  for (ContentRow& row : rows) row.kind = in.u32();
  for (ContentRow& row : rows) row.prefix = in.u64();
  for (ContentRow& row : rows) row.simhash = in.u64();
  for (ContentRow& row : rows) row.content = in.u64();
  if (!in.is_whole() || !in.is_at_end()) return false;
  if (taken && contents_.index() != nullptr) contents_.index()->import_rows(rows);
  return true;
}

bool PrefixIndex::import_claims(FrameReader& in, const SlotMap& slots) {
  in.u32();
  std::vector<ImportedClaim> found;
  for (size_t left = in.count(12); left != 0; --left) {
    const auto context = slots.contexts.find(in.u32());
    const uint64_t prefix = in.u64();
    if (context != slots.contexts.end()) found.push_back({prefix, context->second, 0, 0});
  }
  const size_t voids = found.size();
  struct Row {
    uint32_t context, slot, owner;
  };
  std::vector<Row> rows(in.count(20));
  for (Row& row : rows) row.context = in.u32();
  for (Row& row : rows) row.slot = in.u32();
  for (Row& row : rows) row.owner = in.u32();
  for (const Row& row : rows) {
    const uint64_t prefix = in.u64();
    const auto slot = slots.slots.find({row.context, row.slot});
    const auto owner = slots.owners.find(row.owner);
    if (slot == slots.slots.end() || owner == slots.owners.end()) continue;
    found.push_back({prefix, slots.contexts.at(row.context), slot->second, owner->second});
  }
  if (!in.is_whole() || !in.is_at_end()) return false;
  if (contents_.index() == nullptr) return true;  // where nobody could ask, nobody claims anything
  for (size_t i = 0; i < found.size(); ++i) {
    if (i >= voids && imported_claims_.size() >= 2 * limits_.claims_max) {
      owners_.refuse();
      continue;
    }
    imported_claims_.push_back(found[i]);
    ++claims_coming_[found[i].context];
  }
  return true;
}

// In the order in which they were written: what is void goes before what is true of it comes.
void PrefixIndex::settle_claims(size_t claims_max) {
  for (const auto& [id, claims] : std::exchange(claims_coming_, {}))  // they come in key order
    if (Context* const context = find_context(id)) context->claims.reserve(claims);
  for (; claims_max != 0 && !imported_claims_.empty(); --claims_max, imported_claims_.pop_front()) {
    if (imported_claims_.size() > kAhead) {
      const ImportedClaim& ahead = imported_claims_[kAhead];
      if (const Context* const context = find_context(ahead.context)) context->listed.prefetch(ahead.prefix);
    }
    const ImportedClaim& claim = imported_claims_.front();
    Context* const context = find_context(claim.context);
    if (context == nullptr || !contents_.takes(context->id)) continue;
    if (claim.owner == 0) {
      owners_.drop(context->claims, claim.prefix);
      continue;
    }
    const BlockId id = find(*context, claim.prefix);
    if (id != kNoBlock && context->slots[claim.slot].live && sets_.contains(pool_[id].holders, claim.slot))
      owners_.claim(context->claims, claim.prefix, claim.slot, claim.owner);
  }
}

bool PrefixIndex::import_settle(size_t rows_max) {
  if (contents_.index() == nullptr) return true;
  if (!imported_claims_.empty()) {
    settle_claims(rows_max);
    return false;
  }
  return contents_.index()->import_settle(rows_max, [this](uint32_t id, uint64_t prefix) {
    Context* const context = find_context(id);
    const BlockId block = context == nullptr ? kNoBlock : find(*context, prefix);
    if (block == kNoBlock) return false;
    pool_[block].is_plain = true;
    return true;
  });
}

// Everything that anybody means by this key; of a snapshot that is being read. What would have expired goes
// too: it may be told of again, as seen since.
void PrefixIndex::disown_all(uint64_t key) {
  while (true) {
    Naming any;
    each_name(key, [&](const Naming& name) {
      any = name;
      return true;
    });
    if (!any) return;
    Context& context = *contexts_.at(sets_.context(owners_of(any)));
    uint32_t first = 0;
    bool found = false;
    sets_.for_each(owners_of(any), [&](uint32_t slot) {
      if (!found) first = slot;
      found = true;
    });
    const BlockId id = record_of(any);
    disown(context, first, any, id, id == kNoBlock ? 0 : pool_[id].last_seen);
  }
}

bool PrefixIndex::import_names(FrameReader& in, std::vector<Imported>& sets, const Aging& aging) {
  struct Row {
    uint64_t key, prefix;
    uint32_t set;
    bool follows;
  };
  std::vector<Row> rows(in.count(24));
  for (Row& row : rows) row.key = in.u64();
  for (Row& row : rows) row.prefix = in.u64();
  for (Row& row : rows) {
    const uint32_t set = in.u32();
    row.set = set & ~kFollows;
    row.follows = (set & kFollows) != 0;
    if (row.set >= sets.size()) return false;
  }
  BlockId before = kNoBlock;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size())
      if (const Context* const ahead = sets[rows[i + kAhead].set].context) {
        ahead->listed.prefetch(rows[i + kAhead].prefix);
        names_.prefetch(rows[i + kAhead].key);
      }
    const Tick last_seen = aging.aged(in.u32());
    if (!in.is_whole()) return false;
    if (Imported& set = sets[rows[i].set]; set.id != kEmptySet)
      before = import_name(rows[i].key, rows[i].prefix, last_seen, set, before, rows[i].follows);
    else
      before = kNoBlock;
  }
  for (size_t left = in.count(16); left != 0; --left) {
    const uint32_t row = in.u32();
    const uint32_t old_slot = in.u32();
    const uint64_t more = in.u64();
    if (row >= rows.size()) return false;
    const Imported& set = sets[rows[row].set];
    const auto slot = set.renamed.find(old_slot);
    if (slot == set.renamed.end()) continue;
    bool stays = false;  // until here: it may have been evicted for a row behind it
    each_name(rows[row].key,
              [&](const Naming& name) { return stays = owns(name, *set.context, slot->second); });
    if (stays) copies_.set(rows[row].key, set.context->id, slot->second, more);
  }
  return true;
}

// Tried: 130,000 names at a time, each table in the order of its keys. No faster: the tables are larger than
// the caches, but so are the lists of what goes where.
BlockId PrefixIndex::import_name(uint64_t key, uint64_t prefix, Tick last_seen, Imported& set, BlockId before,
                                 bool follows) {
  Context& context = *set.context;
  BlockId id = find_near(context, before, prefix);
  if (id == kNoBlock) {
    if (is_full(context)) make_room(context);
    id = add_record(context, prefix, follows ? before : kNoBlock, SetReferences(sets_, set.id), last_seen);
    try {
      add_name(id, key, SetReferences(sets_, set.id));
    } catch (...) {  // no more memory: what is held without a name, nobody could take away
      free_record(context, id);
      throw;
    }
    ++set.blocks;
    set.digest += mix64(prefix);
  } else {
    add_name(id, key, SetReferences(sets_, set.id));
    sets_.for_each(set.id, [&](uint32_t slot) {
      SetId holders = pool_[id].holders;
      if (sets_.contains(holders, slot))
        return aliases_.set(prefix, context.id, slot, aliases_.get(prefix, context.id, slot) + 1);
      replace(holders, sets_.with(holders, context.id, slot));
      pool_[id].holders = holders;
      ++context.slots[slot].blocks;
      context.slots[slot].digest += mix64(prefix);
    });
    pool_[id].last_seen = std::max<Tick>(pool_[id].last_seen, last_seen);
  }
  return id;
}

}  // namespace kvindexer
