// The blocks of one context by content, for matches that do not start at the first token.
//
// A content (block_size tokens) is a record in a NearTable: SimHash, content hash, prefix hash of one block
// that has it. Further prefixes of the content are a chain (content_chains.hpp).
//
// Asleep, awake. Until the first question nothing is put in the tables: what is stored lies in a backlog
// (content_backlog.hpp), at a tenth of the cost. A question first puts all of it there, in slices (`rouse`).
// From then on the context is awake, and the backlog is short: 4,096 blocks, and fewer in a small context,
// which are put in the tables together by what comes next. When more blocks than it held at the last question
// have come since, it falls asleep again. A content is in the backlog or in the tables, seldom in both (where
// its prefix went and came back), and that does no harm.
//
// Growth. A bucket holds some 30 records on average (`records_per_bucket`): an insertion that makes them more
// splits the next bucket, never more than a few for each that it inserts.
//
// Removal. Only the prefix hash is known then, and a table from prefix to record would cost 5 bytes a block
// and a fifth of the time of an insertion. So a prefix is put down as doomed, which hides it from every
// answer at once, and a sweep that goes through the backlog and round the buckets, 16 records for each
// removal, takes its record out: never more than about an eighth of the records are doomed. Asleep, where a
// record takes less, it is 6 for each, and a third at the most. Members of chains
// leave at once. Whatever carries a doomed prefix is dead, wherever it lies; so a prefix that comes back
// while it is doomed goes to the tables outright, which know what they have.
//
// Bounds. A bucket of more than kBucketRecordsMax records (thousands of blocks with nearly the same tokens)
// takes no more: contents beyond are kept as chains without a record, which exact matches find and near ones
// do not (`crowded` counts them). Prefix hash 0 is refused.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "content_backlog.hpp"
#include "content_chains.hpp"
#include "content_hash.hpp"
#include "content_rows.hpp"
#include "doomed_set.hpp"
#include "near_search.hpp"
#include "near_table.hpp"
#include "segmented_table.hpp"
#include "slice_clock.hpp"

namespace kvindexer {

class FuzzyContext {
 public:
  FuzzyContext(size_t block_size, size_t shingle, const NearScans& scans)
      : block_size_(block_size), shingle_(shingle), scans_(&scans), table_(NearTable::kBitsMin, scans) {}

  size_t block_size() const { return block_size_; }
  size_t shingle() const { return shingle_; }
  // Blocks with an entry, doomed ones too.
  size_t size() const { return table_.size() + chains_.size() + backlog_.size(); }
  size_t backlog() const { return backlog_.size(); }
  bool is_awake() const { return awake_; }
  size_t doomed() const { return doomed_[0].size() + doomed_[1].size(); }
  size_t crowded() const { return chains_.crowded(); }
  size_t chained() const { return chains_.size(); }
  size_t bytes() const;

  // A content hash for each prefix. One that is there already may be counted twice until it is asked for.
  void insert(std::span<const uint64_t> prefixes, std::span<const Content> hashes);
  void remove(std::span<const uint64_t> prefixes);

  // Before a question: puts a slice of the backlog in the tables; true when nothing is left.
  bool rouse();

  // One prefix of the content, which may be doomed, or 0.
  uint64_t find_exact(uint64_t simhash, uint64_t content);
  void prefetch(uint64_t simhash) const { table_.prefetch(simhash); }
  void prefetch_records(uint64_t simhash) const { table_.prefetch_records(simhash); }

  const NearScans& scans() const { return *scans_; }
  // Changes with whatever is stored or removed.
  uint64_t version() const { return version_; }

  // A slice of a search (see NearSearch::run).
  template <class Hit>
  bool search(NearSearch& search, size_t work_max, Hit hit) const {
    return search.run(table_, work_max, hit);
  }

  // Calls visit(prefix) for `prefix`, unless it is 0, and all others of its content, leaving doomed ones out,
  // until it returns false.
  template <class Visit>
  void for_prefixes(uint64_t prefix, uint64_t content, Visit visit);
  // All prefixes that are there and not doomed, in no order. Walks everything: for tests and dumps.
  std::vector<uint64_t> prefixes();

  // -- snapshots (content_walk.hpp)

  // About `rows_max` more rows, without their context; true when there are no more.
  bool walk(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows);
  // A prefix of a content whose other prefixes are there: behind one of them, if that lies in its chain. Does
  // nothing when it is there already. `crowded`: the SimHash is not known.
  void append(uint64_t before, const ContentRow& row, bool crowded);

  // Gives memory back in slices; true when nothing is left. For a context that is not used any more.
  bool dismantle();

