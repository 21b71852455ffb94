// Prefixes beyond the first that have the same content: one document behind ten thousand prompts is one
// record in the NearTable and a chain here, so that a query meets it once.
//
// A chain is doubly linked through a table keyed by prefix hash, so that any member leaves in constant time;
// its first member is found by content. Prefix hash 0 ends a chain and is never a member. About 30 bytes a
// member and as many a chain.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "segmented_table.hpp"

namespace kvindexer {

class ContentChains {
 public:
  size_t size() const { return members_.size(); }
  size_t bytes() const { return members_.bytes() + firsts_.bytes(); }
  // Contents that have no record beside their chain.
  size_t crowded() const { return crowded_; }

  bool contains(uint64_t prefix) { return members_.size() != 0 && members_.find(prefix) != nullptr; }

  // The first prefix of the content, 0 when there is no chain.
  uint64_t first(uint64_t content) {
    if (firsts_.size() == 0) return 0;
    const First* const first = firsts_.find(content);
    return first == nullptr ? 0 : first->prefix;
  }
  uint64_t next(uint64_t prefix) { return members_.find(prefix)->next; }

  // `crowded`: this content has no record, should the chain be new. Throws std::bad_alloc, and then nothing
  // has changed.
  void add(uint64_t content, uint64_t prefix, bool crowded) {
    assert(prefix != 0 && "prefix hash 0 ends a chain");
    First* const first = firsts_.find(content);
    if (first == nullptr) {
      members_.insert({prefix, 0, content});
      try {
        firsts_.insert({content, prefix, crowded ? 1u : 0u});
      } catch (...) {
        members_.erase(members_.find(prefix));
        throw;
      }
      crowded_ += crowded ? 1 : 0;
      return;
    }
    const uint64_t second = first->prefix;
    members_.insert({prefix, second, content});
    first->prefix = prefix;
    members_.find(second)->link = prefix;
  }

  // The same behind another member, should that be one. The prefix must be none.
  void add_behind(uint64_t before, uint64_t content, uint64_t prefix, bool crowded) {
    Member* const at = size() == 0 ? nullptr : members_.find(before);
    if (at == nullptr) return add(content, prefix, crowded);
    const uint64_t next = at->next;
    members_.insert({prefix, next, before});
    members_.find(before)->next = prefix;
    if (next != 0) members_.find(next)->link = prefix;
  }

  void remove(uint64_t prefix) {
    Member* const member = members_.find(prefix);
    const uint64_t next = member->next;
    const uint64_t link = member->link;
    members_.erase(member);
    First* const first = firsts_.find(link);
    const bool was_first = first != nullptr && first->prefix == prefix;
    if (next != 0) members_.find(next)->link = link;
    if (!was_first) {
      members_.find(link)->next = next;
    } else if (next != 0) {
      first->prefix = next;
    } else {
      crowded_ -= first->crowded;
      firsts_.erase(first);
    }
  }

  // Calls visit(prefix) for every member.
  template <class Visit>
  void for_each(Visit visit) {
    uint64_t cursor = 0;
    for (bool done = members_.size() == 0; !done;)
      members_.sweep(cursor, done, 4'096, [&](const Member& member) {
        visit(member.key);
        return true;
      });
  }

  // Calls visit(content, first prefix) for every content that has no record beside its chain, from `cursor`
  // on, until it returns false. False when there may be more.
  template <class Visit>
  bool walk_crowded(uint64_t& cursor, Visit visit) const {
    if (crowded_ == 0) return true;
    return firsts_.walk(
        cursor, [&](const First& first) { return first.crowded == 0 || visit(first.key, first.prefix); });
  }

  // Gives memory back in slices; true when nothing is left. For chains that are not used any more.
  bool dismantle(size_t segments_max) {
    return members_.dismantle(segments_max, [](const Member&) {}) &&
           firsts_.dismantle(segments_max, [](const First&) {});
  }

 private:
  struct Member {
    uint64_t key;   // prefix hash
    uint64_t next;  // 0: the last
    uint64_t link;  // the content for the first member, else the prefix before
    bool empty() const { return key == 0; }
  };
  struct First {
    uint64_t key;  // content hash
    uint64_t prefix;
    uint32_t crowded;
    bool empty() const { return prefix == 0; }
  };

  SegmentedTable<Member> members_;
  SegmentedTable<First> firsts_;
  size_t crowded_ = 0;
};

}  // namespace kvindexer
