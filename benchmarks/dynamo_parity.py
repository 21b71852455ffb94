"""The same registrations, the same ZMQ frames and the same queries to this service and to Dynamo's standalone indexer.

    pip install --group bench-peers
    python -m benchmarks.dynamo_parity [--without-salts] [CAPTURE ...]

Captured traffic of real engines is published once, to both as subscribers of one socket. At each recorded request
both are asked `/query` with the same body, and their `scores` and `instances` are compared. A difference alone does not
tell who is right, so it is judged by what the engine itself reported (`cached_tokens`) of the pod that it was sent to.
`--without-salts` leaves out salted requests and their blocks, which Dynamo files as if they had no salt.

Neither is asked before it has applied all that was published: after the frames a marker batch follows, one block
of tokens that no prompt has, and both are polled until it is found. Frames are numbered anew, so that markers fit
between them. Dynamo's indexer listens on every interface of the machine; it is talked to on 127.0.0.1 only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import itertools
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from app.errors import Unresponsive
from app.replay.capture import Capture, Frame, Request, Send
from app.replay.formats import load_capture
from app.replay.indexer import own_indexer
from app.simulator.publisher import Publisher, PublisherSettings
from benchmarks.dynamo_peer import dynamo_is_installed

CAPTURES = Path(__file__).parent.parent / "tests" / "data" / "captures"
DEADLINE_S = 30.0
POLL_INTERVAL_S = 0.002
MARKER_TOKEN = 3_000_000_000  # far past every vocabulary
SHOWN_MAX = 5


class Right(enum.StrEnum):
    """Whose answer for the pod that a request was sent to is what its engine reported."""

    HERE = "the engine agrees with the answer here"
    DYNAMO = "the engine agrees with Dynamo's"
    NEITHER = "the engine agrees with neither"
    OTHER_POD = "they differ about a pod that was not asked, so no engine has said"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One request to which the two answered differently, and what was said of the pod that it was sent to."""

    request: int
    right: Right
    ours: Any
    theirs: Any
    cached_tokens: int | None


@dataclasses.dataclass(slots=True)
class Comparison:
    name: str
    requests: int = 0
    differences: list[Difference] = dataclasses.field(default_factory=list)

    @property
    def same(self) -> int:
        return self.requests - len(self.differences)

    def tally(self) -> dict[Right, int]:
        counts = Counter(found.right for found in self.differences)
        return {right: counts[right] for right in Right}

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.same} of {self.requests} answers are the same"
        for right, count in self.tally().items():
            if count:
                yield f"    {count}: {right}"
        for found in [found for found in self.differences if found.right is not Right.OTHER_POD][:SHOWN_MAX]:
            yield (
                f"    request {found.request}: scores here {found.ours['scores']}, Dynamo's "
                f"{found.theirs['scores']}; the engine took {found.cached_tokens} tokens from its cache"
            )


