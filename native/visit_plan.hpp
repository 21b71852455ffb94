// Which buckets a search visits: all within a radius of each query's own, with the queries that ask there.
//
// Listed a region at a time (the buckets that share their leading bits), so that lists stay in the
// first-level cache. In a region every bucket is listed once, in order, found by a counting sort of its asks;
// that was measured to halve the time of a search that visits a bucket once for each query.
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

namespace kvindexer {

// Lists the buckets within a radius of each query's own with the queries that ask there, a region at a time.
class VisitPlan {
 public:
  // The last `shown_bits` bits of a bucket's number are in its words too: flipped, they count there.
  VisitPlan(unsigned bits, unsigned region_bits, int radius, unsigned distance_max, unsigned shown_bits,
            std::span<const uint32_t> keys)
      : distance_max_(distance_max),
        low_bits_(bits - region_bits),
        radius_(radius),
        keys_(keys),
        begin_((size_t{1} << region_bits) + 1, 0),
        order_(keys.size()),
        lows_(keys.size()),
        high_(flips_of(region_bits)) {
    const Flips low = flips_of(low_bits_);
    for (size_t flipped = 0; flipped < low.size(); ++flipped) {
      for (const uint32_t flip : low[flipped]) {
        const int shown = std::popcount(flip & ((1u << shown_bits) - 1));
        steps_.push_back({flip, Ask::of(0, static_cast<uint32_t>(shown)).bits -
                                    Ask::of(0, static_cast<uint32_t>(flipped)).bits});
      }
      steps_end_[flipped] = steps_.size();
    }
    for (const uint32_t key : keys) ++begin_[(key >> low_bits_) + 1];
    for (size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
    std::vector<uint32_t> next(begin_.begin(), begin_.end() - 1);
    for (uint32_t query = 0; query < keys.size(); ++query) {
      const uint32_t place = next[keys[query] >> low_bits_]++;
      order_[place] = query;
      lows_[place] = keys[query] & ((1u << low_bits_) - 1);
    }
  }

  uint32_t regions() const { return static_cast<uint32_t>(begin_.size() - 1); }

  // Every bucket of the region once, in order.
  void list_sorted(uint32_t region) {
    if (keys_.size() < kQueriesCounted) {
      ends_.assign(size_t{1} << low_bits_, 0);
      for_asks(region, [&](uint32_t low, Ask) { ++ends_[low]; });
    } else {
      count_asks(region);
    }
    visits_.resize(ends_.size() + kScanAhead);
    Visit* visit = visits_.data();
    uint32_t begin = 0;
    for (uint32_t low = 0; low < ends_.size(); ++low) {
      *visit = {region << low_bits_ | low, begin};
      visit += ends_[low] != 0 ? 1 : 0;
      begin += std::exchange(ends_[low], begin);
    }
    visits_.resize(static_cast<size_t>(visit - visits_.data()));
    end(visits_, begin);
    asks_end_ = begin;
    if (asks_.size() < begin) asks_.resize(begin);
    uint32_t* const ends = ends_.data();
    Ask* const asks = asks_.data();
    for_asks(region, [ends, asks](uint32_t low, Ask ask) { asks[ends[low]++] = ask; });
  }

  // A bucket once for each query that asks there.
  void list_unsorted(uint32_t region) {
    visits_.clear();
    asks_.clear();
    for_asks(region, [&](uint32_t low, Ask ask) {
      visits_.push_back({region << low_bits_ | low, static_cast<uint32_t>(asks_.size())});
      asks_.push_back(ask);
    });
    asks_end_ = asks_.size();
    end(visits_, asks_end_);
  }

  // Buckets and queries, ascending: `named` is bucket << 32 | query, of which the last `bits` bits of the
  // bucket count.
  Asked list_named(std::span<const uint64_t> named, unsigned bits, Asked asked) {
    named_visits_.clear();
    named_asks_.clear();
    for (const uint64_t name : named) {
      const uint32_t bucket = static_cast<uint32_t>(name >> 32) & ((1u << bits) - 1);
      if (named_visits_.empty() || named_visits_.back().bucket != bucket)
        named_visits_.push_back({bucket, static_cast<uint32_t>(named_asks_.size())});
      named_asks_.push_back(Ask::of(static_cast<uint32_t>(name), distance_max_));
    }
    end(named_visits_, named_asks_.size());
    asked.visits = named_visits_;
    asked.asks = named_asks_;
    return asked;
  }

  std::span<const Visit> visits() const { return visits_; }
  std::span<const Ask> asks() const { return std::span(asks_).first(asks_end_); }

 private:
  static constexpr size_t kQueriesCounted = 1'024;     // from here on it pays not to count asks one by one
  using Flips = std::array<std::vector<uint32_t>, 3>;  // [n]: all patterns with n bits set

  static void end(std::vector<Visit>& visits, size_t asks) {
    visits.insert(visits.end(), kScanAhead, {0, static_cast<uint32_t>(asks)});
  }

  static Flips flips_of(unsigned bits) {
    Flips flips;
    flips[0].push_back(0);
    for (unsigned i = 0; i < bits; ++i) {
      flips[1].push_back(1u << i);
      for (unsigned j = 0; j < i; ++j) flips[2].push_back(1u << i | 1u << j);
    }
    return flips;
  }

  // ends_[low] = number of asks at each bucket of the region, without listing them: start with the number of
  // queries at each bucket by bits flipped so far (the region's own 0, its neighbours' 1 or 2), then let
  // every low bit flip or not. A third of the time of counting one by one.
  void count_asks(uint32_t region) {
    const size_t size = size_t{1} << low_bits_;
    for (auto& count : counts_) count.assign(size, 0);
    for (size_t flipped = 0; flipped <= static_cast<size_t>(radius_); ++flipped)
      for (const uint32_t flip : high_[flipped])
        for (uint32_t i = begin_[region ^ flip]; i < begin_[(region ^ flip) + 1]; ++i)
          ++counts_[flipped][lows_[i]];
    for (size_t bit = 1; bit < size; bit *= 2)
      for (size_t base = 0; base < size; base += 2 * bit)
        flip_bit(counts_[0].data() + base, counts_[1].data() + base, counts_[2].data() + base, bit);
    ends_ = counts_[0];
    for (size_t flipped = 1; flipped <= static_cast<size_t>(radius_); ++flipped)
      for (size_t low = 0; low < size; ++low) ends_[low] += counts_[flipped][low];
  }

  static void flip_bit(uint32_t* __restrict zero, uint32_t* __restrict one, uint32_t* __restrict two,
                       size_t bit) {
    for (size_t i = 0; i < bit; ++i) {
      const uint32_t low = one[i];
      two[i] += one[i + bit];
      two[i + bit] += low;
      one[i] += zero[i + bit];
      one[i + bit] += zero[i];
    }
  }

  template <class Visitor>
  void for_asks(uint32_t region, Visitor visitor) const {
    for (int flipped = 0; flipped <= radius_; ++flipped) {
      const uint32_t distance_max = distance_max_ - static_cast<uint32_t>(flipped);
      const Step* const steps = steps_.data();
      const Step* const end = steps + steps_end_[static_cast<size_t>(radius_ - flipped)];
      for (const uint32_t flip : high_[static_cast<size_t>(flipped)])
        for (uint32_t i = begin_[region ^ flip], last = begin_[(region ^ flip) + 1]; i < last; ++i) {
          const uint32_t low = lows_[i], ask = Ask::of(order_[i], distance_max).bits;
          for (const Step* step = steps; step < end; ++step) visitor(low ^ step->flip, Ask{ask + step->more});
        }
    }
  }

  unsigned distance_max_;
  unsigned low_bits_;
  int radius_;
  std::span<const uint32_t> keys_;
  std::vector<uint32_t>
      begin_;  // by region: the queries order_[begin_[i]] up to order_[begin_[i + 1]] fall in it
  std::vector<uint32_t> order_;
  std::vector<uint32_t> lows_;  // in that order, what follows the region in their keys
  Flips high_;
  struct Step {
    uint32_t flip;  // of low bits
    uint32_t more;  // distance allowed, as an Ask has it: those bits less, but for those that words show
  };
  std::vector<Step> steps_;            // by the number of bits
  std::array<size_t, 3> steps_end_{};  // with so many bits at the most
  std::array<std::vector<uint32_t>, 3> counts_;
  std::vector<uint32_t> ends_;
  std::vector<Visit> visits_, named_visits_;
  std::vector<Ask> asks_, named_asks_;
  size_t asks_end_ = 0;  // what is behind lies there from other regions
};

}  // namespace kvindexer
