// The names of prefixes whose records carry another engine's name already, as in a fleet where every engine
// draws a seed of its own: engine hash -> record, and the slots that name it so. A name may outlive its
// prefix: 36 bits of that tell whether the record is still the one that was meant. Sources whose engines
// agree share one.
//
// Why not beside the records: how many names a prefix has is anybody's guess. Names that came together lie in
// neighbouring records here too; a table finds them by engine hash. Names of one hash may be several.
//
// Cost: 20 bytes a record and about 8 in the table.
#pragma once

#include <new>

#include "holder_sets.hpp"
#include "id_table.hpp"
#include "numbered_pool.hpp"

namespace kvindexer {

#pragma pack(push, 1)
struct OtherName {
  uint64_t key;               // mix64(engine hash): engines may count 1, 2, 3
  uint64_t block : 28;        // the record of the prefix when the name was made
  uint64_t prefix_low : 36;   // of the prefix hash: whether it still is
  SetId owners : 31;          // kEmptySet: the record is free
  uint32_t has_namesake : 1;  // `key` may be found elsewhere too; once set it stays with the name
};
#pragma pack(pop)

using OtherNameId = RecordId;
inline constexpr OtherNameId kNoOtherName = kNoRecord;

class OtherNames {
 public:
  OtherNames() : table_(KeyOf{&pool_}) {}
  OtherNames(const OtherNames&) = delete;
  OtherNames& operator=(const OtherNames&) = delete;

  size_t size() const { return pool_.size(); }
  size_t bytes() const { return pool_.bytes() + table_.bytes(); }
  void reserve(size_t names) { table_.reserve(names); }

  OtherName& operator[](OtherNameId id) const { return pool_[id]; }
  bool has(uint64_t key) const { return size() != 0 && table_.find(key) != kNoOtherName; }
  void prefetch(uint64_t key) const {
    if (size() != 0) table_.prefetch(key);
  }
  // Of a key that was prefetched, once that is here: its record too, where there is one.
  void prefetch_record(uint64_t key) const {
    if (const OtherNameId id = size() == 0 ? kNoOtherName : table_.likely(key); id != kNoOtherName)
      pool_.prefetch(id);
  }
  // Until `visit(id)` says that it has had enough. It must not add or erase names.
  template <class Visit>
  void each(uint64_t key, Visit visit) const {
    if (size() != 0) table_.each(key, visit);
  }
  // The only name with this key; kNoOtherName when there is none, or maybe more than one anywhere.
  OtherNameId only(uint64_t key) const {
    const OtherNameId id = size() == 0 ? kNoOtherName : table_.find(key);
    return id != kNoOtherName && pool_[id].has_namesake ? kNoOtherName : id;
  }

  // Whether the name means this prefix, which its record has now.
  static bool is_of(const OtherName& name, uint64_t prefix) {
    return name.prefix_low == (prefix & kPrefixLow);
  }

  // Another name by this key is coming, wherever that will lie; tells whether any is here.
  bool mark_namesakes(uint64_t key) {
    bool any = false;
    each(key, [&](OtherNameId id) {
      pool_[id].has_namesake = any = true;
      return false;
    });
    return any;
  }
  // `owners` is not empty. Throws std::bad_alloc, and then nothing has changed.
  void insert(uint64_t key, BlockId block, uint64_t prefix, SetId owners, bool has_namesake) {
    if (pool_.is_full()) throw std::bad_alloc();
    const OtherNameId id = pool_.add();
    pool_[id] = {key, block, prefix & kPrefixLow, owners, has_namesake};
    try {
      table_.insert(key, id);
    } catch (...) {
      pool_.free(id);
      throw;
    }
  }
  void erase(OtherNameId id) {
    table_.erase(pool_[id].key, id);
    pool_.free(id);
  }

  // Names from `cursor` on (0 at first) in an order of their own, until `visit(name)` says that it has had
  // enough, or too much was passed over. True when there is no more. A name that stays from the first call to
  // the last is visited once, whatever comes and goes.
  template <class Visit>
  bool walk(uint64_t& cursor, Visit visit) const {
    constexpr size_t kPassedOverMax = 65'536;
    size_t passed_over = 0;
    return pool_.walk(cursor, [&](OtherNameId, const OtherName* name) {
      if (name == nullptr || name->owners == kEmptySet) return ++passed_over < kPassedOverMax;
      return static_cast<bool>(visit(*name));
    });
  }

  // Erases those that `keep(name)` does not keep, looking at about `visits_max` records (1 at least) from
  // `cursor` on; returns how many that were. What it does not keep has no owners any more.
  template <class Keep>
  size_t sweep(uint64_t& cursor, bool& done, size_t visits_max, Keep keep) {
    size_t visits = 0;
    pool_.walk(cursor, [&](OtherNameId id, OtherName* name) {
      if (name != nullptr && name->owners != kEmptySet && !keep(*name)) erase(id);
      return ++visits < visits_max;
    });
    done = cursor >= pool_.end();
    return visits;
  }

 private:
  using Pool = NumberedPool<OtherName>;
  static constexpr uint64_t kPrefixLow = (uint64_t{1} << 36) - 1;
  static_assert(BlockPool::kIdsMax < uint64_t{1} << 28);
  struct KeyOf {
    const Pool* pool;
    uint64_t operator()(OtherNameId id) const { return (*pool)[id].key; }
    void prefetch(OtherNameId id) const { pool->prefetch(id); }
  };

  Pool pool_;
  IdTable<KeyOf> table_;
};

}  // namespace kvindexer
