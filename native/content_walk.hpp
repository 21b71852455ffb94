// The rows of a FuzzyContext, out and in (content_rows.hpp says what they are for).
//
// Why nothing is missed while the context changes between two slices: what goes from the backlog to the
// buckets goes from where the walk begins to where it goes on. Of the buckets: a record stays among those of
// its leading bits wherever splits move it, and everything of a bucket is taken at once. A chain is gone
// through from its front. What joins it comes to the front, and is noted; so behind the prefix that was given
// last lies what has not been given. When that prefix left the chain, the chain is given again from its
// front, and before it the prefix that went from the chain to the record meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fuzzy_context.hpp"

namespace kvindexer {

inline bool FuzzyContext::walk(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows) {
  while (rows.size() < rows_max) {
    if (!cursor.chains.empty()) {
      walk_chain(cursor, rows_max, rows);
    } else if (cursor.bits == 0) {
      walk_backlog(cursor, rows_max - rows.size(), rows);
    } else if (cursor.step < 1u << cursor.bits) {
      walk_buckets(cursor, rows);
    } else if (!cursor.crowded_done) {
      cursor.crowded_done = chains_.walk_crowded(cursor.crowded_from, [&](uint64_t content, uint64_t first) {
        rows.push_back({.kind = ContentRow::kCrowded, .prefix = first, .content = content});
        if (chains_.next(first) != 0) cursor.chains.push_back({0, content, first, true});
        return rows.size() < rows_max;
      });
    } else {
      return true;
    }
  }
  return false;
}

inline void FuzzyContext::walk_backlog(ContentCursor& cursor, size_t visits_max,
                                       std::vector<ContentRow>& rows) {
  backlog_.walk(cursor.backlog, visits_max, [&](const Record& record) {
    if (!is_doomed(record.prefix))
      rows.push_back({.kind = ContentRow::kStored,
                      .prefix = record.prefix,
                      .simhash = record.simhash,
                      .content = record.content});
  });
  if (backlog_.is_done(cursor.backlog)) cursor.bits = table_.bits();
}

// One bucket, or two that were one, of those with the leading bits of the step: there are as many as splits
// have made since the walk began.
inline void FuzzyContext::walk_buckets(ContentCursor& cursor, std::vector<ContentRow>& rows) {
  const unsigned more = table_.bits() - cursor.bits;
  const unsigned below = NearTable::kBitsMax - table_.bits();
  const uint32_t in_step = cursor.within >> below;
  table_.for_buckets(cursor.leading() << more | in_step, [&](uint32_t bucket) {
    for (uint32_t slot = 0; slot < table_.bucket_size(bucket); ++slot)
      walk_record(table_.record({bucket, slot}), cursor, rows);
  });
  cursor.within = (in_step + 1) << below;
  if (cursor.within >> (NearTable::kBitsMax - cursor.bits) == 0) return;
  cursor.within = 0;
  ++cursor.step;
}

inline void FuzzyContext::walk_record(const Record& record, ContentCursor& cursor,
                                      std::vector<ContentRow>& rows) {
  const uint64_t first = chains_.first(record.content);
  const bool doomed = is_doomed(record.prefix);
  const uint64_t given = doomed ? first : record.prefix;
  if (given == 0) return;
  rows.push_back(
      {.kind = ContentRow::kStored, .prefix = given, .simhash = record.simhash, .content = record.content});
  if ((doomed ? chains_.next(first) : first) != 0)
    cursor.chains.push_back({record.simhash, record.content, given, false});
}

inline void FuzzyContext::walk_chain(ContentCursor& cursor, size_t rows_max, std::vector<ContentRow>& rows) {
  ContentCursor::Chain& left = cursor.chains.back();
  const auto row = [&left](ContentRow::Kind kind, uint64_t prefix) {
    return ContentRow{.kind = kind, .prefix = prefix, .simhash = left.simhash, .content = left.content};
  };
  uint64_t next;
  if (chains_.contains(left.last)) {
    next = chains_.next(left.last);
  } else {
    const uint64_t holder = left.crowded ? 0 : recorded(left.simhash, left.content);
    if (holder != 0 && holder != left.last && !is_doomed(holder))
      rows.push_back(row(ContentRow::kStored, holder));
    next = chains_.first(left.content);
  }
  if (next != 0) {
    rows.push_back(row(left.crowded ? ContentRow::kBehindCrowded : ContentRow::kBehind, left.last));
    do {
      rows.push_back(row(ContentRow::kFurther, next));
      left.last = next;
      next = chains_.next(next);
    } while (next != 0 && rows.size() < rows_max);
  }
  if (next == 0) cursor.chains.pop_back();
}

inline void FuzzyContext::append(uint64_t before, const ContentRow& row, bool crowded) {
  const uint64_t prefix = row.prefix;
  ++version_;
  if (prefix == 0 || chains_.contains(prefix)) return;
  if (doomed() != 0) revive(prefix);  // its record, if any, is found below
  if (!crowded) {
    const uint64_t record = recorded(row.simhash, row.content);
    if (record == prefix) return;
    if (record == 0 && chains_.first(row.content) == 0) {
      const Content content{row.simhash, row.content};
      insert({&prefix, 1}, {&content, 1});
      return;
    }
  }
  chains_.add_behind(before, row.content, prefix, crowded);
}

}  // namespace kvindexer
