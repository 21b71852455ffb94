// The prefix index: context -> prefix hash -> holder slots. The contract is the docstring of
// app/index/prefix_index.py; this text says how it is kept.
//
// Tables.
//   records      block_pool.hpp: prefix hash, holders, last seen and one name             28 bytes an entry
//   listed       id_table.hpp, one a context: prefix hash -> record, of those that do not follow the record
//                before them                                                               about 8 bytes
//   names        id_table.hpp: engine hash -> records that carry it                        about 10 bytes
//   other names  other_names.hpp: engine hash -> record, set of slots that name it so, where the record
//                carries another engine's name already                                   about 28 bytes
//   copies       one: (engine hash, slot) -> copies beyond the first                       nearly empty
//   aliases      one: (prefix, slot) -> names beyond the first                             nearly empty
//   marks        one a context: speculative (prefix, source) -> deadline
//
// What is dead is masked at once and swept later. A cleared slot goes into its context's dead mask; a name
// counts only while its slot lives, the prefix is there, has not expired and is held by that slot. So clear,
// drop and expiry cost nothing when they happen, and `sweep` (bounded, resumed where it stood) takes the
// remains away. A slot's bit is used again only after a whole pass that began behind its death.
//
// Blocks that came together lie in neighbouring records, so that storing, removing and matching them again
// finds the next one without a table. Whoever relies on that checks the record that it finds there.
//
// A record whose parent, the block before it in its chain, lies in the record before it is not even listed:
// it `follows`. Nobody needs it but by way of its parent, as long as everybody comes along the chain, and so
// half of what a new block costs in tables is saved. Before a parent goes, what follows it is listed. Whoever
// has a prefix hash and no chain has all records listed first (`list_all`), and new ones at once, until
// nobody has asked so for ten minutes: then sweeps undo it. Invariant: a record is listed, or its parent's
// record is the one before it. So where the parent's record is known, or that there is none,
// `Context::find_child` is the whole truth.
//
// One limit is known and accepted: a slot names one prefix by two engine hashes (vLLM before 0.17 hides the
// cache salt), the prefix expires, and is stored again by one of them before a sweep has met the other. Then
// that other name is valid again, and its removal takes the prefix away though the first still names it: the
// index says less than there is.
//
// One thread. Nothing here reads a clock: `now` is an argument, in ticks, and never goes backwards.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.hpp"
#include "content_feed.hpp"
#include "context.hpp"
#include "hash_chain.hpp"
#include "holder_sets.hpp"
#include "match_walk.hpp"
#include "orphan_book.hpp"
#include "other_names.hpp"
#include "segmented_table.hpp"
#include "snapshot_frame.hpp"

