// Match answers as JSON text, straight from the rows of the index.
//
// An object for each row costs more than the match itself: 64 rows as Python values and their encoding take
// some 100 us, as text from here 10. So what an answer says of a source beside its depths is kept here,
// already quoted, and kept true by the registry; a row is then a few numbers between pieces of text.
//
// The rules are those of app/scoring.py, in the same order: depths of contexts of several block sizes are
// merged in tokens, tier by tier; the best comes first; ties go by name and rank. The tests hold both
// together.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "match_walk.hpp"

namespace kvindexer {

struct AnswerSource {
  std::string name;     // of the pod; orders equal rows
  std::string opening;  // {"pod":"pod-a","dp_rank":0,
  uint32_t dp_rank = 0;
  uint32_t block_size = 0;  // 0: not known yet
  std::string state;
  double heard_at_s = 0;  // NaN: never
  uint32_t place = 0;     // among all sources by name and rank; the book's own
};

class AnswerBook {
 public:
  struct Deepest {
    uint64_t blocks = 0;
    uint64_t tokens = 0;
  };

  void put(uint32_t source, AnswerSource said) {
    AnswerSource& known = sources_[source];
    in_order_ = in_order_ && known.name == said.name && known.dp_rank == said.dp_rank;
    said.place = known.place;
    known = std::move(said);
  }

  void drop(uint32_t source) { sources_.erase(source); }

  void begin() {
    rows_.clear();
    contexts_ = 0;
    if (!in_order_) order_sources();
  }

  void begin_context() { ++contexts_; }

  // A row of a context of `block_size` tokens a block. False when the source is not in the book.
  bool add(const Row& row, uint32_t block_size) {
    const auto found = sources_.find(row.source);
    if (found == sources_.end()) return false;
    Reach reach{&found->second, {}, {}, row.source};
    for (size_t i = 0; i < reach.tokens.size(); ++i) reach.tokens[i] = uint64_t{row.depths[i]} * block_size;
    rows_.push_back(reach);
    return true;
  }

  // The rows that were added since `begin`, best first, separated by commas. `unit` is in tokens.
  Deepest render(uint64_t unit, uint64_t tokens, double now_s, std::string& out) {
    if (contexts_ > 1) merge();
    rank(unit);
    const Reach* before = nullptr;
    std::string_view same;  // of the row before: everything between its opening and its state
    size_t at = out.size();
    for (const Reach& row : rows_) {
      const AnswerSource& said = *row.said;
      out.resize(at + said.opening.size() + kRowBytesMax);
      char* to = out.data() + at;
      if (before != nullptr) *to++ = ',';
      to = put_text(to, said.opening);
      if (before != nullptr && before->tokens == row.tokens && before->said->block_size == said.block_size) {
        same = std::string_view(out.data() + same_at_, same.size());
        to = put_text(to, same);
      } else {
        char* const start = to;
        to = put_depths(to, row, unit, tokens);
        same_at_ = static_cast<size_t>(start - out.data());
        same = std::string_view(start, static_cast<size_t>(to - start));
      }
      to = put_text(put_text(to, ",\"state\":\""), said.state);
      to = put_text(to, "\",\"last_event_age_s\":");
      to = std::isnan(said.heard_at_s) ? put_text(to, "null") : put_real(to, now_s - said.heard_at_s);
      to = put_text(to, ",\"hints\":null}");
      at = static_cast<size_t>(to - out.data());
      before = &row;
    }
    out.resize(at);
    if (rows_.empty()) return {};
    return {rows_[0].tokens[kTiers - 1] / unit, rows_[0].tokens[kTiers - 1]};
  }

 private:
  // Text of a row beside its opening: names 230 bytes, eight integers of 20, two reals of 24, a state.
  static constexpr size_t kRowBytesMax = 512;

  struct Reach {
    const AnswerSource* said;
    std::array<uint64_t, kTiers + 1> tokens;  // tiers 0..t, then speculative
    std::array<uint64_t, kTiers + 1> order;   // what rows are ranked by, most first
    uint32_t source;
  };

