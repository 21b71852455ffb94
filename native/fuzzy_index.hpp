// What can be reused of a prompt whose prefix differs: contents by context, asked for at any token offset.
//
// A window is block_size tokens of a query, named by its token offset. Three coarse questions; the caller
// filters what they answer (who holds it, who is excluded) in between:
//   exact   which windows, at every offset, are stored contents. rsync rolls a weak hash over the windows to
//   look
//           before it hashes; the SimHash rolls here already and finds the bucket, and XXH64 of 16 tokens
//           costs 8 ns, so every window is hashed outright and a match is a match of the 64-bit content hash.
//   near    what lies within a Hamming distance of the windows at given offsets
//   select  which windows to report: they must not overlap and the sum of their weights is the largest
//   possible
//
// Bounds. A window has at most `matches_max` matches, best first; what is dropped for it is counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "content_walk.hpp"
#include "fuzzy_context.hpp"

namespace kvindexer {

struct FuzzyMatch {
  uint32_t offset;  // of the window, in tokens
  uint16_t distance;
  uint16_t exact;  // 1: the content hashes agree
  uint64_t prefix;
};

struct FuzzyStatistics {
  uint64_t contexts = 0;
  uint64_t blocks = 0;   // entries, doomed ones too
  uint64_t chained = 0;  // of them: beyond the first with their content
  uint64_t backlog = 0;  // of them: not in the tables yet
  uint64_t asleep = 0;   // contexts that are not asked
  uint64_t doomed = 0;   // removed, not swept yet
  uint64_t crowded = 0;  // contents that near matches do not find
  uint64_t bytes = 0;
  uint64_t matches_dropped = 0;  // since start
};

class FuzzyIndex {
 public:
  // `scans` counts in native_scans(): 0 is the fastest, and numbers past the end mean the last.
  FuzzyIndex(size_t shingle, size_t scans)
      : shingle_(shingle), scans_(&native_scans()[std::min(scans, native_scans().size() - 1)]) {}
  FuzzyIndex(const FuzzyIndex&) = delete;

  // Whether blocks of so many tokens have a SimHash.
  bool takes_blocks_of(size_t block_size) const {
    return block_size >= shingle_ && block_size <= Votes::kVotesMax;
  }
  // Does nothing when the context is there. Throws std::invalid_argument for a block size that has no
  // SimHash.
  void add_context(uint32_t id, size_t block_size) {
    if (!takes_blocks_of(block_size))
      throw std::invalid_argument("block size must be between the shingle and 65535 tokens");
    if (contexts_.contains(id)) return;
    graveyard_.reserve(graveyard_.size() + contexts_.size() + 1);  // of all, one day
    contexts_.emplace(id, std::make_unique<FuzzyContext>(block_size, shingle_, *scans_));
  }
  void drop_context(uint32_t id) noexcept {
    const auto found = contexts_.find(id);
    if (found == contexts_.end()) return;
    graveyard_.push_back(std::move(found->second));  // there is room: see add_context
    contexts_.erase(found);
  }
  bool has_context(uint32_t id) const { return contexts_.contains(id); }
  size_t block_size(uint32_t id) const { return contexts_.at(id)->block_size(); }

  // What `insert` wants to know of blocks, from their tokens.
  void hash(uint32_t id, const uint8_t* tokens, std::span<Content> out) const {
    content_hashes(tokens, out.size(), block_size(id), shingle_, out.data());
  }
  std::vector<Content> hashes(uint32_t id, const uint8_t* tokens, size_t blocks) const {
    std::vector<Content> found(blocks);
    hash(id, tokens, found);
    return found;
  }
  // See FuzzyContext::insert.
  void insert(uint32_t id, std::span<const uint64_t> prefixes, std::span<const Content> hashes) {
    bury();
    if (is_noting_)
      for (size_t i = 0; i < prefixes.size(); ++i) note_stored(id, prefixes[i], hashes[i]);
    contexts_.at(id)->insert(prefixes, hashes);
  }
  void remove(uint32_t id, std::span<const uint64_t> prefixes) {
    bury();
    if (is_noting_)
      for (const uint64_t prefix : prefixes)
        note({.context = id, .kind = ContentRow::kRemoved, .prefix = prefix});
    contexts_.at(id)->remove(prefixes);
  }
  // For tests and dumps.
  std::vector<uint64_t> prefixes(uint32_t id) { return contexts_.at(id)->prefixes(); }

