// The batch of events that an engine publishes, read in one pass over its msgpack bytes.
//
// The general way opens the batch, then each event, then each field, and so walks over every array three
// times. Here the usual events (stored and removed blocks, arrays or maps of any release) are read where they
// stand, numbers straight to the buffers that the index reads. Nothing is decided here that a reader of the
// events could see: an event with anything unusual in it (a field of another type, a name twice, no tokens, a
// salt, metadata) is not plain, its span goes to the decoder of app/ingest/wire_decode.py, and a payload that
// is not a batch of that shape is refused as a whole. That decoder reads every batch by itself, and the tests
// hold both equal.
//
// Cost: one pass, and a second one over the spans of events that are not plain.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "wire.hpp"

namespace kvindexer::wire {

enum class Field : uint8_t {
  kType,
  kBlockHashes,
  kParent,
  kTokenIds,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kKind,
  kSalt,
  kMetadata,
  kOther,
};

inline constexpr std::array<std::string_view, 13> kFieldNames{
    "type",      "block_hashes", "parent_block_hash", "token_ids",          "block_size", "lora_id", "medium",
    "lora_name", "extra_keys",   "group_idx",         "kv_cache_spec_kind", "cache_salt", "metadata"};

// Fields of the array shapes by position, behind the tag.
inline constexpr std::array<Field, 10> kStoredFields{
    Field::kBlockHashes, Field::kParent,   Field::kTokenIds,  Field::kBlockSize, Field::kLoraId,
    Field::kMedium,      Field::kLoraName, Field::kExtraKeys, Field::kGroup,     Field::kKind};
inline constexpr std::array<Field, 3> kRemovedFields{Field::kBlockHashes, Field::kMedium, Field::kGroup};

inline Field field_of(std::string_view name) {
  const auto found = std::find(kFieldNames.begin(), kFieldNames.end(), name);
  return static_cast<Field>(found - kFieldNames.begin());
}

enum class EventKind : uint8_t { kStored, kRemoved };

// A plain event. A removal has hashes, `medium` and `group` only.
struct PlainEvent {
  EventKind kind = EventKind::kStored;
  size_t hashes = 0;
  size_t tokens = 0;
  std::optional<uint64_t> parent;
  uint32_t block_size = 0;
  uint32_t group = 0;
  std::optional<std::string_view> medium;
  std::optional<std::string_view> lora;  // its name
  std::optional<std::string_view> spec_kind;
  Span extra_keys;  // empty: none, or one null a block
};

inline constexpr uint32_t kSizeMax = 65'536;
inline constexpr uint32_t kGroupMax = 65'535;
inline constexpr size_t kTextBytesMax = 1'024;
inline constexpr size_t kNullKeysMax = 65'536;

// Reads one event after the other. `Room` gives the buffer for an array:
// `uint8_t* room(Field, size_t count, size_t width)`, null when there is none.
template <typename Room>
class EventReader {
 public:
  EventReader(Cursor& cursor, size_t children_max, Room& room)
      : cursor_(cursor), children_max_(children_max), room_(room) {}

  // The next event; false when it is not plain: the cursor is then anywhere in it.
  bool read(PlainEvent& event) {
    event = PlainEvent{};
    seen_ = 0;
    number_of_lora_ = false;
    if (cursor_.at == cursor_.end) return false;
    const Shape shape = shape_of(*cursor_.at);
    if (shape == Shape::kScalar) return false;
    const Head head = read_head(cursor_);
    if (head.fault != Fault::kNone || head.children == 0 || head.children > children_max_) return false;
    const bool read =
        shape == Shape::kArray ? read_array(event, head.children) : read_map(event, head.children);
    return read && is_complete(event);
  }

 private:
  bool read_array(PlainEvent& event, uint64_t children) {
    std::string_view tag;
    if (!read_text(tag) || !read_tag(event, tag)) return false;
    const std::span<const Field> fields =
        event.kind == EventKind::kStored ? std::span<const Field>(kStoredFields) : kRemovedFields;
    for (uint64_t i = 1; i < children; ++i) {
      // Elements that a later release appended are left out.
      const Field field = i <= fields.size() ? fields[i - 1] : Field::kOther;
      if (!read_field(event, field)) return false;
    }
    return true;
  }

