// A posted batch of the usual events, from its bytes into the index without a Python object for any of them.
//
// Decoding, sifting and applying a batch the general way touches some forty functions and as many objects,
// which stores of new blocks keep driving out of the caches: it costs as much as decoding. Nearly every batch
// of an engine is plain and uniform: stored and removed blocks as event_payload.hpp and json_events.hpp read
// them, all stored ones of one tier, adapter and block size. Such a batch is read here into memory that is
// used again for the next, and applied in one call. Every other one is refused before anything has changed,
// and goes the general way (app/api/short_events.py), which reads all; the tests hold both equal.
//
// What only its source can say (whether the block size is its own, whether a number is the next) is asked by
// app/service/batches.py between the two. Bound: kBytesMax of a payload, so at most about 12 times that is
// kept.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "event_payload.hpp"
#include "json_events.hpp"
#include "prefix_index.hpp"
#include "request_head.hpp"

namespace kvindexer {

class PlainBatch {
 public:
  static constexpr size_t kBytesMax = 131'072;

  struct Event {
    wire::EventKind kind;
    uint32_t tier;
    uint32_t group;
    std::optional<uint64_t> parent;
    std::span<const uint64_t> hashes;
    const uint8_t* tokens;
    size_t token_count;
  };

  struct Applied {
    uint64_t stored = 0, removed = 0, orphans = 0, unknown = 0;
  };

  // `tiers` by the name of a medium in lower case; `kinds` of groups that are indexed.
  PlainBatch(std::vector<std::pair<std::string, uint32_t>> tiers, std::vector<std::string> kinds)
      : tiers_(std::move(tiers)), kinds_(std::move(kinds)) {}

  // False for what is not plain; nothing is in the batch then.
  bool read_msgpack(wire::Span payload, size_t events_max) {
    return begin(payload.size()) && (read_payload(payload, events_max) || refuse());
  }

  bool read_json(wire::Span body, size_t events_max, wire::JsonEnvelope& envelope) {
    if (!begin(body.size())) return false;
    const Room room{this};
    wire::JsonEventsReader reader(body, events_max, room,
                                  [this](const wire::PlainEvent& event) { return accept(event); });
    if (!reader.read(envelope) || events_.empty()) return refuse();
    ts_ = envelope.ts;
    rank_ = static_cast<uint32_t>(envelope.dp_rank);
    return true;
  }

  const std::vector<Event>& events() const { return events_; }
  std::optional<double> ts() const { return ts_; }
  std::optional<uint32_t> rank() const { return rank_; }
  size_t stores() const { return stores_; }
  // Of the stored blocks, where there are any.
  uint32_t tier() const { return tier_; }
  uint32_t block_size() const { return block_size_; }
  const std::string& lora() const { return lora_; }
  bool speaks_of_others_than(uint32_t tier) const {
    return std::any_of(events_.begin(), events_.end(),
                       [&](const Event& event) { return event.tier != tier; });
  }
  size_t blocks() const {
    size_t blocks = 0;
    for (const Event& event : events_) blocks += event.hashes.size();
    return blocks;
  }

  // `context` is that of the stored blocks.
  Applied apply(PrefixIndex& index, uint32_t source, uint32_t context, Tick now, bool count_copies) const {
    Applied applied;
    for (const Event& event : events_) {
      const Place place{source, event.tier, event.group};
      if (event.kind == wire::EventKind::kRemoved) {
        const Removed removed = index.remove(place, event.hashes, now);
        applied.removed += removed.removed;
        applied.unknown += removed.unknown;
      } else {
        const Stored stored = index.store(place, context, event.hashes, event.parent, event.tokens,
                                          ExtraKeys{}, now, count_copies, 0);
        applied.stored += stored.stored;
        applied.orphans += stored.orphans;
        applied.unknown += stored.unknown;
      }
    }
    return applied;
  }

 private:
  // Every number takes a byte of the payload at least, and 8 here at most, as does the head of its array.
  bool begin(size_t bytes) {
    refuse();
    if (bytes > kBytesMax) return false;
    if (bytes > bytes_) {
      const size_t more = std::bit_ceil(bytes);
      memory_ = std::make_unique_for_overwrite<uint64_t[]>(more);
      bytes_ = more;
    }
    return true;
  }