namespace kvindexer {

using NameTable = IdTable<NameOf, kFillLoose>;

// Where a walk over all names stands: at a record, then at one of the other names.
struct NameCursor {
  uint64_t at = 0;
  bool in_others = false;
};
struct Limits {
  Tick ttl = 0;  // 0: entries do not expire
  size_t contexts_max = 1000;
  size_t prefixes_per_context_max = 10'000'000;
  size_t prefixes_max = 40'000'000;  // in all; BlockPool::kRecordsMax at the most
  size_t orphan_blocks_max = 65'536;
  size_t speculative_blocks_max = 262'144;
  size_t claims_max = 4'000'000;
  bool lists_all = false;  // each entry by its hash, always: for whoever asks so all the time
};

struct Stored {
  uint64_t stored = 0, orphans = 0, unknown = 0;
};
struct Holding {    // a source that holds a prefix, with one of the owners that it holds it for (0: none is
                    // named)
  uint32_t prefix;  // its place in the question
  uint32_t source;
  uint32_t owner;
};
struct Removed {
  uint64_t removed = 0, unknown = 0;
};
struct NameRun {  // names of one slot, in the order of the table; copies are 1 or more
  Place place;
  uint32_t context;
  std::vector<uint64_t> engine_hashes, prefixes, copies;
};
struct SlotRow {  // a living slot
  uint32_t context, slot, source, tier, group;
  uint64_t blocks, digest;
};
struct SlotMap {  // of the contexts, slots and owners of a snapshot, to those of this index
  std::map<uint32_t, uint32_t> contexts;
  std::unordered_map<uint32_t, uint32_t> owners;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> slots;  // (context, slot) of the snapshot -> slot
};
struct Aging {  // from a snapshot's ticks to these
  Tick saved_at;
  Tick elapsed;  // since then
  Tick now;
  Tick aged(Tick last_seen) const {
    const uint64_t age = uint64_t{saved_at - std::min(saved_at, last_seen)} + elapsed;
    return age < now ? now - static_cast<Tick>(age) : 0;
  }
};
struct Swept {
  uint64_t visited = 0, expired = 0;
  bool pass_done = false;
};
struct Statistics {
  uint64_t contexts = 0, prefixes = 0, holder_sets = 0, engine_keys = 0, copies = 0, orphan_blocks = 0;
  uint64_t speculative_blocks = 0, bytes = 0, expired = 0, evicted = 0, evicted_in_all = 0,
           contexts_evicted = 0, orphans_dropped = 0;
  uint64_t orphans_expired = 0, speculative_refused = 0, claims = 0, claims_refused = 0;
};

class PrefixIndex {
 public:
  // `contents`, when not null, is told of plain blocks, and lives longer. Contexts whose blocks can have a
  // SimHash come and go there with those of this index.
  explicit PrefixIndex(const Limits& limits, FuzzyIndex* contents = nullptr)
      : limits_(limits),
        walk_(sets_, limits.ttl),
        lists_all_(limits.lists_all),
        names_(NameOf{&pool_}),
        orphans_(limits.orphan_blocks_max),
        contents_(contents),
        owners_(limits.claims_max) {}
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // -- contexts and sources

  // Makes a context; returns its number and that of the context that had to go for it, if any.
  std::pair<uint32_t, std::optional<uint32_t>> add_context(uint64_t seed, uint32_t block_size);
  void touch_context(uint32_t id) { use(id); }
  size_t context_size(uint32_t id) const { return contexts_.at(id)->records; }
  size_t block_bytes(uint32_t id) const { return contexts_.at(id)->block_bytes; }

  uint32_t add_source();
  bool has_source(uint32_t source) const { return sources_.contains(source); }
  void drop_source(uint32_t source);

  // Owners can be named where there is a fuzzy index for the context; elsewhere nobody could ask for them.
  uint32_t add_owner() { return owners_.add(); }
  void clear_owner(uint32_t owner) {
    owners_.clear(owner);
    remains_ = true;
  }
  std::vector<std::pair<uint32_t, uint64_t>> owner_claims() const { return owners_.owners(); }
  std::vector<uint32_t> unclaimed_owners() const { return owners_.unclaimed(); }

  // -- events (owner 0: none)

  Stored store(const Place& place, uint32_t context, std::span<const uint64_t> engine_hashes,
               std::optional<uint64_t> parent, const uint8_t* tokens, ExtraKeys extra, Tick now,
               bool count_copies, uint32_t owner);
  Stored place(const Place& place, std::span<const uint64_t> engine_hashes, Tick now, bool count_copies,
               uint32_t owner);
  // Prefixes whose hashes are known, each with its number of copies.
  Stored store_prefixes(const Place& place, uint32_t context, std::span<const uint64_t> engine_hashes,
                        std::span<const uint64_t> prefixes, std::span<const uint64_t> copies, Tick now,
                        bool count_copies, uint32_t owner);
  // A `store` whose hashes were computed elsewhere; `chain_from` is the prefix before the first block, none
  // for a root event. `contents` are those of the leading blocks without extra keys.
  Stored store_hashed(const Place& place, uint32_t context, std::span<const uint64_t> engine_hashes,
                      std::optional<uint64_t> chain_from, std::span<const uint64_t> prefixes,
                      std::vector<Content> contents, Tick now, bool count_copies, uint32_t owner);
  // The prefix on which `store` would chain a child of `parent`.
  std::optional<uint64_t> chain_of(const Place& place, uint32_t context, uint64_t parent, Tick now) {
    const std::optional<Named> named =
        resolve(place.source, parent, now, contexts_.at(context).get(), &place);
    return named ? std::optional(named->prefix) : std::nullopt;
  }
  Removed remove(const Place& place, std::span<const uint64_t> engine_hashes, Tick now);
  void clear(uint32_t source, std::optional<uint32_t> tier, std::optional<uint32_t> context);

