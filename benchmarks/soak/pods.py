"""Simulated engines: a real paged cache each, what it says on the wire, and what goes wrong on the way.

The cache of the simulator is the truth: what it would reuse is what the indexer has to answer. A pod works when it is
told to, from one thread; its publisher sends from its own. Losses and copies are drawn from a seed.
"""

from __future__ import annotations

import http.client
import random
import time
import urllib.parse
from collections.abc import Callable, Sequence

import msgspec

from app.ingest.vllm import WireEvent, WireForm, encode_batch
from app.simulator.kv_cache import KVCacheSettings, PagedKVCache
from app.simulator.publisher import Publisher, PublisherSettings

MODEL = "soak"
BLOCK = 16
PAGES = 600
SEQUENCES_MAX = 4
DOCUMENTS = 40
DOCUMENT_BLOCKS = 48
FLUSH_S = 10.0

Post = Callable[[str, bytes, str], tuple[int, bytes]]


class Documents:
    """What prompts begin with: the same for every pod, so that prefixes are shared between them."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._texts = [
            [draw.randrange(150_000) for _ in range(DOCUMENT_BLOCKS * BLOCK)] for _ in range(DOCUMENTS)
        ]

    def prompt(self, draw: random.Random) -> list[int]:
        """Some of a document and something of its own."""
        text = draw.choice(self._texts)
        tail = [draw.randrange(150_000) for _ in range(draw.choice((1, 5, 16, 40)))]
        return text[: draw.randrange(1, len(text))] + tail

    def question(self, draw: random.Random) -> list[int]:
        text = draw.choice(self._texts)
        return text[: BLOCK * draw.randrange(1, DOCUMENT_BLOCKS + 1)]


class SimulatedPod:
    """What every pod does, however it tells of it."""

    form = WireForm.MAPS_0_33

    def __init__(self, name: str, documents: Documents, seed: int) -> None:
        self.name = name
        self.restarts = 0
        self.next_seq = 0
        self._documents = documents
        self._draw = random.Random(seed)
        self._boot()

    def _boot(self) -> None:
        self.cache = PagedKVCache(KVCacheSettings(capacity_pages=PAGES, hash_seed=self.name.encode()))
        self._sequences: list[str] = []
        self._made = 0
        self.next_seq = 0

    def held_blocks(self, token_ids: Sequence[int]) -> int:
        """How deep the engine holds these whole blocks."""
        return self.cache.lookup([*token_ids, 0]) // BLOCK

    def work(self) -> None:
        """One prompt, or a few decoded tokens, and what has to go for it."""
        if len(self._sequences) >= SEQUENCES_MAX or (self._sequences and self._draw.random() < 0.2):
            self.cache.detach(self._sequences.pop(0))
        if self._sequences and self._draw.random() < 0.3:
            self.cache.append(
                self._sequences[-1],
                [self._draw.randrange(150_000) for _ in range(self._draw.choice((1, 16, 33)))],
            )
        else:
            self._made += 1
            self._sequences.append(f"s{self._made}")
            self.cache.attach(self._sequences[-1], self._documents.prompt(self._draw))
        self._tell(self.cache.drain_events())

    def clear(self) -> None:
        for sequence in self._sequences:
            self.cache.detach(sequence)
        self._sequences = []
        assert self.cache.reset(), "a cache without sequences can be reset"
        self._tell(self.cache.drain_events())

    def _payload(self, events: list[WireEvent]) -> bytes:
        return encode_batch(self.form, ts=time.time(), events=events)

    def _tell(self, events: list[WireEvent]) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Nothing to close."""


class PublishingPod(SimulatedPod):
    """By ZMQ; about one frame in thirty is lost on the way and one in thirty comes twice."""

    def __init__(self, name: str, documents: Documents, seed: int) -> None:
        super().__init__(name, documents, seed)
        self.lost = self.doubled = 0
        self.publisher = Publisher()

    def registration(self) -> dict[str, object]:
        return {
            "model": MODEL,
            "zmq_endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
        }

    def crash(self) -> None:
        """The process is gone: what has not left its sockets is lost, and so is all that it held."""
        self.publisher.stop()
        self.restarts += 1
        self._boot()

    def come_back(self) -> None:
        self.publisher = Publisher(
            PublisherSettings(
                endpoint=self.publisher.endpoint, replay_endpoint=self.publisher.replay_endpoint
            )
        )

    def end_round(self) -> None:
        """Nothing new, but surely heard: a lost frame before it is noticed at once and not by the next probe."""
        self._publish([], copies=1)

    def lose_for_good(self) -> None:
        """A batch that neither arrives nor can be asked for again, and one behind it that shows it."""
        self._publish([*self.cache.drain_events()], copies=0)
        assert self.publisher.flush(FLUSH_S), "a publisher hands over in milliseconds"
        self.publisher.restart()
        self._publish([], copies=1)

    def stop(self) -> None:
        self.publisher.stop()

    def _tell(self, events: list[WireEvent]) -> None:
        if events:
            copies = self._draw.choices((1, 0, 2), (28, 1, 1))[0]
            self.lost += copies == 0
            self.doubled += copies == 2
            self._publish(events, copies=copies)

    def _publish(self, events: list[WireEvent], *, copies: int) -> None:
        self.publisher.publish(self.next_seq, self._payload(events), copies=copies)
        self.next_seq += 1


class PostingPod(SimulatedPod):
    """By HTTP, as an engine's payload or as JSON; a batch has a number, so it is sent again until it is taken."""

    def __init__(self, name: str, documents: Documents, seed: int, post: Post, *, as_json: bool) -> None:
        super().__init__(name, documents, seed)
        self._post = post
        self._as_json = as_json

    def _tell(self, events: list[WireEvent]) -> None:
        if not events:
            return
        seq = self.next_seq
        self.next_seq += 1
        if self._as_json:
            _, plain, *_ = msgspec.msgpack.decode(self._payload(events))
            body = msgspec.json.encode(
                {"pod": self.name, "model": MODEL, "seq": seq, "ts": time.time(), "events": plain}
            )
            target, kind = "/v1/events", "application/json"
        else:
            query = urllib.parse.urlencode({"pod": self.name, "model": MODEL, "seq": seq})
            body, target, kind = self._payload(events), f"/v1/events?{query}", "application/msgpack"
        for _ in range(2_000):
            try:
                status, answer = self._post(target, body, kind)
            except (OSError, http.client.HTTPException):
                status, answer = 503, b""
            if status == 200:
                return
            assert status == 503, f"a batch of {self.name} was refused: {status} {answer[:300]!r}"
            time.sleep(0.05)
        raise AssertionError(f"a batch of {self.name} was not taken within 100 s")
