// Interned sets of holder slots.
//
// A prefix is usually held by the same few slots as its neighbours, so an entry stores the number of a shared
// set, and a block costs the same at one holder and at a thousand. Sets are bitsets over the slots of one
// context, cut to the words that are not zero. (set, +slot) -> set goes through a small cache, so that
// storing what another pod has is O(1).
//
// References are counted by the tables; a set that nobody refers to is freed and its number used again.
// The number 0 is the empty set: it has no content and is never counted.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "segmented_table.hpp"
#include "xxh64.hpp"

namespace kvindexer {

using SetId = uint32_t;
inline constexpr SetId kEmptySet = 0;

class HolderSets {
 public:
  HolderSets() { sets_.add(); }

  size_t size() const { return live_; }
  size_t bytes() const {
    return sets_.size() * sizeof(Set) + word_bytes_ + by_content_.bytes() + free_.capacity() * sizeof(SetId) +
           sizeof(steps_) + sizeof(differences_);
  }

  uint32_t context(SetId id) const { return sets_[id].context; }
  bool contains(SetId id, uint32_t slot) const {
    const Set& set = sets_[id];
    const uint32_t word = slot / 64 - set.first_word;  // wraps to a large number below the first word
    return word < set.words.size() && (set.words[word] >> (slot % 64) & 1) != 0;
  }

  // Words of the set; bit b of words()[w] is slot (first_word() + w) * 64 + b.
  std::span<const uint64_t> words(SetId id) const { return sets_[id].words; }
  uint32_t first_word(SetId id) const { return sets_[id].first_word; }

  template <class Visit>
  void for_each(SetId id, Visit visit) const {
    const Set& set = sets_[id];
    for (size_t w = 0; w < set.words.size(); ++w)
      for (uint64_t bits = set.words[w]; bits != 0; bits &= bits - 1)
        visit(
            static_cast<uint32_t>((set.first_word + w) * 64 + static_cast<unsigned>(std::countr_zero(bits))));
  }

  // The set with one slot more or less. The result holds no reference yet: `retain` it before anything is
  // released.
  SetId with(SetId id, uint32_t context, uint32_t slot) { return step(id, context, slot, true); }
  SetId without(SetId id, uint32_t slot) { return step(id, sets_[id].context, slot, false); }

  // The set less the slots in `mask` (bit b of mask[w] is slot w * 64 + b), and how many those are.
  SetId minus(SetId id, std::span<const uint64_t> mask) { return intersection_minus(id, id, mask); }
  size_t size_minus(SetId id, std::span<const uint64_t> mask) const {
    const Set& set = sets_[id];
    size_t size = 0;
    for (size_t w = 0; w < set.words.size(); ++w) {
      const size_t word = set.first_word + w;
      size += static_cast<size_t>(std::popcount(set.words[w] & ~(word < mask.size() ? mask[word] : 0)));
    }
    return size;
  }
  bool intersects(SetId id, std::span<const uint64_t> mask) const {
    const Set& set = sets_[id];
    for (size_t w = 0; w < set.words.size() && set.first_word + w < mask.size(); ++w)
      if ((set.words[w] & mask[set.first_word + w]) != 0) return true;
    return false;
  }
  SetId intersection_minus(SetId id, SetId other, std::span<const uint64_t> mask) {
    // A sweep asks the same for neighbour after neighbour.
    Difference& cached = differences_[mix64((uint64_t{id} << 32) | other) % differences_.size()];
    if (!is_difference(cached, id, other, mask)) {
      cached.valid = false;
      cached.mask.assign(mask.begin(), mask.end());
      const SetId to = make_intersection_minus(id, other, mask);
      cached.of = id;
      cached.other = other;
      cached.to = to;
      cached.generations = generations(id, other, to);
      cached.valid = true;
    }
    return cached.to;
  }

  void retain(SetId id, uint32_t count = 1) {
    if (id != kEmptySet) sets_[id].references += count;
  }
  void release(SetId id, uint32_t count = 1) {
    if (id == kEmptySet || count == 0) return;
    assert(sets_[id].references >= count && "a set is released once for each time it was retained");
    if ((sets_[id].references -= count) == 0) free(id);
  }

  uint64_t word_at(SetId id, size_t word) const {
    const Set& set = sets_[id];
    const size_t at = word - set.first_word;
    return at < set.words.size() ? set.words[at] : 0;
  }

