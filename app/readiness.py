"""Whether a router should ask this process yet: what was configured has to be connected and caught up
first.

A pod that is down must not keep the indexer unready for ever, so after a time of grace it is ready with
what it has; each match row says how far its source can be trusted anyway. A stream without a replay endpoint is
waited for until it is connected: what it missed nobody can tell before its next batch, and an idle engine has
none. Once ready, always ready: a pod that fails later is that pod's state, and no reason to take a whole replica
out of service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.pods import PodSpec, SourceState
from app.service import IndexerService

_WAITED_FOR = {
    SourceState.DOWN: "is not connected yet",
    SourceState.CATCHING_UP: "is replaying what was missed",
}


class Readiness:
    def __init__(
        self,
        service: IndexerService,
        pods: Iterable[PodSpec],
        *,
        clock: Callable[[], float],
        grace_s: float,
        unfinished: Callable[[], list[tuple[str, str]]] = list,
    ) -> None:
        self._service = service
        self._unfinished = unfinished  # what else has to be over, as `missing` tells it: the first discovery
        self._is_ready = False
        self._waiting = {
            (spec.name, rank)
            for spec in pods
            if spec.zmq_endpoint is not None
            for rank in range(spec.dp_size)
        }
        self._clock = clock
        self._grace_s = grace_s
        self._began_s: float | None = None

    def wait_for(self, spec: PodSpec) -> None:
        """One more that is as good as configured: it was followed when the last process ended, or is discovered.

        Once ready, nothing is waited for any more.
        """
        if spec.zmq_endpoint is not None and not self._is_ready:
            self._waiting |= {(spec.name, rank) for rank in range(spec.dp_size)}

    def begin(self) -> None:
        """The process has started: the time of grace runs."""
        self._began_s = self._clock()

    def missing(self) -> list[tuple[str, str]]:
        """(place, sentence) of everything that is waited for; empty when ready."""
        if self._began_s is None:
            return [("", "the process is starting")]
        if self._is_ready or self._clock() - self._began_s >= self._grace_s:
            self._is_ready = True
            self._waiting.clear()
            return []
        found = list(self._unfinished())
        for pod, dp_rank in sorted(self._waiting):
            sentence = self._sentence(pod, dp_rank)
            if sentence is None:
                self._waiting.discard((pod, dp_rank))
            else:
                found.append((f"pods.{pod}.{dp_rank}", sentence))
        self._is_ready = not found
        return found

    def _sentence(self, name: str, dp_rank: int) -> str | None:
        pod = self._service.pods.get(name)
        source = None if pod is None else pod.sources.get(dp_rank)
        if pod is None or source is None:
            return None
        if source.stream is SourceState.CATCHING_UP and pod.spec.replay_endpoint is None:
            return None
        said = _WAITED_FOR.get(source.stream)
        return None if said is None else f"pod {name!r} rank {dp_rank} {said}"
