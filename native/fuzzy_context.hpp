// The blocks of one context by content, for matches that do not start at the first token.
//
// A content (block_size tokens) is a record in a NearTable: SimHash, content hash, prefix hash of one block
// that has it. Further prefixes of the content are a chain (content_chains.hpp).
//
// Growth. When a bucket holds 48 records on average a table of twice as many buckets takes over, and every
// insertion moves a few buckets of the old one; until that is done both are searched. No call moves more than
// it inserts, times four and a bucket.
//
// Removal. Only the prefix hash is known then, and a table from prefix to record would cost 5 bytes a block
// and a fifth of the time of an insertion. So a prefix is put down as doomed, which hides it from every
// answer at once, and a sweep that goes round the buckets, 16 records for each removal, takes its record out:
// never more than about an eighth of the records are doomed. Members of chains leave at once.
//
// Bounds. A bucket of more than kBucketRecordsMax records (thousands of blocks with nearly the same tokens)
// takes no more: contents beyond are kept as chains without a record, which exact matches find and near ones
// do not (`crowded` counts them). Prefix hash 0 is refused.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "content_chains.hpp"
#include "content_rows.hpp"
#include "near_table.hpp"
#include "segmented_table.hpp"
#include "simhash.hpp"
#include "xxh64.hpp"

namespace kvindexer {

// What the fuzzy index knows of a block's tokens.
struct Content {
  uint64_t simhash;
  uint64_t hash;
};

inline Content content_of(const uint8_t* tokens, size_t block_size, size_t shingle) {
  return {simhash(tokens, block_size, shingle), xxh64(tokens, block_size * 4, 0)};
}

class FuzzyContext {
 public:
  FuzzyContext(size_t block_size, size_t shingle, const NearScans& scans)
      : block_size_(block_size), shingle_(shingle), scans_(&scans) {
    current_ = std::make_unique<NearTable>(NearTable::kBitsMin, records_);
  }

  size_t block_size() const { return block_size_; }
  size_t shingle() const { return shingle_; }
  // Blocks with an entry, doomed ones too.
  size_t size() const { return current_->size() + (old_ ? old_->size() : 0) + chains_.size(); }
  size_t doomed() const { return doomed_[0].prefixes.size() + doomed_[1].prefixes.size(); }
  size_t crowded() const { return chains_.crowded(); }
  size_t chained() const { return chains_.size(); }
  size_t bytes() const;

  // `tokens`: block_size little-endian uint32 for each prefix. Those that are there already are left alone.
  // Returns the number of new entries.
  size_t insert(std::span<const uint64_t> prefixes, const uint8_t* tokens) {
    return insert_each(prefixes, [this, tokens](size_t block) {
      return content_of(tokens + block * block_size_ * 4, block_size_, shingle_);
    });
  }
  // The same with contents that were computed elsewhere.
  size_t insert(std::span<const uint64_t> prefixes, std::span<const Content> contents) {
    return insert_each(prefixes, [contents](size_t block) { return contents[block]; });
  }
  void remove(std::span<const uint64_t> prefixes);

  // One prefix of the content, which may be doomed, or 0.
  uint64_t find_exact(uint64_t simhash, uint64_t content);
  void prefetch(uint64_t simhash) const { current_->prefetch(simhash); }
  void prefetch_records(uint64_t simhash) const { current_->prefetch_records(simhash); }

  // See NearTable::search.
  template <class Hit>
  void search(std::span<const uint64_t> queries, unsigned distance_max, Hit hit) const {
    current_->search(queries, distance_max, *scans_, hit);
    if (old_) old_->search(queries, distance_max, *scans_, hit);
  }

  // Calls visit(prefix) for `prefix`, unless it is 0, and all others of its content, leaving doomed ones out,
  // until it returns false.
  template <class Visit>
  void for_prefixes(uint64_t prefix, uint64_t content, Visit visit);
  // All prefixes that are there and not doomed, in no order. Walks everything: for tests and dumps.
  std::vector<uint64_t> prefixes();

  // -- snapshots (content_walk.hpp)