  // Of the windows from `window` on; `window` becomes the next one, that behind the last at the end. Stops
  // behind `windows_max` windows or about as many matches; and before the first while the context is roused,
  // which takes some slices.
  std::vector<FuzzyMatch> exact(uint32_t id, const uint8_t* tokens, size_t count, size_t matches_max,
                                size_t& window, size_t windows_max);
  static std::vector<uint32_t> select(std::span<const uint32_t> weights, size_t block_size);

  FuzzyStatistics statistics() const;

  // -- snapshots: rows out and in, as content_rows.hpp has them

  void export_begin();
  bool is_exporting() const { return is_noting_; }
  // What was noted since the last call, and about `rows_max` more; `done` tells that from now on there are
  // notes only.
  std::vector<ContentRow> export_rows(size_t rows_max, bool& done);
  // False: more was noted between two calls than is kept, and what was written is not the index.
  bool export_is_whole() const { return notes_lost_ == 0; }
  void export_end();
  // Contexts are those of this index; rows of others are passed over.
  void import_rows(std::span<const ContentRow> rows);
  // Behind the last rows: keeps of the next `rows_max` prefixes those for which `keep(context, prefix)`. True
  // when there are no more.
  template <class Keep>
  bool import_settle(size_t rows_max, Keep keep);

 private:
  friend class NearQuery;

  static constexpr size_t kNotesMax = 1 << 22;  // 128 MiB

  struct Near {
    uint64_t simhash;
    uint64_t content;
    uint64_t prefix;
    uint32_t distance;
    bool exact;
    // Best first; the same whatever order they were found in.
    bool operator<(const Near& other) const {
      if (exact != other.exact) return exact;
      if (distance != other.distance) return distance < other.distance;
      return prefix < other.prefix;
    }
  };

  void report(FuzzyContext& context, uint32_t offset, const std::vector<Near>& found, size_t matches_max,
              std::vector<FuzzyMatch>& matches);
  void bury() {
    if (!graveyard_.empty() && graveyard_.back()->dismantle()) graveyard_.pop_back();
  }

  void note(const ContentRow& row) {
    if (notes_.size() < kNotesMax)
      notes_.push_back(row);
    else
      ++notes_lost_;
  }
  void note_stored(uint32_t context, uint64_t prefix, const Content& content) {
    note({context, ContentRow::kStored, prefix, content.simhash, content.hash});
  }
  bool walk(size_t rows_max, std::vector<ContentRow>& rows);
  void begin_walk();

  size_t shingle_;
  const NearScans* scans_;
  std::unordered_map<uint32_t, std::unique_ptr<FuzzyContext>> contexts_;
  std::vector<std::unique_ptr<FuzzyContext>> graveyard_;  // dropped, taken apart in slices
  uint64_t matches_dropped_ = 0;

  std::map<uint32_t, ContentCursor> walking_;  // contexts that are not walked through yet
  bool is_noting_ = false, is_settling_ = false;
  std::vector<ContentRow> notes_;
  size_t notes_lost_ = 0;
};

// What lies near the windows of a prompt at given offsets, found in slices between which the index may
// change.
//
// What is stored when the first slices begin and is still there when its window's matches are taken is among
// them, unless `matches_max` leaves it out; nothing is that is not stored then. What comes meanwhile may be.
class NearQuery {
 public:
  // Offsets are such that offset + block_size <= count. Throws std::invalid_argument beyond kQueriesMax.
  NearQuery(FuzzyIndex& index, uint32_t id, const uint8_t* tokens, size_t count,
            std::vector<uint32_t> offsets, unsigned distance_max, size_t matches_max);
  NearQuery(const NearQuery&) = delete;

