"""The pods that are registered, their sources, and every change of a source's trust state.

A source has two facts: what is known of its stream (live, catching up, down) and whether its picture is
incomplete (batches or blocks were lost for good). The state that the world sees follows from both: down and
catching up first, then degraded, then live. So a stream that reconnects cannot hide a loss, and a loss cannot
hide a dead stream.

An incomplete picture becomes complete when the source is reset (restart, deadline), or when the engine clears
its cache and the source never spoke of another tier than the GPU's: a clear says nothing about offloaded
blocks. What it speaks of such a tier later on shows that some of those may have been lost as well: then the
picture is incomplete again.

Every change of state is one log line with its cause and its remedy, and so is another cause for being down;
nothing else is logged here.
Bounds: `pods_max` pods and `dp_ranks_max` ranks each; past them LimitExceeded, nothing changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from app import _native
from app.config import Settings
from app.errors import InvalidInput, LimitExceeded, UnknownPod
from app.events import Tier
from app.index.interface import Index
from app.pods import Pod, PodSpec, Source, SourceState
from app.service.live import LiveFeed

logger = logging.getLogger(__name__)

REMEDIES = {
    SourceState.LIVE: "none needed",
    SourceState.CATCHING_UP: "none needed: a replay is under way",
    SourceState.DEGRADED: "matches may be short or stale until the engine resets its cache or restarts; "
    "a replay endpoint that answers lets gaps be filled",
    SourceState.DOWN: "check that the engine runs and can be reached; past its deadline it holds nothing",
}
_NEW = "new"  # what a source was of which nothing had been told
_REMEDY_WITHOUT_REPLAY = "none needed: its next batch tells; with a replay endpoint it would be known at once"


class PodListener(Protocol):
    """Told when pods come and go (the ZMQ ingest follows them)."""

    def pod_added(self, spec: PodSpec) -> None: ...
    def pod_removed(self, name: str) -> None: ...


class Registry:
    def __init__(self, settings: Settings, index: Index, live: LiveFeed, clock: Callable[[], float]) -> None:
        self.pods: dict[str, Pod] = {}
        self.listeners: list[PodListener] = []
        self.answers = _native.AnswerBook()  # what answers say of each source; `_publish` keeps it true
        self.on_silent: Callable[[str, int], None] | None = None  # decides instead of this process's clock
        self._settings = settings
        self._index = index
        self._live = live
        self._clock = clock
        self._by_index_id: dict[int, Source] = {}
        self._spoke: dict[int, Source] = {}  # by index id, those that speak by HTTP: longest silent first

    # -- pods

    def register(self, spec: PodSpec) -> Pod:
        """Idempotent. What the pod holds is kept when nothing differs that it depends on."""
        self.check(spec)
        old = self.pods.get(spec.name)
        if old is not None and old.spec == spec:
            return old
        if old is not None and _keeps_contents(old, spec):
            return self._amend(old, spec)
        if old is not None:
            self.drop(spec.name)
        elif len(self.pods) >= self._settings.pods_max:
            raise LimitExceeded(f"pods_max = {self._settings.pods_max} pods are registered", bound="pods_max")
        pod = self.pods[spec.name] = Pod(spec)
        for dp_rank in range(spec.dp_size):
            self.source(spec.name, dp_rank)
        for listener in self.listeners:
            listener.pod_added(spec)
        if self._live.is_heard:
            self._live.tell(
                "pod_added", pod=spec.name, model=spec.model, lora=spec.lora, dp_size=spec.dp_size
            )
        return pod

    def find(self, name: str) -> Pod:
        try:
            return self.pods[name]
        except KeyError:
            raise UnknownPod(name) from None

    def drop(self, name: str) -> None:
        pod = self.find(name)
        for listener in self.listeners:
            listener.pod_removed(name)
        for source in pod.sources.values():
            self._drop_source(source)
        del self.pods[name]
        if self._live.is_heard:
            self._live.tell("pod_removed", pod=name)

    def check(self, spec: PodSpec) -> None:
        """Raises InvalidInput or LimitExceeded for what is wrong with the spec alone."""
        self.check_name(spec.name)
        if not spec.model:
            raise InvalidInput(f"pod {spec.name!r} needs a model", field="model")
        if spec.block_size is not None and spec.block_size < 1:
            raise InvalidInput(f"block_size {spec.block_size} is not positive", field="block_size")
        if spec.dp_size < 1:
            raise InvalidInput(f"dp_size {spec.dp_size} is not positive", field="dp_size")
        self.check_rank(spec.dp_size - 1)

    def check_name(self, name: str) -> None:
        """Raises InvalidInput for what cannot be the name of a pod."""
        if not name:
            raise InvalidInput("a pod needs a name", field="pod")
        if name.endswith("/blocks"):  # DELETE of its path would be that of another pod's blocks
            raise InvalidInput("a pod whose name ends with /blocks could not be deleted", field="pod")

    # -- sources

    def source(self, name: str, dp_rank: int) -> Source:
        """The source of a registered pod's rank, made when the rank speaks for the first time."""
        pod = self.find(name)
        source = pod.sources.get(dp_rank)
        if source is None:
            self.check_rank(dp_rank)
            source = Source(name, dp_rank, self._index.add_source(), block_size=pod.spec.block_size)
            pod.sources[dp_rank] = source
            self._by_index_id[source.index_id] = source
            self._publish(source)
        return source

    def check_rank(self, dp_rank: int) -> None:
        if dp_rank < 0:
            raise InvalidInput(f"dp_rank {dp_rank} is negative", field="dp_rank")
        if dp_rank >= self._settings.dp_ranks_max:
            bound = f"dp_ranks_max = {self._settings.dp_ranks_max}"
            raise LimitExceeded(f"dp_rank {dp_rank} does not fit {bound}", bound="dp_ranks_max")

    def check_model(self, pod: Pod, model: str | None) -> None:
        if model is not None and model != pod.spec.model:
            detail = f"pod {pod.spec.name!r} serves {pod.spec.model!r}, not {model!r}"
            raise InvalidInput(detail, field="model")

    def by_index_id(self, index_id: int) -> Source | None:
        return self._by_index_id.get(index_id)

    def hear(self, source: Source) -> None:
        """The source spoke now."""
        source.last_event_at_s = self._clock()
        if self.pods[source.pod].spec.zmq_endpoint is None:
            self._spoke.pop(source.index_id, None)
            self._spoke[source.index_id] = source
        known = self.answers.hear(source.index_id, source.last_event_at_s)
        assert known, "a source is in the book of answers from its beginning"

    def set_block_size(self, source: Source, block_size: int | None) -> None:
        """Of its GPU tier, as its events show it."""
        source.block_size = block_size
        self._publish(source)

    def restore(self, source: Source, heard_s_ago: float | None) -> None:
        """The source is as an earlier process knew it; the longest silent must come first."""
        if heard_s_ago is not None:
            self.hear(source)
            source.last_event_at_s = self._clock() - heard_s_ago
        self._publish(source)

    def reset_silent(self, count_max: int) -> None:
        """Resets up to `count_max` of the HTTP sources that are silent past their deadline. O(those)."""
        deadline_s = self._settings.http_silence_deadline_s
        for source in list(itertools.islice(self._spoke.values(), count_max)):
            if source.last_event_at_s is None or self._clock() - source.last_event_at_s < deadline_s:
                return
            del self._spoke[source.index_id]
            if self.on_silent is None:
                self.silence(source)
            else:
                self.on_silent(source.pod, source.dp_rank)

    def silence(self, source: Source) -> None:
        cause = f"silent for {self._settings.http_silence_deadline_s:g} s: it holds nothing now"
        self.set_stream(source, SourceState.DOWN, cause)
        self.reset(source, cause)

    def welcome_back(self, source: Source) -> None:
        """A source that was reset for its silence spoke: what it stored before is not known any more."""
        if source.stream is SourceState.DOWN and self.pods[source.pod].spec.zmq_endpoint is None:
            cause = "it spoke again after what it held was forgotten for its silence"
            self.lose(source, cause)
            self.set_stream(source, SourceState.LIVE, cause)

    def reset(self, source: Source, cause: str) -> None:
        """The source holds nothing from now on, and nothing is missing from that picture."""
        self._index.clear(source.index_id)
        source.last_seq = None
        source.last_digest = None
        source.first_digest = None
        source.newest_ts = None
        source.block_size = self.pods[source.pod].spec.block_size
        source.chunk_sizes.clear()
        source.offloads = False
        source.cleared_loss = ""
        self._change(source, cause, incomplete=False)
        self._publish(source)

    def lose(self, source: Source, cause: str) -> None:
        """Something of this source was lost for good."""
        self._change(source, cause, incomplete=True)

    def set_away(self, pods: Iterable[Pod], cause: str) -> None:
        """What is told of these pods does not come through now, and why; "" when it does again. One line in the log
        of whoever finds out, none here. O(their sources)."""
        for pod in pods:
            for source in pod.sources.values():
                before = source.state
                source.away_cause = cause
                if source.state is before:
                    continue
                self._publish(source)
                self._tell_state(source, before.value, source.cause)

    def clear_gpu(self, source: Source) -> None:
        """The engine reset its prefix cache: the GPU picture is true again, other tiers are as they were."""
        self._index.clear(source.index_id, tier=Tier.GPU)
        if not source.offloads:
            source.cleared_loss = source.loss_cause or source.cleared_loss
            self._change(source, "the engine cleared its prefix cache", incomplete=False)

    def offload(self, source: Source) -> None:
        """It speaks of another tier than the GPU's."""
        source.offloads = True
        if source.cleared_loss:
            self.lose(source, f"a clear says nothing of its other tiers: {source.cleared_loss}")
            source.cleared_loss = ""

    def set_stream(self, source: Source, stream: SourceState, cause: str) -> None:
        assert stream is not SourceState.DEGRADED, "a loss is told by `lose`"
        self._change(source, cause, stream=stream)

    def _change(
        self, source: Source, cause: str, *, stream: SourceState | None = None, incomplete: bool | None = None
    ) -> None:
        before, cause_before = source.state, source.cause
        is_new = stream is not None and not source.stream_cause and source.last_event_at_s is None
        if stream is not None:
            source.stream_cause = cause
        if incomplete is not None:
            source.loss_cause = cause if incomplete else ""
        source.stream = source.stream if stream is None else stream
        source.incomplete = source.incomplete if incomplete is None else incomplete
        self._publish(source)
        if source.state is before and (source.state is not SourceState.DOWN or source.cause == cause_before):
            return
        if source.state is SourceState.DEGRADED:
            cause = source.cause  # not that the stream goes on, but what was lost before
        was = _NEW if is_new else before.value
        self._tell_state(source, was, cause)
        remedy = self._remedy(source)
        logger.log(
            logging.INFO if source.state in (SourceState.LIVE, SourceState.CATCHING_UP) else logging.WARNING,
            "source %s rank %d is %s (was %s): %s; remedy: %s",
            source.pod,
            source.dp_rank,
            source.state,
            was,
            cause,
            remedy,
            extra={
                "pod": source.pod,
                "dp_rank": source.dp_rank,
                "from": was,
                "to": source.state.value,
                "cause": cause,
                "remedy": remedy,
                "last_seq": source.last_seq,
            },
        )

    def _remedy(self, source: Source) -> str:
        pod = self.pods[source.pod].spec
        if source.state is SourceState.CATCHING_UP and pod.replay_endpoint is None:
            return _REMEDY_WITHOUT_REPLAY
        return REMEDIES[source.state]

    def _tell_state(self, source: Source, before: str, cause: str) -> None:
        """Those who read the live feed."""
        if self._live.is_heard:
            self._live.tell(
                "state",
                pod=source.pod,
                dp_rank=source.dp_rank,
                state=source.state.value,
                state_before=before,
                cause=cause,
                last_seq=source.last_seq,
            )

    def _publish(self, source: Source) -> None:
        """After every change of what an answer says of a source beside its depths."""
        heard_at_s = source.last_event_at_s
        self.answers.put(
            source.index_id,
            source.pod,
            b'{"pod":%b,"dp_rank":%d,' % (msgspec.json.encode(source.pod), source.dp_rank),
            source.dp_rank,
            source.block_size or 0,
            source.state.value,
            math.nan if heard_at_s is None else heard_at_s,
        )

    def _amend(self, pod: Pod, spec: PodSpec) -> Pod:
        gone = range(spec.dp_size, pod.spec.dp_size)  # not the ranks that spoke without having been declared
        for dp_rank in [rank for rank in pod.sources if rank in gone]:
            self._drop_source(pod.sources.pop(dp_rank))
        pod.spec = spec
        for source in pod.sources.values():
            source.block_size = spec.block_size or source.block_size
            self._publish(source)
        for dp_rank in range(spec.dp_size):
            self.source(spec.name, dp_rank)
        return pod

    def _drop_source(self, source: Source) -> None:
        self._index.drop_source(source.index_id)
        del self._by_index_id[source.index_id]
        self.answers.drop(source.index_id)
        self._spoke.pop(source.index_id, None)


def _keeps_contents(pod: Pod, spec: PodSpec) -> bool:
    """Nothing differs but a block size that is so already, the number of ranks, where its load is read, or who says so.

    Whoever follows a stream replays it from the start when told of the pod, and a replay into what is held
    would count every copy twice: so whatever concerns a stream starts empty.
    """
    same = pod.spec == dataclasses.replace(
        spec,
        block_size=pod.spec.block_size,
        dp_size=pod.spec.dp_size,
        metrics_url=pod.spec.metrics_url,
        discovered_by=pod.spec.discovered_by,
    )
    sizes = {source.block_size for source in pod.sources.values()} - {None, spec.block_size}
    return (
        same
        and (spec.block_size is None or not sizes)
        and (spec.dp_size == pod.spec.dp_size or spec.zmq_endpoint is None)
    )