  // By name and rank, which settles ties: made anew when a source came, not for every answer.
  void order_sources() {
    std::vector<AnswerSource*> all;
    for (auto& [source, said] : sources_) all.push_back(&said);
    std::sort(all.begin(), all.end(), [](const AnswerSource* one, const AnswerSource* other) {
      return std::tie(one->name, one->dp_rank) < std::tie(other->name, other->dp_rank);
    });
    for (size_t i = 0; i < all.size(); ++i) all[i]->place = static_cast<uint32_t>(i);
    in_order_ = true;
  }

  // Rows of one source in several contexts become one.
  void merge() {
    std::sort(rows_.begin(), rows_.end(),
              [](const Reach& one, const Reach& other) { return one.source < other.source; });
    size_t kept = 0;
    for (const Reach& row : rows_) {
      if (kept != 0 && rows_[kept - 1].source == row.source) {
        for (size_t level = 0; level < row.tokens.size(); ++level)
          rows_[kept - 1].tokens[level] = std::max(rows_[kept - 1].tokens[level], row.tokens[level]);
      } else {
        rows_[kept++] = row;
      }
    }
    rows_.resize(kept);
  }

  // Most tokens first, then most announced, then most on the fastest tiers, then by name and rank.
  void rank(uint64_t unit) {
    for (Reach& row : rows_) {
      const auto& t = row.tokens;
      row.order = {t[3], t[4] / unit, t[0] / unit, t[1] / unit, t[2] / unit};
    }
    std::sort(rows_.begin(), rows_.end(), [](const Reach& one, const Reach& other) {
      return one.order != other.order ? one.order > other.order : one.said->place < other.said->place;
    });
  }

  static char* put_text(char* to, std::string_view text) {
    std::memcpy(to, text.data(), text.size());
    return to + text.size();
  }

  static char* put_number(char* to, uint64_t value) { return std::to_chars(to, to + 20, value).ptr; }

  // Always with a point or an exponent: a reader must not take it for an integer.
  static char* put_real(char* to, double value) {
    char* const end = std::to_chars(to, to + 32, value).ptr;
    for (const char* at = to; at != end; ++at)
      if (*at == '.' || *at == 'e') return end;
    return put_text(end, ".0");
  }

  static char* put_depths(char* to, const Reach& row, uint64_t unit, uint64_t tokens) {
    const uint64_t matched_tokens = row.tokens[kTiers - 1];
    const uint64_t matched_blocks = matched_tokens / unit;
    const uint64_t blocks = tokens / unit;
    const uint64_t own = row.said->block_size != 0 ? row.said->block_size : unit;
    const uint64_t usable = tokens == 0 ? 0 : (tokens - 1) / own;
    const double percent =
        blocks == 0 ? 0.0 : static_cast<double>(100 * matched_blocks) / static_cast<double>(blocks);
    to = put_number(put_text(to, "\"matched_blocks\":"), matched_blocks);
    to = put_number(put_text(to, ",\"matched_tokens\":"), matched_tokens);
    to = put_number(put_text(to, ",\"reusable_tokens\":"), own * std::min(matched_tokens / own, usable));
    to = put_real(put_text(to, ",\"percent\":"), percent);
    to = put_number(put_text(to, ",\"tiers\":{\"gpu\":"), row.tokens[0] / unit);
    to = put_number(put_text(to, ",\"cpu\":"), row.tokens[1] / unit);
    to = put_number(put_text(to, ",\"disk\":"), row.tokens[2] / unit);
    to = put_number(put_text(to, ",\"external\":"), row.tokens[3] / unit);
    return put_number(put_text(to, "},\"speculative_blocks\":"), row.tokens[kTiers] / unit);
  }

  std::unordered_map<uint32_t, AnswerSource> sources_;
  bool in_order_ = true;
  std::vector<Reach> rows_;
  size_t contexts_ = 0;
  size_t same_at_ = 0;
};

}  // namespace kvindexer
