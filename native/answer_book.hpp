// Match answers as JSON text, straight from the rows of the index.
//
// An object for each row costs more than the match itself: 64 rows as Python values and their encoding take
// some 100 us, as text from here 2. So what an answer says of a source beside its depths is kept here,
// already quoted, and kept true by the registry; a row is then a few numbers between pieces of text.
//
// The rules are those of app/service/scoring.py, in the same order: depths of contexts of several block sizes
// are merged in tokens, tier by tier; the best comes first; ties go by name and rank; ages are whole
// milliseconds. The tests hold both together.
//
// Sources lie in the order of names and ranks, which is the order of rows that reach as far as each other, as
// most rows of an answer do. So rows are not sorted: they are marked in a bitmap by place, and dealt out to
// the few groups that differ. The text of a group's depths is made once and copied.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
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
    const auto [found, is_new] = sources_.try_emplace(source);
    AnswerSource& known = found->second;
    const bool stays = in_order_ && !is_new && known.name == said.name && known.dp_rank == said.dp_rank;
    said.place = known.place;
    known = std::move(said);
    in_order_ = false;  // should there be no memory for its line, all are made anew
    if (stays) lines_[known.place] = line_of(known);
    in_order_ = stays;
  }

  // What changes with every batch. False when the source is not in the book.
  bool hear(uint32_t source, double heard_at_s) {
    const auto found = sources_.find(source);
    if (found == sources_.end()) return false;
    found->second.heard_at_s = heard_at_s;
    if (in_order_) lines_[found->second.place].heard_at_s = heard_at_s;
    return true;
  }

  void drop(uint32_t source) {
    sources_.erase(source);
    in_order_ = false;
  }

  void begin() {
    rows_.clear();
    contexts_ = 0;
    if (!in_order_) order_sources();
  }

  void begin_context() { ++contexts_; }

  // A row of a context of `block_size` tokens a block. False when the source is not in the book.
  bool add(const Row& row, uint32_t block_size) {
    const uint32_t place = place_of(row.source);
    if (place == kNowhere) return false;
    Reach& reach = rows_.emplace_back();
    reach.place = place;
    for (size_t i = 0; i < reach.tokens.size(); ++i) reach.tokens[i] = uint64_t{row.depths[i]} * block_size;
    return true;
  }

  // `head`, the rows that were added since `begin`, best first and separated by commas, and `tail`, into what
  // `room(bytes)` gives, which is more than enough; returns the end of it. `unit` is in tokens.
  template <class Room>
  char* render(std::string_view head, std::string_view tail, uint64_t unit, uint64_t tokens, double now_s,
               Deepest& deepest, Room room) {
    deepest = {};
    if (contexts_ > 1) merge();
    if (!deal(unit)) sort(unit);
    char* to = room(head.size() + tail.size() + (rows_.size() + 1) * (opening_bytes_max_ + kRowBytesMax));
    to = put_text(to, head);
    const Reach* before = nullptr;
    std::string_view same;  // of the row before: everything between its opening and its age
    for (const uint32_t number : ranked_) {
      const Reach& row = rows_[number];
      const Line& line = lines_[row.place];
      if (before != nullptr) *to++ = ',';
      to = put_opening(to, line);
      const Line& above = lines_[before == nullptr ? row.place : before->place];
      if (before != nullptr && are_same(before->tokens, row.tokens) && above.block_size == line.block_size &&
          above.state == line.state) {
        to = put_text(to, same);
      } else {
        char* const from = to;
        to = put_depths(to, row, line.block_size, unit, tokens);
        to = put_text(put_text(put_text(to, ",\"state\":\""), states_[line.state]),
                      "\",\"last_event_age_s\":");
        same = std::string_view(from, static_cast<size_t>(to - from));
      }
      to = std::isnan(line.heard_at_s) ? put_text(to, "null") : put_age(to, now_s - line.heard_at_s);
      to = put_text(to, ",\"hints\":null}");
      before = &row;
    }
    to = put_text(to, tail);
    if (!rows_.empty()) {
      const Reach& best = rows_[ranked_[0]];
      deepest = {best.tokens[kTiers - 1] / unit, best.tokens[kTiers - 1]};
    }
    return to;
  }

 private:
  // Text of a row beside its opening: names 230 bytes, eight integers of 20, two reals of 24, a state.
  static constexpr size_t kRowBytesMax = 512;
  static constexpr size_t kGroupsMax = 16;
  static constexpr uint32_t kNowhere = UINT32_MAX;

  using Depths = std::array<uint64_t, kTiers + 1>;  // tiers 0..t, then speculative

  struct Reach {
    uint32_t place;
    uint32_t group;
    Depths tokens;
  };

  // What a row says of its source: an answer reads the lines of all its sources, one after the other, so a
  // line is short. Longer openings are in `sources_`.
  struct Line {
    static constexpr size_t kInside = 64;

    double heard_at_s;
    uint32_t block_size;
    uint16_t state;  // in `states_`
    uint16_t opening_bytes;
    std::array<char, kInside> opening;
    const AnswerSource* said;
  };

  Line line_of(const AnswerSource& said) {
    auto state = std::find(states_.begin(), states_.end(), said.state);
    if (state == states_.end()) state = states_.insert(state, said.state);
    Line line{said.heard_at_s,
              said.block_size,
              static_cast<uint16_t>(state - states_.begin()),
              static_cast<uint16_t>(std::min<size_t>(said.opening.size(), UINT16_MAX)),
              {},
              &said};
    std::memcpy(line.opening.data(), said.opening.data(), std::min(said.opening.size(), Line::kInside));
    opening_bytes_max_ = std::max(opening_bytes_max_, said.opening.size());
    return line;
  }

  static char* put_opening(char* to, const Line& line) {
    if (line.opening_bytes > Line::kInside) return put_text(to, line.said->opening);
    std::memcpy(to, line.opening.data(), Line::kInside);  // all of it: what is too much is written over
    return to + line.opening_bytes;
  }

  // A loop over so few is faster than a call of memcmp.
  static bool are_same(const Depths& one, const Depths& other) {
    uint64_t differ = 0;
    for (size_t i = 0; i < one.size(); ++i) differ |= one[i] ^ other[i];
    return differ == 0;
  }

  // By name and rank, which settles ties: made anew when a source came or went, not for every answer.
  void order_sources() {
    std::vector<std::pair<AnswerSource*, uint32_t>> all;
    for (auto& [source, said] : sources_) all.emplace_back(&said, source);
    std::sort(all.begin(), all.end(), [](const auto& one, const auto& other) {
      return std::tie(one.first->name, one.first->dp_rank) <
             std::tie(other.first->name, other.first->dp_rank);
    });
    lines_.clear();
    opening_bytes_max_ = Line::kInside;
    places_.assign(std::bit_ceil(2 * all.size() + 1), {0, kNowhere});
    for (const auto& [said, source] : all) {
      said->place = static_cast<uint32_t>(lines_.size());
      lines_.push_back(line_of(*said));
      size_t at = source;
      while (places_[at & (places_.size() - 1)].second != kNowhere) ++at;
      places_[at & (places_.size() - 1)] = {source, said->place};
    }
    marked_.assign(lines_.size() / 64 + 1, 0);
    row_at_.resize(lines_.size());
    in_order_ = true;
  }

  // Sources are numbered one after the other, so nearly each is where it is looked for first.
  uint32_t place_of(uint32_t source) const {
    for (size_t at = source;; ++at) {
      const auto& [known, place] = places_[at & (places_.size() - 1)];
      if (place == kNowhere || known == source) return place;
    }
  }

  // Rows of one source in several contexts become one.
  void merge() {
    std::sort(rows_.begin(), rows_.end(),
              [](const Reach& one, const Reach& other) { return one.place < other.place; });
    size_t kept = 0;
    for (const Reach& row : rows_) {
      if (kept != 0 && rows_[kept - 1].place == row.place) {
        for (size_t level = 0; level < row.tokens.size(); ++level)
          rows_[kept - 1].tokens[level] = std::max(rows_[kept - 1].tokens[level], row.tokens[level]);
      } else {
        rows_[kept++] = row;
      }
    }
    rows_.resize(kept);
  }

  // What rows are ranked by, most first: tokens, then announced blocks, then blocks on the fastest tiers.
  static Depths order_of(const Depths& tokens, uint64_t unit) {
    return {tokens[3], tokens[4] / unit, tokens[0] / unit, tokens[1] / unit, tokens[2] / unit};
  }

  // `ranked_` without sorting rows; false when they differ too much for it.
  bool deal(uint64_t unit) {
    size_t groups = 0;
    for (Reach& row : rows_) {
      size_t group = 0;
      while (group < groups && !are_same(groups_[group].tokens, row.tokens)) ++group;
      if (group == groups) {
        if (groups == kGroupsMax) return false;
        groups_[groups++] = {row.tokens, order_of(row.tokens, unit), 0};
      }
      row.group = static_cast<uint32_t>(group);
      ++groups_[group].rows;
    }
    if (!place_groups(groups)) return false;
    ranked_.resize(rows_.size());
    for (uint32_t i = 0; i < rows_.size(); ++i) {  // from here on nothing fails: no mark stays
      marked_[rows_[i].place / 64] |= uint64_t{1} << (rows_[i].place % 64);
      row_at_[rows_[i].place] = i;
    }
    for (size_t word = 0; word < marked_.size(); ++word) {
      for (uint64_t bits = marked_[word]; bits != 0; bits &= bits - 1) {
        const uint32_t row = row_at_[word * 64 + static_cast<size_t>(std::countr_zero(bits))];
        ranked_[groups_[rows_[row].group].rows++] = row;
      }
      marked_[word] = 0;
    }
    return true;
  }

  // `rows` of each group becomes the rank of its first row; false where two groups rank as equals, and their
  // rows go by name together.
  bool place_groups(size_t groups) {
    std::array<uint32_t, kGroupsMax> by_rank;
    for (uint32_t i = 0; i < groups; ++i) by_rank[i] = i;
    std::sort(by_rank.begin(), by_rank.begin() + groups,
              [&](uint32_t one, uint32_t other) { return groups_[one].order > groups_[other].order; });
    size_t first = 0;
    for (size_t i = 0; i < groups; ++i) {
      Group& group = groups_[by_rank[i]];
      if (i > 0 && groups_[by_rank[i - 1]].order == group.order) return false;
      first += std::exchange(group.rows, first);
    }
    return true;
  }

  void sort(uint64_t unit) {
    std::vector<Depths> orders;
    ranked_.clear();
    for (const Reach& row : rows_) {
      ranked_.push_back(static_cast<uint32_t>(ranked_.size()));
      orders.push_back(order_of(row.tokens, unit));
    }
    std::sort(ranked_.begin(), ranked_.end(), [&](uint32_t one, uint32_t other) {
      return orders[one] != orders[other] ? orders[one] > orders[other]
                                          : rows_[one].place < rows_[other].place;
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

  // In whole milliseconds, which as digits cost an eighth of a real's.
  static char* put_age(char* to, double age_s) {
    const double age_ms = age_s * 1000 + 0.5;
    if (!(age_ms >= 0 && age_ms < 1e15)) return put_real(to, std::floor(age_ms) / 1000);
    const auto whole = static_cast<uint64_t>(age_ms);
    to = put_number(to, whole / 1000);
    const auto part = static_cast<uint32_t>(whole % 1000);
    *to++ = '.';
    *to++ = static_cast<char>('0' + part / 100);
    if (part % 100 != 0) *to++ = static_cast<char>('0' + part / 10 % 10);
    if (part % 10 != 0) *to++ = static_cast<char>('0' + part % 10);
    return to;
  }

  static char* put_depths(char* to, const Reach& row, uint32_t block_size, uint64_t unit, uint64_t tokens) {
    const uint64_t matched_tokens = row.tokens[kTiers - 1];
    const uint64_t matched_blocks = matched_tokens / unit;
    const uint64_t blocks = tokens / unit;
    const uint64_t own = block_size != 0 ? block_size : unit;
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

  struct Group {  // of rows that reach as far as each other on every tier
    Depths tokens;
    Depths order;
    size_t rows;
  };

  std::unordered_map<uint32_t, AnswerSource> sources_;
  bool in_order_ = false;  // what follows is of `sources_` as they are
  std::vector<std::string> states_;
  std::vector<Line> lines_;                            // by place
  size_t opening_bytes_max_ = 0;                       // of a line: what is written for one at the most
  std::vector<std::pair<uint32_t, uint32_t>> places_;  // of sources, by the source's number
  std::vector<uint64_t> marked_;                       // a bit a place; all 0 between two answers
  std::vector<uint32_t> row_at_;                       // by place, where it is marked
  std::vector<Reach> rows_;
  std::vector<uint32_t> ranked_;  // rows, best first
  std::array<Group, kGroupsMax> groups_;
  size_t contexts_ = 0;
};

}  // namespace kvindexer
