"""Random histories of one source from the tracker to the index: what is held of a source that is live is what its engine
held after the batch that is told as its last one.

The engine is a cache of a few blocks that stores, evicts and clears; network, replay socket and clock are those
of test_sequence_model.py. What is said of a source that is not live is not checked: that is what not live means.
"""

from __future__ import annotations

import random
import struct

from app.config import Settings
from app.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from app.index.prefix_index import PrefixIndex
from app.ingest.actions import Action, Deliver, Report, Reset
from app.pods import PodSpec, Source, SourceState
from app.service import IndexerService, MatchQuery, index_limits
from tests.ingest.engine import Bench, SimulatedEngine
from tests.ingest.test_sequence_model import TrackedSource, play

BLOCKS = 6
SIZE = 4
PROMPTS = [struct.pack(f"<{SIZE}I", *[block] * SIZE) for block in range(BLOCKS)]


class CachingEngine(SimulatedEngine):
    """`contents` has, by payload, what a batch says and what is cached behind it; of every incarnation."""

    def __init__(self, buffer_batches: int) -> None:
        super().__init__(buffer_batches)
        self.draw = random.Random(buffer_batches)
        self.cached: set[int] = set()
        self.contents: dict[bytes, tuple[EventBatch, frozenset[int]]] = {}

    def publish(self) -> tuple[int, bytes]:
        seq, payload = super().publish()
        events = [self._event() for _ in range(self.draw.randint(1, 3))]
        batch = EventBatch(events=tuple(events), positions=tuple(range(len(events))))
        self.contents[payload] = batch, frozenset(self.cached)
        return seq, payload

    def restart(self) -> None:
        super().restart()
        self.cached = set()

    def _event(self) -> Event:
        if self.draw.random() < 0.08:
            self.cached.clear()
            return AllBlocksCleared()
        block = self.draw.randrange(BLOCKS)
        name = struct.pack("<Q", 1_000 * (self.incarnation + 1) + block)
        if block in self.cached:
            self.cached.remove(block)
            return BlockRemoved(block_hashes=name)
        self.cached.add(block)
        return BlockStored(
            block_hashes=name, parent_block_hash=None, token_ids=PROMPTS[block], block_size=SIZE
        )


class ServedBench(Bench):
    """Carries out what the tracker decides as app/ingest/feed.py does, on a service."""

    engine: CachingEngine
    checks = 0

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        settings = Settings(fuzzy=False)
        self.service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=lambda: self.now)
        self.service.register(PodSpec("pod", "m", zmq_endpoint="tcp://one:5557"))
        self.service.set_source_state("pod", 0, SourceState.DOWN)

    @property
    def source(self) -> Source:
        return self.service.pod("pod").sources[0]

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            super().run([action])
            if isinstance(action, Deliver):
                batch, _ = self.engine.contents[action.payload]
                self.service.apply("pod", 0, batch, seq=action.seq, digest=action.digest)
            elif isinstance(action, Reset):
                self.service.reset_source("pod", 0, restarted=action.restarted)
            elif isinstance(action, Report):
                self.service.set_source_state("pod", 0, action.state, cause=action.cause)
            self.check()

    def check(self) -> None:
        if self.source.state is not SourceState.LIVE:
            return
        type(self).checks += 1
        truth = self.engine.contents[self.delivered[-1]][1] if self.delivered else frozenset[int]()
        assert {block for block in range(BLOCKS) if self.holds(block)} == truth

    def holds(self, block: int) -> bool:
        return bool(self.service.match(MatchQuery("m", token_ids=PROMPTS[block])).matches)


class ServedSource(TrackedSource):
    make_engine = CachingEngine
    make_bench = ServedBench

    def restart_in_place(self, hidden: bool) -> None:
        """Over one connection it can look as if nothing had happened, and then for a while it does."""
        self.disconnect(restarted=True)


def test_what_is_held_of_a_live_source_is_what_its_engine_held() -> None:
    for seed in range(400):
        try:
            play(seed, ServedSource)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert ServedBench.checks > 1_500, "sources are live often enough for that to mean something"
