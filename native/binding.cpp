// The only file that knows Python: every function takes and returns buffers or numbers, never Python
// containers of single blocks. Lengths and ranges are checked by the Python front
// (app/index/prefix_index.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "answer_book.hpp"
#include "event_payload.hpp"
#include "flight_book.hpp"
#include "fuzzy_index.hpp"
#include "head_book.hpp"
#include "id_table.hpp"
#include "json_cut.hpp"
#include "linear_scan.hpp"
#include "plain_batch.hpp"
#include "prefix_index.hpp"
#include "request_head.hpp"
#include "wire.hpp"
#include "xxh64.hpp"

#ifdef KVINDEXER_ENDING_MEMORY
#include "ending_memory.hpp"
#endif

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvindexer;

namespace {

const uint8_t* data_of(const nb::bytes& buffer) { return static_cast<const uint8_t*>(buffer.data()); }

// A copy of a bytes object as uint64: bytes objects promise no alignment.
std::vector<uint64_t> words_of(const nb::bytes& buffer) {
  std::vector<uint64_t> words(buffer.size() / 8);
  if (!words.empty()) std::memcpy(words.data(), buffer.data(), words.size() * 8);
  return words;
}

ExtraKeys extra_of(const std::optional<nb::tuple>& keys) {
  ExtraKeys extra;
  if (!keys) return extra;
  for (const nb::handle item : *keys) {
    const nb::bytes key = nb::cast<nb::bytes>(item);
    extra.bytes.insert(extra.bytes.end(), data_of(key), data_of(key) + key.size());
    extra.ends.push_back(static_cast<uint32_t>(extra.bytes.size()));
  }
  return extra;
}

// Copies of a bytes object as contents: SimHash and content hash of each block.
std::vector<Content> contents_of(const nb::bytes& buffer) {
  static_assert(sizeof(Content) == 16);
  std::vector<Content> contents(buffer.size() / sizeof(Content));
  if (!contents.empty()) std::memcpy(contents.data(), buffer.data(), contents.size() * sizeof(Content));
  return contents;
}

// Prefix hashes of all blocks; contents of the leading ones without extra keys, none where `shingle` is 0.
nb::tuple hash_blocks(uint64_t chain_from, size_t block_size, const nb::bytes& tokens,
                      const std::optional<nb::tuple>& keys, size_t shingle) {
  const ExtraKeys extra = extra_of(keys);
  const size_t blocks = tokens.size() / 4 / block_size;
  HashChain chain(chain_from, data_of(tokens), block_size * 4, keys ? &extra : nullptr);
  std::vector<uint64_t> prefixes(blocks);
  for (uint64_t& prefix : prefixes) prefix = chain.next();
  size_t plain = 0;
  while (shingle != 0 && plain < blocks && extra.of(plain).empty()) ++plain;
  std::vector<Content> contents(plain);
  content_hashes(data_of(tokens), plain, block_size, shingle, contents.data());
  return nb::make_tuple(nb::bytes(prefixes.data(), prefixes.size() * 8),
                        nb::bytes(contents.data(), contents.size() * sizeof(Content)));
}

nb::bytes bytes_of(std::span<const Row> rows) {
  static_assert(sizeof(Row) == 24);
  return nb::bytes(rows.data(), rows.size_bytes());
}

nb::bytes bytes_of(const std::vector<uint64_t>& words) { return nb::bytes(words.data(), words.size() * 8); }

template <class Hashes>
nb::bytes hashes_of(Hashes chain, size_t blocks) {
  std::vector<uint64_t> hashes(blocks);
  for (uint64_t& hash : hashes) hash = chain.next();
  return nb::bytes(hashes.data(), hashes.size() * 8);
}

nb::bytes bytes_of_holdings(const std::vector<Holding>& holdings) {
  static_assert(sizeof(Holding) == 12);
  return nb::bytes(holdings.data(), holdings.size() * sizeof(Holding));
}

void bind_index(nb::module_& m) {
  m.def(
      "xxh64", [](const nb::bytes& data, uint64_t seed) { return xxh64(data_of(data), data.size(), seed); },
      "data"_a, "seed"_a = 0);
  m.def(
      "prefix_hashes",
      [](uint64_t seed, size_t block_size, const nb::bytes& tokens, const std::optional<nb::tuple>& extra) {
        const ExtraKeys keys = extra_of(extra);
        return hashes_of(HashChain(seed, data_of(tokens), block_size * 4, extra ? &keys : nullptr),
                         tokens.size() / 4 / block_size);
      },
      "seed"_a, "block_size"_a, "token_ids"_a, "extra_keys"_a.none());

  nb::class_<SlotMap>(m, "SlotMap")
      .def(nb::init<>())
      .def("import_owner", [](SlotMap& self, uint32_t old, uint32_t owner) { self.owners[old] = owner; });
  nb::class_<PrefixIndex>(m, "PrefixIndex")
      .def(
          "__init__",
          [](PrefixIndex* self, Tick ttl, size_t contexts_max, size_t prefixes_per_context_max,
             size_t prefixes_max, size_t orphan_blocks_max, size_t speculative_blocks_max, size_t claims_max,
             bool lists_all, FuzzyIndex* contents) {
            if (prefixes_max < 1 || prefixes_max > BlockPool::kRecordsMax)
              throw std::invalid_argument("prefixes_max is out of range");
            new (self) PrefixIndex(Limits{ttl, contexts_max, prefixes_per_context_max, prefixes_max,
                                          orphan_blocks_max, speculative_blocks_max, claims_max, lists_all},
                                   contents);
          },
          "ttl_ticks"_a, "contexts_max"_a, "prefixes_per_context_max"_a, "prefixes_max"_a,
          "orphan_blocks_max"_a, "speculative_blocks_max"_a, "claims_max"_a, "lists_all"_a,
          "contents"_a.none() = nb::none(), nb::keep_alive<1, 10>())
      .def("add_context", &PrefixIndex::add_context)
      .def("touch_context", &PrefixIndex::touch_context)
      .def("context_size", &PrefixIndex::context_size)
      .def("add_source", &PrefixIndex::add_source)
      .def("has_source", &PrefixIndex::has_source)
      .def("drop_source", &PrefixIndex::drop_source)
      .def("store",
           [](PrefixIndex& self, uint32_t source, uint32_t context, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, std::optional<uint64_t> parent, const nb::bytes& tokens,
              const std::optional<nb::tuple>& extra, Tick now, bool count_copies, uint32_t owner) {
             const std::vector<uint64_t> names = words_of(engine_hashes);
             const ExtraKeys keys = extra_of(extra);
             const uint8_t* const data = data_of(tokens);
             const Stored stored = self.store({source, tier, group}, context, names, parent, data, keys, now,
                                              count_copies, owner);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("place",
           [](PrefixIndex& self, uint32_t source, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, Tick now, bool count_copies, uint32_t owner) {
             const Stored stored =
                 self.place({source, tier, group}, words_of(engine_hashes), now, count_copies, owner);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("store_prefixes",
           [](PrefixIndex& self, uint32_t source, uint32_t context, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, const nb::bytes& prefixes, const nb::bytes& copies, Tick now,
              bool count_copies, uint32_t owner) {
             const Stored stored =
                 self.store_prefixes({source, tier, group}, context, words_of(engine_hashes),
                                     words_of(prefixes), words_of(copies), now, count_copies, owner);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("store_hashed",
           [](PrefixIndex& self, uint32_t source, uint32_t context, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, std::optional<uint64_t> chain_from, const nb::bytes& prefixes,
              const nb::bytes& contents, Tick now, bool count_copies, uint32_t owner) {
             const Stored stored =
                 self.store_hashed({source, tier, group}, context, words_of(engine_hashes), chain_from,
                                   words_of(prefixes), contents_of(contents), now, count_copies, owner);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("chain_of", [](PrefixIndex& self, uint32_t source, uint32_t context, uint32_t tier, uint32_t group,
                          uint64_t parent,
                          Tick now) { return self.chain_of({source, tier, group}, context, parent, now); })
      .def("remove",
           [](PrefixIndex& self, uint32_t source, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, Tick now) {
             const Removed removed = self.remove({source, tier, group}, words_of(engine_hashes), now);
             return std::tuple(removed.removed, removed.unknown);
           })
      .def("clear", &PrefixIndex::clear, "source"_a, "tier"_a.none(), "context"_a.none())
      .def("match_tokens",
           [](PrefixIndex& self, uint32_t context, const nb::bytes& tokens,
              const std::optional<nb::tuple>& extra, Tick now) {
             const ExtraKeys keys = extra_of(extra);
             return bytes_of(self.match_tokens(context, data_of(tokens),
                                               tokens.size() / self.block_bytes(context),
                                               extra ? &keys : nullptr, now));
           })
      .def("match_hashes",
           [](PrefixIndex& self, uint32_t context, const nb::bytes& hashes, Tick now) {
             return bytes_of(self.match_hashes(context, HashList(data_of(hashes)), hashes.size() / 8, now));
           })
      .def("add_speculative",
           [](PrefixIndex& self, uint32_t context, uint32_t source, const nb::bytes& hashes, Tick ttl,
              Tick now) {
             return self.add_speculative(context, source, HashList(data_of(hashes)), hashes.size() / 8, ttl,
                                         now);
           })
      .def("holders",
           [](PrefixIndex& self, uint32_t context, uint64_t prefix, Tick now) {
             std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> holders;
             for (const Place& holder : self.holders(context, prefix, now))
               holders.emplace_back(holder.source, holder.tier, holder.group);
             return holders;
           })
      .def("holdings",
           [](PrefixIndex& self, uint32_t context, const nb::bytes& prefixes, Tick now) {
             return bytes_of_holdings(self.holdings(context, words_of(prefixes), now));
           })
      .def("owners_at",
           [](PrefixIndex& self, uint32_t context, uint32_t source, uint32_t tier, uint32_t group,
              const nb::bytes& prefixes) {
             return self.owners_at(context, {source, tier, group}, words_of(prefixes));
           })
      .def("add_owner", &PrefixIndex::add_owner)
      .def("clear_owner", &PrefixIndex::clear_owner)
      .def("owner_claims", &PrefixIndex::owner_claims)
      .def("unclaimed_owners", &PrefixIndex::unclaimed_owners)
      .def("prefix_of",
           [](PrefixIndex& self, uint32_t context, uint32_t source, uint32_t tier, uint32_t group,
              uint64_t engine_hash,
              Tick now) { return self.prefix_of(context, {source, tier, group}, engine_hash, now); })
      .def("names",
           [](PrefixIndex& self, uint64_t at, bool in_others, size_t names_max, Tick now) {
             std::vector<NameRun> runs;
             NameCursor cursor{at, in_others};
             const bool done = self.names(cursor, names_max, now, runs);
             nb::list found;
             for (const NameRun& run : runs)
               found.append(nb::make_tuple(run.place.source, run.context, run.place.tier, run.place.group,
                                           bytes_of(run.engine_hashes), bytes_of(run.prefixes),
                                           bytes_of(run.copies)));
             return nb::make_tuple(found, done, cursor.at, cursor.in_others);
           })
      .def("blocks_by_tier",
           [](const PrefixIndex& self, uint32_t source) {
             const auto blocks = self.blocks_by_tier(source);
             return std::tuple(blocks[0], blocks[1], blocks[2], blocks[3]);
           })
      .def("slots",
           [](const PrefixIndex& self) {
             std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t>>
                 rows;
             for (const SlotRow& row : self.slots())
               rows.emplace_back(row.context, row.slot, row.source, row.tier, row.group, row.blocks,
                                 row.digest);
             return rows;
           })
      .def("export_begin", &PrefixIndex::export_begin)
      .def("export_end", &PrefixIndex::export_end)
      .def("export_names",
           [](PrefixIndex& self, size_t names_max) {
             bool done = false;
             const std::vector<uint8_t> frame = self.export_names(names_max, done);
             return nb::make_tuple(nb::bytes(frame.data(), frame.size()), done);
           })
      .def("export_changes",
           [](PrefixIndex& self, size_t keys_max) {
             size_t keys_left = 0;
             const std::vector<uint8_t> frame = self.export_changes(keys_max, keys_left);
             return nb::make_tuple(nb::bytes(frame.data(), frame.size()), keys_left);
           })
      .def("export_contents",
           [](PrefixIndex& self, size_t rows_max) {
             bool done = false;
             const std::vector<uint8_t> frame = self.export_contents(rows_max, done);
             return nb::make_tuple(nb::bytes(frame.data(), frame.size()), done);
           })
      .def("export_claims",
           [](PrefixIndex& self, size_t claims_max) {
             bool done = false;
             const std::vector<uint8_t> frame = self.export_claims(claims_max, done);
             return nb::make_tuple(nb::bytes(frame.data(), frame.size()), done);
           })
      .def("has_whole_contents", &PrefixIndex::has_whole_contents)
      .def("import_settle", &PrefixIndex::import_settle)
      .def("import_slot",
           [](PrefixIndex& self, SlotMap& slots, uint32_t old_context, uint32_t old_slot, uint32_t context,
              uint32_t source, uint32_t tier, uint32_t group) {
             slots.contexts[old_context] = context;
             slots.slots[{old_context, old_slot}] = self.import_slot(context, {source, tier, group});
           })
      .def("import_expect", &PrefixIndex::import_expect)
      .def("import_expect_names", &PrefixIndex::import_expect_names)
      .def("import_frame",
           [](PrefixIndex& self, const nb::bytes& frame, const SlotMap& slots, Tick saved_at, Tick elapsed,
              Tick now, bool takes_contents) {
             return self.import_frame({data_of(frame), frame.size()}, slots, {saved_at, elapsed, now},
                                      takes_contents);
           })
      .def("orphan_blocks", &PrefixIndex::orphan_blocks)
      .def("orphan_drops", &PrefixIndex::orphan_drops)
      .def("list_all", &PrefixIndex::list_all)
      .def("sweep",
           [](PrefixIndex& self, Tick now, size_t visits_max) {
             const Swept swept = self.sweep(now, visits_max);
             return std::tuple(swept.visited, swept.expired, swept.pass_done);
           })
      .def("statistics", [](const PrefixIndex& self) {
        const Statistics now = self.statistics();
        return std::tuple(now.contexts, now.prefixes, now.holder_sets, now.engine_keys, now.copies,
                          now.orphan_blocks, now.speculative_blocks, now.bytes, now.expired, now.evicted,
                          now.evicted_in_all, now.contexts_evicted, now.orphans_dropped, now.orphans_expired,
                          now.speculative_refused, now.claims, now.claims_refused);
      });
}

// -- what is under way to the log

void bind_flight(nb::module_& m) {
  m.def("hash_blocks", &hash_blocks, "chain_from"_a, "block_size"_a, "token_ids"_a, "extra_keys"_a.none(),
        "shingle"_a);
  nb::class_<FlightBook>(m, "FlightBook")
      .def(nb::init<>())
      .def("is_empty", &FlightBook::is_empty)
      .def("blocks", &FlightBook::blocks)
      .def("meaning",
           [](const FlightBook& self, uint64_t seed, uint32_t tier, uint32_t group, uint64_t engine_hash) {
             const auto [meaning, prefix] = self.meaning(seed, tier, group, engine_hash);
             return std::pair(static_cast<int>(meaning), prefix);
           })
      .def("store",
           [](FlightBook& self, uint64_t number, uint64_t seed, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, const nb::bytes& prefixes) {
             self.store(number, seed, tier, group, words_of(engine_hashes), words_of(prefixes));
           })
      .def("touch", [](FlightBook& self, uint64_t number,
                       const nb::bytes& engine_hashes) { self.touch(number, words_of(engine_hashes)); })
      .def("clear", &FlightBook::clear)
      .def("land", &FlightBook::land);
}

// -- answers

std::string_view text_of(const nb::bytes& buffer) { return {buffer.c_str(), buffer.size()}; }

// What nanobind makes of an argument must not fail: it would end the process.
std::string string_of(const nb::str& text) {
  Py_ssize_t size = 0;
  const char* const first = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (first == nullptr) throw nb::python_error();
  return {first, static_cast<size_t>(size)};
}

nb::object bytes_of_text(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// Opens an answer with `head`, closes it with `tail`, and says how deep the best row is (blocks, tokens).
nb::tuple finish_answer(AnswerBook& book, const nb::bytes& head, const nb::bytes& tail, uint32_t unit,
                        uint64_t tokens, double now_s) {
  AnswerBook::Deepest deepest;
  nb::object answer;
  const auto room = [&answer](size_t bytes) {
    answer = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
    if (!answer) throw nb::python_error();
    return PyBytes_AS_STRING(answer.ptr());
  };
  const char* const end = book.render(text_of(head), text_of(tail), unit, tokens, now_s, deepest, room);
  PyObject* text = answer.release().ptr();
  if (_PyBytes_Resize(&text, end - PyBytes_AS_STRING(text)) != 0) throw nb::python_error();
  return nb::make_tuple(nb::steal(text), deepest.blocks, deepest.tokens);
}

void add_row(AnswerBook& book, const Row& row, uint32_t block_size, const std::optional<nb::set>& ids) {
  if (ids && !ids->contains(nb::int_(row.source))) return;
  if (!book.add(row, block_size)) throw std::out_of_range("a row of a source that is not in the book");
}

// `answers` are (block size, rows of a match); `ids`, a set of sources, leaves out the rows of all others.
nb::tuple render_answer(AnswerBook& self, const nb::bytes& head, const nb::bytes& tail,
                        const nb::list& answers, uint32_t unit, uint64_t tokens, double now_s,
                        const std::optional<nb::set>& ids) {
  self.begin();
  for (const nb::handle answer : answers) {
    const auto [block_size, packed] = nb::cast<std::pair<uint32_t, nb::bytes>>(answer);
    self.begin_context();
    for (size_t at = 0; at + sizeof(Row) <= packed.size(); at += sizeof(Row)) {
      Row row;
      std::memcpy(&row, data_of(packed) + at, sizeof(Row));
      add_row(self, row, block_size, ids);
    }
  }
  return finish_answer(self, head, tail, unit, tokens, now_s);
}

// The same from one context, of which `unit` is the block size, without rows in between.
nb::tuple answer_match(AnswerBook& self, PrefixIndex& index, uint32_t context, const nb::bytes& asked,
                       bool are_hashes, const std::optional<nb::tuple>& extra, Tick now,
                       const nb::bytes& head, const nb::bytes& tail, uint32_t unit, uint64_t tokens,
                       double now_s, const std::optional<nb::set>& ids) {
  std::span<const Row> rows;
  if (are_hashes) {
    rows = index.match_hashes(context, HashList(data_of(asked)), asked.size() / 8, now);
  } else {
    const ExtraKeys keys = extra_of(extra);
    rows = index.match_tokens(context, data_of(asked), asked.size() / index.block_bytes(context),
                              extra ? &keys : nullptr, now);
  }
  self.begin();
  self.begin_context();
  for (const Row& row : rows) add_row(self, row, unit, ids);
  return finish_answer(self, head, tail, unit, tokens, now_s);
}

void bind_answers(nb::module_& m) {
  nb::class_<AnswerBook>(m, "AnswerBook")
      .def(nb::init<>())
      .def("put",
           [](AnswerBook& self, uint32_t source, const nb::str& name, const nb::bytes& opening,
              uint32_t dp_rank, uint32_t block_size, const nb::str& state, double heard_at_s) {
             self.put(source, {string_of(name), std::string(text_of(opening)), dp_rank, block_size,
                               string_of(state), heard_at_s, 0});
           })
      .def("hear", &AnswerBook::hear)
      .def("drop", &AnswerBook::drop)
      .def("render", &render_answer, "head"_a, "tail"_a, "answers"_a, "unit"_a, "tokens"_a, "now_s"_a,
           "sources"_a.none())
      .def("match", &answer_match, "index"_a, "context"_a, "asked"_a, "are_hashes"_a, "extra_keys"_a.none(),
           "now"_a, "head"_a, "tail"_a, "unit"_a, "tokens"_a, "now_s"_a, "sources"_a.none());
}

// -- fuzzy

template <class Value>
nb::bytes bytes_of_values(const std::vector<Value>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(Value));
}

// A copy of a bytes object as uint32: bytes objects promise no alignment.
std::vector<uint32_t> halves_of(const nb::bytes& buffer) {
  std::vector<uint32_t> halves(buffer.size() / 4);
  if (!halves.empty()) std::memcpy(halves.data(), buffer.data(), halves.size() * 4);
  return halves;
}

// An IdTable alone: tests choose keys that no blocks are known for. A record's number is its place in `keys`.
template <uint32_t kFillMax, bool kDealNarrow>
struct LoneIds {
  struct KeyOf {
    const std::vector<uint64_t>* keys;
    uint64_t operator()(BlockId id) const { return (*keys)[id]; }
    void prefetch(BlockId id) const { __builtin_prefetch(&(*keys)[id]); }
  };
  std::vector<uint64_t> keys;
  IdTable<KeyOf, kFillMax, kDealNarrow> table{KeyOf{&keys}};
  LoneIds() = default;
  LoneIds(const LoneIds&) = delete;
};

template <uint32_t kFillMax, bool kDealNarrow>
void bind_id_table(nb::module_& m, const char* name) {
  using Ids = LoneIds<kFillMax, kDealNarrow>;
  nb::class_<Ids>(m, name)
      .def(nb::init<>())
      .def("reserve", [](Ids& self, size_t entries) { self.table.reserve(entries); })
      .def("insert",
           [](Ids& self, const nb::bytes& keys) {
             for (const uint64_t key : words_of(keys)) {
               self.keys.push_back(key);
               self.table.insert(key, static_cast<BlockId>(self.keys.size() - 1));
             }
           })
      .def("erase",
           [](Ids& self, const nb::bytes& numbers) {
             for (const uint32_t id : halves_of(numbers)) self.table.erase(self.keys[id], id);
           })
      .def("numbers",
           [](const Ids& self, const nb::bytes& keys) {
             std::vector<BlockId> found;
             for (const uint64_t key : words_of(keys))
               self.table.each(key, [&](BlockId id) {
                 found.push_back(id);
                 return false;
               });
             return bytes_of_values(found);
           })
      .def("all",
           [](const Ids& self) {
             std::vector<BlockId> found;
             self.table.for_each([&](BlockId id) { found.push_back(id); });
             return bytes_of_values(found);
           })
      .def("bytes", [](const Ids& self) { return self.table.bytes(); });
}

const NearScans& scans_of(size_t number) {
  return native_scans()[std::min(number, native_scans().size() - 1)];
}

// A NearTable alone: tests choose SimHashes that no tokens are known for.
struct LoneTable {
  NearTable table;
  uint64_t inserted = 0;
  LoneTable(unsigned bits, size_t scans) : table(bits, scans_of(scans)) {}
  LoneTable(const LoneTable&) = delete;
};

void bind_near_table(nb::module_& m) {
  nb::class_<LoneTable>(m, "NearTable")
      .def(nb::init<unsigned, size_t>(), "bits"_a, "scans"_a = 0)
      .def("insert",
           [](LoneTable& self, const nb::bytes& simhashes) {
             for (const uint64_t simhash : words_of(simhashes)) {
               ++self.inserted;
               self.table.insert({simhash, self.inserted, self.inserted});
             }
           })
      .def("erase",  // of those inserted, by number from 0 on; numbers of others stay
           [](LoneTable& self, uint64_t simhash, uint64_t number) {
             self.table.erase(self.table.find(simhash, number + 1).value());
           })
      .def("split",
           [](LoneTable& self, size_t buckets) {
             self.table.split(buckets);
             return std::pair(self.table.bits(), self.table.frontier());
           })
      .def(
          "search",
          [](const LoneTable& self, const nb::bytes& queries, unsigned distance_max, size_t scans) {
            std::vector<uint32_t> rows;
            self.table.search(words_of(queries), distance_max, scans_of(scans),
                              [&](uint32_t query, unsigned distance, const Record& record) {
                                rows.insert(rows.end(),
                                            {query, distance, static_cast<uint32_t>(record.prefix - 1)});
                              });
            return bytes_of_values(rows);
          },
          "queries"_a, "distance_max"_a, "scans"_a = 0);
}

void bind_fuzzy(nb::module_& m) {
  bind_near_table(m);
  static_assert(sizeof(FuzzyMatch) == 16);
  m.def(
      "simhash",
      [](const nb::bytes& tokens, size_t shingle) {
        return simhash(data_of(tokens), tokens.size() / 4, shingle);
      },
      "token_ids"_a, "shingle"_a = 1);
  m.def(
      "sliding_simhashes",
      [](const nb::bytes& tokens, size_t block_size, size_t shingle) {
        return bytes_of_values(sliding_simhashes(data_of(tokens), tokens.size() / 4, block_size, shingle));
      },
      "token_ids"_a, "block_size"_a, "shingle"_a = 1);
  m.def(
      "linear_scan",
      [](const nb::bytes& stored, const nb::bytes& queries, unsigned distance_max) {
        return bytes_of_values(linear_scan(words_of(stored), words_of(queries), distance_max));
      },
      "stored"_a, "queries"_a, "distance_max"_a);
  m.def(
      "content_hashes",
      [](const nb::bytes& tokens, size_t block_size, size_t shingle) {
        std::vector<Content> hashes(tokens.size() / 4 / block_size);
        content_hashes(data_of(tokens), hashes.size(), block_size, shingle, hashes.data());
        return bytes_of_values(hashes);
      },
      "token_ids"_a, "block_size"_a, "shingle"_a = 1);
  nb::class_<FuzzyIndex>(m, "FuzzyIndex")
      .def(nb::init<size_t, size_t>(), "shingle"_a, "scans"_a = 0)
      .def("add_context", &FuzzyIndex::add_context)
      .def("drop_context", &FuzzyIndex::drop_context)
      .def("insert",
           [](FuzzyIndex& self, uint32_t context, const nb::bytes& prefixes, const nb::bytes& tokens) {
             const std::vector<uint64_t> known = words_of(prefixes);
             self.insert(context, known, self.hashes(context, data_of(tokens), known.size()));
           })
      .def("remove", [](FuzzyIndex& self, uint32_t context,
                        const nb::bytes& prefixes) { self.remove(context, words_of(prefixes)); })
      .def("prefixes",
           [](FuzzyIndex& self, uint32_t context) { return bytes_of_values(self.prefixes(context)); })
      .def("exact",
           [](FuzzyIndex& self, uint32_t context, const nb::bytes& tokens, size_t matches_max, size_t window,
              size_t windows_max) {
             const std::vector<FuzzyMatch> found =
                 self.exact(context, data_of(tokens), tokens.size() / 4, matches_max, window, windows_max);
             return std::pair(bytes_of_values(found), window);
           })
      .def_static("select",
                  [](const nb::bytes& weights, size_t block_size) {
                    return bytes_of_values(FuzzyIndex::select(halves_of(weights), block_size));
                  })
      .def("statistics", [](const FuzzyIndex& self) {
        const FuzzyStatistics now = self.statistics();
        return std::tuple(now.contexts, now.blocks, now.chained, now.backlog, now.asleep, now.doomed,
                          now.crowded, now.bytes, now.matches_dropped);
      });
  nb::class_<NearQuery>(m, "NearQuery")
      .def(
          "__init__",
          [](NearQuery* self, FuzzyIndex& index, uint32_t context, const nb::bytes& tokens,
             const nb::bytes& offsets, unsigned distance_max, size_t matches_max) {
            new (self) NearQuery(index, context, data_of(tokens), tokens.size() / 4, halves_of(offsets),
                                 distance_max, matches_max);
          },
          "index"_a, "context"_a, "token_ids"_a, "offsets"_a, "distance_max"_a, "matches_max"_a,
          nb::keep_alive<1, 2>())
      .def("step", &NearQuery::step)
      .def("take", [](NearQuery& self, size_t matches_max) {
        bool done = false;
        const std::vector<FuzzyMatch> found = self.take(matches_max, done);
        return std::pair(bytes_of_values(found), done);
      });
}

// -- wire

PyObject* wire_error = nullptr;  // app._native.WireError, owned by the module

// A contiguous view of whatever holds bytes: bytes, bytearray, memoryview, msgspec.Raw.
class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  wire::Span span() const { return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

[[noreturn]] void raise_wire(wire::Fault fault, size_t index, bool whole) {
  const std::string place = whole ? "the value" : "element " + std::to_string(index);
  nb::object error =
      nb::steal(PyObject_CallFunction(wire_error, "s", (place + " is " + wire::fault_words(fault)).c_str()));
  if (!error.is_valid()) throw nb::python_error();
  error.attr("fault") = wire::fault_name(fault);
  error.attr("index") = index;
  PyErr_SetObject(wire_error, error.ptr());
  throw nb::python_error();
}

using Capacity = size_t (*)(wire::Span);
using Parse = wire::Parsed (*)(wire::Span, uint8_t*);

template <Capacity capacity, Parse parse, size_t kWidth>
nb::bytes parse_numbers(nb::handle data) {
  const BufferView view(data);
  const size_t room = capacity(view.span());
  PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(room * kWidth));
  if (out == nullptr) throw nb::python_error();
  const wire::Parsed parsed = parse(view.span(), reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out)));
  if (parsed.fault != wire::Fault::kNone) {
    Py_DECREF(out);
    const bool whole = parsed.fault == wire::Fault::kNotArray || parsed.fault == wire::Fault::kTrailing ||
                       (parsed.fault == wire::Fault::kTruncated && parsed.count == 0);
    raise_wire(parsed.fault, parsed.index, whole);
  }
  const Py_ssize_t size = static_cast<Py_ssize_t>(parsed.count * kWidth);
  if (PyBytes_GET_SIZE(out) != size && _PyBytes_Resize(&out, size) != 0) throw nb::python_error();
  return nb::steal<nb::bytes>(out);
}

// What is left of a JSON text, and the buffers of the arrays that were cut out of it; None where
// json_cut.hpp refuses it.
nb::object json_cut(nb::handle data, size_t numbers_max, size_t arrays_max) {
  const BufferView view(data);
  nb::list arrays;
  std::string rest;
  const bool done = wire::cut_json(view.span(), arrays_max, rest, [&](wire::Span span, const wire::Cut& cut) {
    const size_t room = wire::json_capacity(span);
    if (room > numbers_max) return false;
    PyObject* out = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(room * cut.width));
    if (out == nullptr) throw nb::python_error();
    const wire::Parsed parsed = cut.parse(span, reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out)));
    const Py_ssize_t size = static_cast<Py_ssize_t>(parsed.count * cut.width);
    if (parsed.fault != wire::Fault::kNone) {
      Py_DECREF(out);
      return false;
    }
    if (PyBytes_GET_SIZE(out) != size && _PyBytes_Resize(&out, size) != 0) throw nb::python_error();
    arrays.append(nb::steal(out));
    return true;
  });
  if (!done) return nb::none();
  return nb::make_tuple(nb::bytes(rest.data(), rest.size()), arrays);
}

size_t json_child_count(nb::handle data, size_t count_max) {
  return wire::count_json_children(BufferView(data).span(), count_max);
}

size_t msgpack_child_count(nb::handle data) {
  const wire::Container container = wire::open_container(BufferView(data).span());
  return container.fault == wire::Fault::kNone ? container.children : 0;
}

wire::Span next_child(wire::Cursor& cursor, size_t index) {
  const uint8_t* start = cursor.at;
  const wire::Fault fault = wire::skip(cursor);
  if (fault != wire::Fault::kNone) raise_wire(fault, index, false);
  return {start, static_cast<size_t>(cursor.at - start)};
}

nb::bytes as_bytes(wire::Span span) { return nb::bytes(span.data(), span.size()); }

// The key of a map entry; null when it is not text. A key that is not UTF-8 cannot be one that anybody asks
// for.
nb::object key_text(wire::Span key) {
  wire::Cursor cursor{key.data(), key.data() + key.size()};
  if (wire::not_an_integer(key[0]) != wire::Fault::kText) return nb::object();
  const wire::Head head = wire::read_head(cursor);
  nb::object name = nb::steal(PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(cursor.at),
                                                   static_cast<Py_ssize_t>(head.bytes), "replace"));
  if (!name.is_valid()) throw nb::python_error();
  return name;
}

nb::object open_children(wire::Cursor& cursor, size_t index, int levels, size_t children_max);

// One child: raw, or opened in its turn while there are levels left. A map that cannot be opened stays raw.
nb::object child_value(wire::Cursor& cursor, size_t index, int levels, size_t children_max) {
  if (levels > 1 && cursor.at != cursor.end && wire::shape_of(*cursor.at) != wire::Shape::kScalar) {
    const wire::Cursor before = cursor;
    nb::object opened = open_children(cursor, index, levels - 1, children_max);
    if (opened.is_valid()) return opened;
    cursor = before;
  }
  return as_bytes(next_child(cursor, index));
}

// The children of the container at the cursor, which ends behind it; null when a map has a key that is not
// text.
nb::object open_children(wire::Cursor& cursor, size_t index, int levels, size_t children_max) {
  const wire::Container container = wire::open_container({cursor.at, cursor.end});
  if (container.fault != wire::Fault::kNone) raise_wire(container.fault, index, false);
  if (container.children > children_max) raise_wire(wire::Fault::kTooMany, index, false);
  cursor = container.cursor;
  if (container.shape == wire::Shape::kArray) {
    nb::list items;
    for (size_t i = 0; i < container.children; ++i)
      items.append(child_value(cursor, i, levels, children_max));
    return items;
  }
  nb::dict fields;
  for (size_t i = 0; i < container.children; i += 2) {
    const nb::object name = key_text(next_child(cursor, i / 2));
    if (!name.is_valid()) return nb::object();
    fields[name] = child_value(cursor, i / 2, levels, children_max);
  }
  return fields;
}

template <int levels>
nb::object msgpack_children(nb::handle data, size_t children_max) {
  const BufferView view(data);
  const wire::Span span = view.span();
  wire::Cursor cursor{span.data(), span.data() + span.size()};
  if (span.empty()) raise_wire(wire::Fault::kTruncated, 0, true);
  if (wire::shape_of(span[0]) == wire::Shape::kScalar) raise_wire(wire::Fault::kNotArray, 0, true);
  nb::object children = open_children(cursor, 0, levels, children_max);
  if (!children.is_valid()) raise_wire(wire::Fault::kOther, 0, true);
  if (cursor.at != cursor.end) raise_wire(wire::Fault::kTrailing, 0, true);
  return children;
}

// The buffers of one event.
class EventBuffers {
 public:
  uint8_t* operator()(wire::Field field, size_t count, size_t width) {
    nb::object& buffer = field == wire::Field::kTokenIds ? tokens : hashes;
    buffer = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * width)));
    if (!buffer.is_valid()) throw nb::python_error();
    return reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(buffer.ptr()));
  }

  nb::object hashes, tokens;
};

