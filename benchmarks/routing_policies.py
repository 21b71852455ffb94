"""Hit rate and balance of every policy of `/v1/route` on a request trace, with pods that are LRU caches.

    python -m benchmarks.routing_policies mooncake_conversation.jsonl.gz --pods 8 --blocks 4000

The trace is one of Mooncake's form (https://github.com/kvcache-ai/Mooncake): a JSON line a request with `timestamp`
(ms), `input_length`, `output_length` and `hash_ids`, one a block of 512 tokens; equal ids are equal prefixes.

The pods are as simple as can be: a cache of `--blocks` blocks, of which a prompt's last leave first; prefill of one
request after the other at `--prefill-rate` tokens/s, then `--decode-s` a token. What is chosen with is the
product's own code, app/routing/routing.py. Each policy runs without loads, when its own choices are all it knows, and
with loads that are `--load-age-s` old. Checked on the way: round robin gives every pod the same number of requests, and
no policy hits more than one cache as large as all of them.

Balance is the busiest pod over the mean, of requests and of tokens computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import heapq
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.pods import Source, SourceState
from app.routing.choices import Outstanding, RecentWork, mean
from app.routing.routing import RECENT_CHOICES, Candidate, Load, Policy, rank
from app.service.scoring import build_row
from benchmarks.measure import print_line, print_machine

BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float
    tokens: int
    output_tokens: int
    blocks: Sequence[int]


class LruPod:
    def __init__(self, blocks_max: int) -> None:
        self.requests = 0
        self.computed_tokens = 0
        self._max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._free_at_s = 0.0
        self._running: list[tuple[float, float]] = []  # ends, starts to decode

    def depth(self, blocks: Sequence[int]) -> int:
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def load(self, now_s: float) -> Load:
        while self._running and self._running[0][0] <= now_s:
            heapq.heappop(self._running)
        waiting = sum(decodes_at_s > now_s for _, decodes_at_s in self._running)
        return Load(len(self._running) - waiting, waiting)

    def take(self, request: TraceRequest, prefill_rate: float, decode_s: float) -> int:
        """Returns the blocks that were hit."""
        depth = self.depth(request.blocks)
        computed = max(0, request.tokens - depth * BLOCK_TOKENS)
        self._free_at_s = max(self._free_at_s, request.at_s) + computed / prefill_rate
        heapq.heappush(self._running, (self._free_at_s + request.output_tokens * decode_s, self._free_at_s))
        for block in reversed(request.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max:
            self._blocks.popitem(last=False)
        self.requests += 1
        self.computed_tokens += computed
        return depth


class Chooser:
    """What app/routing/router.py does around app/routing/routing.py, without a service."""

    def __init__(self, policy: Policy, pods: int, load_age_s: float | None, decay_s: float) -> None:
        self._policy = policy
        self._sources = [Source(f"pod-{n}", 0, n, block_size=BLOCK_TOKENS) for n in range(pods)]
        self._load_age_s = load_age_s
        self._books = Outstanding(decay_s=decay_s, places_max=pods)
        self._work = RecentWork(choices=RECENT_CHOICES, places_max=pods)
        self._loads: list[Load | None] = [None] * pods
        self._read_at_s = float("-inf")
        self._request_tokens = 0.0

    def choose(self, request: TraceRequest, fleet: Sequence[LruPod]) -> int:
        now_s = request.at_s
        if self._load_age_s is not None and now_s - self._read_at_s >= self._load_age_s:
            self._loads = [pod.load(now_s) for pod in fleet]
            self._read_at_s = now_s
            for source in self._sources:
                self._books.forget((source.pod, 0))
        ranked = rank(
            self._policy,
            self._candidates(request, fleet),
            tokens=request.tokens,
            block_size=BLOCK_TOKENS,
            request_tokens=self._request_tokens or request.tokens,
        )
        self._books.add(ranked[0].candidate.place, now_s)
        self._work.add(ranked[0].candidate.place, uncached=ranked[0].uncached_tokens, tokens=request.tokens)
        self._request_tokens = mean(self._request_tokens, request.tokens, share=0.02)
        return next(s.index_id for s in self._sources if s.pod == ranked[0].candidate.pod)

    def _candidates(self, request: TraceRequest, fleet: Sequence[LruPod]) -> Iterator[Candidate]:
        for source, pod, load in zip(self._sources, fleet, self._loads, strict=True):
            depth = min(pod.depth(request.blocks), request.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
            row = build_row(source, (depth,) * 5, unit=BLOCK_TOKENS, tokens=request.tokens, now_s=0.0)
            place = source.pod, 0
            own, turn = self._books.count(place, request.at_s), self._books.turn(place)
            work = self._work.work(place)
            yield Candidate(source.pod, 0, row if depth else None, load, own, turn, work, SourceState.LIVE)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    requests_balance: float
    computed_balance: float

    def __str__(self) -> str:
        return (
            f"hit {100 * self.hit_rate:5.2f} %   busiest / mean: requests {self.requests_balance:.2f}, "
            f"computed {self.computed_balance:.2f}"
        )


def simulate(
    trace: Sequence[TraceRequest], chooser: Chooser, fleet: Sequence[LruPod], options: argparse.Namespace
) -> Outcome:
    hit = 0
    for request in trace:
        pod = fleet[chooser.choose(request, fleet)]
        hit += pod.take(request, options.prefill_rate, options.decode_s)
    requests, computed = [pod.requests for pod in fleet], [pod.computed_tokens for pod in fleet]
    blocks = sum(len(request.blocks) for request in trace)
    return Outcome(
        hit / blocks,
        max(requests) * len(fleet) / sum(requests),
        max(computed) * len(fleet) / sum(computed),
    )


def read_trace(path: Path) -> list[TraceRequest]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [
        TraceRequest(row["timestamp"] / 1_000, row["input_length"], row["output_length"], row["hash_ids"])
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4_000, help="of each pod's cache")
    parser.add_argument("--prefill-rate", type=float, default=8_000.0, help="tokens/s of a pod")
    parser.add_argument("--decode-s", type=float, default=0.02, help="a token of output")
    parser.add_argument("--load-age-s", type=float, default=1.0)
    parser.add_argument("--decay-s", type=float, default=10.0, help="KVINDEXER_ROUTE_DECAY_S")
    options = parser.parse_args()
    print_machine()
    print(f"settings: {options}")
    trace = read_trace(options.trace)

    def run(policy: Policy, load_age_s: float | None, pods: int, blocks: int) -> Outcome:
        chooser = Chooser(policy, pods, load_age_s, options.decay_s)
        return simulate(trace, chooser, [LruPod(blocks) for _ in range(pods)], options)

    shared = run(Policy.ROUND_ROBIN, None, 1, options.pods * options.blocks)
    print_line(
        f"one cache of {options.pods} x {options.blocks} blocks", f"hit {100 * shared.hit_rate:5.2f} %"
    )
    for policy in Policy:
        for load_age_s in (None, options.load_age_s):
            found = run(policy, load_age_s, options.pods, options.blocks)
            assert found.hit_rate <= shared.hit_rate * 1.02, (
                "no fleet has a better memory than one large cache"
            )
            if policy is Policy.ROUND_ROBIN:
                each = -(-len(trace) // options.pods) * options.pods / len(trace)
                assert found.requests_balance <= each + 1e-9, "in turn is even"
            known = "own choices only" if load_age_s is None else f"loads {load_age_s:g} s old"
            print_line(f"{policy}, {known}", str(found))


if __name__ == "__main__":
    main()