  ContentCursor begin_walk() const;
  // About `rows_max` more rows, without their context; true when there are no more.
  bool walk(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows);
  // A prefix of a content whose other prefixes are there: behind one of them, if that lies in its chain. Does
  // nothing when it is there already. `crowded`: the SimHash is not known.
  void append(uint64_t before, const ContentRow& row, bool crowded);

  // Gives memory back in slices; true when nothing is left. For a context that is not used any more.
  bool dismantle();

 private:
  static constexpr size_t kRecordsPerBucket = 48;
  static constexpr size_t kRecordsPerBucketCrowded = 8;
  static constexpr size_t kBucketRecordsMax = 1'024;
  static constexpr size_t kVisitsPerRemoval = 16;
  static constexpr size_t kMovesPerInsertion = 4;
  static constexpr size_t kBatch = 128;
  static constexpr size_t kLag = 6;

  struct Doomed {
    uint64_t key;  // prefix hash
    bool empty() const { return key == 0; }
  };

  // A set of prefix hashes with a bitmap in front, which answers most questions of a sweep from the cache.
  struct Doom {
    SegmentedTable<Doomed> prefixes;
    std::vector<uint64_t> bitmap;

    bool contains(uint64_t prefix) {
      if (prefixes.size() == 0) return false;
      const uint64_t bit = prefix & (bitmap.size() * 64 - 1);
      return (bitmap[bit / 64] >> (bit % 64) & 1) != 0 && prefixes.find(prefix) != nullptr;
    }
    // `bits_max`: room for a bitmap, should the set be empty; it is not changed otherwise.
    void add(uint64_t prefix, size_t bits_max) {
      if (prefixes.size() == 0) bitmap.assign(std::bit_ceil(std::max<size_t>(64, bits_max)) / 64, 0);
      const uint64_t bit = prefix & (bitmap.size() * 64 - 1);
      bitmap[bit / 64] |= uint64_t{1} << (bit % 64);
      prefixes.insert({prefix});
    }
    void remove(uint64_t prefix) { prefixes.erase(prefixes.find(prefix)); }
  };

  bool is_doomed(uint64_t prefix) { return doomed_[0].contains(prefix) || doomed_[1].contains(prefix); }
  template <class ContentOf>
  size_t insert_each(std::span<const uint64_t> prefixes, ContentOf content_of_block);
  bool revive(uint64_t prefix);
  bool insert_block(uint64_t prefix, uint64_t simhash, uint64_t content);
  std::optional<Record> survivor_of(const Record& record);

  // The prefix of the content's record, which may be doomed, or 0.
  uint64_t recorded(uint64_t simhash, uint64_t content) const;
  void walk_record(const Record& record, ContentCursor& cursor, std::vector<ContentRow>& rows);
  void walk_buckets(ContentCursor& cursor, std::vector<ContentRow>& rows);
  void walk_chain(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows);

  void grow(size_t insertions);
  void insert_moved();
  void sweep(size_t visits_max);
  void sweep_bucket(NearTable& table, uint32_t bucket);