// Null for text that is not UTF-8.
nb::object text_or_none(const std::optional<std::string_view>& text) {
  if (!text) return nb::none();
  PyObject* decoded = PyUnicode_DecodeUTF8(text->data(), static_cast<Py_ssize_t>(text->size()), "strict");
  if (decoded == nullptr) PyErr_Clear();
  return nb::steal(decoded);
}

// A plain event as app/_native.pyi says; null when a text in it is not UTF-8.
nb::object plain_event(const wire::PlainEvent& event, EventBuffers& buffers, size_t start, size_t end) {
  const nb::object medium = text_or_none(event.medium);
  if (!medium.is_valid()) return nb::object();
  if (event.kind == wire::EventKind::kRemoved) {
    return nb::make_tuple(start, end, std::move(buffers.hashes), medium, event.group);
  }
  const nb::object lora = text_or_none(event.lora);
  const nb::object kind = text_or_none(event.spec_kind);
  if (!lora.is_valid() || !kind.is_valid()) return nb::object();
  const nb::object extra = event.extra_keys.empty() ? nb::object(nb::none()) : as_bytes(event.extra_keys);
  return nb::make_tuple(start, end, std::move(buffers.hashes), medium, event.group, event.parent,
                        std::move(buffers.tokens), event.block_size, lora, kind, extra);
}

