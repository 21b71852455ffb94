"""Which of the pods that could serve a prompt should? Pure: depths and loads in, an order out.

`prefix_and_load`, the default, estimates what each choice costs the fleet, in tokens of prefill:

    cost(pod) = uncached(pod) + LOAD_WEIGHT * in_flight(pod) * request_tokens
              + BALANCE_WEIGHT * excess(pod) * request_tokens + prompt_tokens * pressure(pod)

    uncached    prompt tokens that the pod has to compute: all, less what it holds on each tier times
                TIER_CREDIT of that tier, less what is announced for it times SPECULATIVE_CREDIT. What a source
                claims that is `degraded` or `down` counts half: it can be stale.
    in_flight   requests: running + WAITING_WEIGHT * waiting as the pod says (vllm:num_requests_running,
                vllm:num_requests_waiting), plus our own choices that it cannot know of yet.
    request_tokens  length of a prompt lately, on average: it makes one unit of requests and tokens, and the
                formula the same for short prompts and for long ones. Not what is left to compute of them: where
                nearly everything is a hit, a request still takes its place in a batch while it decodes.
    excess      how much more work than the mean of the candidates we have given the pod lately (RECENT_CHOICES
                choices), over that mean or `request_tokens`, whichever is more: -1 to 1. The work of a choice is
                uncached(pod) + SEAT_SHARE * prompt_tokens, as a request that finds everything takes a seat in a
                batch too. What fleets with time to spare are balanced by: where no request waits for another,
                in_flight is 0 everywhere.
    pressure    0 up to KV_FREE of the KV cache in use (vllm:kv_cache_usage_perc), then up to 1 when it is
                full: the engine would preempt a request and compute it again.

    score = 1 - cost / prompt_tokens: 1 is an idle pod that has everything, 0 a pod as dear as an idle and empty
    one; far below 0 for a busy one.

Why not the longest prefix alone: prompts of one application begin alike, so the pod that computed the first
block first would have all of them (the whole of a public hour of chat traffic, 12,031 requests on 8 pods of
4,000 blocks: 8.7 % of blocks hit, worse than round robin's 9.8 %, and one pod does all the work). With cost,
what every pod holds is worth nothing in comparison, as it should be.
Why LOAD_WEIGHT is as low as 1/16: work in flight is soon over, while a prefix computed once more pushes
another one out of a cache, for all requests to come. On that traffic 1/16 hits 33.0 %, 1/8 32.6 %, 1/6 32.4 % with
the busiest pod at 1.02 times the mean and the first token no later; one cache as large as all of them would hit
33.7 % (`kvindexer experiment`).
Why BALANCE_WEIGHT: sessions of an agent begin with the same 1,264 tokens and come one at a time, so without it the
pod that had the first one has them all (public tau-bench trace, 8 pods: 92.2 % hit, busiest pod 8.0 times the mean).
A session that begins is as dear everywhere, and goes where least was computed; a few steps later its own history
outweighs any excess, and it stays. 1/4 leaves 1.26 times the mean, 3/8 1.04 to 1.10 at 92.1 % hit, which is what one
gets who knows the sessions in advance (docs/experiment.md); on the chat traffic no value up to 1/2 moves the hit rate
by more than 0.1 points.
Cost arithmetic is the idea of NVIDIA Dynamo's KV router; TIER_CREDIT follows from the rates of prefill (some
10k tokens/s), of PCIe and of NVMe for KV of about 128 KiB a token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from app.pods import SourceState
from app.service.scoring import TIER_LABELS, MatchRow

LOAD_WEIGHT = 0.0625
BALANCE_WEIGHT = 0.375
SEAT_SHARE = 0.25
RECENT_CHOICES = 1_024  # of all pods together: a choice counts for less by a factor e behind so many others
WAITING_WEIGHT = 2.0  # a waiting request has all of its prefill before it
KV_FREE = 0.9
TIER_CREDIT = (1.0, 0.9, 0.6, 0.5)  # gpu, cpu, disk, external
SPECULATIVE_CREDIT = 0.8
DOUBT = {SourceState.DEGRADED: 0.5, SourceState.DOWN: 0.5}

CREDITS = tuple(zip(TIER_LABELS, TIER_CREDIT, strict=True))


class Policy(enum.StrEnum):
    LONGEST_PREFIX = "longest_prefix"
    PREFIX_AND_LOAD = "prefix_and_load"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


class Load(msgspec.Struct, frozen=True):
    """What an engine says of itself: requests, requests, and the share of its KV cache in use (0..1)."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0

    @property
    def requests(self) -> float:
        return self.running + WAITING_WEIGHT * self.waiting


IDLE = Load()


