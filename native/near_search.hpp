// A search of a NearTable in slices, between which the table may change.
//
// The work of a search is divided by table, by number of leading bits (buckets that are split have one more)
// and by region (VisitPlan); a slice does some regions, and each region sees the table as it is at that
// moment. A record goes from a bucket into one with more leading bits only, and those are searched behind:
// one that is there from the first slice to the last is found. Once, unless its bucket is split meanwhile; a
// hit counts only in the first table and in the region that lead there. What comes or goes meanwhile is found
// or not.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "near_table.hpp"
#include "slice_clock.hpp"

namespace kvindexer {

class NearSearch {
 public:
  // `queries` outlive the search.
  NearSearch(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans)
      : queries_(queries),
        distance_max_(distance_max),
        scans_(&scans),
        radii_(NearTable::radii_of(distance_max)),
        keys_(queries.size()),
        words_(queries.size()) {
    assert(queries.size() <= kQueriesMax);
    assert(distance_max <= kNearDistanceMax && "beyond distance 8 the radii would have to be larger than 2");
  }

  // Goes on until about `work_max` is done, the clock says that it is enough or, then it returns true, all is
  // done. An ask is one unit of work, and so is a sixth of a bucket that is read for it: some 6 ns. Calls
  // hit(query, distance, record) for every record within `distance_max` of every query.
  template <class Hit>
  bool run(const NearTable& table, size_t work_max, Hit hit) {
    if (table.size() == 0 || queries_.empty()) return true;
    size_t work = 0;
    const SliceClock clock;
    for (; table_ < 3 && radii_[table_] >= 0; ++table_, bits_ = 0) {
      if (bits_ < table.bits()) begin(table.bits());
      for (; bits_ <= table.bits() + (table.frontier() != 0 ? 1 : 0); begin(bits_ + 1)) {
        if (!plan_) {
          plan();
          work += kWorkPerQuery * queries_.size();
        }
        for (; region_ < plan_->regions(); ++region_) {
          if (bits_ < table.bits()) break;  // all that is left here has been split
          if (!has_region(table)) continue;
          if (work != 0 && (work >= work_max || clock.is_over())) return false;
          work += search_region(table, hit);
        }
      }
    }
    return true;
  }

 private:
  static constexpr unsigned kRegionBitsMin = 6, kRegionBitsMax = 8;
  static constexpr size_t kWorkPerVisit = 6, kWorkPerQuery = 4;
  static constexpr size_t kQueriesSorted = 64;   // with fewer, sorting them costs more than it saves
  static constexpr size_t kQueriesMany = 8'192;  // from here on a region of 64 is a slice of its own

  void begin(unsigned bits) {
    bits_ = bits;
    region_bits_ = 0;
    if (queries_.size() >= kQueriesSorted) region_bits_ = kRegionBitsMin;
    if (queries_.size() >= kQueriesMany)  // the table may have a bit less
      region_bits_ = std::clamp(bits - 1, kRegionBitsMin, kRegionBitsMax);
    region_ = 0;
    plan_.reset();
  }

  void plan() {
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = NearTable::chunk(table_, queries_[i], bits_);
      if (table_ != 0) words_[i] = NearTable::word_of(table_, queries_[i], layout_of(bits_));
    }
    const unsigned shown_bits = table_ == 0 ? 0 : bits_ - layout_of(bits_).own_from;
    plan_ =
        std::make_unique<VisitPlan>(bits_, region_bits_, radii_[table_], distance_max_, shown_bits, keys_);
  }

  // Whether there are buckets of so many bits in the region.
  bool has_region(const NearTable& table) const {
    const uint64_t begin = uint64_t{region_} << (table.bits() - region_bits_);
    const uint64_t end = uint64_t{region_ + 1} << (table.bits() - region_bits_);
    return bits_ == table.bits() ? end > table.frontier() : begin < table.frontier();
  }

  // Returns the work that it was.
  template <class Hit>
  size_t search_region(const NearTable& table, Hit& hit) {
    candidates_.clear();
    if (region_bits_ == 0)
      plan_->list_unsorted(region_);
    else
      plan_->list_sorted(region_);
    const Asked asked{plan_->visits(), plan_->asks(), queries_.data(), distance_max_};
    const size_t work = asked.asks.size() + kWorkPerVisit * asked.visits.size();
    const NearTable::Level& level = table.levels_[bits_ - table.bits()];
    if (table_ == 0) {
      search_records(table, bits_, asked, hit);
      return work;
    }
    scans_->words({asked, level.words(table_), table.words_, words_.data()}, candidates_);
    named_.clear();
    for (const Candidate& candidate : candidates_)
      named_.push_back(uint64_t{table.bucket_of_word(candidate.word_or_slot)} << 32 | candidate.query);
    candidates_.clear();
    std::sort(named_.begin(), named_.end());
    named_.erase(std::unique(named_.begin(), named_.end()), named_.end());
    const auto middle = std::lower_bound(named_.begin(), named_.end(), uint64_t{2} << (table.bits() + 32));
    const std::span<const uint64_t> whole(named_.begin(), middle), halves(middle, named_.end());
    for (const auto& [named, bits] : {std::pair(whole, table.bits()), std::pair(halves, table.bits() + 1)})
      if (!named.empty()) search_records(table, bits, plan_->list_named(named, bits, asked), hit);
    return work;
  }

  // `asked` are buckets of `bits` bits of table A.
  template <class Hit>
  void search_records(const NearTable& table, unsigned bits, const Asked& asked, Hit& hit) {
    const NearTable::Level& level = table.levels_[bits - table.bits()];
    scans_->records({asked, level.buckets(), table.records_, table.words_}, candidates_);
    for (const Candidate& candidate : candidates_) {
      const Record found = table.record({1u << bits | candidate.bucket, candidate.word_or_slot});
      const uint64_t difference = found.simhash ^ queries_[candidate.query];
      if (table_ != 0) {  // where its word lies
        if (NearTable::chunk(table_, found.simhash, region_bits_) != region_) continue;
        if (table.bits_of(table.bucket_at(table_, found.simhash)) != bits_) continue;
      }
      if (table.first_table(found.simhash, difference, radii_) != table_) continue;
      hit(candidate.query, static_cast<unsigned>(std::popcount(difference)), found);
    }
    candidates_.clear();
  }

  std::span<const uint64_t> queries_;
  unsigned distance_max_;
  const NearScans* scans_;
  NearTable::Radii radii_;
  std::vector<uint32_t> keys_, words_;
  unsigned table_ = 0;
  unsigned bits_ = 0;  // 0: not begun with this table
  unsigned region_bits_ = 0;
  uint32_t region_ = 0;
  std::unique_ptr<VisitPlan> plan_;
  std::vector<Candidate> candidates_;
  std::vector<uint64_t> named_;
};

template <class Hit>
void NearTable::search(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans,
                       Hit hit) const {
  NearSearch search(queries, distance_max, scans);
  while (!search.run(*this, SIZE_MAX, hit));
}

}  // namespace kvindexer
