// Contents that no question has asked for yet: a list that only grows at its end, 24 bytes each.
//
// A record in the NearTable costs nine cache lines to put there, here three that the last one touched too; a
// fuzzy index that is never asked has all its contents here. They lie in chunks that never move. In part 0
// they come as they were told of; before a large list is put in the tables, it is spread over more parts by
// the leading bits of the SimHash, so that what goes to the same buckets goes there together.
//
// The order means nothing: what is erased is replaced by the last of its part. A cursor goes through the
// parts in order and through each from its end. So whatever moves meanwhile goes where the cursor has not
// been yet, or has been there already: from part 0 to the others, from the end to a place that was erased,
// and from the list into the tables, which whoever needs all goes through afterwards.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "near_nodes.hpp"
#include "pages.hpp"

namespace kvindexer {

class ContentBacklog {
 public:
  struct Cursor {
    size_t part = 0;
    size_t left = SIZE_MAX;  // of the part
    bool is_at_start() const { return part == 0 && left == SIZE_MAX; }
  };

  ContentBacklog() : parts_(1) {}

  size_t size() const { return size_; }
  size_t bytes() const {
    size_t chunks = 0;
    for (const Part& part : parts_) chunks += part.chunks.size();
    return chunks * sizeof(Chunk);
  }

  void add(const Record& record) {
    parts_[0].add(record);
    ++size_;
  }

  // Whether `take` gives what lies close together.
  bool is_spread() const { return parts_[0].size <= kSpreadMin; }
  // Spreads so many more.
  void spread(size_t records);
  // Takes out up to so many that have some leading bits in common, as many as it returns.
  unsigned take(size_t records, std::vector<Record>& out);

  // Goes on with a cursor until it has seen `visits_max` or, then `is_done`, all; erases those of which
  // drop(prefix) is true. Returns how many it saw.
  template <class Drop>
  size_t sweep(Cursor& cursor, size_t visits_max, Drop drop);
  // The same, calling visit(record).
  template <class Visit>
  void walk(Cursor& cursor, size_t visits_max, Visit visit) const;
  bool is_done(const Cursor& cursor) const { return cursor.part >= parts_.size(); }

  void release_into(std::vector<Pages>& pages) {
    for (Part& part : parts_)
      for (Pages& chunk : part.chunks) pages.push_back(std::move(chunk));
    parts_ = std::vector<Part>(1);
    part_bits_ = 0;
    size_ = 0;
  }

 private:
  static constexpr size_t kChunk = 1'024;
  static constexpr size_t kSpreadMin = 8'192;
  static constexpr size_t kPart = 4'096;  // records in a part, about
  static constexpr unsigned kPartBitsMax = 8;
  static constexpr size_t kPartsBegun = 32;  // at a time
  static constexpr size_t kSpares = 4;       // chunks that are kept for what comes

  struct Chunk {
    uint64_t simhash[kChunk];
    uint64_t content[kChunk];
    uint64_t prefix[kChunk];
  };
  static_assert(sizeof(Chunk) % Pages::kPageBytes == 0);

  struct Part {
    std::vector<Pages> chunks;
    size_t size = 0;

    Chunk& chunk(size_t i) const { return *static_cast<Chunk*>(chunks[i / kChunk].base()); }
    uint64_t prefix(size_t i) const { return chunk(i).prefix[i % kChunk]; }
    Record at(size_t i) const {
      const Chunk& from = chunk(i);
      return {from.simhash[i % kChunk], from.content[i % kChunk], from.prefix[i % kChunk]};
    }
    void put(size_t i, const Record& record) {
      Chunk& to = chunk(i);
      to.simhash[i % kChunk] = record.simhash;
      to.content[i % kChunk] = record.content;
      to.prefix[i % kChunk] = record.prefix;
    }
    void add(const Record& record) {
      if (size == chunks.size() * kChunk) add_chunk();
      put(size++, record);
    }
    void add_chunk() {
      Pages fresh;
      fresh.renew(sizeof(Chunk) / Pages::kPageBytes);
      chunks.push_back(std::move(fresh));
    }
    Record pop() {
      const Record last = at(--size);
      while (chunks.size() > size / kChunk + 1 + kSpares) chunks.pop_back();
      return last;
    }
    void erase(size_t i) {
      const Record last = pop();
      if (i != size) put(i, last);
    }
  };

  std::vector<Part> parts_;
  unsigned part_bits_ = 0;  // the SimHashes of a part other than 0 have so many leading bits in common
  size_t size_ = 0;
};

inline void ContentBacklog::spread(size_t records) {
  if (part_bits_ == 0) part_bits_ = std::min<unsigned>(kPartBitsMax, std::bit_width(size_ / kPart));
  const unsigned bits = part_bits_;
  for (size_t i = 0; i < kPartsBegun && parts_.size() < 1 + (size_t{1} << bits); ++i) {
    parts_.emplace_back();
    parts_.back().add_chunk();
  }
  if (parts_.size() < 1 + (size_t{1} << bits)) return;
  for (records = std::min(records, parts_[0].size); records > 0; --records) {
    const Record record = parts_[0].pop();
    parts_[1 + (record.simhash >> 32 >> (32 - bits))].add(record);
  }
}

inline unsigned ContentBacklog::take(size_t records, std::vector<Record>& out) {
  while (parts_.size() > 1 && parts_.back().size == 0) parts_.pop_back();
  if (parts_.size() == 1) part_bits_ = 0;
  Part& part = parts_.back();
  records = std::min(records, part.size);
  for (size_t i = 0; i < records; ++i) out.push_back(part.pop());
  size_ -= records;
  return part_bits_;
}

template <class Drop>
size_t ContentBacklog::sweep(Cursor& cursor, size_t visits_max, Drop drop) {
  size_t visits = 0;
  for (; visits < visits_max && !is_done(cursor); ++visits) {
    Part& part = parts_[cursor.part];
    cursor.left = std::min(cursor.left, part.size);
    if (cursor.left == 0) {
      cursor = {cursor.part + 1, SIZE_MAX};
      continue;
    }
    --cursor.left;
    if (!drop(part.prefix(cursor.left))) continue;
    part.erase(cursor.left);
    --size_;
  }
  return visits;
}

template <class Visit>
void ContentBacklog::walk(Cursor& cursor, size_t visits_max, Visit visit) const {
  for (; visits_max > 0 && !is_done(cursor); --visits_max) {
    const Part& part = parts_[cursor.part];
    cursor.left = std::min(cursor.left, part.size);
    if (cursor.left == 0) {
      cursor = {cursor.part + 1, SIZE_MAX};
      continue;
    }
    visit(part.at(--cursor.left));
  }
}

}  // namespace kvindexer