  // Returns the number of hashes that are marked because of this call. `ttl` is at least 1.
  uint64_t add_speculative(uint32_t context, uint32_t source, HashList hashes, size_t blocks, Tick ttl,
                           Tick now);

  // -- queries

  // Rows are valid until the next match.
  std::span<const Row> match_tokens(uint32_t id, const uint8_t* tokens, size_t blocks, const ExtraKeys* extra,
                                    Tick now) {
    Context& context = use(id);
    HashChain chain(context.seed, tokens, context.block_bytes, extra);
    return walk_.match(context, chain, blocks, now);
  }
  std::span<const Row> match_hashes(uint32_t id, HashList hashes, size_t blocks, Tick now) {
    return walk_.match(use(id), hashes, blocks, now);
  }

  std::vector<Place> holders(uint32_t context, uint64_t prefix, Tick now);
  // Every (source, owner) of each of the prefixes, in their order; a source of several slots may come again.
  std::vector<Holding> holdings(uint32_t context, std::span<const uint64_t> prefixes, Tick now);
  // Every owner of each of the prefixes in one slot: (its place in the question, owner).
  std::vector<std::pair<uint32_t, uint32_t>> owners_at(uint32_t context, const Place& place,
                                                       std::span<const uint64_t> prefixes);
  // The prefix that the place holds in this context under that name; none when it holds none.
  std::optional<uint64_t> prefix_of(uint32_t context, const Place& place, uint64_t engine_hash, Tick now);
  // About `names_max` of what all slots hold, from `cursor` on (0 at first) in an order of the table's own;
  // true when there is no more.
  bool names(NameCursor& cursor, size_t names_max, Tick now, std::vector<NameRun>& runs);
  std::array<uint64_t, kTiers> blocks_by_tier(uint32_t source) const;
  std::vector<SlotRow> slots() const;
  uint64_t orphan_blocks(uint32_t source) const { return orphans_.blocks_of(source); }
  std::vector<std::pair<uint32_t, uint64_t>> orphan_drops() { return orphans_.take_drops(); }
  Statistics statistics() const;

  // Lists all records by their prefixes, looking at about `visits_max`; true when there is no more to be
  // done. For whoever is about to ask for prefixes without their chains (`holders`, `holdings`,
  // `store_prefixes`, `store_hashed`): they do it themselves, but all at once.
  bool list_all(size_t visits_max, Tick now);

  // -- snapshots (prefix_index_snapshot.cpp says how)

  // begin, names until done, contents until done, claims until done, changes until few are left, and at one
  // instant: the last changes, contents and claims, `slots`, and whatever says who the living owners are.
  void export_begin();
  std::vector<uint8_t> export_names(size_t names_max, bool& done);
  std::vector<uint8_t> export_changes(size_t keys_max, size_t& keys_left);
  std::vector<uint8_t> export_contents(size_t rows_max, bool& done);
  // Done: with this frame, what was claimed until now is written.
  std::vector<uint8_t> export_claims(size_t claims_max, bool& done);
  // Whether the contents, if there are any, are those of the instant of the last frame.
  bool has_whole_contents() const {
    return contents_.index() != nullptr && contents_.index()->export_is_whole();
  }
  void export_end();
  // The frames of a snapshot in their order, into slots that were made for it and hold nothing. False: not a
  // frame, and what of it was read has been taken in.
  uint32_t import_slot(uint32_t context, const Place& place);
  // Guesses of what is coming: entries of a context, of which there is room for so many, and names.
  size_t import_expect(uint32_t context, size_t entries) {
    entries = std::min({entries, limits_.prefixes_per_context_max, limits_.prefixes_max});
    contexts_.at(context)->listed.reserve(entries);
    return entries;
  }
  void import_expect_names(size_t entries, size_t other_names) {
    names_.reserve(std::min(entries, limits_.prefixes_max));
    other_names_.reserve(other_names);
  }
  bool import_frame(std::span<const uint8_t> frame, const SlotMap& slots, const Aging& aging,
                    bool takes_contents);
  // Behind the last frame, until it says true: of the claims and contents, what belongs to an entry stays.
  bool import_settle(size_t rows_max);

  // -- time