 private:
  static constexpr size_t kRecordsPerBucketCrowded = 8;
  static constexpr size_t kBucketRecordsMax = 1'024;
  static constexpr size_t kVisitsPerRemoval = 16;
  static constexpr size_t kVisitsPerRemovalAsleep = 6;  // most lies in the backlog, where it takes less
  static constexpr size_t kInsertionsPerSplit = 16;     // at the least
  static constexpr size_t kSplitsMin = 8;               // together they are cheaper than one by one
  static constexpr size_t kPut = 1'024;                 // in one go
  static constexpr size_t kPutsPerInsertion = 2;        // at the least, once a backlog is long
  static constexpr size_t kPendingPart = 64;            // of an awake context that waits, at the most
  static constexpr size_t kPendingMax = 4 * kPut;
  static constexpr size_t kUnaskedMin = 65'536;
  static constexpr size_t kRemovalsPerGiveBack = 4'096;  // fewer than a segment of a full set holds
  // What a slice does at the most, and what between two looks at the clock.
  static constexpr size_t kDrainsPerSlice = 3;
  static constexpr size_t kSplitsPerSlice = 1'024, kSplitsTogether = 128;
  static constexpr size_t kSpreadPerSlice = 16'384, kSpreadTogether = 2'048;
  static constexpr size_t kSweptTogether = ContentBacklog::kSweptTogether;
  static constexpr size_t kBatch = 128;
  static constexpr size_t kLag = 6;

  bool is_doomed(uint64_t prefix) { return doomed_[0].contains(prefix) || doomed_[1].contains(prefix); }
  uint32_t doomed_of(std::span<const uint64_t> prefixes);
  bool revive(uint64_t prefix);
  size_t pending_max() const { return std::clamp(size() / kPendingPart, kPut, kPendingMax); }
  void drain();
  void put(std::span<const Record> records);
  void put_block(const Record& record, const NearTable::Spot& spot);
  std::optional<Record> survivor_of(const Record& record);

  // The prefix of the content's record, which may be doomed, or 0.
  uint64_t recorded(uint64_t simhash, uint64_t content) const;
  void walk_backlog(ContentCursor& cursor, size_t visits_max, std::vector<ContentRow>& rows);
  void walk_record(const Record& record, ContentCursor& cursor, std::vector<ContentRow>& rows);
  void walk_buckets(ContentCursor& cursor, std::vector<ContentRow>& rows);
  void walk_chain(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows);

  size_t records_per_bucket() const;
  size_t splits_for(size_t records) const;
  void grow(size_t insertions);
  void sweep(size_t visits_max);
  void sweep_bucket(uint32_t bucket);

