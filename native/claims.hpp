// Whom blocks were stored for: owners (agents), beside the slots that hold the blocks.
//
// A claim is (prefix, slot, owner): the owner was named when the slot stored the prefix. Several owners of
// one block are several claims. A claim lives as long as its slot holds its prefix, so whoever takes a slot
// off an entry drops the claims with it; a dead slot's claims are passed over and go with its bit. An owner
// that is cleared is passed over from then on, and a sweep takes its claims away. So a claim that is counted
// by a query is always of a living owner, slot and entry, and numbers of owners are never used again.
//
// While a snapshot is written, the prefixes whose claims change are noted; what ends with its owner or its
// slot needs no note, because a snapshot lists those that live.
//
// Bounds: `claims_max` claims in all; more are refused and counted. 16 bytes a claim, nothing for blocks
// without an owner.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "segmented_table.hpp"

namespace kvindexer {

struct Claim {
  uint64_t key;  // prefix hash
  uint32_t slot;
  uint32_t owner;  // never 0
  bool empty() const { return owner == 0; }
};
using ClaimTable = SegmentedTable<Claim>;  // one a context

struct ClaimNote {          // the claims on a prefix changed
  uint64_t key;             // prefix hash
  const ClaimTable* table;  // to be told from others only: it may be gone
  bool empty() const { return table == nullptr; }
};

class OwnerBook {
 public:
  explicit OwnerBook(size_t claims_max) : claims_max_(claims_max) {}

  uint32_t add() {
    claims_of_.emplace(last_ + 1, 0);
    ++unclaimed_;
    return ++last_;
  }
  // Its claims stay in their tables until `is_live` has them swept away.
  void clear(uint32_t owner) {
    const auto of_owner = claims_of_.find(owner);
    if (of_owner == claims_of_.end()) return;
    unclaimed_ -= of_owner->second == 0 ? 1 : 0;
    claims_of_.erase(of_owner);
  }
  bool is_live(const Claim& claim) const { return claims_of_.contains(claim.owner); }

  uint64_t claims() const { return claims_; }
  uint64_t refused() const { return refused_; }
  // (owner, claims) of every living owner, in no order.
  std::vector<std::pair<uint32_t, uint64_t>> owners() const { return {claims_of_.begin(), claims_of_.end()}; }
  // Living owners without a claim; O(1) where there are none.
  std::vector<uint32_t> unclaimed() const {
    std::vector<uint32_t> found;
    if (unclaimed_ == 0) return found;
    for (const auto& [owner, claims] : claims_of_)
      if (claims == 0) found.push_back(owner);
    return found;
  }

  void claim(ClaimTable& table, uint64_t prefix, uint32_t slot, uint32_t owner) {
    const auto of_owner = claims_of_.find(owner);
    if (of_owner == claims_of_.end()) return;  // cleared while its blocks waited for their parent
    if (table.size() != 0)
      for (const Claim* at = table.find(prefix); at != nullptr; at = table.next_equal(at))
        if (at->slot == slot && at->owner == owner) return;
    if (claims_ == claims_max_) {
      ++refused_;
      return;
    }
    note(table, prefix);
    table.insert({prefix, slot, owner});
    ++claims_;
    unclaimed_ -= of_owner->second++ == 0 ? 1 : 0;
  }
  // The next `claim`, if it is that of this prefix, needs no memory.
  void make_way(ClaimTable& table, uint64_t prefix) {
    note(table, prefix);
    table.make_way(prefix);
  }

  // Drops the claims on a prefix of the slots that `goes` names. Throws std::bad_alloc, and then none of them
  // has gone.
  template <class Goes>
  void drop(ClaimTable& table, uint64_t prefix, Goes goes) {
    if (table.size() == 0 || table.find(prefix) == nullptr) return;
    note(table, prefix);
    for (Claim* at = table.find(prefix); at != nullptr;) {
      if (!goes(at->slot)) {
        at = table.next_equal(at);
        continue;
      }
      discount(*at);
      table.erase(at);
      at = table.find(prefix);  // the table has moved
    }
  }
  void drop(ClaimTable& table, uint64_t prefix) {
    drop(table, prefix, [](uint32_t) { return true; });
  }

  // As a claim that finds no room.
  void refuse() { ++refused_; }

  // For a claim that is leaving its table by another way.
  void discount(const Claim& claim) {
    --claims_;
    if (const auto of_owner = claims_of_.find(claim.owner); of_owner != claims_of_.end())
      unclaimed_ += --of_owner->second == 0 ? 1 : 0;
  }

  void begin_notes() { notes_.emplace(); }
  void end_notes() { notes_.reset(); }
  // Up to about `notes_max` of them leave, each to `visit(note)`; returns how many are left.
  template <class Visit>
  size_t take_notes(size_t notes_max, Visit visit) {
    assert(notes_ && "an export has begun");
    uint64_t cursor = 0;
    bool done = false;
    notes_->sweep(cursor, done, notes_max, [&](const ClaimNote& note) {
      visit(note);
      return false;
    });
    return notes_->size();
  }

 private:
  // Invariant: whatever changes the claims on a prefix calls this first, so that an export under way writes
  // them again.
  void note(const ClaimTable& table, uint64_t prefix) {
    if (!notes_) return;
    for (const ClaimNote* at = notes_->find(prefix); at != nullptr; at = notes_->next_equal(at))
      if (at->table == &table) return;
    notes_->insert({prefix, &table});
  }

  const size_t claims_max_;
  std::unordered_map<uint32_t, uint64_t> claims_of_;  // of living owners
  uint32_t last_ = 0;
  uint64_t claims_ = 0, refused_ = 0;
  size_t unclaimed_ = 0;                            // of `claims_of_`
  std::optional<SegmentedTable<ClaimNote>> notes_;  // while an export is under way
};

}  // namespace kvindexer