// A float64 that is a time as such, any other span as it stands.
nb::object time_value(wire::Span span) {
  if (span.size() == 9 && span[0] == 0xcb) {
    const double value = std::bit_cast<double>(wire::read_be(span.data() + 1, 8));
    if (std::isfinite(value) && value >= 0) return nb::float_(value);
  }
  return as_bytes(span);
}

// None where there is none, a small number as such, any other span as it stands.
nb::object rank_value(wire::Span span) {
  if (span.empty() || span[0] == 0xc0) return nb::none();
  if (span[0] < 0x80) return nb::int_(span[0]);
  return as_bytes(span);
}

// (time, rank or None, events), each event plain or raw; None for a payload that event_payload.hpp refuses.
nb::object msgpack_events(nb::handle data, size_t children_max) {
  const BufferView view(data);
  wire::Batch batch;
  if (!wire::open_batch(view.span(), children_max, batch)) return nb::none();
  const uint8_t* const base = view.span().data();
  EventBuffers buffers;
  wire::EventReader reader(batch.cursor, children_max, buffers);
  wire::PlainEvent event;
  nb::list events;
  for (size_t i = 0; i < batch.events; ++i) {
    const uint8_t* const start = batch.cursor.at;
    nb::object item;
    if (reader.read(event)) {
      item = plain_event(event, buffers, static_cast<size_t>(start - base),
                         static_cast<size_t>(batch.cursor.at - base));
    }
    if (!item.is_valid()) {
      batch.cursor.at = start;
      if (wire::skip(batch.cursor) != wire::Fault::kNone) return nb::none();
      item = as_bytes({start, static_cast<size_t>(batch.cursor.at - start)});
    }
    events.append(item);
  }
  wire::Span rank;
  if (!wire::close_batch(batch, rank)) return nb::none();
  return nb::make_tuple(time_value(batch.ts), rank_value(rank), events);
}

