// A search of one NearTable in slices, between which the table may change.
//
// The work of a search is divided by table and region (VisitPlan); a slice does some regions, and each region
// sees the table as it is at that moment. A record that is in the table from the first slice to the last is
// found, once: its place depends on its SimHash alone, and a hit counts only in the first table and the
// region that lead there. What comes or goes meanwhile is found or not.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "near_table.hpp"

namespace kvindexer {

class NearSearch {
 public:
  // `queries` outlive the search.
  NearSearch(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans)
      : queries_(queries),
        distance_max_(distance_max),
        scans_(&scans),
        radii_(NearTable::radii_of(distance_max)),
        region_bits_(queries.size() < kQueriesSorted ? 0 : kRegionBits),
        keys_(queries.size()),
        words_(queries.size()) {
    assert(distance_max <= kNearDistanceMax && "beyond distance 8 the radii would have to be larger than 2");
  }

  // From the beginning, in another table.
  void restart() {
    table_ = 0;
    plan_.reset();
  }

  // Goes on until about `work_max` asks are done or, then it returns true, all. `table` is the one of the
  // slices before. Calls hit(query, distance, record) once for every record within `distance_max` of every
  // query.
  template <class Hit>
  bool run(const NearTable& table, size_t work_max, Hit hit) {
    if (table.size() == 0 || queries_.empty()) return true;
    for (size_t work = 0; table_ < 3 && radii_[table_] >= 0;) {
      if (!plan_) plan(table);
      for (; region_ < plan_->regions(); ++region_) {
        if (work >= work_max) return false;
        work += search_region(table, hit);
      }
      plan_.reset();
      ++table_;
    }
    return true;
  }

 private:
  static constexpr unsigned kRegionBits = 6;
  static constexpr size_t kWorkPerVisit = 6;
  static constexpr size_t kQueriesSorted = 64;  // with fewer, sorting them costs more than it saves

  void plan(const NearTable& table) {
    for (size_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = NearTable::chunk(table_, queries_[i], table.bits());
      if (table_ != 0) words_[i] = table.word_of(table_, queries_[i]);
    }
    plan_ = std::make_unique<VisitPlan>(table.bits(), region_bits_, radii_[table_], distance_max_, keys_);
    region_ = 0;
  }

  // Returns the work that it was.
  template <class Hit>
  size_t search_region(const NearTable& table, Hit& hit) {
    if (region_bits_ == 0)
      plan_->list_unsorted(region_);
    else
      plan_->list_sorted(region_);
    Asked asked{plan_->visits(), plan_->asks(), queries_.data(), distance_max_};
    const size_t work = asked.asks.size() + kWorkPerVisit * asked.visits.size();
    if (table_ != 0) {
      scans_->words({asked, table.heads(table_), table.words_, words_.data()}, candidates_);
      asked = plan_->list_candidates(candidates_, 32 - table.bits(), asked);
    }
    scans_->records({asked, table.buckets_of_a(), *table.records_, table.words_}, candidates_);
    for (const Candidate& candidate : candidates_) {
      const Record found = table.record({candidate.bucket, candidate.word_or_slot});
      const uint64_t difference = found.simhash ^ queries_[candidate.query];
      // Once: where the first table that leads to the record has it.
      if (table_ != 0 && NearTable::chunk(table_, found.simhash, region_bits_) != region_) continue;
      if (table.first_table(difference, radii_) != table_) continue;
      hit(candidate.query, static_cast<unsigned>(std::popcount(difference)), found);
    }
    candidates_.clear();
    return work;
  }

  std::span<const uint64_t> queries_;
  unsigned distance_max_;
  const NearScans* scans_;
  NearTable::Radii radii_;
  unsigned region_bits_;
  std::vector<uint32_t> keys_, words_;
  unsigned table_ = 0;
  uint32_t region_ = 0;
  std::unique_ptr<VisitPlan> plan_;
  std::vector<Candidate> candidates_;
};

template <class Hit>
void NearTable::search(std::span<const uint64_t> queries, unsigned distance_max, const NearScans& scans,
                       Hit hit) const {
  NearSearch(queries, distance_max, scans).run(*this, SIZE_MAX, hit);
}

}  // namespace kvindexer
