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
};

class AnswerBook {
 public:
  struct Deepest {
    uint64_t blocks = 0;
    uint64_t tokens = 0;
  };

  void put(uint32_t source, AnswerSource said) { sources_[source] = std::move(said); }
  void drop(uint32_t source) { sources_.erase(source); }

  void begin() { ranked_.clear(); }

  // A row of a context of `block_size` tokens a block. False when the source is not in the book.
  bool add(const Row& row, uint32_t block_size) {
    const auto found = sources_.find(row.source);
    if (found == sources_.end()) return false;
    Reach reach{row.source, &found->second, {}};
    for (size_t i = 0; i < reach.tokens.size(); ++i) reach.tokens[i] = uint64_t{row.depths[i]} * block_size;
    ranked_.push_back(reach);
    return true;
  }

  // Appends the rows that were added since `begin`, best first, separated by commas.
  Deepest render(uint32_t unit, uint64_t tokens, double now_s, std::string& out) {
    merge();
    std::sort(ranked_.begin(), ranked_.end(), [unit](const Reach& one, const Reach& other) {
      return order_of(one, unit) < order_of(other, unit);
    });
    for (size_t i = 0; i < ranked_.size(); ++i) {
      if (i != 0) out += ',';
      render_row(ranked_[i], unit, tokens, now_s, out);
    }
    if (ranked_.empty()) return {};
    return {ranked_[0].tokens[kTiers - 1] / unit, ranked_[0].tokens[kTiers - 1]};
  }

 private:
  struct Reach {
    uint32_t source;
    const AnswerSource* said;
    std::array<uint64_t, kTiers + 1> tokens;  // tiers 0..t, then speculative
  };

  // Most tokens first, then most announced, then most on the fastest tiers, then by name and rank.
  using Order =
      std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, std::string_view, uint32_t>;

  static Order order_of(const Reach& reach, uint64_t unit) {
    const auto& t = reach.tokens;
    return {~t[3],          ~(t[4] / unit), ~(t[0] / unit),   ~(t[1] / unit),
            ~(t[2] / unit), ~(t[3] / unit), reach.said->name, reach.said->dp_rank};
  }

  // Rows of one source in several contexts become one.
  void merge() {
    std::sort(ranked_.begin(), ranked_.end(),
              [](const Reach& one, const Reach& other) { return one.source < other.source; });
    size_t kept = 0;
    for (size_t i = 0; i < ranked_.size(); ++i) {
      if (kept != 0 && ranked_[kept - 1].source == ranked_[i].source) {
        for (size_t level = 0; level < ranked_[i].tokens.size(); ++level)
          ranked_[kept - 1].tokens[level] =
              std::max(ranked_[kept - 1].tokens[level], ranked_[i].tokens[level]);
      } else {
        ranked_[kept++] = ranked_[i];
      }
    }
    ranked_.resize(kept);
  }

  static void append(std::string& out, std::string_view name, uint64_t value) {
    out += name;
    std::array<char, 20> digits;
    const auto written = std::to_chars(digits.data(), digits.data() + digits.size(), value);
    out.append(digits.data(), written.ptr);
  }

  // Always with a point or an exponent: a reader must not take it for an integer.
  static void append(std::string& out, std::string_view name, double value) {
    out += name;
    std::array<char, 32> digits;
    const auto written = std::to_chars(digits.data(), digits.data() + digits.size(), value);
    const std::string_view text(digits.data(), static_cast<size_t>(written.ptr - digits.data()));
    out += text;
    if (text.find_first_of(".e") == std::string_view::npos) out += ".0";
  }

  static void render_row(const Reach& reach, uint64_t unit, uint64_t tokens, double now_s, std::string& out) {
    const AnswerSource& said = *reach.said;
    const uint64_t matched_tokens = reach.tokens[kTiers - 1];
    const uint64_t matched_blocks = matched_tokens / unit;
    const uint64_t blocks = tokens / unit;
    const uint64_t own = said.block_size != 0 ? said.block_size : unit;
    const uint64_t usable = tokens == 0 ? 0 : (tokens - 1) / own;
    out += said.opening;
    append(out, "\"matched_blocks\":", matched_blocks);
    append(out, ",\"matched_tokens\":", matched_tokens);
    append(out, ",\"reusable_tokens\":", own * std::min(matched_tokens / own, usable));
    append(out, ",\"percent\":",
           blocks == 0 ? 0.0 : static_cast<double>(100 * matched_blocks) / static_cast<double>(blocks));
    append(out, ",\"tiers\":{\"gpu\":", reach.tokens[0] / unit);
    append(out, ",\"cpu\":", reach.tokens[1] / unit);
    append(out, ",\"disk\":", reach.tokens[2] / unit);
    append(out, ",\"external\":", reach.tokens[3] / unit);
    append(out, "},\"speculative_blocks\":", reach.tokens[kTiers] / unit);
    out += ",\"state\":\"";
    out += said.state;
    if (std::isnan(said.heard_at_s))
      out += "\",\"last_event_age_s\":null";
    else
      append(out, "\",\"last_event_age_s\":", now_s - said.heard_at_s);
    out += ",\"hints\":null}";
  }

  std::unordered_map<uint32_t, AnswerSource> sources_;
  std::vector<Reach> ranked_;
};

}  // namespace kvindexer
