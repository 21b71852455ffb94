"""Follows the event streams of every registered pod over ZMQ and feeds them to the service.

Three parts: a receiver that owns the sockets, one sequence tracker a source that makes a gapless
stream of what the sockets bring, and a feed that hands batches to the service. All of it happens on the event loop.
This is their front: told by the service which pods there are, asked by the API and the metrics how it
goes.

A pod whose endpoints make no sense is not followed; its ranks are `down` and say why.

Alone, a process follows every pod. Beside other replicas (`on_grant`) it follows those that were granted, and nothing
of the others is reported. Following begins behind the last batch that the writer has of a source: the replay shows
whether it is still the same engine, and brings what came since.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping

from app.endpoints import Endpoint, rank_endpoints
from app.errors import InvalidInput
from app.ingest.feed import Decode, Feed, QueueLimits, Stream, Writer
from app.ingest.receiver import Receiver
from app.ingest.sequence import SequenceLimits
from app.ingest.sockets import SocketLimits
from app.ingest.subscription import FollowedPod
from app.ingest.turns import Turns
from app.ingest.vllm import decode_batch
from app.pods import PodSpec, SourceState

logger = logging.getLogger(__name__)

_RANKS_TOLD_MAX = 1_024  # of a pod that cannot be followed


@dataclasses.dataclass(frozen=True, slots=True)
class ZmqSettings:
    """Every bound and interval of the ingest, by the part that keeps it."""

    sequence: SequenceLimits = dataclasses.field(default_factory=SequenceLimits)
    queue: QueueLimits = dataclasses.field(default_factory=QueueLimits)
    sockets: SocketLimits = dataclasses.field(default_factory=SocketLimits)
    slice_s: float = 0.00015  # of the loop's time, for reading or for draining, between two rounds of others


class ZmqIngest:
    """A PodListener. All calls are made from the event loop's thread; `stop` blocks for milliseconds."""

    def __init__(
        self,
        writer: Writer,
        settings: ZmqSettings | None = None,
        *,
        decode: Decode = decode_batch,
        on_grant: bool = False,
        is_blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_blocked = is_blocked
        self._writer = writer
        self._decode = decode
        self._settings = settings or ZmqSettings()
        self._granted: set[str] | None = set() if on_grant else None  # None: all are
        self._specs: dict[str, PodSpec] = {}
        self._pods: dict[str, FollowedPod] = {}
        self._feed: Feed | None = None
        self._receiver: Receiver | None = None

    def start(self) -> None:
        """On the running event loop; pods that were added before are followed from now on."""
        assert self._feed is None, (
            "an ingest starts once: its trackers know nothing of an earlier one's batches"
        )
        turns = Turns(asyncio.get_running_loop(), self._settings.slice_s)
        self._feed = Feed(
            self._writer,
            self._decode,
            self._settings.queue,
            turns,
            self._resume_reading,
            is_blocked=self._is_blocked,
        )
        self._receiver = Receiver(self._feed, turns, self._settings.sequence, self._settings.sockets)
        for pod in self._pods.values():
            self._begin(pod, self._receiver)
        self._receiver.start()

    def stop(self) -> None:
        """Ends all sockets. What is still queued is not applied; a later start replays it."""
        if self._receiver is None or self._feed is None:
            return
        self._receiver.stop()
        self._feed.close()
        self._receiver = None

    def unblocked(self) -> None:
        """The writer takes batches again."""
        if self._feed is not None:
            self._feed.flush()

    # -- PodListener

    def pod_added(self, spec: PodSpec) -> None:
        """Follow it; followed with the same spec already, nothing changes; with another, anew."""
        if self._specs.get(spec.name) == spec:
            return
        self.pod_removed(spec.name)
        if spec.zmq_endpoint is None:
            return
        self._specs[spec.name] = spec
        if self._granted is None or spec.name in self._granted:
            self._follow(spec)

    def pod_removed(self, name: str) -> None:
        """From here on nothing of it reaches the service. A pod that is not followed is fine."""
        self._specs.pop(name, None)
        self._unfollow(name)

    # -- beside other replicas

    def grant(self, name: str) -> None:
        """This replica follows the pod from now on, as soon as it is there. The writer has read all that the
        replica before it wrote of the pod."""
        assert self._granted is not None, "an ingest that follows every pod needs no grant"
        if name in self._granted:
            return
        self._granted.add(name)
        if (spec := self._specs.get(name)) is not None:
            self._follow(spec)

    def withdraw(self, name: str) -> None:
        """Another replica may follow it from now on: nothing more of it reaches the writer, nor what is queued."""
        assert self._granted is not None, "an ingest that follows every pod has no grants"
        self._granted.discard(name)
        self._unfollow(name)

    def _follow(self, spec: PodSpec) -> None:
        try:
            ranks = rank_endpoints(spec.zmq_endpoint or "", spec.replay_endpoint, spec.dp_size)
        except InvalidInput as error:
            logger.error("pod %s is not followed: %s", spec.name, error, extra={"pod": spec.name})
            for rank in range(min(spec.dp_size, _RANKS_TOLD_MAX)):
                self._writer.set_source_state(spec.name, rank, SourceState.DOWN, cause=str(error))
            return
        streams = tuple(
            (_stream(spec, rank, publisher, replay), publisher, replay)
            for rank, (publisher, replay) in enumerate(ranks)
        )
        pod = self._pods[spec.name] = FollowedPod(
            spec.name, spec.topic.encode(errors="surrogatepass"), streams
        )
        for stream, _, _ in streams:
            self._writer.set_source_state(stream.pod, stream.dp_rank, SourceState.DOWN, cause=stream.cause)
        if self._receiver is not None:
            self._begin(pod, self._receiver)

    def _begin(self, pod: FollowedPod, receiver: Receiver) -> None:
        for stream, _, _ in pod.streams:
            stream.resume_at = self._writer.position(stream.pod, stream.dp_rank)
        receiver.follow(pod)

    def _unfollow(self, name: str) -> None:
        pod = self._pods.pop(name, None)
        if pod is None:
            return
        for stream, _, _ in pod.streams:
            stream.followed = False
        if self._receiver is not None:
            self._receiver.unfollow(name)

    # -- how it goes

    @property
    def queued_batches(self) -> int:
        return 0 if self._feed is None else self._feed.queued_batches

    @property
    def queued_bytes(self) -> int:
        return 0 if self._feed is None else self._feed.queued_bytes

    def streams(self) -> Iterator[Stream]:
        for pod in self._pods.values():
            for stream, _, _ in pod.streams:
                yield stream

    def counters(self) -> Mapping[str, int]:
        """Totals since `start`, by name."""
        if self._feed is None or self._receiver is None:
            return {}
        return {
            **dataclasses.asdict(self._receiver.counters),
            **dataclasses.asdict(self._receiver.sequence_counters),
            **dataclasses.asdict(self._feed.counters),
            "held_overflows": self._receiver.held_overflows,
            "queue_full_pauses": self._feed.pauses,
        }

    def gauges(self) -> Mapping[str, int]:
        """How full each bounded place is now, by name."""
        if self._feed is None or self._receiver is None:
            return {}
        return {
            "queued_batches": self._feed.queued_batches,
            "queued_bytes": self._feed.queued_bytes,
            "held_bytes": self._receiver.held_bytes,
            "replays_running": self._receiver.replays_running,
            "replays_waiting": self._receiver.replays_waiting,
        }

    def _resume_reading(self) -> None:
        if self._receiver is not None:
            self._receiver.wake()


def _stream(spec: PodSpec, dp_rank: int, publisher: Endpoint, replay: Endpoint | None) -> Stream:
    return Stream(
        spec.name,
        dp_rank,
        str(publisher),
        None if replay is None else str(replay),
        block_size=spec.block_size,
        cause=f"{'binding' if publisher.binds else 'connecting to'} {publisher}",
    )
