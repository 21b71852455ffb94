// Storing: how what engines say becomes records, names and holders.
#include <algorithm>
#include <array>

#include "prefix_index.hpp"

namespace kvindexer {

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
  frame.parent = before == kNoBlock ? std::nullopt : std::optional(chain_from);
  frame.before = before;
  frame.restating = !parent && count_copies && is_restated(context, frame, now);
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
    frame.is_chain = false;
    frame.record = named->id;
    frame.owner = owner;
    result.stored += store_frame(use(named->context->id), std::move(frame), now, count_copies);
  }
  return result;
}

Stored PrefixIndex::store_prefixes(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                                   std::span<const uint64_t> prefixes, std::span<const uint64_t> copies,
                                   Tick now, bool count_copies, uint32_t owner) {
  asked_by_hash_ = now;
  orphans_.expire(now, limits_.ttl);
  Frame frame{.place = place, .engine_hashes = engine_hashes, .prefixes = prefixes, .copies = copies};
  frame.is_chain = false;
  frame.owner = owner;
  return {store_frame(use(id), std::move(frame), now, count_copies), 0, 0};
}

Stored PrefixIndex::store_hashed(const Place& place, uint32_t id, std::span<const uint64_t> engine_hashes,
                                 std::optional<uint64_t> chain_from, std::span<const uint64_t> prefixes,
                                 std::vector<Content> contents, Tick now, bool count_copies, uint32_t owner) {
  asked_by_hash_ = now;
  orphans_.expire(now, limits_.ttl);
  Context& context = use(id);
  Frame frame{.place = place, .engine_hashes = engine_hashes, .prefixes = prefixes};
  frame.before = chain_from ? find(context, *chain_from) : kNoBlock;
  frame.parent = chain_from;
  bool plain = !chain_from;
  if (frame.before != kNoBlock) {
    const BlockRecord& parent = pool_[frame.before];
    plain = parent.is_plain && !parent.is_expired(now, limits_.ttl) && is_held(context, parent);
  }
  if (plain) frame.plain = contents.size();
  frame.contents = std::move(contents);
  frame.restating = !chain_from && count_copies && is_restated(context, frame, now);
  frame.owner = owner;
  return {store_frame(context, std::move(frame), now, count_copies), 0, 0};
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

// Whether a root event tells nothing but what its slot names already. Nearly every event ends with its first
// block.
bool PrefixIndex::is_restated(Context& context, Frame& frame, Tick now) {
  const size_t blocks = frame.engine_hashes.size();
  const std::optional<uint32_t> slot = context.find_slot(frame.place);
  if (blocks < 2 || !slot) return false;
  BlockId id = kNoBlock;
  for (size_t block = 0; block < blocks; ++block) {
    id = context.find_child(sets_, id, prefix_at(frame, block));
    if (!holds(*slot, id, now)) return false;
    const uint64_t key = mix64(frame.engine_hashes[block]);
    const BlockRecord& record = pool_[id];
    // No table where the record has the name.
    bool is_named = record.name == key && owns(Naming{id, kNoOtherName}, context, *slot);
    if (!is_named)
      each_name(key, [&](const Naming& name) {
        return is_named = owns(name, context, *slot) && record_of(name) == id;
      });
    if (!is_named) return false;
  }
  return true;
}

// Stores the blocks of a frame and of every orphan that they release, depth first.
uint64_t PrefixIndex::store_frame(Context& context, Frame first, Tick now, bool count_copies) {
  uint64_t stored = 0;
  const Storing by{context, now, count_copies, contents_.takes(context.id)};
  std::vector<Frame> frames;
  frames.push_back(std::move(first));
  try {
    while (!frames.empty()) stored += store_next(by, frames);
  } catch (...) {  // no more memory: what is left of the orphans waits for their parent to be told of again
    for (const Frame& frame : frames)
      if (frame.orphan) (*frame.orphan)->is_released = false;
    throw;
  }
  contents_.flush();
  return stored;
}

// The next block or run of blocks of the last frame, which goes when it has none; returns how many.
uint64_t PrefixIndex::store_next(const Storing& by, std::vector<Frame>& frames) {
  Frame& frame = frames.back();
  const bool is_awaited = orphans_.blocks_of(frame.place.source) != 0;
  renew_parent(by.context, frame);
  uint64_t stored = 0;
  if (!is_awaited && frame.is_chain) stored += store_run(by, frame);
  if (frame.next == frame.engine_hashes.size()) {
    if (frame.orphan) orphans_.take(*frame.orphan);
    frames.pop_back();
    return stored;
  }
  const size_t block = frame.next++;
  prefix_at(frame, block);
  if (frame.is_living(block)) {
    store_block(by, frame);
    ++stored;
    if (frame.orphan) (*frame.orphan)->living[block] = false;
  } else {
    frame.before = by.context.find_child(sets_, frame.before, frame.prefixes[block]);
  }
  if (is_awaited) release_waiters(by.context, frame, block, frames);
  return stored;
}

// What was stored for orphans between two blocks of a frame may have taken the record of the block before
// away: then that has none, as nothing but this frame stores its prefix.
void PrefixIndex::renew_parent(Context& context, Frame& frame) {
  if (!frame.is_chain || frame.before == kNoBlock) return;
  const uint64_t parent = frame.next == 0 ? *frame.parent : frame.prefixes[frame.next - 1];
  const BlockRecord* const record = pool_.peek(frame.before);
  if (record == nullptr || record->prefix != parent || record->holders == kEmptySet ||
      sets_.context(record->holders) != context.id)
    frame.before = kNoBlock;
}

// Pushes a frame for each orphan that waits for this block, the oldest on top. A block that came without
// tokens may be known to be plain from before.
void PrefixIndex::release_waiters(Context& context, const Frame& parent, size_t block,
                                  std::vector<Frame>& frames) {
  const uint64_t prefix = parent.prefixes[block];
  const auto waiting = orphans_.waiting(parent.place.source, context.id, parent.engine_hashes[block]);
  if (waiting.empty()) return;
  const BlockId before = parent.before;
  const bool plain = block < parent.plain || (before != kNoBlock && pool_[before].is_plain);
  for (const auto orphan : waiting) {  // `parent` may move
    Frame frame{.place = orphan->place, .engine_hashes = orphan->engine_hashes};
    hash_blocks(context, prefix, frame.engine_hashes.size(), orphan->tokens.data(), orphan->extra,
                frame.own_prefixes);
    frame.prefixes = frame.own_prefixes;
    frame.tokens = orphan->tokens.data();
    frame.plain = plain_blocks(plain, orphan->extra, frame.engine_hashes.size());
    frame.parent = prefix;
    frame.before = before;
    frame.owner = orphan->owner;
    frame.orphan = orphan;
    frames.push_back(std::move(frame));
    orphan->is_released = true;
  }
}

// What is done for every block that is stored, however it came into its record.
inline void PrefixIndex::see(const Storing& by, Frame& frame, size_t block, BlockId id, BlockRecord& record) {
  record.last_seen = by.now;
  frame.before = id;
  if (by.told || marks_ != 0) tell(by, frame, block, record);
}

// The rest of it, where somebody is waiting for the block.
void PrefixIndex::tell(const Storing& by, Frame& frame, size_t block, BlockRecord& record) {
  Context& context = by.context;
  if (by.told && block < frame.plain && !record.is_plain) {
    record.is_plain = true;
    if (frame.tokens != nullptr)
      contents_.born(frame.prefixes[block], frame.tokens + block * context.block_bytes, context.block_bytes);
    else
      contents_.born(frame.prefixes[block], frame.contents[block]);
  }
  if (by.told && frame.owner != 0)
    owners_.claim(context.claims, frame.prefixes[block], *frame.slot, frame.owner);
  if (marks_ != 0) confirm(context, frame.prefixes[block], context.slots[*frame.slot].local);
}

// Stores the next blocks of a frame, of which none is awaited, up to one that takes more than these three
// ways; returns how many.
size_t PrefixIndex::store_run(const Storing& by, Frame& frame) {
  const size_t begin = frame.next;
  const size_t end = frame.engine_hashes.size();
  if (begin == end) return 0;
  if (!frame.slot) frame.slot = slot_of(by.context, frame.place);
  for (size_t at = begin; at < end; at = frame.next) {
    store_known(by, frame);
    if (frame.next < end) store_renamed(by, frame);
    if (frame.next < end) store_new(by, frame);
    if (frame.next == at) break;
  }
  return frame.next - begin;
}

// The next blocks that lie one behind the other, as they do when they were stored together, each under the
// name by which it comes now. All of them take the same step from one set of slots to another, nearly always.
void PrefixIndex::store_known(const Storing& by, Frame& frame) {
  Context& context = by.context;
  Slot& slot = context.slots[*frame.slot];
  HolderStep step(sets_);
  bool held = false;
  for (; frame.next < frame.engine_hashes.size(); ++frame.next) {
    const size_t block = frame.next;
    const uint64_t prefix = prefix_at(frame, block);
    const uint64_t key = mix64(frame.engine_hashes[block]);
    const BlockId id = context.behind(sets_, frame.before, prefix);
    if (id == kNoBlock) break;
    BlockRecord& record = pool_[id];
    if (record.name != key || record.has_namesake || record.is_expired(by.now, limits_.ttl)) break;
    if (!step.is_from(record.holders, record.owners)) {
      step.begin(record.holders, record.owners);
      held = sets_.contains(record.holders, *frame.slot);
      if (record.owners == kEmptySet || held != sets_.contains(record.owners, *frame.slot)) break;
      if (!held) {
        step.lead_holders_to(sets_.with(record.holders, context.id, *frame.slot));
        step.lead_owners_to(sets_.with(record.owners, context.id, *frame.slot));
      }
    }
    expect(by, frame, prefix);
    if (held) {
      if (by.count_copies && !frame.restating) break;
    } else {
      touch(key);
      record.holders = step.holders();
      record.owners = step.owners();
      step.take();
      ++slot.blocks;
      slot.digest += mix64(prefix);
    }
    see(by, frame, block, id, record);
  }
}

// The same where the blocks have the names of another engine already, as they do when each engine draws a
// seed of its own: this one's lie among the other names, or are new there.
void PrefixIndex::store_renamed(const Storing& by, Frame& frame) {
  Context& context = by.context;
  const SetReferences alone(sets_, sets_.with(kEmptySet, context.id, *frame.slot));
  for (size_t fetched = frame.next; frame.next < frame.engine_hashes.size(); ++frame.next) {
    const size_t block = frame.next;
    const uint64_t prefix = prefix_at(frame, block);
    const uint64_t key = mix64(frame.engine_hashes[block]);
    const BlockId id = context.behind(sets_, frame.before, prefix);
    if (id == kNoBlock) break;
    BlockRecord& record = pool_[id];
    if (record.name == key || record.owners == kEmptySet || record.is_expired(by.now, limits_.ttl)) break;
    prefetch_names(frame.engine_hashes, true, block, fetched);
    const OtherNameId other = find_other(key, id);
    if (other == kNoOtherName && has_name(key)) break;
    const bool held = sets_.contains(record.holders, *frame.slot);
    if (held != (other != kNoOtherName && sets_.contains(other_names_[other].owners, *frame.slot))) break;
    expect(by, frame, prefix);
    if (held) {
      if (by.count_copies && !frame.restating) break;
    } else {
      SetReferences holders(sets_, sets_.with(record.holders, context.id, *frame.slot));
      touch(key);
      if (other != kNoOtherName) {
        own(context, *frame.slot, Naming{kNoBlock, other}, id, key);
      } else {
        other_names_.insert(key, id, prefix, alone.id(), false);
        sets_.retain(alone.id());
      }
      hold(context, *frame.slot, id, std::move(holders));
    }
    see(by, frame, block, id, record);
  }
}

// The next blocks whose prefixes and names are new. What their insertion needs of the tables is fetched while
// the blocks before them are inserted, for kAhead blocks at once: a prefetch waits for its page walk, and
// walks that are asked for together go on together.
void PrefixIndex::store_new(const Storing& by, Frame& frame) {
  struct Ahead {
    PrefixTable::Spot prefix;
    NameTable::Spot name;
    uint64_t key;
  };
  std::array<Ahead, 2 * kAhead> ring;
  Context& context = by.context;
  Slot& slot = context.slots[*frame.slot];
  const size_t begin = frame.next;
  const size_t end = frame.engine_hashes.size();
  // What stands behind this block then stands behind a new one, and follows nothing.
  if (context.behind(sets_, frame.before, prefix_at(frame, begin)) != kNoBlock) return;
  SetReferences alone(sets_, sets_.with(kEmptySet, context.id, *frame.slot),
                      static_cast<uint32_t>(2 * (end - begin)));
  for (size_t fetched = begin; frame.next < end; ++frame.next) {
    const size_t block = frame.next;
    if (block == begin || fetched < std::min(end, block + kAhead)) {
      // Of the first block it is not known yet whether it is new.
      const size_t first = fetched;
      const size_t ahead = block == begin ? block + 1 : std::min(end, fetched + kAhead);
      for (; fetched < ahead; ++fetched) {
        const uint64_t key = mix64(frame.engine_hashes[fetched]);
        ring[fetched % ring.size()] = {PrefixTable::spot_of(prefix_at(frame, fetched)),
                                       NameTable::spot_of(key), key};
      }
      for (size_t i = first; i < ahead; ++i) {
        context.listed.prefetch(ring[i % ring.size()].prefix);
        names_.prefetch(ring[i % ring.size()].name);
        other_names_.prefetch(ring[i % ring.size()].key);
      }
    }
    const Ahead& at = ring[block % ring.size()];
    const uint64_t prefix = frame.prefixes[block];
    PrefixTable::Probe in_prefixes = context.listed.probe(prefix, at.prefix);
    NameTable::Probe in_names = names_.probe(at.key, at.name);
    if (in_prefixes.found() != kNoBlock || in_names.found() != kNoBlock || other_names_.has(at.key)) break;
    if (is_full(context)) {
      make_room(context);
      in_prefixes = context.listed.probe(prefix, at.prefix);
      in_names = names_.probe(at.key, at.name);
    }
    expect(by, frame, prefix);
    touch(at.key);
    const BlockId id = pool_.add();
    const bool follows = may_follow(frame.before, id);
    const bool is_listed = !follows || lists_all_;
    BlockRecord& record = pool_[id];
    record = {.prefix = prefix,
              .name = at.key,
              .holders = alone.id(),
              .is_listed = is_listed,
              .owners = alone.id(),
              .follows = follows,
              .last_seen = by.now,
              .is_plain = false,
              .has_namesake = false};
    try {
      if (is_listed) context.listed.insert(in_prefixes, id);
      names_.insert(in_names, id);
    } catch (...) {
      if (is_listed) context.listed.erase(at.prefix, id);
      pool_.free(id);
      throw;
    }
    alone.take(2);
    ++context.records;
    ++slot.blocks;
    slot.digest += mix64(prefix);
    see(by, frame, block, id, record);
  }
}

// The block that comes next in a frame (`next` is past it already), whatever there is of it.
void PrefixIndex::store_block(const Storing& by, Frame& frame) {
  Context& context = by.context;
  const size_t block = frame.next - 1;
  const uint64_t prefix = frame.prefixes[block];
  if (!frame.slot) frame.slot = slot_of(context, frame.place);
  BlockId id = frame.record;
  if (id == kNoBlock)
    id = frame.is_chain ? context.find_child(sets_, frame.before, prefix)
                        : find_near(context, frame.before, prefix);
  store_name(by, frame, block, id);
  see(by, frame, block, id, pool_[id]);
}

// The frame's slot names the prefix by the block's engine hash, once more where that counts; `id` is the
// prefix's record, kNoBlock when there is none, and becomes the one that there is then.
void PrefixIndex::store_name(const Storing& by, const Frame& frame, size_t block, BlockId& id) {
  Context& context = by.context;
  const uint32_t slot = *frame.slot;
  const uint64_t key = mix64(frame.engine_hashes[block]), prefix = frame.prefixes[block];
  if (id != kNoBlock && pool_[id].is_expired(by.now, limits_.ttl)) {
    forget(context, id);
    ++statistics_.expired;
    id = kNoBlock;
  }
  if (id == kNoBlock && is_full(context)) make_room(context);
  const Naming name = find_own_name(context, slot, key, id, by.now);
  const bool held = id != kNoBlock && sets_.contains(pool_[id].holders, slot);
  const bool owned = name && sets_.contains(owners_of(name), slot);
  const bool counts = by.count_copies && !frame.restating && frame.copies.empty();
  const uint64_t more = !frame.copies.empty() ? frame.copies[block] - 1
                        : held && owned       ? copies_.get(key, context.id, slot) + (counts ? 1 : 0)
                                              : 0;  // a name that outlived its prefix is counted anew
  expect(by, frame, prefix);
  if (!held || !owned || counts || !frame.copies.empty()) touch(key);
  if (more != 0) copies_.make_way(key);
  if (held && !owned) aliases_.make_way(prefix);
  if (id == kNoBlock) {
    id = add_record(context, prefix, frame.is_chain ? frame.before : kNoBlock,
                    SetReferences(sets_, sets_.with(kEmptySet, context.id, slot)), by.now);
    try {
      own(context, slot, name, id, key);
    } catch (...) {  // no more memory: what is held without a name, nobody could take away
      free_record(context, id);
      throw;
    }
    ++context.slots[slot].blocks;
    context.slots[slot].digest += mix64(prefix);
  } else {
    SetReferences holders(sets_, held ? kEmptySet : sets_.with(pool_[id].holders, context.id, slot));
    if (!owned) own(context, slot, name, id, key);  // from here on nothing fails
    if (!held)
      hold(context, slot, id, std::move(holders));
    else if (!owned)
      aliases_.set(prefix, context.id, slot, aliases_.get(prefix, context.id, slot) + 1);
  }
  copies_.set(key, context.id, slot, more);
}

}  // namespace kvindexer
