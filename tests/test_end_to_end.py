"""The whole way, with faults: real publishers, the service in a process of its own, and what a router is told.

Captured traffic of real engines is played with frames lost, doubled and cut short on the way; afterwards the
table must be what it is without the fault. What no capture contains is made here: then the answers must be
those of a twin, a pod that was told the same by HTTP, in order and without a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ingest.vllm import Cleared, Removed, Stored, WireEvent, WireForm, encode_batch
from app.replay.capture import Capture, Frame
from app.replay.formats import load_capture
from app.replay.indexer import IndexerUnderTest, own_indexer
from app.replay.runner import Replay
from app.replay.settings import ReplaySettings
from app.replay.verdict import Scope
from app.simulator.publisher import Publisher, PublisherSettings

CAPTURES = Path(__file__).parent / "data" / "captures"
DEADLINE_S = 30.0
BLOCK = 4

Send = Callable[[Publisher, Frame], None]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


# -- captured traffic, harmed on the way


def not_last(capture: Capture) -> set[tuple[str, int, int]]:
    """(pod, rank, number) of frames that another one of their source follows before anybody asks."""
    steps = itertools.pairwise(capture.steps)
    return {
        (step.pod, step.dp_rank, step.seq)
        for step, then in steps
        if isinstance(step, Frame)
        and isinstance(then, Frame)
        and (step.pod, step.dp_rank, step.seq + 1) == (then.pod, then.dp_rank, then.seq)
    }


def play(url: str, http: httpx.Client, capture: Capture, send: Send) -> list[dict[str, Any]]:
    """The ranks of the capture's pods after their publishers ended; every request was answered exactly."""
    with IndexerUnderTest(url) as indexer:
        replay = Replay(capture, indexer, ReplaySettings(deadline_s=DEADLINE_S, keep_pods=True), send=send)
        try:
            report = replay.run()
            pods = [http.get(f"/v1/pods/{pod}").json() for pod in capture.ranks]
        finally:
            for pod in capture.ranks:
                http.delete(f"/v1/pods/{pod}")
    assert report.passed, report.as_json()
    assert report.tally(Scope.OUTSIDE)["requests"] >= len(capture.requests) * 0.99
    return [rank for pod in pods for rank in pod["ranks"]]


CAPTURED = ["v0.32.0-workload", "core/v0.23.0.jsonl"]


@pytest.mark.parametrize("name", CAPTURED)
def test_frames_lost_in_the_middle(url: str, http: httpx.Client, name: str) -> None:
    capture = load_capture(CAPTURES / name)
    lost = {frame for frame in not_last(capture) if frame[2] % 2}
    assert len(lost) > 50, "the capture has frames to lose"

    def lose(publisher: Publisher, frame: Frame) -> None:
        copies = 0 if (frame.pod, frame.dp_rank, frame.seq) in lost else 1
        publisher.publish(frame.seq, frame.payload, copies=copies)

    for rank in play(url, http, capture, lose):
        assert rank["gaps"] > 10
        assert rank["restarts"] == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_every_frame_twice(url: str, http: httpx.Client, name: str) -> None:
    def send_twice(publisher: Publisher, frame: Frame) -> None:
        publisher.publish(frame.seq, frame.payload, copies=2)

    for rank in play(url, http, load_capture(CAPTURES / name), send_twice):
        assert (rank["gaps"], rank["restarts"]) == (0, 0)


def test_replay_that_stops_short(url: str, http: httpx.Client) -> None:
    """Two replies and no end marker, as engines before vLLM 0.33 do to a slow reader: asked again from there."""
    capture = load_capture(CAPTURES / "core" / "v0.33.0.jsonl")
    candidates = not_last(capture)
    numbers = sorted(number for _, _, number in candidates)
    first = next(number for number in numbers if {number + 1, number + 2} <= set(numbers))
    lost = range(first, first + 3)

    def lose_and_cut(publisher: Publisher, frame: Frame) -> None:
        if frame.seq == lost.start:
            publisher.limit_replays(2)
        publisher.publish(frame.seq, frame.payload, copies=0 if frame.seq in lost else 1)

    (rank,) = play(url, http, capture, lose_and_cut)
    assert (rank["gaps"], rank["restarts"]) == (1, 0)
    assert rank["replays"] >= 3, "the gap took several rounds"


# -- a pod that says what we want, and its twin


def tokens(*names: str) -> list[int]:
    """One block of token ids a name."""
    return [ord(name) * 10 + place for name in names for place in range(BLOCK)]


