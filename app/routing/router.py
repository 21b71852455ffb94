"""The choice of a pod: a match, what is known of the loads, app/routing/routing.py, and our own choices
(app/routing/choices.py).

Candidates are the ranks of every registered pod of the model that can serve the adapter; where the request
names `pods`, those of them only. A pod that it names and that is not registered is a candidate too: it holds
nothing that we know of, and the router says that it is ready.

Loads come with the request, or else from app/routing/loads.py, and between two loads of a pod we count what we chose it
for ourselves: a burst that comes faster than any load is measured must spread all the same. A load that was read
anew makes the count of that pod start again, as it has those choices in it; so does one of a request, unless it
only repeats the last. Without any load the count alone is the load, and fades (`route_decay_s`).

Beside that we count the work that our choices gave each rank lately (RecentWork): fleets without any load to speak
of are balanced by it.

`reserve` announces the prompt for the chosen rank, as `/v1/prefixes` does. So the next prompt with the same
beginning sees it before the engine's first event does; confirmed blocks take the announcement's place, and it never
removes any.

Cost: a match, and O(candidates), some 2 us each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import msgspec

from app.config import Settings
from app.errors import NoCandidate
from app.pods import Pod, PodSpec, SourceState
from app.routing.choices import Outstanding, RecentWork, mean
from app.routing.routing import RECENT_CHOICES, Candidate, Load, Policy, Ranked, rank
from app.service import IndexerService, MatchQuery, MatchResult
from app.service.scoring import MatchRow

RequestLoads = Mapping[str, Load]
Polled = Callable[[str, int], Load | None]  # pod, rank -> its load, None when not known or stale

# Share of one more request in the mean length of prompts: some 50 requests back.
_MEAN_SHARE = 0.02
_LOADS_TOLD_MAX = 65_536
_PLACES_MAX = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class RouteResult:
    match: MatchResult
    ranked: list[Ranked]  # best first, never empty
    reserved_blocks: int


class Router:
    """All calls are made on the service's thread. `chosen` counts choices by policy since the start."""

    def __init__(
        self,
        settings: Settings,
        service: IndexerService,
        *,
        clock: Callable[[], float],
        polled: Polled = lambda _pod, _dp_rank: None,
    ) -> None:
        self.chosen = dict.fromkeys(Policy, 0)
        self.reserved_blocks = 0
        self._service = service
        self._clock = clock
        self._polled = polled
        self._outstanding = Outstanding(decay_s=settings.route_decay_s, places_max=_PLACES_MAX)
        self._work = RecentWork(choices=RECENT_CHOICES, places_max=_PLACES_MAX)
        self._told: dict[tuple[str, int], Load] = {}  # the last load of each place
        self._request_tokens = 0.0
        service.listeners.append(self)

    def pod_added(self, spec: PodSpec) -> None:
        """Nothing is known of it yet."""

    def pod_removed(self, name: str) -> None:
        """What was chosen for it says nothing of who comes by its name. O(ranks)."""
        for dp_rank in self._service.pod(name).sources:
            self._work.drop((name, dp_rank))
            self._outstanding.drop((name, dp_rank))
            self._told.pop((name, dp_rank), None)

    def counters(self) -> Mapping[str, int]:
        """Choices by policy, and blocks that were reserved with them."""
        return {
            **{f"choices_{policy}": count for policy, count in self.chosen.items()},
            "reserved_blocks": self.reserved_blocks,
        }

    def route(
        self,
        query: MatchQuery,
        *,
        policy: Policy,
        loads: RequestLoads,
        reserve: bool,
        ttl_s: float,
        dry_run: bool = False,
    ) -> RouteResult:
        """Raises NoCandidate; InvalidInput and LimitExceeded as match and add_speculative do."""
        # Every row is needed, and the hashes where they are announced: filters are for what is shown.
        asked = msgspec.structs.replace(
            query, min_blocks=0, top_k=None, include_hashes=query.include_hashes or reserve
        )
        match = self._service.match(asked)
        now_s = self._clock()
        rows = {(row.pod, row.dp_rank): row for row in match.matches}
        candidates = [
            self._candidate(pod, dp_rank, state, rows, loads, now_s)
            for pod, dp_rank, state in self._places(query)
        ]
        if not candidates:
            raise NoCandidate(_nobody(query))
        ranked = rank(
            policy,
            candidates,
            tokens=match.tokens,
            block_size=match.block_size,
            request_tokens=self._request_tokens or match.tokens,
        )
        if dry_run:
            return RouteResult(match, ranked, 0)
        reserved = self._reserve(ranked[0].candidate, query, match, ttl_s) if reserve else 0
        self._outstanding.add(ranked[0].candidate.place, now_s)
        self._work.add(ranked[0].candidate.place, uncached=ranked[0].uncached_tokens, tokens=match.tokens)
        self._request_tokens = mean(self._request_tokens, float(match.tokens), share=_MEAN_SHARE)
        self.chosen[policy] += 1
        self.reserved_blocks += reserved
        return RouteResult(match, ranked, reserved)

    def _reserve(self, chosen: Candidate, query: MatchQuery, match: MatchResult, ttl_s: float) -> int:
        if chosen.state is None:
            return 0
        assert match.prefix_hashes is not None, "a match that is to be reserved is asked for its hashes"
        return self._service.add_speculative(
            chosen.pod,
            chosen.dp_rank,
            query.model,
            query.lora,
            match.prefix_hashes,
            ttl_s,
            match.block_size,
        )

    def _places(self, query: MatchQuery) -> Iterator[tuple[str, int, SourceState | None]]:
        pods = self._service.pods
        if query.pods is None:
            served = [pod for pod in pods.values() if _serves(pod, query)]
        else:
            served = []
            for name in query.pods:
                known = pods.get(name)
                if known is None:
                    yield name, 0, None
                elif _serves(known, query):
                    served.append(known)
        for pod in served:
            if not pod.sources:
                yield pod.spec.name, 0, SourceState.LIVE
            for dp_rank, source in pod.sources.items():
                yield pod.spec.name, dp_rank, source.state

    def _candidate(
        self,
        pod: str,
        dp_rank: int,
        state: SourceState | None,
        rows: Mapping[tuple[str, int], MatchRow],
        loads: RequestLoads,
        now_s: float,
    ) -> Candidate:
        place = pod, dp_rank
        told = loads.get(pod)
        load = self._polled(pod, dp_rank) if told is None else self._shared(told, pod)
        last = self._told.get(place)
        # Each load that is read is an object of its own, so it is new whatever it says.
        if load is not None and (load is not last if told is None else load != last):
            self._outstanding.forget(place)
            self._told[place] = load
            if len(self._told) > _LOADS_TOLD_MAX:
                del self._told[next(iter(self._told))]
        return Candidate(
            pod,
            dp_rank,
            rows.get(place),
            load,
            self._outstanding.count(place, now_s),
            self._outstanding.turn(place),
            self._work.work(place),
            state,
        )

    def _shared(self, load: Load, pod: str) -> Load:
        """A request's load is of the whole pod: each of its ranks has its part."""
        known = self._service.pods.get(pod)
        ranks = 1 if known is None else max(1, len(known.sources))
        return load if ranks == 1 else Load(load.running / ranks, load.waiting / ranks, load.kv_usage)


def _serves(pod: Pod, query: MatchQuery) -> bool:
    return pod.spec.model == query.model and pod.spec.lora in (None, query.lora)


def _nobody(query: MatchQuery) -> str:
    of = f"model {query.model!r}" + ("" if query.lora is None else f" with adapter {query.lora!r}")
    among = "registered pods" if query.pods is None else "pods of the request"
    return f"none of the {among} serves {of}"