  // Takes away what is dead or expired, looking at about `visits_max` entries; goes on where the last call
  // ended.
  Swept sweep(Tick now, size_t visits_max);

 private:
  static constexpr size_t kAhead = MatchWalk::kAhead;

#pragma pack(push, 1)
  struct Touched {  // a name of this key changed while an export is under way
    uint64_t key;
    uint32_t times;
    bool empty() const { return times == 0; }
  };
#pragma pack(pop)
  // Where a name lies: in its record or, when that is kNoBlock, among the other names. One of both is there,
  // or there is no name.
  struct Naming {
    BlockId id = kNoBlock;
    OtherNameId other = kNoOtherName;
    explicit operator bool() const { return id != kNoBlock || other != kNoOtherName; }
  };
  struct ListedName {  // of an export
    uint64_t key, prefix;
    SetId owners, holders;
    Tick last_seen;
    BlockId id = kNoBlock;  // of the record that carries it, if one does
    bool follows = false;   // the record before that
  };
  struct Imported {  // a set of slots in a frame that is being read, and what was added to each of them
    SetId id = kEmptySet;
    Context* context = nullptr;
    std::unordered_map<uint32_t, uint32_t> renamed = {};  // slot of the snapshot -> slot
    uint64_t blocks = 0, digest = 0;
  };
  struct ImportedSets {  // of a frame; what was added is in the books of the slots when this goes
    PrefixIndex& index;
    std::vector<Imported> sets;
    ~ImportedSets();
  };
  struct ImportedClaim {  // of a snapshot that is being read
    uint64_t prefix;
    uint32_t context, slot;
    uint32_t owner;  // 0: what came before of this prefix is void
  };
  struct ClaimCursor {  // of a walk through the claims of all contexts
    uint32_t context = 0;
    uint64_t key = 0;
  };
  struct Frame {  // blocks on their way into a slot, one after the other
    Place place;
    std::span<const uint64_t> engine_hashes = {}, prefixes = {};
    std::span<const uint64_t> copies = {};  // empty: they are counted; else this is how many there are
    HashChain* chain = nullptr;             // computes the prefixes from `hashed` on, in order
    size_t hashed = SIZE_MAX;               // all of them
    const uint8_t* tokens = nullptr;        // of all blocks; null: not known
    std::vector<Content> contents = {};     // of the plain blocks, where their tokens are not known
    size_t plain = 0;                       // leading blocks on whose chains nobody has extra keys
    bool is_chain = true;                   // each block stands on the one before it
    std::optional<uint64_t> parent = {};    // on which the first block of a chain stands
    BlockId before = kNoBlock;              // record of the block before the next one; kNoBlock: it has none
    BlockId record = kNoBlock;              // of the only block, where that is known
    bool restating = false;                 // what the slot names is told once more, and not copied
    std::optional<uint32_t> slot = {};      // made with the first block that is stored
    uint32_t owner = 0;
    size_t next = 0;
    std::optional<OrphanBook::Orphans::iterator> orphan = {};  // that waited until now, and has the blocks
    std::vector<uint64_t> own_prefixes = {};

    bool is_living(size_t block) const { return !orphan || (*orphan)->living[block]; }
  };
  struct Storing {  // what the blocks of one call have in common
    Context& context;
    Tick now;
    bool count_copies;
    bool told;  // the fuzzy index takes the context
  };
  struct Named {
    Context* context;
    uint64_t prefix;
    BlockId id;
  };
  struct Target {  // a name that loses a copy
    Context* context;
    uint32_t slot;
    Naming name;
  };
  struct Removal {
    Place place;
    BlockId near = kNoBlock;  // the record whose name was removed last
    int32_t step = 0;         // from the record before to that one, when they are neighbours
    Context* context = nullptr;
    std::optional<uint32_t> slot = {};  // of the place in `context`, where there is one
  };
  enum class Stage { kGraveyard, kRecords, kMarks, kClaims, kOtherNames, kCopies, kAliases };

  // prefix_index_contexts.cpp
  void drop_context(uint32_t id);
  uint32_t local_source(Context& context, uint32_t source);
  uint32_t slot_of(Context& context, const Place& place);

