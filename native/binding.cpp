// The only file that knows Python: every function takes and returns buffers or numbers, never Python containers of
// single blocks. Lengths and ranges are checked by the Python front (app/index/prefix_index.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "prefix_index.hpp"
#include "xxh64.hpp"

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

nb::bytes bytes_of(const std::vector<Row>& rows) {
  static_assert(sizeof(Row) == 24);
  return nb::bytes(rows.data(), rows.size() * sizeof(Row));
}

template <class Hashes>
nb::bytes hashes_of(Hashes chain, size_t blocks) {
  std::vector<uint64_t> hashes(blocks);
  for (uint64_t& hash : hashes) hash = chain.next();
  return nb::bytes(hashes.data(), hashes.size() * 8);
}

void bind_index(nb::module_& m) {
  m.def(
      "xxh64", [](const nb::bytes& data, uint64_t seed) { return xxh64(data_of(data), data.size(), seed); }, "data"_a,
      "seed"_a = 0);
  m.def(
      "prefix_hashes",
      [](uint64_t seed, size_t block_size, const nb::bytes& tokens, const std::optional<nb::tuple>& extra) {
        const ExtraKeys keys = extra_of(extra);
        return hashes_of(HashChain(seed, data_of(tokens), block_size * 4, extra ? &keys : nullptr),
                         tokens.size() / 4 / block_size);
      },
      "seed"_a, "block_size"_a, "token_ids"_a, "extra_keys"_a.none());

  nb::class_<PrefixIndex>(m, "PrefixIndex")
      .def("__init__",
           [](PrefixIndex* self, Tick ttl, size_t contexts_max, size_t prefixes_per_context_max,
              size_t orphan_blocks_max, size_t speculative_blocks_max) {
             new (self) PrefixIndex(
                 Limits{ttl, contexts_max, prefixes_per_context_max, orphan_blocks_max, speculative_blocks_max});
           })
      .def("add_context", &PrefixIndex::add_context)
      .def("touch_context", &PrefixIndex::touch_context)
      .def("context_size", &PrefixIndex::context_size)
      .def("add_source", &PrefixIndex::add_source)
      .def("has_source", &PrefixIndex::has_source)
      .def("drop_source", &PrefixIndex::drop_source)
      .def("store",
           [](PrefixIndex& self, uint32_t source, uint32_t context, uint32_t tier, uint32_t group,
              const nb::bytes& engine_hashes, std::optional<uint64_t> parent, const nb::bytes& tokens,
              const std::optional<nb::tuple>& extra, Tick now, bool count_copies) {
             const Stored stored = self.store({source, tier, group}, context, words_of(engine_hashes), parent,
                                              data_of(tokens), extra_of(extra), now, count_copies);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("place",
           [](PrefixIndex& self, uint32_t source, uint32_t tier, uint32_t group, const nb::bytes& engine_hashes,
              Tick now, bool count_copies) {
             const Stored stored = self.place({source, tier, group}, words_of(engine_hashes), now, count_copies);
             return std::tuple(stored.stored, stored.orphans, stored.unknown);
           })
      .def("remove",
           [](PrefixIndex& self, uint32_t source, uint32_t tier, uint32_t group, const nb::bytes& engine_hashes,
              Tick now) {
             const Removed removed = self.remove({source, tier, group}, words_of(engine_hashes), now);
             return std::tuple(removed.removed, removed.unknown);
           })
      .def("clear", &PrefixIndex::clear, "source"_a, "tier"_a.none(), "context"_a.none())
      .def("match_tokens",
           [](PrefixIndex& self, uint32_t context, const nb::bytes& tokens, const std::optional<nb::tuple>& extra,
              Tick now) {
             const ExtraKeys keys = extra_of(extra);
             std::vector<Row> rows;
             self.match_tokens(context, data_of(tokens), tokens.size() / self.block_bytes(context),
                               extra ? &keys : nullptr, now, rows);
             return bytes_of(rows);
           })
      .def("match_hashes",
           [](PrefixIndex& self, uint32_t context, const nb::bytes& hashes, Tick now) {
             std::vector<Row> rows;
             self.match_hashes(context, data_of(hashes), hashes.size() / 8, now, rows);
             return bytes_of(rows);
           })
      .def("add_speculative",
           [](PrefixIndex& self, uint32_t context, uint32_t source, const nb::bytes& hashes, Tick ttl, Tick now) {
             return self.add_speculative(context, source, data_of(hashes), hashes.size() / 8, ttl, now);
           })
      .def("holders",
           [](PrefixIndex& self, uint32_t context, uint64_t prefix, Tick now) {
             std::vector<std::tuple<uint32_t, uint32_t, uint32_t>> holders;
             for (const Holder& holder : self.holders(context, prefix, now))
               holders.emplace_back(holder.source, holder.tier, holder.group);
             return holders;
           })
      .def("blocks_by_tier",
           [](const PrefixIndex& self, uint32_t source) {
             const auto blocks = self.blocks_by_tier(source);
             return std::tuple(blocks[0], blocks[1], blocks[2], blocks[3]);
           })
      .def("orphan_blocks", &PrefixIndex::orphan_blocks)
      .def("orphan_drops", &PrefixIndex::orphan_drops)
      .def("sweep",
           [](PrefixIndex& self, Tick now, size_t visits_max) {
             const Swept swept = self.sweep(now, visits_max);
             return std::tuple(swept.visited, swept.expired, swept.pass_done);
           })
      .def("statistics", [](const PrefixIndex& self) {
        const Statistics now = self.statistics();
        return std::tuple(now.contexts, now.prefixes, now.holder_sets, now.engine_keys, now.copies, now.orphan_blocks,
                          now.speculative_blocks, now.bytes, now.expired, now.evicted, now.contexts_evicted,
                          now.orphans_dropped, now.orphans_expired, now.speculative_refused);
      });
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native core of the KV prefix-cache indexer; see app/_native.pyi.";
  bind_index(m);
}
