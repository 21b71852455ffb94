"""Questions by content: what of a prompt can be reused wherever it stands, and who holds it now.

The fuzzy index knows contents and prefix hashes and is kept in step by the prefix index (its contract says
how); who holds a prefix is asked of the prefix index while a question is answered. So what was cleared, has
expired or belongs to a pod that is gone is not reported, swept or not.

A question is answered from one context: the given block size of the model and adapter, or the smallest one known.
Blocks that came without their tokens (from a dump) are not found, nor is a block that has extra keys or follows one
that has.

A question takes milliseconds, so over HTTP it runs in slices, between which matches and events have their turn. A
block that is held throughout is found; a holder that is named for it held it at some moment of the question.

Bounds: `fuzzy_tokens_max` tokens a question, `fuzzy_candidates_max` stored blocks a window, `fuzzy_queue_max`
questions at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from app.config import Settings
from app.errors import InvalidInput, LimitExceeded, Overloaded, SwitchedOff
from app.fuzzy.answer import FuzzyAnswer, Holding, Holdings, assemble
from app.fuzzy.fuzzy_index import MAX_DISTANCE, FuzzyIndex, FuzzyLimits, Slices, finish
from app.index.interface import Index, list_in_slices
from app.service.owners import Owners
from app.service.queries import Queries
from app.service.registry import Registry

_NOTHING = FuzzyAnswer((), (), (), ())


class FuzzyQuery(msgspec.Struct, frozen=True):
    """`token_ids` are uint32, little-endian. `exclude` are pods and owners; `agent1` stands for `agent1:role` too."""

    model: str
    token_ids: bytes
    lora: str | None = None
    block_size: int | None = None
    max_distance: int = MAX_DISTANCE
    mode: Literal["grid", "sliding"] = "grid"
    exclude: tuple[str, ...] = ()
    limit_per_block: int = 4


class FuzzyResult(msgspec.Struct, frozen=True):
    block_size: int
    tokens: int
    answer: FuzzyAnswer
    shared_prefix_hash: int | None  # of the prompt's first block; None when it fills none


def fuzzy_index(settings: Settings) -> FuzzyIndex | None:
    """None where `fuzzy` is off: then nothing is kept for it."""
    if not settings.fuzzy:
        return None
    return FuzzyIndex(FuzzyLimits(matches_per_window_max=settings.fuzzy_candidates_max))


class FuzzyQueries:
    """Part of the service; `contents` is the fuzzy index that the prefix index keeps in step."""

    def __init__(
        self,
        settings: Settings,
        index: Index,
        contents: FuzzyIndex | None,
        registry: Registry,
        owners: Owners,
        queries: Queries,
        *,
        now: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._index = index
        self._contents = contents
        self._registry = registry
        self._owners = owners
        self._queries = queries
        self._now = now
        self._counts = dict.fromkeys(("queries", "asked_tokens", "reusable_tokens", "refused"), 0)
        self._asked = 0  # questions under way or in line
        self._turn = asyncio.Lock()

    async def ask(self, query: FuzzyQuery) -> FuzzyResult:
        """`match` in slices, between which the event loop serves others.

        One question is under way at a time, the others wait in line; past `fuzzy_queue_max` raises Overloaded.
        """
        if self._asked >= self._settings.fuzzy_queue_max:
            self._counts["refused"] += 1
            raise Overloaded(f"{self._asked} fuzzy matches are asked for already: fuzzy_queue_max")
        self._asked += 1
        try:
            async with self._turn:
                slices = self._slices(query)
                while True:
                    try:
                        next(slices)
                    except StopIteration as done:
                        result: FuzzyResult = done.value
                        return result
                    await asyncio.sleep(0)
        finally:
            self._asked -= 1

    def match(self, query: FuzzyQuery) -> FuzzyResult:
        """Raises SwitchedOff, LimitExceeded (`fuzzy_tokens_max`), and InvalidInput for what does not fit."""
        return finish(self._slices(query))

    def _slices(self, query: FuzzyQuery) -> Slices[FuzzyResult]:
        self.check()
        assert self._contents is not None
        tokens_max = self._settings.fuzzy_tokens_max
        tokens = len(query.token_ids) // 4
        if len(query.token_ids) % 4:
            raise InvalidInput("token_ids must be whole uint32 values", field="token_ids")
        if tokens > tokens_max:
            detail = f"{tokens} tokens are more than fuzzy_tokens_max = {tokens_max}"
            raise LimitExceeded(detail, bound="fuzzy_tokens_max")
        unit = self._queries.unit(query.model, query.lora, query.block_size)
        context = self._index.context_ids(query.model, query.lora).get(unit)
        answer = _NOTHING
        if context is not None and tokens >= unit and self._contents.has_context(context):
            # From here on prefixes are asked for by themselves.
            yield from list_in_slices(self._index, self._now)
            holdings = Holdings(lambda hashes: self._holdings(context, hashes), query.exclude)
            ask = self._contents.grid_slices if query.mode == "grid" else self._contents.sliding_slices
            windows = yield from ask(context, query.token_ids, query.max_distance, holdings.usable)
            answer = yield from assemble(
                windows, holdings, block_size=unit, tokens=tokens, limit_per_block=query.limit_per_block
            )
        self._counts["queries"] += 1
        self._counts["asked_tokens"] += tokens
        self._counts["reusable_tokens"] += unit * len(answer.blocks)
        return FuzzyResult(unit, tokens, answer, self._first_hash(query, unit))

    def check(self) -> None:
        """Raises SwitchedOff."""
        if self._contents is None:
            raise SwitchedOff("fuzzy matches are switched off here", setting="fuzzy")

    def gauges(self) -> Mapping[str, int]:
        """What is stored; {} where it is switched off."""
        if self._contents is None:
            return {}
        return {**dataclasses.asdict(self._contents.stats()), "asked": self._asked}

    def counters(self) -> Mapping[str, int]:
        """Since the start."""
        dropped = 0 if self._contents is None else self._contents.stats().matches_dropped
        return {**self._counts, "candidates_dropped": dropped}

    def _holdings(self, context: int, prefix_hashes: Collection[int]) -> Mapping[int, Sequence[Holding]]:
        asked = array("Q", prefix_hashes)
        owners_of: dict[tuple[int, int], set[str]] = {}  # (place among those asked, source) -> owners
        for row in self._index.holdings(context, asked.tobytes(), self._now()):
            owners = owners_of.setdefault((row.prefix, row.source), set())
            name = self._owners.name(row.owner)
            if name is not None:
                owners.add(name)
        found: dict[int, list[Holding]] = {}
        for (place, index_id), owners in owners_of.items():
            source = self._registry.by_index_id(index_id)
            if source is not None:
                holding = Holding(source.pod, source.dp_rank, tuple(sorted(owners)))
                found.setdefault(asked[place], []).append(holding)
        return found

    def _first_hash(self, query: FuzzyQuery, unit: int) -> int | None:
        first = query.token_ids[: 4 * unit]
        packed = self._index.prefix_hashes(query.model, query.lora, unit, first, None)
        return struct.unpack("<Q", packed)[0] if packed else None