 private:
  struct Set {
    std::vector<uint64_t> words;  // first and last are not zero
    uint64_t hash = 0;
    uint32_t first_word = 0;
    uint32_t context = 0;
    uint32_t references = 0;
    uint32_t generation = 0;  // of the number; tells cached steps that it was used again
  };
#pragma pack(push, 1)
  struct Content {
    uint64_t key;  // hash of the content
    SetId id;
    bool empty() const { return id == kEmptySet; }
  };
#pragma pack(pop)
  struct Step {
    SetId from = kEmptySet, to = kEmptySet;
    uint32_t slot = 0, context = 0;
    uint32_t from_generation = 0, to_generation = 0;
    bool added = false, valid = false;
  };

  struct Difference {  // (of & other) - mask = to
    SetId of = kEmptySet, other = kEmptySet, to = kEmptySet;
    std::array<uint32_t, 3> generations{};
    std::vector<uint64_t> mask;
    bool valid = false;
  };

  std::array<uint32_t, 3> generations(SetId a, SetId b, SetId c) const {
    return {sets_[a].generation, sets_[b].generation, sets_[c].generation};
  }
  bool is_difference(const Difference& cached, SetId of, SetId other, std::span<const uint64_t> mask) const {
    return cached.valid && cached.of == of && cached.other == other &&
           cached.generations == generations(of, other, cached.to) && std::ranges::equal(cached.mask, mask);
  }

  SetId make_intersection_minus(SetId id, SetId other, std::span<const uint64_t> mask) {
    const Set& set = sets_[id];
    scratch_.assign(set.words.begin(), set.words.end());
    for (size_t w = 0; w < scratch_.size(); ++w) {
      const size_t word = set.first_word + w;
      scratch_[w] &= word_at(other, word) & ~(word < mask.size() ? mask[word] : 0);
    }
    return intern(set.context, set.first_word);
  }

  bool is_step(const Step& step, SetId id, uint32_t context, uint32_t slot, bool add) const {
    return step.from == id && step.slot == slot && step.added == add && step.context == context &&
           step.valid && step.from_generation == sets_[id].generation &&
           step.to_generation == sets_[step.to].generation;
  }

  SetId step(SetId id, uint32_t context, uint32_t slot, bool add) {
    if (is_step(*last_step_, id, context, slot, add)) return last_step_->to;
    const uint64_t key =
        (uint64_t{id} << 33) ^ (uint64_t{slot} << 1) ^ (uint64_t{context} << 20) ^ (add ? 1 : 0);
    Step& cached = steps_[mix64(key) % steps_.size()];
    last_step_ = &cached;
    if (is_step(cached, id, context, slot, add)) return cached.to;
    scratch_.assign(sets_[id].words.begin(), sets_[id].words.end());
    uint32_t first_word = sets_[id].first_word;
    const uint32_t word = slot / 64;
    if (scratch_.empty()) first_word = word;
    if (add) {
      if (word < first_word) {
        scratch_.insert(scratch_.begin(), first_word - word, 0);
        first_word = word;
      }
      if (word - first_word >= scratch_.size()) scratch_.resize(word - first_word + 1);
      scratch_[word - first_word] |= uint64_t{1} << (slot % 64);
    } else if (word >= first_word && word - first_word < scratch_.size()) {
      scratch_[word - first_word] &= ~(uint64_t{1} << (slot % 64));
    }
    const SetId to = intern(context, first_word);
    cached = Step{id, to, slot, context, sets_[id].generation, sets_[to].generation, add, true};
    return to;
  }

  // The number of the set with the content of scratch_, made when it is new.
  SetId intern(uint32_t context, uint32_t first_word) {
    while (!scratch_.empty() && scratch_.back() == 0) scratch_.pop_back();
    size_t zeros = 0;
    while (zeros < scratch_.size() && scratch_[zeros] == 0) ++zeros;
    scratch_.erase(scratch_.begin(), scratch_.begin() + static_cast<ptrdiff_t>(zeros));
    if (scratch_.empty()) return kEmptySet;
    first_word += static_cast<uint32_t>(zeros);
    const uint64_t hash = xxh64(reinterpret_cast<const uint8_t*>(scratch_.data()), scratch_.size() * 8,
                                (uint64_t{context} << 32) | first_word);
    for (const Content* at = by_content_.find(hash); at != nullptr; at = by_content_.next_equal(at)) {
      const Set& set = sets_[at->id];
      if (set.context == context && set.first_word == first_word && set.words == scratch_) return at->id;
    }
    if (free_.empty()) {
      if (free_.capacity() <= sets_.size()) free_.reserve(2 * sets_.size());  // all of them, one day
      free_.push_back(sets_.add());
    }
    const SetId id = free_.back();  // until there is memory for all of it
    Set& set = sets_[id];
    set.words.assign(scratch_.begin(), scratch_.end());
    set.hash = hash;
    set.first_word = first_word;
    set.context = context;
    by_content_.insert(Content{hash, id});
    word_bytes_ += set.words.capacity() * 8;
    free_.pop_back();
    ++live_;
    return id;
  }