  // prefix_index_store.cpp
  void hash_blocks(const Context& context, uint64_t chain_from, size_t blocks, const uint8_t* tokens,
                   const ExtraKeys& extra, std::vector<uint64_t>& prefixes) const;
  static size_t plain_blocks(bool parent, const ExtraKeys& extra, size_t blocks);
  bool is_restated(Context& context, Frame& frame, Tick now);
  uint64_t store_frame(Context& context, Frame first, Tick now, bool count_copies);
  uint64_t store_next(const Storing& by, std::vector<Frame>& frames);
  void renew_parent(Context& context, Frame& frame);
  void release_waiters(Context& context, const Frame& frame, size_t block, std::vector<Frame>& frames);
  uint64_t prefix_at(Frame& frame, size_t block) {
    while (frame.hashed <= block) hashed_[frame.hashed++] = frame.chain->next();
    return frame.prefixes[block];
  }
  size_t store_run(const Storing& by, Frame& frame);
  void store_known(const Storing& by, Frame& frame);
  void store_renamed(const Storing& by, Frame& frame);
  void store_new(const Storing& by, Frame& frame);
  void store_block(const Storing& by, Frame& frame);
  void store_name(const Storing& by, const Frame& frame, size_t block, BlockId& id);
  // Before a block is stored: all that `see` needs memory for.
  void expect(const Storing& by, const Frame& frame, uint64_t prefix) {
    if (!by.told) return;
    contents_.expect_birth(by.context.id, by.context.block_bytes);
    if (frame.owner != 0) owners_.make_way(by.context.claims, prefix);
  }
  void see(const Storing& by, Frame& frame, size_t block, BlockId id, BlockRecord& record);
  void tell(const Storing& by, Frame& frame, size_t block, BlockRecord& record);

  // prefix_index_remove.cpp
  size_t remove_run(Removal& removal, std::span<const uint64_t> engine_hashes, Tick now);
  void empty_run(Removal& removal, HolderStep& step, std::span<const uint64_t> engine_hashes);
  size_t remove_renamed(Removal& removal, std::span<const uint64_t> engine_hashes, Tick now);
  bool is_counted(Context& context, uint64_t key, uint64_t prefix);
  void find_targets(Removal& removal, uint64_t key);
  uint64_t remove_name(Removal& removal, uint64_t key, Tick now);
  void prefetch_removal(const Removal& removal, std::span<const uint64_t> engine_hashes) const;

  // prefix_index_names.cpp: records
  BlockId add_record(Context& context, uint64_t prefix, BlockId parent, SetReferences holders,
                     Tick last_seen);
  BlockId find(Context& context, uint64_t prefix);
  BlockId find_live(Context& context, uint64_t prefix, Tick now);
  // Where the record before is probably that of the prefix before, but need not be.
  BlockId find_near(Context& context, BlockId before, uint64_t prefix) {
    const BlockId neighbour = context.behind(sets_, before, prefix);
    return neighbour != kNoBlock ? neighbour : find(context, prefix);
  }
  // Whether a new record follows that of its parent, if there is one.
  bool may_follow(BlockId parent, BlockId id) const {
    if (parent == kNoBlock || id != parent + 1) return false;
    const BlockRecord* const before = pool_.peek(parent);
    return before != nullptr && before->holders != kEmptySet;
  }
  // What is left of a dropped context behind a record that was buried follows nothing, and is nobody's.
  bool is_unlisted(BlockId id) const {
    const BlockRecord* const record = pool_.peek(id);
    return record != nullptr && record->holders != kEmptySet && record->follows && !record->is_listed;
  }
  void list(Context& context, BlockId id);
  void unlist(Context& context, BlockId id);
  void list_behind(Context& context, BlockId id);
  void free_record(Context& context, BlockId id);
  void hold(Context& context, uint32_t slot, BlockId id, SetReferences holders);
  void unname(BlockId id);
  void replace(SetId& set, SetId by);
  bool holds(uint32_t slot, BlockId id, Tick now) const {
    return id != kNoBlock && !pool_[id].is_expired(now, limits_.ttl) &&
           sets_.contains(pool_[id].holders, slot);
  }
  // By a slot that lives.
  bool is_held(const Context& context, const BlockRecord& record) const {
    return sets_.size_minus(record.holders, context.dead) != 0;
  }
  // Nobody holds the record any more. Throws std::bad_alloc, and then somebody does.
  void die(Context& context, const BlockRecord& record) {
    if (record.is_plain) contents_.expect_death(context.id);
    owners_.drop(context.claims, record.prefix);
    if (record.is_plain) contents_.died(record.prefix);
  }