class Parity:
    """Plays one capture to both indexers; pods are numbered, because Dynamo's instances are."""

    def __init__(
        self,
        capture: Capture,
        ours: httpx.Client,
        theirs: httpx.Client,
        model: str,
        *,
        without_salts: bool = False,
    ) -> None:
        self._capture = capture
        self._without_salts = without_salts
        self._salted: dict[str, set[Any]] = {pod: set() for pod in capture.ranks}  # engine hashes
        self._indexers = (ours, theirs)
        self._model = model
        self._instances = {pod: number for number, pod in enumerate(sorted(capture.ranks), start=1)}
        self._publishers: dict[tuple[str, int], Publisher] = {}
        self._numbers: dict[tuple[str, int], Iterator[int]] = {}
        self._markers = itertools.count()
        self._unsettled: set[tuple[str, int]] = set()

    def run(self) -> Comparison:
        comparison = Comparison(self._capture.name)
        with contextlib.ExitStack() as cleanup:
            for pod, ranks in self._capture.ranks.items():
                for dp_rank in ranks:
                    self._register(pod, dp_rank, cleanup)
            for step in self._capture.steps:
                if isinstance(step, Frame):
                    source = (step.pod, step.dp_rank)
                    payload = self._unsalted(step) if self._without_salts else step.payload
                    self._publishers[source].publish(next(self._numbers[source]), payload)
                    self._unsettled.add(source)
                elif isinstance(step, Send):
                    self._compare(step.request, comparison)
        return comparison

    def _register(self, pod: str, dp_rank: int, cleanup: contextlib.ExitStack) -> None:
        publisher = Publisher(PublisherSettings())
        cleanup.callback(publisher.stop)
        body = {
            "instance_id": self._instances[pod],
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "model_name": self._model,
            "block_size": self._capture.block_size,
            "dp_rank": dp_rank,
        }
        for indexer in self._indexers:
            indexer.post("/register", json=body).raise_for_status()
        if not publisher.wait_subscribed(DEADLINE_S, subscribers=len(self._indexers)):
            raise Unresponsive(f"pod {pod} rank {dp_rank} did not get its {len(self._indexers)} subscribers")
        self._publishers[pod, dp_rank] = publisher
        self._numbers[pod, dp_rank] = itertools.count()

    def _compare(self, number: int, comparison: Comparison) -> None:
        request = self._capture.requests[number]
        if self._without_salts and request.cache_salt is not None:
            return
        self._settle()
        ours, theirs = (self._ask(indexer, request) for indexer in self._indexers)
        comparison.requests += 1
        if ours != theirs:
            right = self._judge(request, ours, theirs)
            comparison.differences.append(Difference(number, right, ours, theirs, request.cached_tokens))

    def _judge(self, request: Request, ours: Any, theirs: Any) -> Right:
        """An engine computes the last token of a prompt in any case, so a whole match counts a block less."""
        size = self._capture.block_size
        most = (len(request.token_ids) - 1) // size * size
        instance = str(self._instances[request.pod])
        here, dynamo = (
            {min(tokens, most) for tokens in answer["scores"].get(instance, {"0": 0}).values()}
            for answer in (ours, theirs)
        )
        if here == dynamo or request.cached_tokens is None:
            return Right.OTHER_POD
        if request.cached_tokens in here:
            return Right.HERE
        return Right.DYNAMO if request.cached_tokens in dynamo else Right.NEITHER

    def _unsalted(self, frame: Frame) -> bytes:
        """The payload without the stored events of salted chains, and without everything that follows from them."""
        ts, events, *rest = msgspec.msgpack.decode(frame.payload)
        salted = self._salted[frame.pod]
        kept = []
        for event in events:
            assert isinstance(event, dict), "--without-salts reads events of releases from 0.24 on"
            if event["type"] == "BlockStored" and (
                any(event.get("extra_keys") or ()) or event["parent_block_hash"] in salted
            ):
                salted.update(event["block_hashes"])
            elif event["type"] != "BlockRemoved" or not salted.issuperset(event["block_hashes"]):
                kept.append(event)
        return msgspec.msgpack.encode([ts, kept, *rest])

    def _ask(self, indexer: httpx.Client, request: Request) -> Any:
        body: dict[str, Any] = {"model_name": self._model, "token_ids": list(request.token_ids)}
        if request.lora is not None:
            body["lora_name"] = request.lora
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        answer = indexer.post("/query", json=body).raise_for_status().json()
        for instance in answer["instances"].values():
            instance.pop("rank_matches", None)  # Mooncake's addition, which Dynamo does not have
            instance["dp"] = {rank: tokens for rank, tokens in instance["dp"].items() if tokens}
        return {"scores": answer["scores"], "instances": answer["instances"]}

    def _settle(self) -> None:
        """Returns when both have applied every frame published so far."""
        for pod, dp_rank in self._unsettled:
            marker = next(self._markers)
            size = self._capture.block_size
            tokens = [MARKER_TOKEN + marker * size + place for place in range(size)]
            stored = {
                "type": "BlockStored",
                "block_hashes": [2**62 + marker],
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            payload = msgspec.msgpack.encode([0.0, [stored], dp_rank])
            self._publishers[pod, dp_rank].publish(next(self._numbers[pod, dp_rank]), payload)
            for indexer in self._indexers:
                self._await(indexer, tokens, str(self._instances[pod]), str(dp_rank))
        self._unsettled.clear()

    def _await(self, indexer: httpx.Client, tokens: list[int], instance: str, rank: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        body = {"model_name": self._model, "token_ids": tokens}
        while rank not in indexer.post("/query", json=body).raise_for_status().json()["scores"].get(
            instance, {}
        ):
            if time.monotonic() > deadline:
                raise Unresponsive(f"{indexer.base_url} did not apply a batch of instance {instance} in time")
            time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def dynamo_indexer() -> Iterator[str]:
    """The URL of Dynamo's standalone indexer, in a process that ends with this context."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + DEADLINE_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = log.read()[-2_000:].decode(errors="replace")
                    raise Unresponsive(f"Dynamo's indexer did not start; it said:\n{said}")
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compare(captures: Sequence[Path], *, without_salts: bool = False) -> list[Comparison]:
    """One pair of indexers for all captures; each capture is a model of its own."""
    comparisons = []
    with own_indexer() as our_url, dynamo_indexer() as their_url:
        for number, path in enumerate(captures):
            # Instances are numbered from 1 in every capture, so each gets a fresh registration on both.
            with httpx.Client(base_url=our_url) as ours, httpx.Client(base_url=their_url) as theirs:
                model = f"capture-{number}"
                parity = Parity(load_capture(path), ours, theirs, model, without_salts=without_salts)
                comparisons.append(parity.run())
                for indexer in (ours, theirs):
                    for row in indexer.get("/workers").raise_for_status().json():
                        body = {"instance_id": row["instance_id"], "model_name": row["model_name"]}
                        indexer.post("/unregister", json=body).raise_for_status()
    return comparisons


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/workers", timeout=1.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "captures", nargs="*", type=Path, default=[CAPTURES / "v0.32.0-workload"], metavar="CAPTURE"
    )
    parser.add_argument(
        "--without-salts", action="store_true", help="Leave out salted requests and their blocks."
    )
    arguments = parser.parse_args()
    if not dynamo_is_installed():
        print("Dynamo's indexer is not installed: pip install --group bench-peers", file=sys.stderr)
        return 1
    comparisons = compare(arguments.captures, without_salts=arguments.without_salts)
    for comparison in comparisons:
        for line in comparison.lines():
            print(line)
    wrong = {Right.DYNAMO, Right.NEITHER}
    return (
        1
        if any(found.right in wrong for comparison in comparisons for found in comparison.differences)
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
