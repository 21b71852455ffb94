// What memory itself takes: random loads from a table of so many bytes, one after the other and fetched ahead.
// Built and run by benchmarks.growth: cache_misses BYTES prints nanoseconds a load of either kind.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

uint64_t mix(uint64_t value) {
  value ^= value >> 33;
  value *= 0xff51afd7ed558ccd;
  value ^= value >> 33;
  value *= 0xc4ceb9fe1a85ec53;
  return value ^ value >> 33;
}

template <typename Walk>
double ns_a_load(size_t loads, Walk walk) {
  const auto begin = std::chrono::steady_clock::now();
  walk(loads);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() /
         static_cast<double>(loads);
}

}  // namespace

int main(int, char** arguments) {
  const size_t lines = std::strtoull(arguments[1], nullptr, 10) / 64;
  std::vector<uint64_t> table(lines * 8);
  for (size_t i = 0; i < table.size(); ++i) table[i] = mix(i);
  constexpr size_t kLoads = 2'000'000;
  constexpr size_t kAhead = 16;
  uint64_t sum = 0;
  const double dependent = ns_a_load(kLoads, [&](size_t loads) {
    for (size_t i = 0; i < loads; ++i) sum = table[mix(sum + i) % lines * 8];
  });
  const double ahead = ns_a_load(kLoads, [&](size_t loads) {
    for (size_t i = 0; i < loads; ++i) {
      __builtin_prefetch(&table[mix(i + kAhead) % lines * 8]);
      sum += table[mix(i) % lines * 8];
    }
  });
  std::printf("%.2f %.2f %d\n", dependent, ahead, sum == 1);
}