  // prefix_index_names.cpp: names
  std::optional<Named> resolve(uint32_t source, uint64_t engine_hash, Tick now, const Context* only,
                               const Place* preferred);
  template <class Visit>  // bool(Naming): true when it has seen enough
  void each_name(uint64_t key, Visit visit);
  SetId owners_of(const Naming& name) const {
    return name.id != kNoBlock ? pool_[name.id].owners : other_names_[name.other].owners;
  }
  bool owns(const Naming& name, const Context& context, uint32_t slot) const {
    const SetId owners = owners_of(name);
    return sets_.context(owners) == context.id && sets_.contains(owners, slot);
  }
  // The record of the prefix that the name meant when it was made; kNoBlock when that is gone.
  BlockId block_of(const OtherName& name) const {
    const BlockRecord* const record = pool_.peek(name.block);
    if (record == nullptr || record->holders == kEmptySet) return kNoBlock;
    if (sets_.context(record->holders) != sets_.context(name.owners)) return kNoBlock;
    return OtherNames::is_of(name, record->prefix) ? static_cast<BlockId>(name.block) : kNoBlock;
  }
  BlockId record_of(const Naming& name) const {
    return name.id != kNoBlock ? name.id : block_of(other_names_[name.other]);
  }
  bool has_name(uint64_t key) const { return names_.find(key) != kNoBlock || other_names_.has(key); }
  // The name by this key, if it is the only one, that of the prefix with this record, and no record's.
  OtherNameId find_other(uint64_t key, BlockId block) const {
    const OtherNameId id = other_names_.only(key);
    return id != kNoOtherName && block_of(other_names_[id]) == block ? id : kNoOtherName;
  }
  void prefetch_names(std::span<const uint64_t> engine_hashes, bool are_new, size_t at,
                      size_t& fetched) const;
  Naming find_own_name(Context& context, uint32_t slot, uint64_t key, BlockId id, Tick now);
  void drop_other(OtherNameId id);
  void add_name(BlockId id, uint64_t key, SetReferences owners);
  void set_owners(const Naming& name, SetId owners);
  void own(Context& context, uint32_t slot, const Naming& name, BlockId id, uint64_t key);
  void disown(Context& context, uint32_t slot, const Naming& name, BlockId id, Tick now);
  void uncount(uint64_t key, SetId owners, SetId left);

  // prefix_index_queries.cpp
  void confirm(Context& context, uint64_t prefix, uint32_t local);

  Context& use(uint32_t id) {
    Context& context = *contexts_.at(id);
    context.last_used = ++uses_;
    return context;
  }
  Context* find_context(uint32_t id) const {
    const auto found = contexts_.find(id);
    return found == contexts_.end() ? nullptr : found->second.get();
  }
  // Invariant: whatever changes a name calls this first, so that an export under way writes the name again.
  void touch(uint64_t key) {
    if (touched_ && touched_->find(key) == nullptr) touched_->insert(Touched{key, 1});
  }

  // prefix_index_snapshot.cpp
  template <class Visit>  // bool(ListedName): false when it has had enough
  bool walk_names(NameCursor& cursor, Visit visit) const;
  ListedName listed(BlockId id) const {
    const BlockRecord& record = pool_[id];
    return {record.name, record.prefix,      record.owners, record.holders, record.last_seen,
            id,          record.follows != 0};
  }
  ListedName listed(const OtherName& name) const;
  std::vector<uint8_t> frame_of(std::span<const uint64_t> void_keys, std::span<const ListedName> found);
  void disown_all(uint64_t key);
  bool import_contents(FrameReader& in, const SlotMap& slots, bool taken);
  bool import_claims(FrameReader& in, const SlotMap& slots);
  void settle_claims(size_t claims_max);
  bool import_names(FrameReader& in, std::vector<Imported>& sets, const Aging& aging);
  BlockId import_name(uint64_t key, uint64_t prefix, Tick last_seen, Imported& set, BlockId before,
                      bool follows);

