"""What every source holds, as batches of events that POST /v1/events of another indexer takes.

One line is one such body. A slice of the index's names becomes a line for each (source, context, tier, group)
in it, with one `PrefixesStored` event; behind the last slice every source has a line without events that tells
its last sequence number, so that its batches go on from there without a gap.

A dump is read a slice at a time while events are applied, so it is not one moment. A source that changed
meanwhile, was incomplete before, or has blocks that wait for a parent (which are not in a dump) ends with
`incomplete` instead of a sequence number: whoever takes the dump knows it as degraded, and never as exact. Not
in it either: ages (what is taken starts its TTL anew) and speculative entries.

Cost: a slice of NAMES_MAX names takes about a millisecond and is all that is held. `dumps_max` run at once;
past it Overloaded.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from app.errors import Overloaded
from app.events import Tier
from app.index.interface import Index
from app.index.prefix_index import ContextInfo, NameRun
from app.pods import Source
from app.service.hints import HintBook, Holder
from app.service.owners import Owners
from app.service.registry import Registry

NAMES_MAX = 2_048  # a slice
SOURCES_MAX = 64  # a slice of last lines

_Mark = tuple[int | None, ...]


class Dumps:
    """Part of the service. `now` gives the index's ticks; `refused` counts dumps that found no room."""

    def __init__(
        self,
        index: Index,
        registry: Registry,
        hints: HintBook,
        owners: Owners,
        *,
        now: Callable[[], int],
        dumps_max: int,
    ) -> None:
        self.running = 0
        self.refused = 0
        self._index = index
        self._registry = registry
        self._hints = hints
        self._owners = owners
        self._now = now
        self._dumps_max = dumps_max

    def begin(self, pods: frozenset[str] | None) -> Iterator[bytes]:
        """The slices of a dump of these pods, or of all; call `end` once when it is done or given up.

        Raises UnknownPod and Overloaded.
        """
        for name in pods or ():
            self._registry.find(name)
        if self.running >= self._dumps_max:
            self.refused += 1
            raise Overloaded(f"dumps_max = {self._dumps_max} dumps are running")
        self.running += 1
        return self._slices(pods)

    def end(self) -> None:
        self.running -= 1

    def _slices(self, pods: frozenset[str] | None) -> Iterator[bytes]:
        before = {source.index_id: self._mark(source) for source in self._sources(pods)}
        cursor: int | None = 0
        while cursor is not None:
            runs, cursor = self._index.names(cursor, NAMES_MAX, self._now())
            contexts = {context.id: context for context in self._index.contexts()}
            lines = []
            for run in runs:
                source = self._registry.by_index_id(run.source)
                if source is not None and (pods is None or source.pod in pods):
                    lines.append(self._line(source, events=[self._event(contexts[run.context], run)]))
            yield b"".join(lines)
        sources = self._sources(pods)
        for first in range(0, len(sources), SOURCES_MAX):
            yield b"".join(
                self._last_line(source, before.get(source.index_id))
                for source in sources[first : first + SOURCES_MAX]
                if self._registry.by_index_id(source.index_id) is source
            )

    def _sources(self, pods: frozenset[str] | None) -> list[Source]:
        found = [pod for name, pod in self._registry.pods.items() if pods is None or name in pods]
        return [source for pod in found for source in pod.sources.values()]

    def _mark(self, source: Source) -> _Mark:
        """Differs when what the source holds has changed."""
        blocks = self._index.blocks_by_tier(source.index_id)
        return (source.batches, source.last_seq, source.restarts, source.removed_blocks, *blocks)

    def _last_line(self, source: Source, before: _Mark | None) -> bytes:
        waits = self._index.orphan_blocks(source.index_id) > 0
        if source.incomplete or waits or before != self._mark(source):
            return self._line(source, incomplete=True, events=[])
        if source.last_seq is None:
            return self._line(source, events=[])
        return self._line(source, seq=source.last_seq, events=[])

    def _event(self, context: ContextInfo, run: NameRun) -> dict[str, Any]:
        names = _numbers(run.engine_hashes)
        event: dict[str, Any] = {
            "type": "PrefixesStored",
            "block_hashes": names,
            "prefix_hashes": _numbers(run.prefix_hashes),
            "block_size": context.block_size,
            "lora_name": context.lora,
            "medium": Tier(run.tier).label,
            "group_idx": run.group,
        }
        copies = _numbers(run.copies)
        if any(count != 1 for count in copies):
            event["copies"] = copies
        hints = self._hints.of_blocks(Holder(run.source, Tier(run.tier), run.group), names, self._now())
        if hints:
            event["hints"] = [
                {"block": block, "metadata": msgspec.Raw(text)} for block, text in hints.items()
            ]
        if owners := self._owners.of_blocks(run, names):
            event["owners"] = owners
        return event

    def _line(self, source: Source, **fields: Any) -> bytes:
        model = self._registry.pods[source.pod].spec.model
        body = {"pod": source.pod, "dp_rank": source.dp_rank, "model": model, **fields}
        return msgspec.json.encode(body) + b"\n"


def _numbers(words: bytes) -> list[int]:
    return array.array("Q", words).tolist()
