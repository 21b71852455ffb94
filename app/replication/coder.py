"""Batches as they go into the log: prefix hashes in place of tokens, computed once, by the replica that accepts them.

Exact for any order in which one replica accepts the batches of a source: `native/flight_book.hpp` knows what is under
way. A block whose parent is not known for certain keeps its tokens, and the index of every replica treats it as it
treats any event of an engine: it is chained, or it waits. These are

    a child of a block that nobody has named yet, and any child while blocks of its source wait for their parent
    a child of a block whose removal or placeholder is under way
    everything of a pod whose registration, removal or first batch is under way, and of a source that may have
    restarted, or begun to use larger chunks
    what may be left out as a duplicate

What replicas accept for one source at the same time, without either waiting for the other's answer, has no order
before the log gives it one; all replicas agree on what comes of it, and a sender that waits for its answers never
gets there.

Where fuzzy matches are made, the SimHash and the content hash of each block go along: they are all that the
fuzzy index keeps of its tokens. So a block of 16 tokens is 16 bytes in the log, or 32, in place of 72.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Set

from app import _native, hashing
from app.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHashed,
    BlockStored,
    Envelope,
    Event,
    EventBatch,
    PrefixesStored,
    Tier,
)
from app.service import IndexerService
from app.service.sifting import sift

_UNTOUCHED, _KNOWN = 0, 1
_VOTES_MAX = 65_535  # tokens of the largest block that has a SimHash

_seed = functools.lru_cache(maxsize=4_096)(hashing.context_seed)


@dataclasses.dataclass(slots=True)
class Ticket:
    """Of an entry that is under way, for `Coder.land`. `number` is that of its last event."""

    pod: str | None = None  # None: it concerns every pod
    dp_rank: int | None = None  # None: it concerns every rank
    number: int = 0
    is_control: bool = False  # it may change what the pod is


@dataclasses.dataclass(slots=True)
class _Flight:
    """What is under way of one source, and what it will be when that has been applied."""

    block_size: int | None
    chunk_sizes: Mapping[Tier, int]
    last_seq: int | None
    book: _native.FlightBook = dataclasses.field(default_factory=_native.FlightBook)
    last: int = 0  # number of the last event
    raw: int = 0  # number of the last store that keeps its tokens
    is_unsure: bool = False  # nobody can foresee all of that: until everything has landed, tokens are kept


class Coder:
    """All calls on the service's thread. `shingle` is the fuzzy index's, 0 where there is none."""

    def __init__(self, service: IndexerService, *, shingle: int) -> None:
        self._service = service
        self._shingle = shingle
        self._number = 0
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._controls: Counter[str] = Counter()  # pod -> entries under way that may change what it is
        self._everywhere = 0  # entries under way that concern every pod
        self.hashed_blocks = 0
        self.raw_blocks = 0  # that kept their tokens

    def is_changing(self, pod: str) -> bool:
        """Something is under way that may change what the pod is: nobody can say now what will be accepted."""
        return pod in self._controls

    def is_under_way(self, pod: str, dp_rank: int) -> bool:
        """Something is under way that may change what will be accepted of the rank."""
        return (pod, dp_rank) in self._flights or pod in self._controls

    def code(self, envelope: Envelope, batch: EventBatch) -> tuple[EventBatch, Ticket]:
        """A batch of a followed stream has no `seq` here: none of them is a duplicate."""
        pod, dp_rank = envelope.pod, envelope.dp_rank
        known = self._service.pods.get(pod)
        ticket = Ticket(pod, dp_rank, is_control=known is None)
        flight = self._flight(pod, dp_rank)
        model = envelope.model if known is None else known.spec.model
        lora = envelope.lora or (None if known is None else known.spec.lora)
        applied = self._foresee(flight, envelope, batch)
        orphans = self._service.waiting_blocks(pod, dp_rank) > 0
        events: list[Event] = []
        for event in batch.events:
            sure = model is not None and not flight.is_unsure and id(event) in applied
            if isinstance(event, BlockStored) and event.token_ids and sure:
                assert model is not None
                coded = self._store(flight, pod, dp_rank, event, model, event.lora or lora, orphans)
                events.append(coded)
                continue
            events.append(event)
            self._note(flight, event, model if sure else None)
        ticket.number = flight.last = max(flight.last, self._number)
        if ticket.is_control:
            self._controls[pod] += 1
        coded_batch = EventBatch(
            events=tuple(events),
            positions=batch.positions,
            rejected=batch.rejected,
            ignored=batch.ignored,
            ts=batch.ts,
            dp_rank=batch.dp_rank,
        )
        return coded_batch, ticket

    def _flight(self, pod: str, dp_rank: int) -> _Flight:
        flight = self._flights.get((pod, dp_rank))
        if flight is not None:
            return flight
        known = self._service.pods.get(pod)
        source = None if known is None else known.sources.get(dp_rank)
        if source is not None:
            flight = _Flight(source.block_size, source.chunk_sizes.copy(), source.last_seq)
        else:
            flight = _Flight(None if known is None else known.spec.block_size, {}, None)
        self._flights[pod, dp_rank] = flight
        return flight

    def _foresee(self, flight: _Flight, envelope: Envelope, batch: EventBatch) -> Set[int]:
        """The ids of the events that will be applied for certain."""
        flight.is_unsure |= envelope.pod in self._controls
        seq = envelope.seq
        if seq is not None and flight.last_seq is not None and seq <= flight.last_seq:
            if seq == 0 and envelope.digest is not None:  # it may tell an engine's restart
                flight.book.clear(self._count(flight))
                flight.is_unsure = True
            return frozenset()
        sifted = sift(batch, flight.block_size, flight.chunk_sizes)
        if sifted.is_useless:
            return frozenset()
        for tier, size in flight.chunk_sizes.items():
            if sifted.chunk_sizes[tier] != size:  # what was stored in smaller ones will be forgotten
                flight.is_unsure = True
        flight.block_size, flight.chunk_sizes = sifted.block_size, sifted.chunk_sizes
        flight.last_seq = flight.last_seq if seq is None else seq
        return {id(event) for event in sifted.events}

    def note_reset(self, pod: str, dp_rank: int) -> Ticket:
        """What the source held is forgotten, or may be."""
        flight = self._flight(pod, dp_rank)
        flight.book.clear(self._count(flight))
        flight.is_unsure = True
        return Ticket(pod, dp_rank, flight.last)

    def note_control(self, pod: str) -> Ticket:
        """What the pod is, or what its ranks hold, may change."""
        self._controls[pod] += 1
        return Ticket(pod, is_control=True)

    def note_everywhere(self) -> Ticket:
        self._everywhere += 1
        return Ticket()

    def land(self, ticket: Ticket) -> None:
        """The entry has been applied, or never will be."""
        if ticket.pod is None:
            self._everywhere -= 1
            return
        if ticket.is_control:
            self._controls[ticket.pod] -= 1
            if not self._controls[ticket.pod]:
                del self._controls[ticket.pod]
        key = None if ticket.dp_rank is None else (ticket.pod, ticket.dp_rank)
        flight = None if key is None else self._flights.get(key)
        if key is None or flight is None:
            return
        flight.book.land(ticket.number)
        if flight.last <= ticket.number:
            del self._flights[key]
        elif flight.raw <= ticket.number:
            flight.raw = 0

    @property
    def sources(self) -> int:
        """With something under way."""
        return len(self._flights)

    def _count(self, flight: _Flight) -> int:
        self._number += 1
        flight.last = self._number
        return self._number

    def _store(
        self,
        flight: _Flight,
        pod: str,
        dp_rank: int,
        event: BlockStored,
        model: str,
        lora: str | None,
        orphans: bool,
    ) -> BlockStored | BlocksHashed:
        number = self._count(flight)
        seed = _seed(model, lora, event.block_size)
        chain = None
        if _is_whole(event):
            if event.parent_block_hash is None:
                chain = seed
            elif not orphans and not flight.raw and not self._everywhere:
                chain = self._chain(flight, pod, dp_rank, event, model, lora, seed, event.parent_block_hash)
        if chain is None:
            flight.book.touch(number, event.block_hashes)
            if event.parent_block_hash is not None:
                flight.raw = number
            self.raw_blocks += event.block_count
            return event
        shingle = self._shingle if self._shingle <= event.block_size <= _VOTES_MAX else 0
        prefixes, contents = _native.hash_blocks(
            chain, event.block_size, event.token_ids, event.extra_keys, shingle
        )
        flight.book.store(number, seed, event.tier, event.group, event.block_hashes, prefixes)
        self.hashed_blocks += event.block_count
        return BlocksHashed(
            block_hashes=event.block_hashes,
            prefix_hashes=prefixes,
            block_size=event.block_size,
            chain_from=None if event.parent_block_hash is None else chain,
            contents=contents,
            lora=lora,
            tier=event.tier,
            group=event.group,
            metadata=event.metadata,
        )

    def _chain(
        self,
        flight: _Flight,
        pod: str,
        dp_rank: int,
        event: BlockStored,
        model: str,
        lora: str | None,
        seed: int,
        parent: int,
    ) -> int | None:
        """The prefix that the event's blocks will stand on; None while nobody can be sure."""
        meaning, prefix = flight.book.meaning(seed, event.tier, event.group, parent)
        if meaning == _UNTOUCHED:
            return self._service.chain_of(pod, dp_rank, model, lora, event)
        return prefix if meaning == _KNOWN else None

    def _note(self, flight: _Flight, event: Event, model: str | None) -> None:
        number = self._count(flight)
        book = flight.book
        if isinstance(event, AllBlocksCleared):
            book.clear(number)
        elif isinstance(event, PrefixesStored) and model is not None:
            seed = _seed(model, event.lora, event.block_size)
            book.store(number, seed, event.tier, event.group, event.block_hashes, event.prefix_hashes)
        else:
            assert isinstance(event, BlockStored | BlockRemoved | PrefixesStored | BlocksHashed)
            book.touch(number, event.block_hashes)
            if isinstance(event, BlockStored) and event.parent_block_hash is not None:
                flight.raw = number


def _is_whole(event: BlockStored) -> bool:
    blocks = event.block_count
    return (
        blocks > 0
        and len(event.block_hashes) == 8 * blocks
        and len(event.token_ids) == blocks * event.block_size * 4
        and (event.extra_keys is None or len(event.extra_keys) == blocks)
    )