class Candidate(msgspec.Struct, frozen=True):
    """A rank that could take the prompt. `row` is what it holds of it, None for nothing."""

    pod: str
    dp_rank: int
    row: MatchRow | None
    load: Load | None  # None: not known
    own: float  # our recent choices that `load` does not have in it yet
    turn: int  # of our last choice of it; smaller is longer ago
    work: float  # tokens, of our recent choices of it: choices.RecentWork
    state: SourceState | None = None  # None: a pod that is not registered

    @property
    def in_flight(self) -> float:
        return (self.load or IDLE).requests + self.own

    @property
    def place(self) -> tuple[str, int]:
        return self.pod, self.dp_rank


class Ranked(msgspec.Struct, frozen=True):
    candidate: Candidate
    score: float  # higher is better, comparable within one answer
    uncached_tokens: float


def rank(
    policy: Policy, candidates: Iterable[Candidate], *, tokens: int, block_size: int, request_tokens: float
) -> list[Ranked]:
    """All candidates, best first. Ranks that are `down` come last whatever they hold: their engine is likely gone.

    Equal ones are ordered by load, then by the turn that is longest ago, then by name.
    """
    candidates = list(candidates)
    mean_work = sum(candidate.work for candidate in candidates) / max(1, len(candidates))
    found = []
    for candidate in candidates:
        uncached = uncached_tokens(candidate.row, tokens=tokens, block_size=block_size)
        score = _score(
            policy,
            candidate,
            uncached,
            tokens=tokens,
            block_size=block_size,
            request_tokens=request_tokens,
            mean_work=mean_work,
        )
        found.append(Ranked(candidate, score, uncached))
    found.sort(key=_order)
    return found


def uncached_tokens(row: MatchRow | None, *, tokens: int, block_size: int) -> float:
    """Tokens to compute, where a token that has to be fetched from a slow tier counts for a part of one.

    At least 1 of a prompt: an engine computes the last token always.
    """
    if row is None:
        return float(tokens)
    credit = 0.0
    depth = 0
    for label, worth in CREDITS:
        deeper = row.tiers[label]
        credit += worth * (deeper - depth)
        depth = deeper
    credit += SPECULATIVE_CREDIT * max(0, row.speculative_blocks - depth)
    credit *= block_size * DOUBT.get(row.state, 1.0)
    return max(tokens - credit, min(tokens, 1))


def pressure(kv_usage: float) -> float:
    return min(1.0, max(0.0, kv_usage - KV_FREE) / (1.0 - KV_FREE))


def excess(work: float, mean_work: float, request_tokens: float) -> float:
    """-1 to 1, 0 where nothing is known. Against `request_tokens` while the mean is smaller: one request is no trend."""
    against = max(mean_work, request_tokens)
    return max(-1.0, min(1.0, (work - mean_work) / against)) if against > 0 else 0.0


def _score(
    policy: Policy,
    candidate: Candidate,
    uncached: float,
    *,
    tokens: int,
    block_size: int,
    request_tokens: float,
    mean_work: float,
) -> float:
    match policy:
        case Policy.PREFIX_AND_LOAD:
            weighed = LOAD_WEIGHT * candidate.in_flight
            weighed += BALANCE_WEIGHT * excess(candidate.work, mean_work, request_tokens)
            cost = uncached + weighed * request_tokens
            if candidate.load is not None:
                cost += tokens * pressure(candidate.load.kv_usage)
            return 1.0 - cost / max(tokens, 1)
        case Policy.LONGEST_PREFIX:
            row = candidate.row
            depth = 0 if row is None else max(row.matched_blocks, row.speculative_blocks)
            return depth * block_size / max(tokens, 1)
        case Policy.ROUND_ROBIN:
            return 1.0 / (1.0 + candidate.turn)
        case Policy.LEAST_LOADED:
            return 1.0 / (1.0 + candidate.in_flight)


def _order(ranked: Ranked) -> tuple[bool, float, float, int, tuple[str, int]]:
    candidate = ranked.candidate
    return (
        candidate.state is SourceState.DOWN,
        -ranked.score,
        candidate.in_flight,
        candidate.turn,
        candidate.place,
    )


def reason(ranked: Ranked, *, tokens: int) -> str:
    """One sentence for a person."""
    candidate, row = ranked.candidate, ranked.candidate.row
    held = 0 if row is None else row.matched_tokens
    said = f"holds {held} of {tokens} tokens"
    if row is not None and row.speculative_blocks > row.matched_blocks:
        said += f", {row.speculative_blocks - row.matched_blocks} more blocks announced"
    load = candidate.load
    if load is None:
        said += ", load not known"
    else:
        said += f", {load.running:g} running, {load.waiting:g} waiting, {100 * load.kv_usage:.0f} % of its KV in use"
    if candidate.own >= 0.05:
        said += f", {candidate.own:.1f} chosen by us since"
    if candidate.work >= 1:
        said += f", {candidate.work:.0f} tokens of work chosen for it lately"
    if candidate.state is None:
        said += ", not registered"
    elif candidate.state is not SourceState.LIVE:
        said += f", {candidate.state}"
    return said