  void free(SetId id) noexcept {
    Set& set = sets_[id];
    Content* at = by_content_.find(set.hash);
    while (at->id != id) at = by_content_.next_equal(at);
    by_content_.erase(at);
    word_bytes_ -= set.words.capacity() * 8;
    set.words = {};
    ++set.generation;
    --live_;
    free_.push_back(id);
  }

  // By number. Never moves what it holds, so it grows without a pause; a deque does that too, but divides by
  // an odd number at each access (7 % of a store).
  class Sets {
   public:
    Set& operator[](SetId id) { return chunks_[id / kChunk][id % kChunk]; }
    const Set& operator[](SetId id) const { return chunks_[id / kChunk][id % kChunk]; }
    size_t size() const { return size_; }
    SetId add() {
      if (size_ == chunks_.size() * kChunk) chunks_.push_back(std::make_unique<Set[]>(kChunk));
      return static_cast<SetId>(size_++);
    }

   private:
    static constexpr size_t kChunk = 256;
    std::vector<std::unique_ptr<Set[]>> chunks_;
    size_t size_ = 0;
  };

  Sets sets_;
  std::vector<SetId> free_;
  SegmentedTable<Content> by_content_;
  std::array<Step, 4096> steps_{};
  std::array<Difference, 64> differences_{};
  Step* last_step_ = &steps_[0];  // a run of blocks takes the same step
  std::vector<uint64_t> scratch_;
  size_t live_ = 0;
  size_t word_bytes_ = 0;
};

// References that go back to where they came from, but for those that an entry takes over.
class SetReferences {
 public:
  SetReferences(HolderSets& sets, SetId id, uint32_t count = 1) : sets_(&sets), id_(id), count_(count) {
    sets.retain(id, count);
  }
  SetReferences(SetReferences&& other) noexcept
      : sets_(other.sets_), id_(other.id_), count_(std::exchange(other.count_, 0)) {}
  ~SetReferences() { sets_->release(id_, count_); }

  SetId id() const { return id_; }
  // So many are in the entries now.
  SetId take(uint32_t count = 1) {
    count_ -= count;
    return id_;
  }

 private:
  HolderSets* sets_;
  SetId id_;
  uint32_t count_;
};

// Entries that take the same step, one after the other: from one set of holders to another and from one set
// of owners to another. References move together, at the latest when this goes; until then it has one of its
// own to each of the sets that it leads to.
class HolderStep {
 public:
  explicit HolderStep(HolderSets& sets) : sets_(sets) {}
  HolderStep(const HolderStep&) = delete;
  ~HolderStep() {
    settle();
    sets_.release(to_holders_);
    sets_.release(to_owners_);
  }

  bool is_from(SetId holders, SetId owners) const { return holders == holders_ && owners == owners_; }
  SetId holders() const { return to_holders_; }
  SetId owners() const { return to_owners_; }

  // From now on it is another step: from these sets to themselves, until `lead_to` says where it leads.
  void begin(SetId holders, SetId owners) {
    settle();
    lead_holders_to(holders_ = holders);
    lead_owners_to(owners_ = owners);
  }
  // Before an entry takes it.
  void lead_holders_to(SetId holders) { lead(to_holders_, holders); }
  void lead_owners_to(SetId owners) { lead(to_owners_, owners); }
  // An entry has taken the step.
  void take() { ++taken_; }

 private:
  void lead(SetId& set, SetId to) {
    sets_.retain(to);
    sets_.release(std::exchange(set, to));
  }

  void settle() {
    sets_.retain(to_holders_, taken_);
    sets_.retain(to_owners_, taken_);
    sets_.release(holders_, taken_);
    sets_.release(owners_, taken_);
    taken_ = 0;
  }

  HolderSets& sets_;
  SetId holders_ = kEmptySet, to_holders_ = kEmptySet, owners_ = kEmptySet, to_owners_ = kEmptySet;
  uint32_t taken_ = 0;
};

}  // namespace kvindexer
