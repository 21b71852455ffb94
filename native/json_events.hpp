// The JSON body of posted events, read in one pass: the envelope and the usual events.
//
// What event_payload.hpp is for msgpack, this is for JSON, and as there nothing is decided here that a reader
// could see. Plain is a small subset of RFC 8259 that every parser reads alike: objects with each name once,
// names and texts of printable ASCII without escapes, integers, arrays of numbers for the strict parsers of
// wire.hpp. A name that is not known, a salt, metadata, an event of another kind: the whole body is not
// plain, and the general way reads it (app/api/short_events.py). The tests hold both equal.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

#include "event_payload.hpp"
#include "json_cut.hpp"

namespace kvindexer::wire {

// What stands beside the events.
struct JsonEnvelope {
  std::string_view pod;
  std::optional<std::string_view> model;
  std::optional<std::string_view> lora;
  uint64_t dp_rank = 0;
  std::optional<uint64_t> seq;
  std::optional<double> ts;
};

inline constexpr uint64_t kJsonRankMax = 65'535;
inline constexpr uint64_t kJsonSeqMax = INT64_MAX;

// `Room` as for EventReader; `accept(PlainEvent&)` takes each event, false refuses all.
template <typename Room, typename Accept>
class JsonEventsReader {
 public:
  JsonEventsReader(Span body, size_t events_max, Room& room, Accept accept)
      : cursor_{body.data(), body.data() + body.size()},
        events_max_(events_max),
        room_(room),
        accept_(accept) {}

  bool read(JsonEnvelope& envelope) {
    uint32_t seen = 0;
    const bool read = read_object([&](std::string_view name) {
      const auto found = std::find(kEnvelopeNames.begin(), kEnvelopeNames.end(), name);
      const auto place = static_cast<uint32_t>(found - kEnvelopeNames.begin());
      if (found == kEnvelopeNames.end() || (seen >> place & 1) != 0) return false;
      seen |= 1u << place;
      return read_envelope_field(envelope, place);
    });
    skip_space(cursor_);
    return read && cursor_.at == cursor_.end && !envelope.pod.empty() && (seen >> kEvents & 1) != 0;
  }

 private:
  enum : uint32_t { kPod, kModel, kLora, kRank, kSeq, kTs, kOwner, kEvents };
  static constexpr std::array<std::string_view, 8> kEnvelopeNames{"pod", "model", "lora",  "dp_rank",
                                                                  "seq", "ts",    "owner", "events"};

  bool read_envelope_field(JsonEnvelope& envelope, uint32_t place) {
    uint64_t number = 0;
    switch (place) {
      case kPod:
        return read_text(envelope.pod);
      case kModel:
        return read_optional_text(envelope.model) && (!envelope.model || !envelope.model->empty());
      case kLora:
        return read_optional_text(envelope.lora);
      case kRank:
        return read_unsigned(envelope.dp_rank, kJsonRankMax);
      case kSeq:
        if (read_null()) return true;
        if (!read_unsigned(number, kJsonSeqMax)) return false;
        envelope.seq = number;
        return true;
      case kTs:
        return read_null() || read_seconds(envelope.ts);
      case kOwner:
        return read_null();
      default:
        return read_events();
    }
  }

  bool read_events() {
    size_t events = 0;
    return read_array([&] { return ++events <= events_max_ && read_event(); });
  }

  bool read_event() {
    event_ = PlainEvent{};
    seen_ = 0;
    has_lora_number_ = false;
    null_keys_.reset();
    if (!read_object([&](std::string_view name) { return read_field(name); })) return false;
    return is_complete() && accept_(event_);
  }

  bool read_field(std::string_view name) {
    const Field field = field_of(name);
    const uint32_t bit = 1u << static_cast<uint32_t>(field);
    if (field == Field::kOther || (seen_ & bit) != 0) return false;
    seen_ |= bit;
    switch (field) {
      case Field::kType:
        return read_tag();
      case Field::kBlockHashes:
        return read_numbers(field, parse_json_hashes, 8, event_.hashes);
      case Field::kTokenIds:
        return read_numbers(field, parse_json_tokens, 4, event_.tokens);
      case Field::kParent:
        return read_null() || read_parent();
      case Field::kBlockSize:
        return read_small(event_.block_size, kSizeMax);
      case Field::kGroup:
        return read_null() || read_small(event_.group, kGroupMax);
      case Field::kMedium:
        return read_optional_text(event_.medium);
      case Field::kLoraName:
        return read_optional_text(event_.lora);
      case Field::kKind:
        return read_optional_text(event_.spec_kind);
      case Field::kLoraId:
        if (read_null()) return true;
        has_lora_number_ = true;
        return read_integer_alone().has_value();
      case Field::kExtraKeys:
        return read_null() || read_null_keys();
      default:
        return read_null();  // a salt, metadata
    }
  }

  bool is_complete() {
    if (!has(Field::kType) || event_.hashes == 0) return false;
    if (event_.kind == EventKind::kRemoved) {
      constexpr uint32_t kOfRemoved =
          bit_of(Field::kType) | bit_of(Field::kBlockHashes) | bit_of(Field::kMedium) | bit_of(Field::kGroup);
      return (seen_ & ~kOfRemoved) == 0;
    }
    if (event_.lora && event_.lora->empty()) event_.lora.reset();
    if (has_lora_number_ && !event_.lora) return false;
    if (null_keys_ && *null_keys_ != event_.hashes) return false;
    return has(Field::kTokenIds) && has(Field::kBlockSize) && event_.tokens != 0 &&
           event_.tokens == event_.hashes * event_.block_size;
  }