  bool read_map(PlainEvent& event, uint64_t children) {
    bool tagged = false;
    for (uint64_t i = 0; i < children; i += 2) {
      std::string_view name;
      if (!read_text(name)) return false;
      const Field field = field_of(name);
      if (field == Field::kType) {
        if (tagged || !read_text(name) || !read_tag(event, name)) return false;
        tagged = true;
      } else if (!tagged || !read_field(event, field)) {
        return false;  // what comes before the tag could be of any event
      }
    }
    return tagged;
  }

  bool read_tag(PlainEvent& event, std::string_view tag) {
    event.kind = tag == "BlockStored" ? EventKind::kStored : EventKind::kRemoved;
    return event.kind == EventKind::kStored || tag == "BlockRemoved";
  }

  bool read_field(PlainEvent& event, Field field) {
    const bool wanted = event.kind == EventKind::kStored || field == Field::kBlockHashes ||
                        field == Field::kMedium || field == Field::kGroup;
    if (field == Field::kOther || !wanted) return skip(cursor_) == Fault::kNone;
    const uint32_t bit = 1u << static_cast<uint32_t>(field);
    if ((seen_ & bit) != 0) return false;
    seen_ |= bit;
    switch (field) {
      case Field::kBlockHashes:
        return read_numbers(field, 8, event.hashes);
      case Field::kTokenIds:
        return read_numbers(field, 4, event.tokens);
      case Field::kParent:
        return read_parent(event);
      case Field::kBlockSize:
        return read_small(event.block_size, kSizeMax);
      case Field::kGroup:
        return read_null() || read_small(event.group, kGroupMax);
      case Field::kMedium:
        return read_optional_text(event.medium);
      case Field::kLoraName:
        return read_optional_text(event.lora);
      case Field::kKind:
        return read_optional_text(event.spec_kind);
      case Field::kLoraId:
        number_of_lora_ = cursor_.at != cursor_.end && *cursor_.at != 0xc0;
        return skip(cursor_) == Fault::kNone;
      case Field::kExtraKeys:
        return read_extra_keys(event);
      default:
        return read_null();  // a salt, metadata
    }
  }

  // What can be said only when all fields are read.
  bool is_complete(PlainEvent& event) const {
    if (event.hashes == 0) return false;
    if (event.kind == EventKind::kRemoved) return true;
    if (event.lora && event.lora->empty()) event.lora.reset();
    // The number is the adapter's only where it has no name.
    if (number_of_lora_ && !event.lora) return false;
    if (null_keys_ != event.hashes && has(Field::kExtraKeys) && event.extra_keys.empty()) return false;
    return has(Field::kTokenIds) && has(Field::kBlockSize) && event.tokens != 0 &&
           event.tokens == event.hashes * event.block_size;
  }

  bool has(Field field) const { return (seen_ >> static_cast<uint32_t>(field) & 1) != 0; }

  bool read_null() {
    if (cursor_.at == cursor_.end || *cursor_.at != 0xc0) return false;
    ++cursor_.at;
    return true;
  }

  bool read_text(std::string_view& text) {
    if (cursor_.at == cursor_.end || not_an_integer(*cursor_.at) != Fault::kText) return false;
    const Head head = read_head(cursor_);
    if (head.fault != Fault::kNone || head.bytes > cursor_.left()) return false;
    text = {reinterpret_cast<const char*>(cursor_.at), static_cast<size_t>(head.bytes)};
    cursor_.at += head.bytes;
    return true;
  }

  bool read_optional_text(std::optional<std::string_view>& text) {
    if (read_null()) return true;
    std::string_view read;
    if (!read_text(read) || read.size() > kTextBytesMax) return false;
    text = read;
    return true;
  }

