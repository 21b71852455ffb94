// What one source's engine hashes will mean once all that is under way to the log has been applied.
//
// A replica computes the prefix hashes of a batch before the batch is applied: between the two lie the
// batches that it sent off and that have not come back. This book knows what each of those does to a name, so
// that a child of a block under way is chained as it will be in the index. Where it cannot be sure (a
// removal, whose copies only the index counts; a block that waits for its parent; a clear) it says so, and
// the block goes off with its tokens: then it is the index that decides, as for any event of an engine.
//
// Every event has a number, ascending; `land` forgets all up to one. Memory: about 100 bytes a block under
// way.
//
// Where there is no memory to put down what an event does, all names are unsure until that event lands.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvindexer {

class FlightBook {
 public:
  enum class Meaning { kUntouched, kKnown, kUnsure };

  bool is_empty() const { return order_.empty() && cleared_ == 0; }
  size_t blocks() const { return names_.size(); }

  // What `engine_hash` names for an event in this slot of the context with this seed; the prefix, where
  // known.
  std::pair<Meaning, uint64_t> meaning(uint64_t seed, uint32_t tier, uint32_t group,
                                       uint64_t engine_hash) const {
    const auto found = names_.find(engine_hash);
    if (found == names_.end()) return {cleared_ == 0 ? Meaning::kUntouched : Meaning::kUnsure, 0};
    const Name& name = found->second;
    if (name.number <= cleared_ || name.seed != seed || (name.slots & slot(tier, group)) == 0)
      return {Meaning::kUnsure, 0};
    return {Meaning::kKnown, name.prefix};
  }

  // The slot names `prefixes`, from this event on.
  void store(uint64_t number, uint64_t seed, uint32_t tier, uint32_t group,
             std::span<const uint64_t> engine_hashes, std::span<const uint64_t> prefixes) {
    put_down(number, engine_hashes, [&](size_t i, Name& name) {
      const bool same = name.number > cleared_ && name.seed == seed && name.prefix == prefixes[i];
      name = {number, seed, prefixes[i], (same ? name.slots : 0) | slot(tier, group)};
    });
  }

  // Something else happens to these.
  void touch(uint64_t number, std::span<const uint64_t> engine_hashes) {
    put_down(number, engine_hashes, [number](size_t, Name& name) { name = {number, 0, 0, 0}; });
  }

  // Something happens to all of them.
  void clear(uint64_t number) { cleared_ = number; }

  void land(uint64_t number) {
    for (; !order_.empty() && order_.front().first <= number; order_.pop_front())
      for (const uint64_t engine_hash : order_.front().second) {
        const auto found = names_.find(engine_hash);
        if (found != names_.end() && found->second.number == order_.front().first) names_.erase(found);
      }
    if (cleared_ <= number) cleared_ = 0;
  }

 private:
  struct Name {
    uint64_t number = 0;  // of the last event that concerned it
    uint64_t seed = 0;
    uint64_t prefix = 0;
    uint64_t slots = 0;  // that name the prefix so for certain
  };

  template <class Change>  // void(size_t, Name&)
  void put_down(uint64_t number, std::span<const uint64_t> engine_hashes, Change change) {
    try {
      order_.emplace_back(number, std::vector<uint64_t>(engine_hashes.begin(), engine_hashes.end()));
      for (size_t i = 0; i < engine_hashes.size(); ++i) change(i, names_[engine_hashes[i]]);
    } catch (...) {
      clear(number);
      throw;
    }
  }

  // Tiers below 4 and groups below 16 have a bit; others are never known.
  static uint64_t slot(uint32_t tier, uint32_t group) {
    return tier < 4 && group < 16 ? uint64_t{1} << (group * 4 + tier) : 0;
  }

  std::unordered_map<uint64_t, Name> names_;
  std::deque<std::pair<uint64_t, std::vector<uint64_t>>> order_;
  uint64_t cleared_ = 0;  // number of the last such event; 0: none is under way
};

}  // namespace kvindexer