  static constexpr uint32_t bit_of(Field field) { return 1u << static_cast<uint32_t>(field); }
  bool has(Field field) const { return (seen_ & bit_of(field)) != 0; }

  bool read_tag() {
    std::string_view tag;
    if (!read_text(tag)) return false;
    event_.kind = tag == "BlockStored" ? EventKind::kStored : EventKind::kRemoved;
    return event_.kind == EventKind::kStored || tag == "BlockRemoved";
  }

  // -- values

  bool read_mark(char mark) {
    skip_space(cursor_);
    return read_mark_here(mark);
  }

  // `read_value(name)` for each entry.
  template <typename ReadValue>
  bool read_object(ReadValue read_value) {
    if (!read_mark('{')) return false;
    if (read_mark('}')) return true;
    do {
      std::string_view name;
      if (!read_text(name) || !read_mark(':') || !read_value(name)) return false;
    } while (read_mark(','));
    return read_mark('}');
  }

  template <typename ReadValue>
  bool read_array(ReadValue read_value) {
    if (!read_mark('[')) return false;
    if (read_mark(']')) return true;
    do {
      if (!read_value()) return false;
    } while (read_mark(','));
    return read_mark(']');
  }

  bool read_text(std::string_view& text) {
    if (!read_mark('"')) return false;
    const uint8_t* const start = cursor_.at;
    while (cursor_.at != cursor_.end && *cursor_.at >= ' ' && *cursor_.at < 0x7f && *cursor_.at != '"' &&
           *cursor_.at != '\\') {
      ++cursor_.at;
    }
    text = {reinterpret_cast<const char*>(start), static_cast<size_t>(cursor_.at - start)};
    return text.size() <= kTextBytesMax && read_mark_here('"');
  }

  bool read_mark_here(char mark) {
    if (cursor_.at == cursor_.end || *cursor_.at != static_cast<uint8_t>(mark)) return false;
    ++cursor_.at;
    return true;
  }

  bool read_null() {
    skip_space(cursor_);
    if (cursor_.left() < 4 || std::memcmp(cursor_.at, "null", 4) != 0) return false;
    cursor_.at += 4;
    return true;
  }

  bool read_optional_text(std::optional<std::string_view>& text) {
    if (read_null()) return true;
    text.emplace();
    return read_text(*text);
  }

  std::optional<Integer> read_integer_alone() {
    skip_space(cursor_);
    const Integer integer = read_json_integer(cursor_);
    return integer.fault == Fault::kNone ? std::optional(integer) : std::nullopt;
  }

  bool read_unsigned(uint64_t& number, uint64_t most) {
    const std::optional<Integer> integer = read_integer_alone();
    if (!integer || integer->negative || integer->bits > most) return false;
    number = integer->bits;
    return true;
  }

  bool read_small(uint32_t& number, uint32_t most) {
    uint64_t wide = 0;
    if (!read_unsigned(wide, most)) return false;
    number = static_cast<uint32_t>(wide);
    return true;
  }

  // An integer of 64 bits or hexadecimal text, as in the arrays.
  bool read_parent() {
    skip_space(cursor_);
    const bool text = cursor_.at != cursor_.end && *cursor_.at == '"';
    const Integer integer = text ? read_json_hex(cursor_) : read_json_integer(cursor_);
    if (integer.fault != Fault::kNone) return false;
    event_.parent = integer.bits;
    return true;
  }

  // Digits with a fraction, which is what clocks are written as.
  bool read_seconds(std::optional<double>& seconds) {
    const uint8_t* const start = cursor_.at;
    const auto skip_digits = [&] {
      const uint8_t* const first = cursor_.at;
      while (cursor_.at != cursor_.end && is_digit(*cursor_.at)) ++cursor_.at;
      return static_cast<size_t>(cursor_.at - first);
    };
    const size_t whole = skip_digits();
    if (whole == 0 || whole > 15 || (whole > 1 && *start == '0')) return false;
    if (cursor_.at != cursor_.end && *cursor_.at == '.') {
      ++cursor_.at;
      const size_t fraction = skip_digits();
      if (fraction == 0 || fraction > 15) return false;
    }
    double value = 0;
    const char* const text = reinterpret_cast<const char*>(start);
    std::from_chars(text, reinterpret_cast<const char*>(cursor_.at), value);
    seconds = value;
    return true;
  }

  bool read_numbers(Field field, Parsed (*parse)(Span, uint8_t*), size_t width, size_t& count) {
    skip_space(cursor_);
    if (cursor_.at == cursor_.end || *cursor_.at != '[') return false;
    const uint8_t* const bracket = find_byte(cursor_.at, cursor_.end, ']');
    if (bracket == nullptr) return false;
    const Span span(cursor_.at, static_cast<size_t>(bracket + 1 - cursor_.at));
    uint8_t* const out = room_(field, json_capacity(span), width);
    if (out == nullptr) return false;
    const Parsed parsed = parse(span, out);
    count = parsed.count;
    cursor_.at = bracket + 1;
    return parsed.fault == Fault::kNone;
  }

  bool read_null_keys() {
    null_keys_ = 0;
    return read_array([&] { return ++*null_keys_ <= kNullKeysMax && read_null(); });
  }

  Cursor cursor_;
  const size_t events_max_;
  Room& room_;
  Accept accept_;
  PlainEvent event_;
  uint32_t seen_ = 0;
  bool has_lora_number_ = false;
  std::optional<size_t> null_keys_;
};

}  // namespace kvindexer::wire