  size_t block_size_;
  size_t shingle_;
  const NearScans* scans_;
  RecordPool records_;
  std::unique_ptr<NearTable> current_, old_;
  bool crowding_ = false;  // a bucket was full: grow early, that may spread its records
  uint32_t frontier_ = 0;  // buckets of old_ before it have been moved
  ContentChains chains_;
  // [0]: the pass of the sweep that is under way sees all of their records; [1]: the next one will.
  std::array<Doom, 2> doomed_;
  uint32_t cursor_ = 0;  // of the sweep: buckets of current_, then those of old_
  std::vector<Pages> trash_;
  std::vector<Record> moving_;
};

inline size_t FuzzyContext::bytes() const {
  size_t bytes = records_.bytes() + chains_.bytes();
  for (const std::unique_ptr<NearTable>* table : {&current_, &old_})
    if (*table) bytes += (*table)->bytes();  // none is left of a context that is taken apart
  for (const Doom& doomed : doomed_)
    bytes += doomed.prefixes.bytes() + doomed.bitmap.capacity() * sizeof(uint64_t);
  for (const Pages& pages : trash_) bytes += pages.bytes();
  return bytes;
}

// -- insertion

// Hashes run ahead of insertions: what a block needs is fetched from memory, step by step, while later ones
// are hashed.
template <class ContentOf>
size_t FuzzyContext::insert_each(std::span<const uint64_t> prefixes, ContentOf content_of_block) {
  std::array<uint64_t, kBatch> simhashes, contents;
  size_t added = 0;
  for (size_t begin = 0; begin < prefixes.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, prefixes.size() - begin);
    for (size_t i = 0; i < count + 3 * kLag; ++i) {
      if (i < count) {
        const Content content = content_of_block(begin + i);
        simhashes[i] = content.simhash;
        current_->prefetch(simhashes[i]);
        if (old_) old_->prefetch(simhashes[i]);
        contents[i] = content.hash;
      }
      if (i >= kLag && i - kLag < count) {
        current_->prefetch_insertion(simhashes[i - kLag]);
        if (old_) old_->prefetch_words(simhashes[i - kLag]);
      }
      if (i >= 2 * kLag && i - 2 * kLag < count) {
        current_->prefetch_more_words(simhashes[i - 2 * kLag]);
        if (old_) old_->prefetch_more_words(simhashes[i - 2 * kLag]);
      }
      if (i >= 3 * kLag) {
        const size_t block = i - 3 * kLag;
        added += insert_block(prefixes[begin + block], simhashes[block], contents[block]);
      }
    }
    grow(count);
  }
  return added;
}

inline bool FuzzyContext::insert_block(uint64_t prefix, uint64_t simhash, uint64_t content) {
  if (prefix == 0) return false;
  const bool revived = doomed() != 0 && revive(prefix);  // its record, if any, is found below
  std::optional<RecordPlace> place;
  NearTable* table = current_.get();
  if (table->may_contain(simhash)) place = table->find(simhash, content);
  if (!place && old_ && old_->bucket_of(simhash) >= frontier_) {
    table = old_.get();
    if (table->may_contain(simhash)) place = table->find(simhash, content);
  }
  if (place) {
    if (table->record(*place).prefix == prefix) return revived;
    if (chains_.contains(prefix)) return false;
    chains_.add(content, prefix, false);
    return true;
  }
  const bool full = current_->bucket_size(current_->bucket_of(simhash)) >= kBucketRecordsMax;
  crowding_ |= full;
  if (full || (chains_.crowded() != 0 && chains_.first(content) != 0)) {
    if (chains_.contains(prefix)) return false;
    chains_.add(content, prefix, true);
    return true;
  }
  current_->insert({simhash, content, prefix});
  return true;
}

inline void FuzzyContext::grow(size_t insertions) {
  if (!trash_.empty()) trash_.pop_back();
  if (!old_) {
    const unsigned bits = current_->bits();
    const size_t load_max = crowding_ ? kRecordsPerBucketCrowded : kRecordsPerBucket;
    if (bits == NearTable::kBitsMax || current_->size() <= load_max << bits) return;
    crowding_ = false;
    old_ = std::move(current_);
    current_ = std::make_unique<NearTable>(bits + 1, records_);
    frontier_ = 0;
    cursor_ = 0;  // what the sweep has not seen yet, it sees while it moves
  }
  moving_.clear();
  const size_t moves_max = insertions * kMovesPerInsertion;
  for (size_t i = 0; i + moving_.size() < moves_max && frontier_ < old_->buckets(); ++i) {
    old_->prefetch_bucket(frontier_ + 2);
    old_->take_bucket(frontier_++, moving_);
  }
  insert_moved();
  if (frontier_ < old_->buckets()) return;
  old_->release_into(trash_);
  old_.reset();
}

inline void FuzzyContext::insert_moved() {
  for (size_t i = 0; i < moving_.size() + 2 * kLag; ++i) {
    if (i < moving_.size()) current_->prefetch(moving_[i].simhash);
    if (i >= kLag && i - kLag < moving_.size()) current_->prefetch_tail(moving_[i - kLag].simhash);
    if (i >= 2 * kLag)
      if (const std::optional<Record> survivor = survivor_of(moving_[i - 2 * kLag]))
        current_->insert(*survivor);
  }
}

// -- removal