// (path, query string, headers that are asked for, bytes of the head, bytes of the body); None for what
// request_head.hpp refuses.
nb::object request_head(const nb::bytes& data) {
  wire::RequestHead head;
  if (!wire::read_request_head({data_of(data), data.size()}, head)) return nb::none();
  nb::list headers;
  for (size_t i = 0; i < head.line_count; ++i) {
    const std::string_view name = wire::asked_name(head.lines[i].name);
    if (!name.empty())
      headers.append(nb::make_tuple(bytes_of_text(name), bytes_of_text(head.lines[i].value)));
  }
  return nb::make_tuple(nb::str(head.path.data(), head.path.size()), bytes_of_text(head.query), headers,
                        head.bytes, head.body_bytes);
}

// (number, bytes of the head, bytes of the body), None for what request_head.hpp refuses; a head without a
// number was not put into the book.
template <bool kPut>
nb::object head_number(HeadBook& self, const nb::bytes& data) {
  wire::RequestHead head;
  if (!wire::read_request_head({data_of(data), data.size()}, head)) return nb::none();
  const std::optional<uint32_t> number = kPut ? self.put(head) : self.find(head);
  return nb::make_tuple(number, head.bytes, head.body_bytes);
}

void bind_head_book(nb::module_& m) {
  nb::class_<HeadBook>(m, "HeadBook")
      .def(nb::init<>())
      .def("find", &head_number<false>)
      .def("put", &head_number<true>);
}

