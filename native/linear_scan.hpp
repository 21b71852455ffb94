// What the NearTable replaces, for the benchmark: every query against every SimHash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvindexer {

struct ScanHit {
  uint32_t query;
  uint32_t stored;
};

namespace linear_scan_detail {

[[gnu::always_inline]] inline void scan(std::span<const uint64_t> stored, std::span<const uint64_t> queries,
                                        unsigned distance_max, std::vector<ScanHit>& hits) {
  for (uint32_t query = 0; query < queries.size(); ++query)
    for (uint32_t i = 0; i < stored.size(); ++i)
      if (static_cast<unsigned>(__builtin_popcountll(stored[i] ^ queries[query])) <= distance_max)
        hits.push_back({query, i});
}

#if defined(__x86_64__) && defined(__GNUC__)
[[gnu::target("popcnt")]] inline void scan_popcnt(std::span<const uint64_t> stored,
                                                  std::span<const uint64_t> queries, unsigned distance_max,
                                                  std::vector<ScanHit>& hits) {
  scan(stored, queries, distance_max, hits);
}
#endif

}  // namespace linear_scan_detail

inline std::vector<ScanHit> linear_scan(std::span<const uint64_t> stored, std::span<const uint64_t> queries,
                                        unsigned distance_max) {
  std::vector<ScanHit> hits;
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("popcnt")) {
    linear_scan_detail::scan_popcnt(stored, queries, distance_max, hits);
    return hits;
  }
#endif
  linear_scan_detail::scan(stored, queries, distance_max, hits);
  return hits;
}

}  // namespace kvindexer