  // Goes on for about `work_max` (see NearSearch::run); true when all is found.
  bool step(size_t work_max);
  // Behind the last step: the matches of the next windows, about `matches_max` in all. `done` tells that
  // there are no more.
  std::vector<FuzzyMatch> take(size_t matches_max, bool& done);

 private:
  static constexpr size_t kWindowsTaken = 1'024;  // in one go

  FuzzyContext* context() const {
    return index_->has_context(id_) ? index_->contexts_.at(id_).get() : nullptr;
  }
  std::vector<uint64_t> simhashes(const uint8_t* tokens, size_t count, size_t block_size) const;
  void trim(std::vector<FuzzyIndex::Near>& list);
  void settle(FuzzyContext& context, size_t window);

  FuzzyIndex* index_;
  uint32_t id_;
  std::vector<uint32_t> offsets_;
  size_t matches_max_;
  std::vector<uint64_t> simhashes_, contents_;
  std::vector<std::vector<FuzzyIndex::Near>> found_;  // by window
  std::unique_ptr<NearSearch> search_;
  bool is_roused_ = false;
  uint64_t version_ = 0;  // when it was
  size_t taken_ = 0;      // windows
};

inline std::vector<FuzzyMatch> FuzzyIndex::exact(uint32_t id, const uint8_t* tokens, size_t count,
                                                 size_t matches_max, size_t& window, size_t windows_max) {
  constexpr size_t kAhead = 16;
  FuzzyContext& context = *contexts_.at(id);
  const size_t block_size = context.block_size();
  std::vector<FuzzyMatch> matches;
  if (window + block_size > count || (window == 0 && !context.rouse())) return matches;
  const size_t first = window;
  const size_t windows = std::min(windows_max, count - block_size + 1 - first);
  const std::vector<uint64_t> simhashes =
      sliding_simhashes(tokens + 4 * first, windows + block_size - 1, block_size, context.shingle());
  for (size_t i = 0; i < windows && matches.size() < windows_max; ++i) {
    if (i + kAhead < windows) context.prefetch(simhashes[i + kAhead]);
    if (i + kAhead / 2 < windows) context.prefetch_records(simhashes[i + kAhead / 2]);
    const uint64_t content = xxh64(tokens + 4 * window, block_size * 4, 0);
    const uint64_t prefix = context.find_exact(simhashes[i], content);
    if (prefix != 0)
      report(context, static_cast<uint32_t>(window), {{simhashes[i], content, prefix, 0, true}}, matches_max,
             matches);
    ++window;
  }
  return matches;
}

inline NearQuery::NearQuery(FuzzyIndex& index, uint32_t id, const uint8_t* tokens, size_t count,
                            std::vector<uint32_t> offsets, unsigned distance_max, size_t matches_max)
    : index_(&index),
      id_(id),
      offsets_(std::move(offsets)),
      matches_max_(matches_max),
      contents_(offsets_.size()),
      found_(offsets_.size()) {
  if (offsets_.size() > kQueriesMax) throw std::invalid_argument("more windows than a search takes");
  const FuzzyContext& context = *index.contexts_.at(id);
  simhashes_ = simhashes(tokens, count, context.block_size());
  for (size_t i = 0; i < offsets_.size(); ++i)
    contents_[i] = xxh64(tokens + 4 * size_t{offsets_[i]}, context.block_size() * 4, 0);
  search_ = std::make_unique<NearSearch>(simhashes_, distance_max, context.scans());
}

inline std::vector<uint64_t> NearQuery::simhashes(const uint8_t* tokens, size_t count,
                                                  size_t block_size) const {
  std::vector<uint64_t> found(offsets_.size());
  if (offsets_.size() * 4 > count) {  // a step of the window costs a quarter of a SimHash
    const std::vector<uint64_t> all = sliding_simhashes(tokens, count, block_size, index_->shingle_);
    for (size_t i = 0; i < offsets_.size(); ++i) found[i] = all[offsets_[i]];
  } else {
    for (size_t i = 0; i < offsets_.size(); ++i)
      found[i] = simhash(tokens + 4 * size_t{offsets_[i]}, block_size, index_->shingle_);
  }
  return found;
}

inline bool NearQuery::step(size_t work_max) {
  FuzzyContext* const from = context();
  if (from == nullptr) return true;
  if (!is_roused_) {
    const bool was_awake = from->backlog() == 0;
    is_roused_ = from->rouse();
    version_ = from->version();
    if (!was_awake) return false;
  }
  return from->search(*search_, work_max, [&](uint32_t window, unsigned distance, const Record& record) {
    std::vector<FuzzyIndex::Near>& list = found_[window];
    list.push_back(
        {record.simhash, record.content, record.prefix, distance, record.content == contents_[window]});
    if (list.size() >= 2 * matches_max_ + 16) trim(list);
  });
}

inline std::vector<FuzzyMatch> NearQuery::take(size_t matches_max, bool& done) {
  std::vector<FuzzyMatch> matches;
  FuzzyContext* const from = context();
  done = from == nullptr;
  if (done) return matches;
  const size_t end = std::min(offsets_.size(), taken_ + kWindowsTaken);
  for (; taken_ < end && matches.size() < matches_max; ++taken_) {
    settle(*from, taken_);
    index_->report(*from, offsets_[taken_], found_[taken_], matches_max_, matches);
    found_[taken_] = {};
  }
  done = taken_ == offsets_.size();
  return matches;
}

// Puts a window's matches in order, as the index has them now.
inline void NearQuery::settle(FuzzyContext& context, size_t window) {
  std::vector<FuzzyIndex::Near>& list = found_[window];
  if (version_ != context.version()) {
    // A record may have moved and been found again, gone, or come to another prefix of its content.
    for (FuzzyIndex::Near& near : list) near.prefix = context.find_exact(near.simhash, near.content);
    std::erase_if(list, [](const FuzzyIndex::Near& near) { return near.prefix == 0; });
    std::sort(list.begin(), list.end());
    const auto same = [](const FuzzyIndex::Near& a, const FuzzyIndex::Near& b) {
      return a.prefix == b.prefix;
    };
    list.erase(std::unique(list.begin(), list.end(), same), list.end());
  }
  if (context.crowded() != 0 &&
      std::none_of(list.begin(), list.end(), [](const FuzzyIndex::Near& near) { return near.exact; }))
    if (const uint64_t prefix = context.find_exact(simhashes_[window], contents_[window]))
      list.push_back({simhashes_[window], contents_[window], prefix, 0, true});
  if (list.size() > matches_max_) trim(list);
  std::sort(list.begin(), list.end());
}

inline void NearQuery::trim(std::vector<FuzzyIndex::Near>& list) {
  std::nth_element(list.begin(), list.begin() + static_cast<ptrdiff_t>(matches_max_), list.end());
  index_->matches_dropped_ += list.size() - matches_max_;
  list.resize(matches_max_);
}

inline void FuzzyIndex::report(FuzzyContext& context, uint32_t offset, const std::vector<Near>& found,
                               size_t matches_max, std::vector<FuzzyMatch>& matches) {
  size_t reported = 0;
  for (const Near& near : found)
    context.for_prefixes(near.prefix, near.content, [&](uint64_t prefix) {
      if (reported == matches_max) {
        ++matches_dropped_;
        return false;
      }
      matches.push_back(
          {offset, static_cast<uint16_t>(near.distance), static_cast<uint16_t>(near.exact), prefix});
      ++reported;
      return true;
    });
}

// weights[i] is what the window at offset i is worth, 0 when it is not to be chosen. Of equal sums, the one
// that takes the earlier window. Returns offsets, ascending.
inline std::vector<uint32_t> FuzzyIndex::select(std::span<const uint32_t> weights, size_t block_size) {
  std::vector<uint64_t> best(weights.size() + block_size, 0);  // [i]: with the windows from i on
  for (size_t i = weights.size(); i-- > 0;) {
    const uint64_t taken = weights[i] == 0 ? 0 : weights[i] + best[i + block_size];
    best[i] = std::max(best[i + 1], taken);
  }
  std::vector<uint32_t> chosen;
  for (size_t i = 0; i < weights.size();) {
    if (weights[i] != 0 && best[i] == weights[i] + best[i + block_size]) {
      chosen.push_back(static_cast<uint32_t>(i));
      i += block_size;
    } else {
      ++i;
    }
  }
  return chosen;
}

inline FuzzyStatistics FuzzyIndex::statistics() const {
  FuzzyStatistics now;
  now.contexts = contexts_.size();
  now.matches_dropped = matches_dropped_;
  for (const auto& [id, context] : contexts_) {
    now.blocks += context->size();
    now.chained += context->chained();
    now.backlog += context->backlog();
    now.asleep += context->is_awake() ? 0 : 1;
    now.doomed += context->doomed();
    now.crowded += context->crowded();
    now.bytes += context->bytes();
  }
  for (const auto& context : graveyard_) now.bytes += context->bytes();
  return now;
}

// -- snapshots

inline void FuzzyIndex::begin_walk() {
  walking_.clear();
  for (const auto& [id, context] : contexts_) walking_.emplace(id, ContentCursor{});
}

inline bool FuzzyIndex::walk(size_t rows_max, std::vector<ContentRow>& rows) {
  const size_t enough = rows.size() + rows_max;
  while (!walking_.empty() && rows.size() < enough) {
    const auto next = walking_.begin();
    const auto found = contexts_.find(next->first);
    const size_t first = rows.size();
    const bool done = found == contexts_.end() || found->second->walk(next->second, enough, rows);
    for (size_t i = first; i < rows.size(); ++i) rows[i].context = next->first;
    if (done) walking_.erase(next);
  }
  return walking_.empty();
}

inline void FuzzyIndex::export_begin() {
  export_end();
  begin_walk();
  is_noting_ = true;
}

inline void FuzzyIndex::export_end() {
  walking_.clear();
  is_noting_ = false;
  notes_ = {};
  notes_lost_ = 0;
}

inline std::vector<ContentRow> FuzzyIndex::export_rows(size_t rows_max, bool& done) {
  std::vector<ContentRow> rows = std::exchange(notes_, {});
  done = walk(rows_max, rows);
  return rows;
}

inline void FuzzyIndex::import_rows(std::span<const ContentRow> rows) {
  std::vector<uint64_t> prefixes;
  std::vector<Content> contents;
  uint64_t before = 0;
  bool crowded = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    const ContentRow& row = rows[i];
    const auto found = contexts_.find(row.context);
    if (found == contexts_.end()) continue;
    FuzzyContext& context = *found->second;
    switch (row.kind) {
      case ContentRow::kStored:
        prefixes.push_back(row.prefix);
        contents.push_back({row.simhash, row.content});
        if (i + 1 < rows.size() && rows[i + 1].kind == row.kind && rows[i + 1].context == row.context) break;
        context.insert(prefixes, contents);
        prefixes.clear();
        contents.clear();
        break;
      case ContentRow::kRemoved:
        context.remove({&row.prefix, 1});
        break;
      case ContentRow::kCrowded:
        context.append(0, row, true);
        break;
      case ContentRow::kFurther:
        context.append(before, row, crowded);
        break;
      default:
        crowded = row.kind == ContentRow::kBehindCrowded;
    }
    before = row.prefix;
  }
}

template <class Keep>
bool FuzzyIndex::import_settle(size_t rows_max, Keep keep) {
  if (!std::exchange(is_settling_, false)) begin_walk();  // anew too, where the last call found no memory
  std::vector<ContentRow> rows;
  const bool done = walk(rows_max, rows);
  for (const ContentRow& row : rows) {
    if (row.kind == ContentRow::kBehind || row.kind == ContentRow::kBehindCrowded) continue;
    if (!keep(row.context, row.prefix)) contexts_.at(row.context)->remove({&row.prefix, 1});
  }
  is_settling_ = !done;
  return done;
}

}  // namespace kvindexer
