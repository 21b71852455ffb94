"""Plays a capture into an indexer over real sockets and asks it what the engines were asked.

Every rank of every pod gets a publisher of its own, and the indexer is told to subscribe as it would to an
engine. Before a question is asked, the indexer must have applied every frame published so far, those of
other pods included; this is read from `last_seq` and `restarts` of `GET /v1/pods/{pod}` with a deadline,
never guessed. Pods that the indexer knows already are refused, so a replay cannot mix with a live fleet;
what it registers it deletes again, unless told to keep it. Cost: one or two calls a request and a few
polls a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection

from app.errors import InvalidInput, Unresponsive
from app.replay.capture import Answer, Capture, Frame, Reset, Send
from app.replay.indexer import POLL_INTERVAL_S, IndexerUnderTest
from app.replay.settings import ReplaySettings
from app.replay.verdict import Report, Scope, Unjudged, Verdict, nearest
from app.simulator.publisher import Publisher, PublisherSettings, open_publishers


@dataclasses.dataclass(slots=True)
class _Stream:
    publisher: Publisher
    last_seq: int | None = None
    restarts: int = 0
    settled: bool = True


@dataclasses.dataclass(slots=True)
class _Question:
    """A request that is on its way; `predictions` collects what the indexer said while it was."""

    scope: Scope
    dp_ranks: Collection[int]
    predictions: set[int] = dataclasses.field(default_factory=set)


def _send(publisher: Publisher, frame: Frame) -> None:
    publisher.publish(frame.seq, frame.payload)


class Replay:
    """One run of one capture; its publishers and pods end with it. `send` publishes a frame, or harms it."""

    def __init__(
        self,
        capture: Capture,
        indexer: IndexerUnderTest,
        settings: ReplaySettings,
        *,
        send: Callable[[Publisher, Frame], None] = _send,
    ) -> None:
        self._capture = capture
        self._indexer = indexer
        self._settings = settings
        self._send = send
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._in_reset: set[tuple[str, int]] = set()
        self._questions: dict[int, _Question] = {}
        self._report = Report(capture.name, capture.model, capture.block_size)

    def run(self) -> Report:
        with contextlib.ExitStack() as cleanup:
            for pod, ranks in self._capture.ranks.items():
                self._connect(pod, max(ranks) + 1, cleanup)
            for step in self._capture.steps:
                match step:
                    case Frame():
                        self._publish(step)
                    case Send(request):
                        self._ask(request)
                    case Answer(request):
                        self._judge(request)
                    case Reset(pod):
                        self._in_reset.update(source for source in self._streams if source[0] == pod)
            self._settle()
        return self._report

    # -- streams

    def _connect(self, pod: str, dp_size: int, cleanup: contextlib.ExitStack) -> None:
        if self._indexer.has_pod(pod):
            raise InvalidInput(
                f"the indexer already has a pod {pod!r}: replay into an indexer of its own, "
                "or delete that pod first"
            )
        publishers = open_publishers(
            PublisherSettings(), host=self._settings.host, port=0, replay_port=0, dp_size=dp_size
        )
        for dp_rank, publisher in enumerate(publishers):
            cleanup.callback(publisher.stop)
            self._streams[pod, dp_rank] = _Stream(publisher)
        self._indexer.register(
            pod,
            {
                "model": self._capture.model,
                "block_size": self._capture.block_size,
                "zmq_endpoint": publishers[0].endpoint,
                "replay_endpoint": publishers[0].replay_endpoint,
                "dp_size": dp_size,
            },
        )
        if not self._settings.keep_pods:
            cleanup.callback(self._forget, pod)
        for publisher in publishers:
            if not publisher.wait_subscribed(self._settings.deadline_s):
                raise Unresponsive(
                    f"the indexer did not subscribe to {publisher.endpoint} "
                    f"within {self._settings.deadline_s:g} s"
                )

    def _forget(self, pod: str) -> None:
        # An indexer that has gone has forgotten already; the reason is reported by whoever met it first.
        with contextlib.suppress(Unresponsive):
            self._indexer.drop(pod)

    def _publish(self, frame: Frame) -> None:
        stream = self._streams[frame.pod, frame.dp_rank]
        if stream.last_seq is not None and frame.seq < stream.last_seq:
            # What came before must be seen first: afterwards its numbers mean other frames.
            self._settle()
            stream.publisher.restart()
            stream.restarts += 1
        self._send(stream.publisher, frame)
        stream.last_seq = frame.seq
        stream.settled = False
        self._report.frames += 1
        self._in_reset.discard((frame.pod, frame.dp_rank))
        for request in self._questions:
            if (
                self._capture.requests[request].concurrent
                and self._capture.requests[request].pod == frame.pod
            ):
                self._predict(request)

    def _settle(self) -> None:
        """Return when a match sees every frame published so far."""
        deadline = time.monotonic() + self._settings.deadline_s
        for pod in sorted({pod for (pod, _), stream in self._streams.items() if not stream.settled}):
            while not self._seen(pod):
                if time.monotonic() > deadline:
                    raise Unresponsive(self._what_is_missing(pod))
                time.sleep(POLL_INTERVAL_S)

    def _seen(self, pod: str) -> bool:
        positions = self._indexer.positions(pod)
        for (name, dp_rank), stream in self._streams.items():
            if name == pod and not stream.settled:
                at = positions.get(dp_rank)
                if at is None or at.last_seq != stream.last_seq or at.restarts < stream.restarts:
                    return False
                stream.settled = True
        return True

    def _what_is_missing(self, pod: str) -> str:
        published = {
            dp_rank: stream.last_seq for (name, dp_rank), stream in self._streams.items() if name == pod
        }
        return (
            f"pod {pod!r}: published up to {published} (by rank), but after {self._settings.deadline_s:g} s "
            f"the indexer is at {self._indexer.positions(pod)}"
        )

    # -- requests

    def _ask(self, number: int) -> None:
        request = self._capture.requests[number]
        ranks = self._capture.ranks.get(request.pod)
        if request.cached_tokens is None:
            self._report.unjudged[Unjudged.NOT_REPORTED] += 1
        elif request.cache_salt is not None and not self._capture.salts_published:
            self._report.unjudged[Unjudged.SALT_HIDDEN] += 1
        elif ranks is None:
            self._report.unjudged[Unjudged.POD_SILENT] += 1
        else:
            possible = ranks if request.dp_rank is None else (request.dp_rank,)
            if any((request.pod, dp_rank) in self._in_reset for dp_rank in possible):
                scope = Scope.INSIDE
            else:
                scope = Scope.CONCURRENT if request.concurrent else Scope.OUTSIDE
            self._questions[number] = _Question(scope, possible)
            self._predict(number)

    def _predict(self, number: int) -> None:
        request, question = self._capture.requests[number], self._questions[number]
        self._settle()
        tokens_by_rank = self._indexer.reusable_tokens(
            model=self._capture.model,
            lora=request.lora,
            cache_salt=request.cache_salt,
            pod=request.pod,
            token_ids=request.token_ids,
        )
        question.predictions.update(tokens_by_rank.get(dp_rank, 0) for dp_rank in question.dp_ranks)

    def _judge(self, number: int) -> None:
        question = self._questions.pop(number, None)
        if question is None:
            return
        request = self._capture.requests[number]
        assert request.cached_tokens is not None, "only requests with a reported truth are asked about"
        self._report.verdicts.append(
            Verdict(
                request=number,
                pod=request.pod,
                dp_rank=request.dp_rank,
                scope=question.scope,
                predicted_tokens=nearest(question.predictions, request.cached_tokens),
                cached_tokens=request.cached_tokens,
            )
        )
