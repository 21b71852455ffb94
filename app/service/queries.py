"""Questions to the index: how much of a prompt each source has, and the hashes to ask with.

A model can have contexts of several block sizes; a query asks them all and app/service/scoring.py merges the answers.
Where a block size is not given, it is the smallest one known of (model, lora): the size of its contexts, or
else of the registered pods of the model, or else `block_size_default`. Hashes are chained from a seed that
has the block size in it, so hashes of one size are unknown in every other, and a query by hashes asks one
context only. `match`, `prefix_hashes` and `add_speculative` choose alike, so what one of them says the others
understand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from app.config import Settings
from app.errors import InvalidInput, LimitExceeded
from app.index.interface import Index, ticks
from app.index.prefix_index import Depths, unpack_rows
from app.service.hints import Hint, HintBook
from app.service.registry import Registry
from app.service.scoring import MatchRow, build_row, merge_depths, rank_rows


class MatchQuery(msgspec.Struct, frozen=True):
    """Exactly one of `token_ids` (uint32, little-endian) and `prefix_hashes` (uint64, little-endian) is set.

    `extra_keys` are canonical encodings, one a block (fewer are padded with none).
    """

    model: str
    lora: str | None = None
    token_ids: bytes | None = None
    prefix_hashes: bytes | None = None
    extra_keys: tuple[bytes, ...] | None = None
    block_size: int | None = None
    pods: frozenset[str] | None = None
    include_hashes: bool = False
    min_blocks: int = 0  # rows with fewer confirmed blocks are left out
    top_k: int | None = None  # rows past this many are left out


class MatchResult(msgspec.Struct, frozen=True):
    model: str
    lora: str | None
    block_size: int
    tokens: int
    blocks: int
    matches: tuple[MatchRow, ...]  # best first
    prefix_hashes: bytes | None  # uint64, little-endian


_ANSWER_END = b'],"prefix_hashes":null}'


class JsonAnswer(msgspec.Struct, frozen=True):
    """A MatchResult as the text of the HTTP contract, and how deep its best row is."""

    body: bytes
    deepest_blocks: int


class Queries:
    """Part of the service: `now` gives the index's ticks, `clock` seconds.

    Counted since the start: `matches`, those of them with a confirmed block (`matches_hit`), the tokens of
    their prompts (`tokens_asked`), and those that the best source holds (`tokens_matched`).
    """

    def __init__(
        self,
        settings: Settings,
        index: Index,
        registry: Registry,
        hints: HintBook,
        *,
        clock: Callable[[], float],
        now: Callable[[], int],
    ) -> None:
        self.matches = 0
        self.matches_hit = 0
        self.tokens_asked = 0
        self.tokens_matched = 0
        self._settings = settings
        self._index = index
        self._registry = registry
        self._hints = hints
        self._clock = clock
        self._now = now

    def match(self, query: MatchQuery) -> MatchResult:
        """Raises InvalidInput for buffers that do not fit."""
        unit, tokens, answers = self._ask(query)
        depths = [(size, unpack_rows(packed)) for size, packed in answers]
        reaches = merge_depths(depths)
        hints = self._find_hints(query, unit, depths)
        now_s = self._clock()
        rows = []
        for index_id, reach in reaches.items():
            source = self._registry.by_index_id(index_id)
            assert source is not None, "the index answers for sources of the registry only"
            if query.pods is None or source.pod in query.pods:
                known = self._hints.best(hints.get(index_id, ()))
                rows.append(build_row(source, reach, unit=unit, tokens=tokens, now_s=now_s, hints=known))
        ranked = rank_rows(rows)
        if ranked:
            self._count(tokens, ranked[0].matched_blocks, ranked[0].matched_tokens)
        else:
            self._count(tokens, 0, 0)
        if query.min_blocks:
            ranked = tuple(row for row in ranked if row.matched_blocks >= query.min_blocks)
        ranked = ranked[: query.top_k]
        hashes = None
        if query.include_hashes:
            hashes = query.prefix_hashes
            if query.token_ids is not None:
                hashes = self._index.prefix_hashes(
                    query.model, query.lora, unit, query.token_ids, query.extra_keys
                )
        return MatchResult(query.model, query.lora, unit, tokens, tokens // unit, ranked, hashes)

    def match_json(self, query: MatchQuery) -> JsonAnswer | None:
        """The same as text, without an object a row: scoring and rendering are native, and held to `match`
        by the tests. Does not answer `include_hashes`, and None when the answer has hints: nothing is counted then.
        """
        if self._hints.is_empty:
            answer = self._answer_one(query)
            if answer is not None:
                return answer
        unit, tokens, answers = self._ask(query)
        if not self._hints.is_empty:
            hints = self._find_hints(query, unit, [(size, unpack_rows(packed)) for size, packed in answers])
            shown = self._shown(query.pods)
            if hints and (shown is None or not shown.isdisjoint(hints)):
                return None
        body, blocks, matched_tokens = self._registry.answers.render(
            _answer_head(query, unit, tokens),
            _ANSWER_END,
            answers,
            unit,
            tokens,
            self._clock(),
            self._shown(query.pods),
        )
        self._count(tokens, blocks, matched_tokens)
        return JsonAnswer(body, blocks)

    def _answer_one(self, query: MatchQuery) -> JsonAnswer | None:
        """What nearly every query is, in one native call: one context is asked, and no hints are known."""
        count = _check_buffers(query)
        contexts = self._index.context_ids(query.model, query.lora)
        unit = query.block_size
        if unit is None and len(contexts) == 1:
            (unit,) = contexts
        if unit is None or unit not in contexts:
            return None
        hashes = query.prefix_hashes
        asked = query.token_ids if hashes is None else hashes
        assert asked is not None, "a query has tokens or hashes"
        tokens = count if hashes is None else count * unit
        body, blocks, matched_tokens = self._index.answer(
            self._registry.answers,
            contexts[unit],
            asked,
            are_hashes=hashes is not None,
            extra_keys=query.extra_keys,
            now=self._now(),
            frame=(_answer_head(query, unit, tokens), _ANSWER_END),
            unit=unit,
            tokens=tokens,
            now_s=self._clock(),
            sources=None if query.pods is None else self._shown(query.pods),
        )
        self._count(tokens, blocks, matched_tokens)
        return JsonAnswer(body, blocks)

    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        block_size: int | None,
    ) -> bytes:
        """uint64, little-endian, one a full block of `unit(model, lora, block_size)` tokens."""
        return self._index.prefix_hashes(
            model, lora, self.unit(model, lora, block_size), token_ids, extra_keys
        )

    def unit(self, model: str, lora: str | None, block_size: int | None) -> int:
        """Tokens a block that an answer counts in: what is given, else the smallest size known."""
        return self._unit(model, block_size, self._index.context_ids(model, lora))

    def add_speculative(
        self,
        pod: str,
        dp_rank: int,
        model: str,
        lora: str | None,
        prefix_hashes: bytes,
        ttl_s: float,
        block_size: int | None,
    ) -> int:
        """A router says that it sent these blocks to a rank. Returns how many are marked (held ones are not).

        Raises UnknownPod; InvalidInput for another model than the pod's; LimitExceeded
        (`speculative_ttl_s_max`).
        """
        found = self._registry.find(pod)
        self._registry.check_model(found, model)
        if not ttl_s > 0:
            raise InvalidInput(f"ttl_s {ttl_s} is not positive", field="ttl_s")
        if ttl_s > self._settings.speculative_ttl_s_max:
            bound = f"speculative_ttl_s_max = {self._settings.speculative_ttl_s_max}"
            raise LimitExceeded(f"ttl_s {ttl_s} is longer than {bound}", bound="speculative_ttl_s_max")
        source = self._registry.source(pod, dp_rank)
        now = self._now()
        context = self._index.context(model, lora, self.unit(model, lora, block_size), now)
        return self._index.add_speculative(context, source.index_id, prefix_hashes, ticks(ttl_s), now)

    def _ask(self, query: MatchQuery) -> tuple[int, int, list[tuple[int, bytes]]]:
        """The answer's unit, the prompt's tokens, and (block size, packed rows) of each context."""
        count = _check_buffers(query)
        contexts = self._index.context_ids(query.model, query.lora)
        size = query.block_size
        if size is not None:
            contexts = {size: contexts[size]} if size in contexts else {}
        unit = self._unit(query.model, size, contexts)
        return (
            unit,
            count * unit if query.token_ids is None else count,
            list(self._rows(query, contexts, unit)),
        )

    def _find_hints(
        self, query: MatchQuery, unit: int, answers: Sequence[tuple[int, Sequence[Depths]]]
    ) -> dict[int, list[Hint]]:
        """By the index ids of their sources; each context that was asked has hints of its own."""
        found: dict[int, list[Hint]] = {}
        if self._hints.is_empty:
            return found
        for size, rows in answers:
            reaches = {row.source: row.tiers[-1] * size for row in rows}
            if not self._hints.knows_any(reaches):
                continue
            hashes = query.prefix_hashes
            if query.token_ids is not None:
                keys = _keys_for(query, size, unit)
                hashes = self._index.prefix_hashes(query.model, query.lora, size, query.token_ids, keys)
            assert hashes is not None, "a query has tokens or hashes"
            for source, hints in self._hints.find(hashes, size, reaches, self._now()).items():
                found.setdefault(source, []).extend(hints)
        return found

    def _count(self, tokens: int, matched_blocks: int, matched_tokens: int) -> None:
        self.matches += 1
        self.tokens_asked += tokens
        if matched_blocks:
            self.matches_hit += 1
            self.tokens_matched += matched_tokens

    def _shown(self, pods: frozenset[str] | None) -> set[int] | None:
        """Index ids of the sources of `pods`; None for all."""
        if pods is None:
            return None
        known = (self._registry.pods.get(name) for name in pods)
        return {source.index_id for pod in known if pod is not None for source in pod.sources.values()}

    def _unit(self, model: str, block_size: int | None, known: Mapping[int, int]) -> int:
        if block_size is not None:
            if block_size < 1:
                raise InvalidInput(f"block_size {block_size} is not positive", field="block_size")
            return block_size
        if known:
            return min(known)
        pods = [pod for pod in self._registry.pods.values() if pod.spec.model == model]
        sizes = [size for pod in pods for source in pod.sources.values() if (size := source.block_size)]
        return min(sizes, default=self._settings.block_size_default)

    def _rows(self, query: MatchQuery, contexts: Mapping[int, int], unit: int) -> Iterator[tuple[int, bytes]]:
        """The answer of each context that the query can be asked of, beside its block size."""
        now = self._now()
        for size, context in contexts.items():
            if query.prefix_hashes is not None:
                if size == unit:
                    yield size, self._index.match_hashes_packed(context, query.prefix_hashes, now)
            elif query.token_ids is not None:
                if size != unit and query.extra_keys is not None and any(query.extra_keys[1:]):
                    continue
                keys = _keys_for(query, size, unit)
                yield size, self._index.match_tokens_packed(context, query.token_ids, keys, now)


def _keys_for(query: MatchQuery, size: int, unit: int) -> tuple[bytes, ...] | None:
    """Keys are given for blocks of `unit` tokens: only the first block's (a salt) are the same for the first block
    of another size."""
    keys = query.extra_keys
    return keys if keys is None or size == unit else keys[:1]


def _answer_head(query: MatchQuery, unit: int, tokens: int) -> bytes:
    return b'%b%d,"blocks":%d,"matches":[' % (
        _answer_opening(query.model, query.lora, unit),
        tokens,
        tokens // unit,
    )


@functools.lru_cache(maxsize=1_024)
def _answer_opening(model: str, lora: str | None, unit: int) -> bytes:
    names = msgspec.json.encode(model), msgspec.json.encode(lora)
    return b'{"model":%b,"lora":%b,"block_size":%d,"tokens":' % (*names, unit)


def _check_buffers(query: MatchQuery) -> int:
    """Tokens, or prefix hashes, of the query."""
    assert (query.token_ids is None) != (query.prefix_hashes is None), (
        "a query has tokens or hashes, and not both"
    )
    if query.token_ids is not None:
        if len(query.token_ids) % 4:
            raise InvalidInput("token_ids must be whole uint32 values", field="token_ids")
        return len(query.token_ids) // 4
    assert query.prefix_hashes is not None
    if len(query.prefix_hashes) % 8:
        raise InvalidInput("prefix_hashes must be whole uint64 values", field="prefix_hashes")
    return len(query.prefix_hashes) // 8
