// Contexts and sources: how they come, are cleared and go.
#include <algorithm>

#include "prefix_index.hpp"

namespace kvindexer {

std::pair<uint32_t, std::optional<uint32_t>> PrefixIndex::add_context(uint64_t seed, uint32_t block_size) {
  std::optional<uint32_t> evicted;
  if (contexts_.size() >= limits_.contexts_max)
    evicted = std::min_element(contexts_.begin(), contexts_.end(), [](const auto& a, const auto& b) {
                return a.second->last_used < b.second->last_used;
              })->first;
  graveyard_.reserve(graveyard_.size() + 1);
  auto context = std::make_unique<Context>(pool_);
  context->id = context_count_ + 1;
  context->seed = seed;
  context->block_bytes = size_t{block_size} * 4;
  context->last_used = ++uses_;
  const uint32_t id = context->id;
  FuzzyIndex* const contents = contents_.index();
  if (contents != nullptr && contents->takes_blocks_of(block_size)) contents->add_context(id, block_size);
  try {
    contexts_.emplace(id, std::move(context));
  } catch (...) {
    if (contents != nullptr) contents->drop_context(id);
    throw;
  }
  if (evicted) drop_context(*evicted);
  return {++context_count_, evicted};
}

void PrefixIndex::drop_context(uint32_t id) {
  const auto found = contexts_.find(id);
  for (const LocalSource& local : found->second->sources)
    if (local.live) std::erase(sources_.at(local.source), id);
  orphans_.drop_if([id](const Orphan& orphan) { return orphan.context == id; });
  marks_ -= found->second->marks.size();
  if (contents_.index() != nullptr) contents_.index()->drop_context(id);
  graveyard_.push_back(std::move(found->second));  // there is room: see add_context
  contexts_.erase(found);
  ++statistics_.contexts_evicted;
  remains_ = true;
}

uint32_t PrefixIndex::add_source() {
  sources_.try_emplace(source_count_ + 1);
  return ++source_count_;
}

void PrefixIndex::drop_source(uint32_t source) {
  clear(source, std::nullopt, std::nullopt);
  for (const uint32_t id : sources_.at(source)) contexts_.at(id)->drop_source(source);
  sources_.erase(source);
}

uint32_t PrefixIndex::local_source(Context& context, uint32_t source) {
  const auto found = context.source_at.find(source);
  if (found != context.source_at.end()) return found->second;
  std::vector<uint32_t>& contexts = sources_.at(source);
  contexts.push_back(context.id);
  try {
    return context.add_source(source);
  } catch (...) {  // no more memory: it has not been seen here
    contexts.pop_back();
    throw;
  }
}

uint32_t PrefixIndex::slot_of(Context& context, const Place& place) {
  if (const std::optional<uint32_t> found = context.find_slot(place)) return *found;
  return context.add_slot(local_source(context, place.source), place);
}

void PrefixIndex::clear(uint32_t source, std::optional<uint32_t> tier, std::optional<uint32_t> only_context) {
  for (const uint32_t id : sources_.at(source)) {  // all, or nothing changes
    Context& context = *contexts_.at(id);
    context.retired_slots.reserve(context.retired_slots.size() + context.find_source(source)->slots.size());
  }
  for (const uint32_t id : sources_.at(source)) {
    if (only_context && *only_context != id) continue;
    Context& context = *contexts_.at(id);
    LocalSource& local = context.sources[context.source_at.at(source)];
    std::erase_if(local.slots, [&](uint32_t slot) {
      if (tier && context.slots[slot].tier != *tier) return false;
      context.retire(slot, pass_);
      return true;
    });
    if (!tier || *tier == 0) ++local.mark_epoch;
  }
  remains_ = true;
  if (orphans_.blocks_of(source) == 0) return;
  orphans_.drop_if([&](const Orphan& orphan) {
    return orphan.place.source == source && (!tier || orphan.place.tier == *tier) &&
           (!only_context || orphan.context == *only_context);
  });
}

}  // namespace kvindexer