  bool refuse() {
    events_.clear();
    used_ = stores_ = 0;
    ts_.reset();
    rank_.reset();
    return false;
  }

  struct Room {  // for the readers
    PlainBatch* batch;
    uint8_t* operator()(wire::Field field, size_t count, size_t width) const {
      return batch->room(field, count, width);
    }
  };

  uint8_t* room(wire::Field field, size_t count, size_t width) {
    const size_t words = (count * width + 7) / 8;
    if (words > bytes_ - used_) return nullptr;
    uint64_t* const at = memory_.get() + used_;
    used_ += words;
    (field == wire::Field::kTokenIds ? tokens_ : hashes_) = at;
    return reinterpret_cast<uint8_t*>(at);
  }

  bool read_payload(wire::Span payload, size_t events_max) {
    wire::Batch batch;
    if (!wire::open_batch(payload, events_max, batch) || batch.events == 0) return false;
    const Room room{this};
    wire::EventReader reader(batch.cursor, payload.size(), room);
    wire::PlainEvent event;
    for (size_t i = 0; i < batch.events; ++i)
      if (!reader.read(event) || !event.extra_keys.empty() || !accept(event)) return false;
    wire::Span rank;
    return wire::close_batch(batch, rank) && read_ts(batch.ts) && read_rank(rank);
  }

  bool read_ts(wire::Span span) {
    if (span[0] == 0xc0) return true;
    if (span.size() != 9 || span[0] != 0xcb) return false;
    ts_ = std::bit_cast<double>(wire::read_be(span.data() + 1, 8));
    return std::isfinite(*ts_) && *ts_ >= 0;
  }

  bool read_rank(wire::Span span) {
    if (span.empty() || span[0] == 0xc0) return true;
    wire::Cursor cursor{span.data(), span.data() + span.size()};
    const wire::Integer rank = wire::read_integer(cursor);
    if (rank.fault != wire::Fault::kNone || rank.bits > wire::kJsonRankMax) return false;
    rank_ = static_cast<uint32_t>(rank.bits);
    return true;
  }

  // Takes an event that was just read; false when it is not like the others.
  bool accept(const wire::PlainEvent& read) {
    const std::optional<uint32_t> tier = tier_of(read.medium);
    if (!tier) return false;
    Event event{read.kind, *tier, read.group, read.parent, {hashes_, read.hashes}, nullptr, 0};
    if (read.kind == wire::EventKind::kStored) {
      if (read.spec_kind && std::find(kinds_.begin(), kinds_.end(), *read.spec_kind) == kinds_.end())
        return false;
      const std::string_view lora = read.lora.value_or(std::string_view());
      if (stores_++ == 0) {
        if (!std::all_of(lora.begin(), lora.end(), [](char c) { return c >= ' ' && c < 0x7f; })) return false;
        tier_ = *tier;
        block_size_ = read.block_size;
        lora_ = lora;
      } else if (tier_ != *tier || block_size_ != read.block_size || lora_ != lora) {
        return false;
      }
      event.tokens = reinterpret_cast<const uint8_t*>(tokens_);
      event.token_count = read.tokens;
    }
    events_.push_back(event);
    return true;
  }

  std::optional<uint32_t> tier_of(const std::optional<std::string_view>& medium) const {
    if (!medium) return 0;
    for (const auto& [name, tier] : tiers_)
      if (wire::same_but_case(*medium, name)) return tier;
    return std::nullopt;
  }

  const std::vector<std::pair<std::string, uint32_t>> tiers_;
  const std::vector<std::string> kinds_;
  std::unique_ptr<uint64_t[]> memory_;  // a word a byte of the longest payload so far
  size_t bytes_ = 0;
  size_t used_ = 0;
  const uint64_t* hashes_ = nullptr;  // of the event that is being read
  const uint64_t* tokens_ = nullptr;
  std::vector<Event> events_;
  size_t stores_ = 0;
  uint32_t tier_ = 0;
  uint32_t block_size_ = 0;
  std::string lora_;
  std::optional<double> ts_;
  std::optional<uint32_t> rank_;
};

}  // namespace kvindexer