def name_of(prefix: str) -> int:
    """The engine's name of the block that ends `prefix`."""
    return int.from_bytes(prefix.encode(), "big")


def stored(prefix: str, *, blocks: int = 1) -> Stored:
    """The last `blocks` blocks of `prefix`, one letter a block."""
    known = len(prefix) - blocks
    return Stored(
        block_hashes=[name_of(prefix[: end + 1]) for end in range(known, len(prefix))],
        parent_block_hash=name_of(prefix[:known]) if known else None,
        token_ids=tokens(*prefix[known:]),
        block_size=BLOCK,
    )


def removed(*prefixes: str) -> Removed:
    return Removed(block_hashes=[name_of(prefix) for prefix in prefixes])


@dataclasses.dataclass
class Engine:
    """An engine that publishes what it is told to, registered with the indexer as a pod of its own model."""

    http: httpx.Client
    model: str
    publisher: Publisher
    incarnation: int = 0
    batches: list[bytes] = dataclasses.field(default_factory=list)  # of this incarnation

    def batch(self, *events: WireEvent) -> bytes:
        ts = 1_795_226_400.0 + 1_000 * self.incarnation + len(self.batches)
        payload = encode_batch(WireForm.MAPS_0_33, ts=ts, events=events)
        self.batches.append(payload)
        return payload

    def say(self, *events: WireEvent, copies: int = 1) -> None:
        payload = self.batch(*events)
        self.publisher.publish(len(self.batches) - 1, payload, copies=copies)

    def die_and_come_back(self) -> None:
        """Another process on the same endpoints, whose numbers begin at 0."""
        self.die()
        self.come_back()

    def die(self) -> None:
        self.publisher.stop()
        self.incarnation += 1
        self.batches = []

    def come_back(self) -> None:
        settings = PublisherSettings(
            endpoint=self.publisher.endpoint, replay_endpoint=self.publisher.replay_endpoint
        )
        self.publisher = Publisher(settings)

    def rank(self) -> Any:
        return self.http.get(f"/v1/pods/{self.model}-pod").json()["ranks"][0]

    def settle(self, *, restarts: int = 0, state: str = "live") -> None:
        """Returns when a match sees all that this incarnation published."""
        last_seq = len(self.batches) - 1 if self.batches else None
        wanted = (last_seq, restarts, state)
        deadline = time.monotonic() + DEADLINE_S
        while (got := (rank := self.rank())["last_seq"], rank["restarts"], rank["state"]) != wanted:
            assert time.monotonic() < deadline, f"waited for {wanted}, the indexer is at {got}"
            time.sleep(0.01)

    def depths(self, prompts: Sequence[str], pod: str | None = None) -> dict[str, int]:
        """Prompt -> depth in blocks."""
        pod = f"{self.model}-pod" if pod is None else pod
        found = {}
        for prompt in prompts:
            query = {"model": self.model, "token_ids": tokens(*prompt), "pods": [pod], "block_size": BLOCK}
            answer = self.http.post("/v1/match", json=query).raise_for_status().json()
            found[prompt] = sum(row["matched_blocks"] for row in answer["matches"])
        return found

    def twin_depths(self, prompts: Sequence[str], *events: WireEvent) -> dict[str, int]:
        """The same of a pod that was told `events`, one a batch, by HTTP."""
        twin = f"{self.model}-twin"
        for seq, event in enumerate(events):
            payload = encode_batch(WireForm.MAPS_0_33, ts=1.0, events=[event])
            self.http.post(
                "/v1/events",
                params={"pod": twin, "model": self.model, "seq": seq},
                content=payload,
                headers={"content-type": "application/msgpack"},
            ).raise_for_status()
        return self.depths(prompts, twin)


@pytest.fixture
def engine(http: httpx.Client, request: pytest.FixtureRequest) -> Iterator[Engine]:
    model = request.node.name.removeprefix("test_")
    made = Engine(http, model, Publisher())
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lambda: made.publisher.stop())
        pod = f"/v1/pods/{model}-pod"
        spec = {
            "model": model,
            "zmq_endpoint": made.publisher.endpoint,
            "replay_endpoint": made.publisher.replay_endpoint,
        }
        http.put(pod, json=spec).raise_for_status()
        cleanup.callback(http.delete, pod)
        assert made.publisher.wait_subscribed(DEADLINE_S)
        yield made


PROMPTS = ["a", "ab", "abc", "abcd", "abcde", "b", "bc", "abx", "abxy", "axy", "xy", "d", "cd", "ax", "c"]