inline void FuzzyContext::remove(std::span<const uint64_t> prefixes) {
  for (const uint64_t prefix : prefixes) {
    if (prefix == 0) continue;
    if (chains_.contains(prefix)) {
      chains_.remove(prefix);
    } else if (!is_doomed(prefix)) {
      doomed_[1].add(prefix, size());
    }
  }
  sweep(prefixes.size() * kVisitsPerRemoval);
}

// True when it was doomed.
inline bool FuzzyContext::revive(uint64_t prefix) {
  bool found = false;
  for (Doom& doomed : doomed_)
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
  revive(record.prefix);  // no other record has it
  const uint64_t heir = chains_.first(record.content);
  if (heir == 0) return std::nullopt;
  chains_.remove(heir);
  return Record{record.simhash, record.content, heir};
}

inline void FuzzyContext::sweep(size_t visits_max) {
  for (size_t visits = 0; visits < visits_max && doomed() != 0;) {
    if (cursor_ == 0 && doomed_[0].prefixes.size() == 0) std::swap(doomed_[0], doomed_[1]);
    if (cursor_ < current_->buckets()) {
      visits += 1 + current_->bucket_size(cursor_);
      sweep_bucket(*current_, cursor_++);
      continue;
    }
    const uint32_t old_bucket = cursor_ - current_->buckets();
    if (old_ && old_bucket < old_->buckets()) {
      visits += 1 + old_->bucket_size(old_bucket);
      sweep_bucket(*old_, old_bucket);
      ++cursor_;
      continue;
    }
    cursor_ = 0;
    doomed_[0].prefixes = {};  // never were there, or have been revived
  }
}

inline void FuzzyContext::sweep_bucket(NearTable& table, uint32_t bucket) {
  table.prefetch_prefixes(bucket + 2);
  for (uint32_t slot = table.bucket_size(bucket); slot-- > 0;) {
    if (!is_doomed(table.prefix({bucket, slot}))) continue;
    if (const std::optional<Record> survivor = survivor_of(table.record({bucket, slot})))
      table.set_prefix({bucket, slot}, survivor->prefix);
    else
      table.erase({bucket, slot});
  }
}

// -- queries

inline uint64_t FuzzyContext::find_exact(uint64_t simhash, uint64_t content) {
  if (const uint64_t prefix = recorded(simhash, content)) return prefix;
  return chains_.crowded() != 0 ? chains_.first(content) : 0;
}

inline uint64_t FuzzyContext::recorded(uint64_t simhash, uint64_t content) const {
  if (const auto place = current_->find(simhash, content)) return current_->record(*place).prefix;
  if (old_)
    if (const auto place = old_->find(simhash, content)) return old_->record(*place).prefix;
  return 0;
}

template <class Visit>
void FuzzyContext::for_prefixes(uint64_t prefix, uint64_t content, Visit visit) {
  if (prefix != 0 && !is_doomed(prefix) && !visit(prefix)) return;
  for (uint64_t other = chains_.first(content); other != 0; other = chains_.next(other))
    if (other != prefix && !visit(other)) return;
}

inline std::vector<uint64_t> FuzzyContext::prefixes() {
  std::vector<uint64_t> found;
  for (const NearTable* table : {current_.get(), old_.get()}) {
    if (table == nullptr) continue;
    for (uint32_t bucket = 0; bucket < table->buckets(); ++bucket)
      for (uint32_t slot = 0; slot < table->bucket_size(bucket); ++slot) {
        const uint64_t prefix = table->record({bucket, slot}).prefix;
        if (!is_doomed(prefix)) found.push_back(prefix);
      }
  }
  chains_.for_each([&](uint64_t prefix) { found.push_back(prefix); });
  return found;
}

inline bool FuzzyContext::dismantle() {
  for (std::unique_ptr<NearTable>* table : {&old_, &current_})
    if (*table) {
      (*table)->release_into(trash_);
      table->reset();
      records_.release_into(trash_);
    }
  if (!trash_.empty()) {
    trash_.pop_back();
    return false;
  }
  return chains_.dismantle(1) && doomed_[0].prefixes.dismantle(1, [](const Doomed&) {}) &&
         doomed_[1].prefixes.dismantle(1, [](const Doomed&) {});
}

}  // namespace kvindexer