  size_t block_size_;
  size_t shingle_;
  const NearScans* scans_;
  bool awake_ = false;
  size_t held_ = 0;           // at the last question
  size_t unasked_ = 0;        // blocks that came since
  bool is_draining_ = false;  // the backlog has been long and is not short yet
  bool has_asker_ = false;    // who does that, it seems: nothing has come since the last slice
  ContentBacklog backlog_;
  NearTable table_;
  uint64_t version_ = 0;
  unsigned bits_early_ = 0;  // a bucket was full: grow early up to so many bits, that may spread its records
  ContentChains chains_;
  // [0]: the pass of the sweep that is under way sees all of their records; [1]: the next one will.
  std::array<DoomedSet, 2> doomed_;
  // Where the sweep stands: in the backlog, then at these leading kBitsMax bits of chunk A.
  ContentBacklog::Cursor backlog_cursor_;
  uint32_t cursor_ = 0;
  std::vector<Record> taken_;      // by `drain`
  std::vector<Record> come_back_;  // doomed, of an insertion
  std::vector<Pages> trash_;
  bool released_ = false;  // it is taken apart
};

inline size_t FuzzyContext::bytes() const {
  size_t bytes = backlog_.bytes() + table_.bytes() + chains_.bytes();
  bytes += (taken_.capacity() + come_back_.capacity()) * sizeof(Record);
  for (const DoomedSet& doomed : doomed_) bytes += doomed.bytes();
  for (const Pages& pages : trash_) bytes += pages.bytes();
  return bytes;
}

// -- insertion

inline void FuzzyContext::insert(std::span<const uint64_t> prefixes, std::span<const Content> hashes) {
  ++version_;
  come_back_.clear();
  const bool any_doomed = doomed() != 0;
  uint32_t known = 0;
  for (size_t i = 0; i < prefixes.size(); ++i) {
    if (any_doomed && i % kSweptTogether == 0)
      known = doomed_of(prefixes.subspan(i, std::min(kSweptTogether, prefixes.size() - i)));
    if (prefixes[i] == 0) continue;
    const Record record{hashes[i].simhash, hashes[i].hash, prefixes[i]};
    if ((known >> i % kSweptTogether & 1) != 0)
      come_back_.push_back(record);
    else
      backlog_.add(record);
  }
  if (!come_back_.empty()) put(come_back_);
  unasked_ += prefixes.size();
  if (unasked_ > std::max(held_, kUnaskedMin)) awake_ = false;
  if (!awake_ || std::exchange(has_asker_, false)) return;
  // More than comes, and one after the other until little is left: between events, others empty the caches.
  // Should whoever asked have gone before all was roused, that is done bit by bit.
  is_draining_ |= backlog_.size() >= pending_max();
  const SliceClock clock;
  const size_t puts_min = prefixes.size() / kPut + 1, puts_max = std::max(kPutsPerInsertion, puts_min);
  for (size_t i = 0; i < puts_max && is_draining_ && (i < puts_min || !clock.is_over()); ++i) {
    drain();
    is_draining_ = backlog_.size() >= kPut;
  }
}

inline bool FuzzyContext::rouse() {
  awake_ = true;
  held_ = size();
  unasked_ = 0;
  if (backlog_.size() == 0) return true;
  is_draining_ = has_asker_ = true;
  ++version_;
  const SliceClock clock;
  const auto goes_on = [&clock](size_t done) { return done == 0 || !clock.is_over(); };
  const size_t records = table_.size() + backlog_.size();
  size_t splits = splits_for(records);
  if (table_.size() == 0 && table_.bits() == NearTable::kBitsMin && splits >= 4 * table_.buckets()) {
    // A new table need not go through all sizes: the last two doublings touch its pages, in slices.
    const auto bits = static_cast<unsigned>(std::bit_width(table_.buckets() + splits)) - 2;
    table_ = NearTable(std::min(bits, NearTable::kBitsMax), *scans_);
    splits = splits_for(records);
  }
  if (splits != 0 && table_.size() < table_.buckets()) {  // now they are cheap, there is little to be moved
    size_t left = std::min(splits, kSplitsPerSlice);
    do {
      table_.split(std::min(left, kSplitsTogether));
      left -= std::min(left, kSplitsTogether);
    } while (left != 0 && table_.bits() < NearTable::kBitsMax && !clock.is_over());
    return false;
  }
  if (!backlog_.is_spread()) {
    for (size_t done = 0; done < kSpreadPerSlice && goes_on(done); done += kSpreadTogether)
      backlog_.spread(kSpreadTogether);
    return false;
  }
  const size_t drains = splits == 0 ? kDrainsPerSlice : 1;
  for (size_t done = 0; done < drains && backlog_.size() != 0 && goes_on(done); ++done) drain();
  is_draining_ = backlog_.size() != 0;
  return !is_draining_;
}

// Puts some kPut of the backlog in the tables, roughly in the order of table A. Should there be no more
// memory, all of it stays in the backlog too.
inline void FuzzyContext::drain() {
  backlog_.take(kPut, taken_);
  const size_t taken = taken_.size();
  try {
    if (doomed() != 0)
      std::erase_if(taken_, [this](const Record& record) { return is_doomed(record.prefix); });
    put(taken_);
  } catch (...) {
    backlog_.put_back(taken);
    throw;
  }
}

// What a block needs is fetched from memory, step by step, some blocks ahead.
inline void FuzzyContext::put(std::span<const Record> records) {
  std::array<NearTable::Spot, kBatch> spots;
  for (size_t begin = 0; begin < records.size(); begin += kBatch) {
    const std::span<const Record> batch = records.subspan(begin, std::min(kBatch, records.size() - begin));
    for (size_t i = 0; i < batch.size() + 3 * kLag; ++i) {
      if (i < batch.size()) {
        spots[i] = table_.spot_of(batch[i].simhash);
        table_.prefetch_spot(spots[i]);
      }
      if (i >= kLag && i - kLag < batch.size()) table_.prefetch_tail(spots[i - kLag]);
      if (i >= 2 * kLag && i - 2 * kLag < batch.size()) table_.prefetch_more_words(spots[i - 2 * kLag]);
      if (i >= 3 * kLag) put_block(batch[i - 3 * kLag], spots[i - 3 * kLag]);
    }
    grow(batch.size());
  }
}

inline void FuzzyContext::put_block(const Record& record, const NearTable::Spot& spot) {
  if (doomed() != 0) revive(record.prefix);  // its record, if any, is found below
  std::optional<RecordPlace> place;
  if (table_.may_contain(spot)) place = table_.find(record.simhash, record.content);
  if (place) {
    if (table_.prefix(*place) == record.prefix || chains_.contains(record.prefix)) return;
    chains_.add(record.content, record.prefix, false);
    return;
  }
  const bool full = spot.bucket->size >= kBucketRecordsMax;
  if (full) bits_early_ = table_.bits() + 1;
  if (full || (chains_.crowded() != 0 && chains_.first(record.content) != 0)) {
    if (!chains_.contains(record.prefix)) chains_.add(record.content, record.prefix, true);
    return;
  }
  table_.insert(record, spot);
}

// What the buckets of a small table lack in records weighs more there, beside what does not grow with it; and
// it is searched the faster.
inline size_t FuzzyContext::records_per_bucket() const {
  if (table_.bits() < bits_early_) return kRecordsPerBucketCrowded;
  if (table_.bits() < 12) return 36;
  return table_.bits() < 14 ? 32 : 30;
}

// How many are due for so many records; some at a time, or none.
inline size_t FuzzyContext::splits_for(size_t records) const {
  if (table_.bits() == NearTable::kBitsMax) return 0;
  const size_t load = records_per_bucket();
  return records < load * (table_.buckets() + kSplitsMin) ? 0 : records / load - table_.buckets();
}

inline void FuzzyContext::grow(size_t insertions) {
  if (const size_t splits = splits_for(table_.size()))
    table_.split(std::min(splits, kSplitsMin + insertions / kInsertionsPerSplit));
}

// -- removal

inline void FuzzyContext::remove(std::span<const uint64_t> prefixes) {
  ++version_;
  const size_t visits = table_.size() < backlog_.size() / 4 ? kVisitsPerRemovalAsleep : kVisitsPerRemoval;
  for (size_t begin = 0; begin < prefixes.size(); begin += kSweptTogether) {
    if (begin % kRemovalsPerGiveBack == 0)
      for (DoomedSet& doomed : doomed_) doomed.give_back();
    const auto some = prefixes.subspan(begin, std::min(kSweptTogether, prefixes.size() - begin));
    for (const uint64_t prefix : some) doomed_[1].prefetch_entry(prefix);
    const uint32_t doomed = doomed_of(some);
    for (size_t i = 0; i < some.size(); ++i) {
      const uint64_t prefix = some[i];
      if (prefix == 0) continue;
      const bool chained = chains_.contains(prefix);
      if (chained) chains_.remove(prefix);
      if (chained && backlog_.size() == 0) continue;
      // Once more: it may be named twice.
      if ((doomed >> i & 1) == 0 && !doomed_[1].contains(prefix)) doomed_[1].add(prefix, size() / visits);
    }
  }
  sweep(prefixes.size() * visits);
}

// As bits. What tells is fetched for all of them, step by step.
inline uint32_t FuzzyContext::doomed_of(std::span<const uint64_t> prefixes) {
  uint32_t found = 0;
  for (DoomedSet& doomed : doomed_)
    if (!doomed.empty())
      for (const uint64_t prefix : prefixes) doomed.prefetch(prefix);
  for (DoomedSet& doomed : doomed_) {
    if (doomed.empty()) continue;
    uint32_t likely = 0;
    for (size_t i = 0; i < prefixes.size(); ++i)
      likely |= static_cast<uint32_t>(doomed.may_contain(prefixes[i])) << i;
    for (uint32_t left = likely; left != 0; left &= left - 1)
      doomed.prefetch_entry(prefixes[std::countr_zero(left)]);
    for (uint32_t left = likely; left != 0; left &= left - 1)
      if (doomed.contains_likely(prefixes[std::countr_zero(left)])) found |= left & -left;
  }
  return found;
}

// True when it was doomed.
inline bool FuzzyContext::revive(uint64_t prefix) {
  bool found = false;
  for (DoomedSet& doomed : doomed_)
    if (doomed.contains(prefix)) {
      doomed.remove(prefix);
      found = true;
    }
  return found;
}

// What becomes of a record: itself, or the same content under another prefix when its own is doomed, or
// nothing.
inline std::optional<Record> FuzzyContext::survivor_of(const Record& record) {
  if (!is_doomed(record.prefix)) return record;
  const uint64_t heir = chains_.first(record.content);
  if (heir == 0) return std::nullopt;
  chains_.remove(heir);
  return Record{record.simhash, record.content, heir};
}

// The backlog, then the buckets in the order of chunk A, which splits do not change: whatever is split or put
// in the tables meanwhile, a pass sees every record.
inline void FuzzyContext::sweep(size_t visits_max) {
  for (size_t visits = 0; visits < visits_max && doomed() != 0;) {
    if (backlog_cursor_.is_at_start() && doomed_[0].empty()) std::swap(doomed_[0], doomed_[1]);
    if (!backlog_.is_done(backlog_cursor_)) {
      visits += backlog_.sweep(backlog_cursor_, visits_max - visits,
                               [this](std::span<const uint64_t> prefixes) { return doomed_of(prefixes); });
      continue;
    }
    const unsigned below = NearTable::kBitsMax - table_.bits();
    const uint32_t leading = cursor_ >> below;
    const uint32_t ahead = (leading + 2) & ((1u << table_.bits()) - 1);
    table_.for_buckets(ahead, [&](uint32_t bucket) { table_.prefetch_swept(bucket); });
    table_.for_buckets(leading, [&](uint32_t bucket) {
      visits += 1 + table_.bucket_size(bucket);
      sweep_bucket(bucket);
    });
    cursor_ = (leading + 1) << below;
    if (cursor_ >> NearTable::kBitsMax == 0) continue;
    cursor_ = 0;
    backlog_cursor_ = {};
    doomed_[0].clear();
  }
}

// What an erasure needs is fetched for some doomed records at once.
inline void FuzzyContext::sweep_bucket(uint32_t bucket) {
  std::array<uint32_t, kSweptTogether> slots;
  for (uint32_t slot = table_.bucket_size(bucket); slot > 0;) {
    size_t doomed = 0;
    while (slot > 0 && doomed < slots.size())
      if (is_doomed(table_.prefix({bucket, --slot}))) slots[doomed++] = slot;
    const std::span<const uint32_t> found(slots.data(), doomed);
    for (const uint32_t each : found) table_.prefetch_spot(table_.spot_of({bucket, each}));
    for (const uint32_t each : found) table_.prefetch_words(table_.spot_of({bucket, each}));
    for (const uint32_t each : found) {  // from the last on: the last of the bucket takes the place of one
      if (const std::optional<Record> survivor = survivor_of(table_.record({bucket, each})))
        table_.set_prefix({bucket, each}, survivor->prefix);
      else
        table_.erase({bucket, each});
    }
  }
}

// -- queries

inline uint64_t FuzzyContext::find_exact(uint64_t simhash, uint64_t content) {
  if (const uint64_t prefix = recorded(simhash, content)) return prefix;
  return chains_.crowded() != 0 ? chains_.first(content) : 0;
}

inline uint64_t FuzzyContext::recorded(uint64_t simhash, uint64_t content) const {
  const auto place = table_.find(simhash, content);
  return place ? table_.prefix(*place) : 0;
}

template <class Visit>
void FuzzyContext::for_prefixes(uint64_t prefix, uint64_t content, Visit visit) {
  if (prefix != 0 && !is_doomed(prefix) && !visit(prefix)) return;
  for (uint64_t other = chains_.first(content); other != 0; other = chains_.next(other))
    if (other != prefix && !visit(other)) return;
}

inline std::vector<uint64_t> FuzzyContext::prefixes() {
  std::vector<uint64_t> found;
  for (uint32_t leading = 0; leading < 1u << table_.bits(); ++leading)
    table_.for_buckets(leading, [&](uint32_t bucket) {
      for (uint32_t slot = 0; slot < table_.bucket_size(bucket); ++slot) {
        const uint64_t prefix = table_.prefix({bucket, slot});
        if (!is_doomed(prefix)) found.push_back(prefix);
      }
    });
  chains_.for_each([&](uint64_t prefix) { found.push_back(prefix); });
  std::sort(found.begin(), found.end());
  std::vector<uint64_t> waiting;
  ContentBacklog::Cursor cursor;
  backlog_.walk(cursor, SIZE_MAX, [&](const Record& record) {
    if (!is_doomed(record.prefix) && !std::binary_search(found.begin(), found.end(), record.prefix))
      waiting.push_back(record.prefix);
  });
  found.insert(found.end(), waiting.begin(), waiting.end());
  return found;
}

inline bool FuzzyContext::dismantle() {
  if (!std::exchange(released_, true)) {
    table_.release_into(trash_);
    backlog_.release_into(trash_);
    for (DoomedSet& doomed : doomed_) doomed.clear();
  }
  if (!trash_.empty()) {
    trash_.pop_back();
    return false;
  }
  return chains_.dismantle(1) && doomed_[0].give_back() && doomed_[1].give_back();
}

}  // namespace kvindexer