def test_killed_and_started_again_from_zero(engine: Engine) -> None:
    """What the old process held is gone before the new one says a word, and then only its words count."""
    engine.say(stored("abcd", blocks=4))
    engine.say(stored("abx"))
    engine.settle()
    assert engine.depths(PROMPTS)["abcd"] == 4

    engine.die_and_come_back()
    engine.settle(restarts=1)
    assert set(engine.depths(PROMPTS).values()) == {0}
    says: list[WireEvent] = [stored("ab", blocks=2), stored("abxy", blocks=2), stored("abc"), removed("abxy")]
    for event in says:
        engine.say(event)
    engine.settle(restarts=1)
    assert engine.depths(PROMPTS) == engine.twin_depths(PROMPTS, *says)
    assert engine.depths(PROMPTS)["abxy"] == 3


def test_killed_and_started_again_further_than_before(engine: Engine) -> None:
    """The new process has passed the old one's number before the indexer is back."""
    engine.say(stored("abcd", blocks=4))
    engine.settle()
    engine.die()
    says = [stored("ab", blocks=2), stored("abx"), stored("abxy")]
    payloads = [engine.batch(event) for event in says]
    engine.come_back()
    for seq, payload in enumerate(payloads):
        engine.publisher.publish(seq, payload)
    engine.settle(restarts=1)
    assert engine.depths(PROMPTS) == engine.twin_depths(PROMPTS, *says)
    assert engine.depths(PROMPTS)["abcd"] == 2


def test_lost_tail_is_found_without_another_word(engine: Engine) -> None:
    engine.settle()
    engine.say(stored("ab", blocks=2), copies=0)
    engine.say(stored("abcd", blocks=2), copies=0)
    engine.settle()
    assert engine.depths(["abcd"]) == {"abcd": 4}


def test_child_before_its_parent(engine: Engine) -> None:
    """In no order at all; until the parent is there, its children count for nothing."""
    engine.say(stored("abcd"), stored("abc"))
    engine.say(stored("abxy", blocks=2))
    engine.settle()
    assert set(engine.depths(PROMPTS).values()) == {0}
    engine.say(stored("a"))
    engine.settle()
    assert engine.depths(["abcd", "abxy"]) == {"abcd": 1, "abxy": 1}
    engine.say(stored("ab"))
    engine.settle()
    in_order = [stored("ab", blocks=2), stored("abcd", blocks=2), stored("abxy", blocks=2)]
    assert engine.depths(PROMPTS) == engine.twin_depths(PROMPTS, *in_order)
    assert engine.depths(["abcd", "abxy"]) == {"abcd": 4, "abxy": 4}


def test_block_in_the_middle_is_evicted_and_stored_again(engine: Engine) -> None:
    says: list[WireEvent] = [stored("abcde", blocks=5), stored("abxy", blocks=2), removed("ab")]
    for event in says:
        engine.say(event)
    engine.settle()
    assert engine.depths(PROMPTS) == engine.twin_depths(PROMPTS, *says)
    assert engine.depths(["abcde", "abxy"]) == {"abcde": 1, "abxy": 1}
    engine.say(stored("ab"))
    engine.settle()
    assert engine.depths(["abcde", "abxy"]) == {"abcde": 5, "abxy": 4}, "what hangs on it counts again"


def test_unknown_parent_is_never_a_root(engine: Engine) -> None:
    engine.say(stored("abcd", blocks=2))
    engine.settle()
    assert set(engine.depths([*PROMPTS, "cd", "cdab"]).values()) == {0}
    assert engine.rank()["orphans"] == 2


def test_last_block_alone_has_no_depth(engine: Engine) -> None:
    engine.say(stored("abcd", blocks=4))
    engine.say(removed("a"), removed("ab"), removed("abc"))
    engine.settle()
    assert engine.rank()["blocks"]["gpu"] == 1
    assert set(engine.depths(PROMPTS).values()) == {0}


def test_copies_are_removed_one_by_one(engine: Engine) -> None:
    engine.say(stored("ab", blocks=2), stored("ab"))
    engine.say(removed("ab"))
    engine.settle()
    assert engine.depths(["ab"]) == {"ab": 2}
    engine.say(removed("ab"))
    engine.settle()
    assert engine.depths(["ab"]) == {"ab": 1}


def test_clear_comes_in_its_place_in_the_batch(engine: Engine) -> None:
    engine.say(stored("abcd", blocks=4))
    engine.say(stored("abx"), Cleared(), stored("ab", blocks=2))
    engine.settle()
    assert engine.depths(["abcd", "abx"]) == {"abcd": 2, "abx": 2}