  // prefix_index_upkeep.cpp
  void forget(Context& context, BlockId id);
  bool is_full(const Context& context) const {
    return context.records >= limits_.prefixes_per_context_max || pool_.size() >= limits_.prefixes_max;
  }
  void make_room(Context& context);
  void evict(Eviction& eviction, Context* only, uint64_t& evicted);
  BlockId some_record(const Context* only);
  void choose_age(Eviction& eviction, const Context* only);
  void find_victims(Eviction& eviction, const Context* only, Victims& victims);
  void bury(BlockId id);
  void prefetch_leavers(BlockId id) const;
  void sweep_stage(Tick now, size_t visits_max, Swept& swept);
  size_t sweep_records(Tick now, size_t visits_max, Swept& swept);
  template <class Slice>
  void sweep_contexts(Swept& swept, Stage next, Slice slice);
  void enter_stage(Stage stage);
  void clean_record(BlockId id, Tick now, Swept& swept);
  bool keep_name(OtherName& name, Tick now);
  SetId living_owners(const OtherName& name, Tick now);
  bool sweep_graveyard();

  const Limits limits_;
  std::map<uint32_t, std::unique_ptr<Context>> contexts_;  // ordered: a sweep goes through them by number
  std::unordered_map<uint32_t, std::vector<uint32_t>> sources_;  // source -> contexts where it has been seen
  uint32_t context_count_ = 0;
  uint32_t source_count_ = 0;
  uint64_t uses_ = 0;

  HolderSets sets_;
  MatchWalk walk_;
  BlockPool pool_;
  bool lists_all_;            // new records too
  uint64_t list_cursor_ = 0;  // of list_all: up to there all are listed
  Tick asked_by_hash_ = 0;    // when somebody last needed that
  NameTable names_;
  OtherNames other_names_;
  SurplusTable copies_, aliases_;
  OrphanBook orphans_;
  ContentFeed contents_;
  OwnerBook owners_;
  size_t marks_ = 0;              // in all contexts, dead ones too until they are swept
  std::vector<Target> targets_;   // of one removal
  std::vector<uint64_t> hashed_;  // prefixes of the event that is being stored

  std::vector<std::unique_ptr<Context>> graveyard_;  // dropped contexts, taken apart in slices
  Eviction eviction_;                                // among all contexts
  Stage stage_ = Stage::kGraveyard;
  bool in_pass_ = false;
  uint32_t sweep_context_ = 0;
  uint64_t sweep_cursor_ = 0;
  uint64_t pass_ = 1;
  bool remains_ = false;  // something died since the pass under way began
  uint64_t random_ = 0;
  Statistics statistics_;

  NameCursor export_cursor_;
  std::optional<SegmentedTable<Touched>> touched_;   // while an export is under way
  std::vector<std::pair<uint32_t, uint64_t>> gone_;  // (context, prefix) since the last frame
  ClaimCursor claim_cursor_;
  std::deque<ImportedClaim> imported_claims_;           // until the names are all there
  std::unordered_map<uint32_t, size_t> claims_coming_;  // of those, by context
};

template <class Visit>
void PrefixIndex::each_name(uint64_t key, Visit visit) {
  bool enough = false;
  names_.each(key, [&](BlockId id) { return enough = visit(Naming{id, kNoOtherName}); });
  if (!enough) other_names_.each(key, [&](OtherNameId id) { return visit(Naming{kNoBlock, id}); });
}

// Records that are free, or whose name nobody owns, are passed over, but not too many in one go.
template <class Visit>
bool PrefixIndex::walk_names(NameCursor& cursor, Visit visit) const {
  constexpr size_t kPassedOverMax = 65'536;
  size_t passed_over = 0;
  if (!cursor.in_others) {
    const bool is_over = pool_.walk(cursor.at, [&](BlockId id, const BlockRecord* record) {
      if (record == nullptr || record->holders == kEmptySet || record->owners == kEmptySet)
        return ++passed_over < kPassedOverMax;
      return static_cast<bool>(visit(listed(id)));
    });
    if (!is_over) return false;
    cursor = {0, true};
  }
  return other_names_.walk(cursor.at, [&](const OtherName& name) { return visit(listed(name)); });
}

}  // namespace kvindexer
