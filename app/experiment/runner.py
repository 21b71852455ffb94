"""One policy on one trace: virtual pods, a real indexer, and what came of it.

For each request, in the order of the trace: every pod advances to its time; what the pods have done since is
published to the indexer; the loads at that moment go with the question; the prompt goes to the pod that was
chosen. What the indexer says that the pod would reuse is held against what the pod then reuses. Nothing is
announced (`reserve`): pods tell at once what they hold, so there is no time to bridge.

Cost: one route and one to two batches over HTTP a request, about 2 ms with blocks of 512 tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from app.errors import LimitExceeded
from app.experiment.indexer_link import IndexerLink, Route, packed_token_ids
from app.experiment.trace import Trace
from app.experiment.virtual_pod import VirtualPod, VirtualRequest
from app.ingest.vllm import WireForm, encode_batch
from app.simulator.engine_settings import EngineSettings, TimeModel
from app.simulator.kv_cache import KVCacheSettings

POLICIES = ("round_robin", "least_loaded", "longest_prefix", "prefix_and_load")

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class FleetShape:
    """`pods` pods of `blocks` pages of `block_size` tokens each."""

    pods: int
    blocks: int
    block_size: int
    time: TimeModel = dataclasses.field(default_factory=TimeModel)

    def names(self) -> list[str]:
        return [f"pod-{number}" for number in range(self.pods)]

    def build(self) -> list[VirtualPod]:
        return [
            VirtualPod(
                name,
                EngineSettings(
                    # No two pods agree on the name of a block, so an indexer that mixes them up is found out.
                    cache=KVCacheSettings(
                        capacity_pages=self.blocks, block_size=self.block_size, hash_seed=name.encode()
                    ),
                    time=self.time,
                ),
            )
            for name in self.names()
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyResult:
    """Rates are parts of 1. `imbalance` is the busiest pod over the mean, in prompt tokens to compute.

    `exact`, `over` and `under` count requests whose prompt was looked up when it arrived; `waited` the others.
    """

    requests: int
    refused: int
    hit_rate: float
    token_hit_rate: float
    imbalance: float
    imbalance_requests: float
    exact: int
    over: int
    under: int
    waited: int
    ttft_p50_s: float
    ttft_p99_s: float
    preemptions: int
    requests_per_pod: tuple[int, ...]

    @property
    def predicted_exact(self) -> float | None:
        """None when every request waited: then nothing was there to judge."""
        judged = self.exact + self.over + self.under
        return self.exact / judged if judged else None

    def as_json(self) -> dict[str, Any]:
        said = dataclasses.asdict(self)
        exact, over, under = said.pop("exact"), said.pop("over"), said.pop("under")
        said["predicted_exact"] = self.predicted_exact
        return {**said, "predictions": {"exact": exact, "over": over, "under": under}}


@dataclasses.dataclass(slots=True)
class _Tally:
    sent: list[tuple[str, VirtualRequest]] = dataclasses.field(default_factory=list)  # pod, request
    refused: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0


class PolicyRun:
    """`run` is called once. Raises what the link raises."""

    def __init__(self, trace: Trace, shape: FleetShape, link: IndexerLink, policy: str) -> None:
        self._trace = trace
        self._shape = shape
        self._link = link
        self._policy = policy
        self._pods = {pod.name: pod for pod in shape.build()}
        self._next_seq = dict.fromkeys(self._pods, 0)
        self._tally = _Tally()

    def run(self, progress: Progress) -> PolicyResult:
        for name in self._pods:
            self._link.register(name, self._shape.block_size)
        try:
            for number, request in enumerate(self._trace.requests):
                for pod in self._pods.values():
                    pod.advance(request.at_s)
                self._publish()
                self._send(number, request.at_s)
                progress(number + 1)
            for pod in self._pods.values():
                pod.advance(math.inf)
        finally:
            for name in self._pods:
                self._link.drop(name)
        return self._result()

    def _send(self, number: int, at_s: float) -> None:
        prompt = self._trace.token_ids(number)
        made = VirtualRequest(
            name=str(number),
            arrived_s=at_s,
            prompt=prompt,
            output=self._trace.own_tokens(number, self._trace.requests[number].output_tokens),
        )
        token_ids = packed_token_ids(prompt)
        route = self._link.route(token_ids, self._policy, list(self._pods), self._loads())
        try:
            self._pods[route.pod].submit(made)
        except LimitExceeded:
            self._tally.refused += 1
            return
        self._tally.sent.append((route.pod, made))
        if not made.waited:
            self._judge(route, made)

    def _loads(self) -> dict[str, dict[str, float]]:
        return {
            name: {"running": pod.running, "waiting": pod.waiting, "kv_usage": pod.cache.usage()}
            for name, pod in self._pods.items()
        }

    def _judge(self, route: Route, made: VirtualRequest) -> None:
        matched = next(row.matched_blocks for row in route.candidates if row.pod == route.pod)
        size = route.block_size
        predicted = size * min(matched, (len(made.prompt) - 1) // size)
        assert made.cached_tokens is not None, "a request that did not wait was looked up"
        self._tally.exact += predicted == made.cached_tokens
        self._tally.over += predicted > made.cached_tokens
        self._tally.under += predicted < made.cached_tokens

    def _publish(self) -> None:
        for name, pod in self._pods.items():
            events = pod.drain_events()
            if events:
                seq = self._next_seq[name]
                payload = encode_batch(WireForm.MAPS_0_33, ts=pod.now_s, events=events)
                self._link.publish(name, seq, payload)
                self._next_seq[name] = seq + 1

    def _result(self) -> PolicyResult:
        tally, size = self._tally, self._shape.block_size
        requests, computed = collections.Counter[str](), collections.Counter[str]()
        for pod, made in tally.sent:
            requests[pod] += 1
            computed[pod] += len(made.prompt) - (made.cached_tokens or 0)
        cached = [made.cached_tokens or 0 for _, made in tally.sent]
        prompts = [len(made.prompt) for _, made in tally.sent]
        delays = sorted(
            made.first_token_s - made.arrived_s for _, made in tally.sent if made.first_token_s is not None
        )
        return PolicyResult(
            requests=len(tally.sent),
            refused=tally.refused,
            hit_rate=_part(
                sum(count // size for count in cached), sum(-(-count // size) for count in prompts)
            ),
            token_hit_rate=_part(sum(cached), sum(prompts)),
            imbalance=_imbalance([computed[name] for name in self._pods]),
            imbalance_requests=_imbalance([requests[name] for name in self._pods]),
            exact=tally.exact,
            over=tally.over,
            under=tally.under,
            waited=sum(made.waited for _, made in tally.sent),
            ttft_p50_s=percentile(delays, 0.50),
            ttft_p99_s=percentile(delays, 0.99),
            preemptions=sum(pod.preemptions for pod in self._pods.values()),
            requests_per_pod=tuple(requests[name] for name in self._pods),
        )


def percentile(ascending: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of them do not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(part * len(ascending)) - 1)]


def _part(count: float, whole: float) -> float:
    return count / whole if whole else 0.0


def _imbalance(loads: Sequence[float]) -> float:
    whole = sum(loads)
    return max(loads) * len(loads) / whole if whole else 1.0
