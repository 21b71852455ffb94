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
#include <array>
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
    size_t chunks = spares_.size();
    for (const Part& part : parts_) chunks += part.chunks.size();
    return chunks * sizeof(Chunk);
  }

  void add(const Record& record) {
    if (parts_[0].is_full()) begin_chunk(parts_[0]);
    parts_[0].add(record);
    ++size_;
  }

  static constexpr size_t kSweptTogether = 32;

  // Whether `take` gives what lies close together.
  bool is_spread() const { return parts_[0].size <= kSpreadMin; }
  // Spreads about so many more: a chunk begun takes as long as some hundred records.
  void spread(size_t work);
  // Takes out up to so many that lie close together, roughly in the order of their SimHashes.
  void take(size_t records, std::vector<Record>& out);
  // Behind that: what it took out, so many, is back in its place. It lies there yet, as long as nothing is
  // added.
  void put_back(size_t records) {
    parts_.back().size += records;
    size_ += records;
  }

  // Goes on with a cursor until it has seen `visits_max` or, then `is_done`, all; erases those that
  // dead(prefixes), of up to kSweptTogether, has bits for. Returns how many it saw.
  template <class Dead>
  size_t sweep(Cursor& cursor, size_t visits_max, Dead dead);
  // The same, calling visit(record).
  template <class Visit>
  void walk(Cursor& cursor, size_t visits_max, Visit visit) const;
  bool is_done(const Cursor& cursor) const { return cursor.part >= parts_.size(); }

  void release_into(std::vector<Pages>& pages) {
    for (Part& part : parts_)
      for (Pages& chunk : part.chunks) pages.push_back(std::move(chunk));
    for (Pages& chunk : spares_) pages.push_back(std::move(chunk));
    parts_ = std::vector<Part>(1);
    spares_.clear();
    part_bits_ = 0;
    size_ = 0;
  }

 private:
  static constexpr size_t kChunk = 1'024;
  static constexpr size_t kSpreadMin = 8'192;
  static constexpr size_t kPart = 4'096;  // records in a part, about
  static constexpr unsigned kPartBitsMax = 7;
  static constexpr size_t kPartsBegun = 4;     // at a time
  static constexpr size_t kSpares = 4;         // chunks that are kept for what comes
  static constexpr size_t kSparesDropped = 4;  // at a time
  static constexpr size_t kWorkPerChunk = 512;

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
    uint64_t simhash(size_t i) const { return chunk(i).simhash[i % kChunk]; }
    std::span<const uint64_t> prefixes(size_t i, size_t count) const {  // of one chunk
      return {chunk(i).prefix + i % kChunk, count};
    }
    // What a sweep that stands at `i` comes to after next: it goes backwards, which nothing foretells.
    void prefetch_swept(size_t i) const {
      const size_t end = i - std::min(i, kSweptTogether);
      for (size_t at = end - std::min(end, kSweptTogether); at < end; at += 8)
        __builtin_prefetch(&chunk(at).prefix[at % kChunk]);
    }
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
    bool is_full() const { return size == chunks.size() * kChunk; }
    void add(const Record& record) { put(size++, record); }  // not when it is full
    Record pop() { return at(--size); }
    bool has_spare() const { return chunks.size() > size / kChunk + 1 + kSpares; }
    void drop_spares() {
      while (has_spare()) chunks.pop_back();
    }
    void erase(size_t i) {
      const Record last = pop();
      if (i != size) put(i, last);
      drop_spares();
    }
  };

  // One that part 0 has left, or a new one.
  void begin_chunk(Part& part) {
    if (spares_.empty()) {
      Pages fresh;  // not a spare before it is there
      fresh.renew(sizeof(Chunk) / Pages::kPageBytes);
      spares_.push_back(std::move(fresh));
    }
    part.chunks.push_back(std::move(spares_.back()));
    spares_.pop_back();
  }

  std::vector<Part> parts_;
  std::vector<Pages> spares_;  // what is left by part 0 as it is spread: the other parts need as many
  unsigned part_bits_ = 0;     // the SimHashes of a part other than 0 have so many leading bits in common
  size_t size_ = 0;
};

inline void ContentBacklog::spread(size_t work) {
  if (part_bits_ == 0) part_bits_ = std::min<unsigned>(kPartBitsMax, std::bit_width(size_ / kPart));
  const unsigned bits = part_bits_;
  for (size_t i = 0; i < kPartsBegun && parts_.size() < 1 + (size_t{1} << bits); ++i) {
    parts_.emplace_back();
    begin_chunk(parts_.back());
  }
  if (parts_.size() < 1 + (size_t{1} << bits)) return;
  for (size_t done = 0; done < work && parts_[0].size != 0; ++done) {
    Part& part = parts_[1 + (parts_[0].simhash(parts_[0].size - 1) >> 32 >> (32 - bits))];
    if (part.is_full()) {
      begin_chunk(part);  // should there be no more memory, nothing has moved yet
      done += kWorkPerChunk;
    }
    part.add(parts_[0].pop());
    if (parts_[0].has_spare()) {
      spares_.push_back(std::move(parts_[0].chunks.back()));
      parts_[0].chunks.pop_back();
    }
  }
}

inline void ContentBacklog::take(size_t records, std::vector<Record>& out) {
  constexpr unsigned kSortBits = 11;  // behind those that all of a part have in common
  while (parts_.size() > 1 && parts_.back().size == 0) parts_.pop_back();
  if (parts_.size() == 1) part_bits_ = 0;
  Part& part = parts_.back();
  const size_t first = part.size - std::min(records, part.size);
  const auto digit = [this](uint64_t simhash) { return simhash << part_bits_ >> (64 - kSortBits); };
  std::array<uint32_t, 1u << kSortBits> places{};
  for (size_t i = first; i < part.size; ++i) ++places[digit(part.simhash(i))];
  uint32_t place = 0;
  for (uint32_t& count : places) place += std::exchange(count, place);
  out.resize(part.size - first);
  for (size_t i = first; i < part.size; ++i) {
    const Record record = part.at(i);
    out[places[digit(record.simhash)]++] = record;
  }
  part.size = first;
  part.drop_spares();
  spares_.resize(spares_.size() - std::min(spares_.size(), kSparesDropped));
  size_ -= out.size();
}

template <class Dead>
size_t ContentBacklog::sweep(Cursor& cursor, size_t visits_max, Dead dead) {
  size_t visits = 0;
  while (visits < visits_max && !is_done(cursor)) {
    Part& part = parts_[cursor.part];
    cursor.left = std::min(cursor.left, part.size);
    if (cursor.left == 0) {
      cursor = {cursor.part + 1, SIZE_MAX};
      ++visits;
      continue;
    }
    const size_t in_chunk = (cursor.left - 1) % kChunk + 1;
    const size_t count = std::min({in_chunk, visits_max - visits, kSweptTogether});
    cursor.left -= count;
    visits += count;
    part.prefetch_swept(cursor.left);
    uint32_t found = dead(part.prefixes(cursor.left, count));
    for (; found != 0; --size_) {  // from the last on: the last of the part takes the place of one
      const unsigned last = std::bit_width(found) - 1;
      found ^= uint32_t{1} << last;
      part.erase(cursor.left + last);
    }
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
