// Tells when a slice of work has held up everything else for long enough.
//
// Work is counted out beforehand, and on a quiet machine the count is what ends a slice. But where pages are
// fetched from memory that the host has to find first, or others take turns on the core, the same count takes
// several times as long; so whoever works in slices asks this between two small parts, each some 0.1 ms. What
// is answered does not depend on where slices end.
#pragma once

#include <chrono>

namespace kvindexer {

class SliceClock {
 public:
  bool is_over() const { return Clock::now() >= end_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSlice{400};

  Clock::time_point end_ = Clock::now() + kSlice;
};

}  // namespace kvindexer