// -- batches that no Python object is made of

// The events as app/events.py has them, for the tests and their oracle.
nb::list events_of(const PlainBatch& batch) {
  nb::list events;
  for (const PlainBatch::Event& event : batch.events()) {
    const nb::bytes hashes(event.hashes.data(), event.hashes.size_bytes());
    if (event.kind == wire::EventKind::kRemoved) {
      events.append(nb::make_tuple(event.tier, event.group, hashes));
    } else {
      events.append(nb::make_tuple(event.tier, event.group, hashes, event.parent,
                                   nb::bytes(event.tokens, event.token_count * 4)));
    }
  }
  return events;
}

nb::object apply_plain(const PlainBatch& self, PrefixIndex& index, uint32_t source, uint32_t context,
                       Tick now, bool count_copies) {
  const PlainBatch::Applied applied = self.apply(index, source, context, now, count_copies);
  return nb::make_tuple(applied.stored, applied.removed, applied.orphans, applied.unknown);
}

nb::object optional_text(const std::optional<std::string_view>& text) {
  return text ? nb::object(nb::str(text->data(), text->size())) : nb::object(nb::none());
}

void bind_plain_batch(nb::module_& m) {
  nb::class_<PlainBatch> batch(m, "PlainBatch");
  batch.attr("BYTES_MAX") = PlainBatch::kBytesMax;
  batch
      .def(nb::init<std::vector<std::pair<std::string, uint32_t>>, std::vector<std::string>>(), "tiers"_a,
           "kinds"_a)
      .def("read_msgpack",
           [](PlainBatch& self, nb::handle payload, size_t events_max) -> nb::object {
             if (!self.read_msgpack(BufferView(payload).span(), events_max)) return nb::none();
             return nb::make_tuple(self.ts(), self.rank());
           })
      .def("read_json",
           [](PlainBatch& self, nb::handle body, size_t events_max) -> nb::object {
             const BufferView view(body);
             wire::JsonEnvelope said;
             if (!self.read_json(view.span(), events_max, said)) return nb::none();
             return nb::make_tuple(nb::str(said.pod.data(), said.pod.size()), optional_text(said.model),
                                   optional_text(said.lora), said.dp_rank, said.seq, said.ts);
           })
      .def("kind",
           [](const PlainBatch& self) {
             return nb::make_tuple(
                 self.events().size(), self.stores(), self.tier(), self.block_size(),
                 self.lora().empty() ? nb::object(nb::none()) : nb::str(self.lora().c_str()),
                 self.speaks_of_others_than(0));
           })
      .def("events", &events_of)
      .def("apply", &apply_plain);
}

