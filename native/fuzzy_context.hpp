// The blocks of one context by content, for matches that do not start at the first token.
//
// A content (block_size tokens) is a record in a NearTable: SimHash, content hash, prefix hash of one block
// that has it. Further prefixes of the content are a chain (content_chains.hpp).
//
// Growth. When a bucket holds 48 records on average a table of twice as many buckets takes over, and every
// insertion moves a few buckets of the old one; until that is done both are searched. No call moves more than
// it inserts, times four.
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
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "content_chains.hpp"
#include "near_table.hpp"
#include "segmented_table.hpp"
#include "simhash.hpp"
#include "xxh64.hpp"

namespace kvindexer {

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
  size_t doomed() const { return doomed_[0].size() + doomed_[1].size(); }
  size_t crowded() const { return chains_.crowded(); }
  size_t chained() const { return chains_.size(); }
  size_t bytes() const;

  // `tokens`: block_size little-endian uint32 for each prefix. Those that are there already are left alone.
  // Returns the number of new entries.
  size_t insert(std::span<const uint64_t> prefixes, const uint8_t* tokens);
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

  // Gives memory back in slices; true when nothing is left. For a context that is not used any more.
  bool dismantle();

 private:
  static constexpr size_t kRecordsPerBucket = 48;
  static constexpr size_t kBucketRecordsMax = 1'024;
  static constexpr size_t kVisitsPerRemoval = 16;
  static constexpr size_t kMovesPerInsertion = 3;
  static constexpr size_t kBatch = 32;

  struct Doomed {
    uint64_t key;  // prefix hash
    bool empty() const { return key == 0; }
  };

  bool is_doomed(uint64_t prefix) {
    return (doomed_[0].size() != 0 && doomed_[0].find(prefix) != nullptr) ||
           (doomed_[1].size() != 0 && doomed_[1].find(prefix) != nullptr);
  }
  bool revive(uint64_t prefix);
  bool insert_block(uint64_t prefix, uint64_t simhash, uint64_t content);
  std::optional<Record> survivor_of(const Record& record);

  void grow(size_t insertions);
  void move_bucket();
  void sweep(size_t visits_max);
  void sweep_bucket(NearTable& table, uint32_t bucket);

  size_t block_size_;
  size_t shingle_;
  const NearScans* scans_;
  RecordPool records_;
  std::unique_ptr<NearTable> current_, old_;
  uint32_t frontier_ = 0;  // buckets of old_ before it have been moved
  ContentChains chains_;
  // [0]: the pass of the sweep that is under way sees all of their records; [1]: the next one will.
  std::array<SegmentedTable<Doomed>, 2> doomed_;
  uint32_t cursor_ = 0;  // of the sweep: buckets of current_, then those of old_
  std::vector<Pages> trash_;
  std::vector<Record> moving_;
};

inline size_t FuzzyContext::bytes() const {
  size_t bytes = records_.bytes() + current_->bytes() + (old_ ? old_->bytes() : 0) + chains_.bytes();
  for (const auto& doomed : doomed_) bytes += doomed.bytes();
  for (const Pages& pages : trash_) bytes += pages.bytes();
  return bytes;
}

// -- insertion

inline size_t FuzzyContext::insert(std::span<const uint64_t> prefixes, const uint8_t* tokens) {
  const size_t block_bytes = block_size_ * 4;
  std::array<uint64_t, kBatch> simhashes, contents;
  size_t added = 0;
  for (size_t begin = 0; begin < prefixes.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, prefixes.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* const block = tokens + (begin + i) * block_bytes;
      simhashes[i] = simhash(block, block_size_, shingle_);
      current_->prefetch(simhashes[i]);
      contents[i] = xxh64(block, block_bytes, 0);
    }
    for (size_t i = 0; i < count; ++i) current_->prefetch_records(simhashes[i]);
    for (size_t i = 0; i < count; ++i) added += insert_block(prefixes[begin + i], simhashes[i], contents[i]);
    grow(count);
  }
  return added;
}

inline bool FuzzyContext::insert_block(uint64_t prefix, uint64_t simhash, uint64_t content) {
  if (prefix == 0) return false;
  const bool revived = doomed() != 0 && revive(prefix);  // its record, if any, is found below
  std::optional<RecordPlace> place = current_->find(simhash, content);
  NearTable* table = current_.get();
  if (!place && old_) {
    table = old_.get();
    place = old_->find(simhash, content);
  }
  if (place) {
    if (table->record(*place).prefix == prefix) return revived;
    if (chains_.contains(prefix)) return false;
    chains_.add(content, prefix, false);
    return true;
  }
  const bool full = current_->bucket_size(current_->bucket_of(simhash)) >= kBucketRecordsMax;
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
    if (bits == NearTable::kBitsMax || current_->size() <= kRecordsPerBucket << bits) return;
    old_ = std::move(current_);
    current_ = std::make_unique<NearTable>(bits + 1, records_);
    frontier_ = 0;
    cursor_ = 0;  // what the sweep has not seen yet, it sees while it moves
  }
  const size_t moves_max = insertions * kMovesPerInsertion;
  for (size_t moves = 0; moves < moves_max && frontier_ < old_->buckets(); moves += 1 + moving_.size())
    move_bucket();
  if (frontier_ < old_->buckets()) return;
  old_->release_into(trash_);
  old_.reset();
}

inline void FuzzyContext::move_bucket() {
  moving_.clear();
  old_->take_bucket(frontier_++, moving_);
  for (const Record& record : moving_) current_->prefetch(record.simhash);
  for (const Record& record : moving_)
    if (const std::optional<Record> survivor = survivor_of(record)) current_->insert(*survivor);
}

// -- removal

inline void FuzzyContext::remove(std::span<const uint64_t> prefixes) {
  for (const uint64_t prefix : prefixes) {
    if (prefix == 0) continue;
    if (chains_.contains(prefix)) {
      chains_.remove(prefix);
    } else if (!is_doomed(prefix)) {
      doomed_[1].insert({prefix});
    }
  }
  sweep(prefixes.size() * kVisitsPerRemoval);
}

// True when it was doomed.
inline bool FuzzyContext::revive(uint64_t prefix) {
  bool found = false;
  for (auto& doomed : doomed_)
    if (doomed.size() != 0)
      if (Doomed* const entry = doomed.find(prefix)) {
        doomed.erase(entry);
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
    if (cursor_ == 0 && doomed_[0].size() == 0) std::swap(doomed_[0], doomed_[1]);
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
    doomed_[0] = {};  // never were there, or have been revived
  }
}

inline void FuzzyContext::sweep_bucket(NearTable& table, uint32_t bucket) {
  for (uint32_t slot = table.bucket_size(bucket); slot-- > 0;) {
    const Record record = table.record({bucket, slot});
    const std::optional<Record> survivor = survivor_of(record);
    if (!survivor)
      table.erase({bucket, slot});
    else if (survivor->prefix != record.prefix)
      table.set_prefix({bucket, slot}, survivor->prefix);
  }
}

// -- queries

inline uint64_t FuzzyContext::find_exact(uint64_t simhash, uint64_t content) {
  if (const auto place = current_->find(simhash, content)) return current_->record(*place).prefix;
  if (old_)
    if (const auto place = old_->find(simhash, content)) return old_->record(*place).prefix;
  return chains_.crowded() != 0 ? chains_.first(content) : 0;
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
  return chains_.dismantle(1) && doomed_[0].dismantle(1, [](const Doomed&) {}) &&
         doomed_[1].dismantle(1, [](const Doomed&) {});
}

}  // namespace kvindexer