  bool read_small(uint32_t& number, uint32_t most) {
    const Integer integer = read_integer(cursor_);
    if (integer.fault != Fault::kNone || integer.bits > most) return false;
    number = static_cast<uint32_t>(integer.bits);
    return true;
  }

  bool read_parent(PlainEvent& event) {
    if (read_null()) return true;
    const Integer integer = read_hash(cursor_);
    if (integer.fault == Fault::kNone) event.parent = integer.bits;
    return integer.fault == Fault::kNone;
  }

  bool read_numbers(Field field, size_t width, size_t& count) {
    if (cursor_.at == cursor_.end || shape_of(*cursor_.at) != Shape::kArray) return false;
    const Head head = read_head(cursor_);
    if (head.fault != Fault::kNone || head.children > cursor_.left()) return false;
    count = static_cast<size_t>(head.children);
    uint8_t* const out = room_(field, count, width);
    if (out == nullptr) return false;
    const Parsed parsed = width == 4 ? read_tokens(cursor_, count, out) : read_hashes(cursor_, count, out);
    return parsed.fault == Fault::kNone;
  }

  // Null, or an array; one of nulls says as little, however engines write it.
  bool read_extra_keys(PlainEvent& event) {
    const uint8_t* const start = cursor_.at;
    null_keys_ = event.hashes;
    if (read_null()) return true;
    if (cursor_.at == cursor_.end || shape_of(*cursor_.at) != Shape::kArray) return false;
    const Head head = read_head(cursor_);
    if (head.fault != Fault::kNone || head.children > cursor_.left()) return false;
    const size_t count = static_cast<size_t>(head.children);
    const bool nulls = count <= kNullKeysMax &&
                       std::all_of(cursor_.at, cursor_.at + count, [](uint8_t byte) { return byte == 0xc0; });
    null_keys_ = count;
    if (nulls) {
      cursor_.at += count;
      return true;
    }
    cursor_.at = start;
    if (skip(cursor_) != Fault::kNone) return false;
    event.extra_keys = {start, static_cast<size_t>(cursor_.at - start)};
    return true;
  }

  Cursor& cursor_;
  const size_t children_max_;
  Room& room_;
  uint32_t seen_ = 0;
  bool number_of_lora_ = false;
  size_t null_keys_ = 0;
};

// The head of a batch: its time and rank as they stand, and where its events are. The rank stands behind
// them.
struct Batch {
  Span ts;
  size_t events = 0;
  bool has_rank = false;
  Cursor cursor{nullptr, nullptr};  // at the first event
};

// False for what is not an array of a time, events and perhaps a rank.
inline bool open_batch(Span payload, size_t children_max, Batch& batch) {
  const Container container = open_container(payload);
  if (container.fault != Fault::kNone || container.shape != Shape::kArray) return false;
  if (container.children != 2 && container.children != 3) return false;
  batch.has_rank = container.children == 3;
  batch.cursor = container.cursor;
  Cursor& cursor = batch.cursor;
  const uint8_t* const start = cursor.at;
  if (shape_of(*start) != Shape::kScalar || skip(cursor) != Fault::kNone) return false;
  batch.ts = {start, static_cast<size_t>(cursor.at - start)};
  if (cursor.at == cursor.end || shape_of(*cursor.at) != Shape::kArray) return false;
  const Head head = read_head(cursor);
  batch.events = static_cast<size_t>(head.children);
  return head.fault == Fault::kNone && head.children <= children_max && head.children <= cursor.left();
}

// The rank behind the events, empty when there is none; false when it is no plain value, or not the end.
inline bool close_batch(Batch& batch, Span& rank) {
  Cursor& cursor = batch.cursor;
  if (batch.has_rank) {
    const uint8_t* const start = cursor.at;
    if (cursor.at == cursor.end || shape_of(*start) != Shape::kScalar || skip(cursor) != Fault::kNone) {
      return false;
    }
    rank = {start, static_cast<size_t>(cursor.at - start)};
  }
  return cursor.at == cursor.end;
}

}  // namespace kvindexer::wire