// The parsers of JSON numbers one by one, for the tests to compare.
template <typename Number, bool (*scan)(wire::Span, uint8_t*, size_t&)>
nb::object scan_json(nb::handle data) {
  const BufferView view(data);
  std::vector<uint8_t> numbers(wire::json_capacity(view.span()) * sizeof(Number));
  size_t count = 0;
  if (!scan(view.span(), numbers.data(), count)) return nb::none();
  return nb::bytes(numbers.data(), count * sizeof(Number));
}

void bind_wire(nb::module_& m) {
  wire_error = PyErr_NewException("app._native.WireError", PyExc_ValueError, nullptr);
  if (wire_error == nullptr) throw nb::python_error();
  m.attr("WireError") = nb::handle(wire_error);
  m.def("msgpack_token_ids",
        &parse_numbers<wire::msgpack_capacity, wire::parse_msgpack_tokens, sizeof(uint32_t)>,
        nb::arg("data"));
  m.def("msgpack_hashes",
        &parse_numbers<wire::msgpack_capacity, wire::parse_msgpack_hashes, sizeof(uint64_t)>,
        nb::arg("data"));
  m.def("json_token_ids", &parse_numbers<wire::json_capacity, wire::parse_json_tokens, sizeof(uint32_t)>,
        nb::arg("data"));
  m.def("json_hashes", &parse_numbers<wire::json_capacity, wire::parse_json_hashes, sizeof(uint64_t)>,
        nb::arg("data"));
  m.def("json_unsigned", &parse_numbers<wire::json_capacity, wire::parse_json_unsigned, sizeof(uint64_t)>,
        nb::arg("data"));
  m.def("msgpack_unsigned",
        &parse_numbers<wire::msgpack_capacity, wire::parse_msgpack_unsigned, sizeof(uint64_t)>,
        nb::arg("data"));
  m.def("json_cut", &json_cut, nb::arg("data"), nb::arg("numbers_max"), nb::arg("arrays_max"));
  m.def("json_child_count", &json_child_count, nb::arg("data"), nb::arg("count_max"));
  m.def("msgpack_child_count", &msgpack_child_count, nb::arg("data"));
  m.def("msgpack_events", &msgpack_events, nb::arg("data"), nb::arg("children_max"));
  m.def("request_head", &request_head, nb::arg("data"));
  m.def("scan_json", &scan_json<uint64_t, wire::scan_fast<uint64_t>>, nb::arg("data"));
  m.def("scan_json_by_words", &scan_json<uint64_t, wire::scan_digits<wire::WordMasks, uint64_t>>,
        nb::arg("data"));
  m.def("scan_json_tokens", &scan_json<uint32_t, wire::scan_fast<uint32_t>>, nb::arg("data"));
  m.def("msgpack_children", &msgpack_children<1>, nb::arg("data"), nb::arg("children_max"));
  m.def("msgpack_grandchildren", &msgpack_children<2>, nb::arg("data"), nb::arg("children_max"));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native core of the KV prefix-cache indexer; see app/_native.pyi.";
  bind_id_table<kFillDense, false>(m, "IdTable");
  bind_id_table<kFillDense, true>(m, "NarrowIdTable");
  bind_id_table<kFillLoose, false>(m, "LooseIdTable");
  bind_id_table<kFillLoose, true>(m, "LooseNarrowIdTable");
  bind_fuzzy(m);
  bind_flight(m);
  bind_index(m);
  bind_answers(m);
  bind_wire(m);
  bind_plain_batch(m);
  bind_head_book(m);
#ifdef KVINDEXER_ENDING_MEMORY
  m.def("end_memory", &end_memory, "found"_a, "not_found"_a);
#endif
}
