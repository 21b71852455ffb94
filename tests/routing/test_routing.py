from __future__ import annotations

import itertools

import pytest

from app.pods import Source, SourceState
from app.routing.routing import (
    BALANCE_WEIGHT,
    DOUBT,
    LOAD_WEIGHT,
    SPECULATIVE_CREDIT,
    TIER_CREDIT,
    Candidate,
    Load,
    Policy,
    excess,
    pressure,
    rank,
    reason,
    uncached_tokens,
)
from app.service.scoring import MatchRow, build_row

UNIT = 16


def held(
    tokens: int, *, gpu: int = 0, cpu: int = 0, disk: int = 0, external: int = 0, announced: int = 0,
    state: SourceState = SourceState.LIVE,
) -> MatchRow:  # fmt: skip
    """Depths in blocks, each at least the one before."""
    reach, deepest = [], 0
    for depth in (gpu, cpu, disk, external, announced):
        deepest = max(deepest, depth)
        reach.append(deepest * UNIT)
    source = Source("x", 0, 0, block_size=UNIT, stream=state)
    if state is SourceState.DEGRADED:
        source.stream, source.incomplete = SourceState.LIVE, True
    return build_row(
        source, (reach[0], reach[1], reach[2], reach[3], reach[4]), unit=UNIT, tokens=tokens, now_s=0
    )


def candidate(
    name: str, row: MatchRow | None = None, *, load: Load | None = None, own: float = 0.0, turn: int = 0,
    work: float = 0.0, state: SourceState | None = SourceState.LIVE,
) -> Candidate:  # fmt: skip
    return Candidate(name, 0, row, load, own, turn, work, state)


def order(
    policy: Policy, *candidates: Candidate, tokens: int = 1_600, request_tokens: float = 1_600
) -> list[str]:
    """The same whichever way they come."""
    found = {
        tuple(
            r.candidate.pod
            for r in rank(policy, given, tokens=tokens, block_size=UNIT, request_tokens=request_tokens)
        )
        for given in itertools.permutations(candidates)
    }
    (only,) = found
    return list(only)


# -- what is to be computed


def test_nothing_held_is_everything_to_compute() -> None:
    assert uncached_tokens(None, tokens=1_600, block_size=UNIT) == 1_600


def test_each_tier_is_worth_less_than_the_one_above() -> None:
    found = [
        uncached_tokens(row, tokens=1_600, block_size=UNIT)
        for row in (held(1_600, gpu=50), held(1_600, cpu=50), held(1_600, disk=50), held(1_600, external=50))
    ]
    assert found == sorted(found)
    assert len(set(found)) == 4
    assert found == pytest.approx([1_600 - 800 * credit for credit in TIER_CREDIT])


def test_tiers_add_up() -> None:
    row = held(1_600, gpu=10, cpu=30, disk=60, external=100)
    expected = 1_600 - 16 * (10 + 20 * TIER_CREDIT[1] + 30 * TIER_CREDIT[2] + 40 * TIER_CREDIT[3])
    assert uncached_tokens(row, tokens=1_600, block_size=UNIT) == pytest.approx(expected)


def test_announced_blocks_count_beyond_confirmed_ones() -> None:
    row = held(1_600, gpu=10, announced=60)
    expected = 1_600 - 16 * (10 + 50 * SPECULATIVE_CREDIT)
    assert uncached_tokens(row, tokens=1_600, block_size=UNIT) == pytest.approx(expected)
    only = held(1_600, announced=60)
    assert uncached_tokens(only, tokens=1_600, block_size=UNIT) == pytest.approx(
        1_600 - 960 * SPECULATIVE_CREDIT
    )


def test_last_token_is_always_computed() -> None:
    assert uncached_tokens(held(1_600, gpu=100), tokens=1_600, block_size=UNIT) == 1
    assert uncached_tokens(None, tokens=0, block_size=UNIT) == 0


@pytest.mark.parametrize("state", [SourceState.DEGRADED, SourceState.DOWN])
def test_what_may_be_stale_is_worth_less(state: SourceState) -> None:
    row = held(1_600, gpu=50, state=state)
    assert row.state is state
    assert uncached_tokens(row, tokens=1_600, block_size=UNIT) == 1_600 - 800 * DOUBT[state]


# -- policies


def test_prefix_and_load_prefers_depth_when_loads_are_equal() -> None:
    pods = [candidate(name, held(1_600, gpu=depth)) for name, depth in (("a", 10), ("b", 90), ("c", 40))]
    assert order(Policy.PREFIX_AND_LOAD, *pods, candidate("d")) == ["b", "c", "a", "d"]


def test_prefix_and_load_leaves_a_prefix_for_an_idle_pod() -> None:
    """A whole prompt of the mean length is worth 1 / LOAD_WEIGHT requests in flight."""
    enough = 1 / LOAD_WEIGHT
    for running, first in ((enough - 1, "full"), (enough + 1, "idle")):
        full = candidate("full", held(1_600, gpu=100), load=Load(running=running))
        assert order(Policy.PREFIX_AND_LOAD, full, candidate("idle", load=Load()))[0] == first


def test_what_every_pod_holds_is_no_reason() -> None:
    everywhere = held(1_600, gpu=50)
    pods = [candidate(name, everywhere, load=Load(running=n)) for name, n in (("a", 2), ("b", 0), ("c", 1))]
    assert order(Policy.PREFIX_AND_LOAD, *pods) == ["b", "c", "a"]


def test_waiting_weighs_more_than_running() -> None:
    running, waiting = candidate("r", load=Load(running=3)), candidate("w", load=Load(waiting=3))
    for policy in (Policy.PREFIX_AND_LOAD, Policy.LEAST_LOADED):
        assert order(policy, running, waiting) == ["r", "w"]


def test_a_full_cache_costs_up_to_the_whole_prompt() -> None:
    assert [pressure(usage) for usage in (0.0, 0.5, 0.9, 0.95, 1.0, 1.5)] == pytest.approx(
        [0, 0, 0, 0.5, 1, 1]
    )
    full = candidate("full", held(1_600, gpu=90), load=Load(kv_usage=1.0))
    assert order(Policy.PREFIX_AND_LOAD, full, candidate("empty", load=Load(kv_usage=0.9))) == [
        "empty",
        "full",
    ]


def test_scale_of_prompts_does_not_matter() -> None:
    for scale in (1, 10):
        tokens = 1_600 * scale
        busy = candidate("busy", held(tokens, gpu=80 * scale), load=Load(running=12))
        idle = candidate("idle", held(tokens, gpu=10 * scale), load=Load())
        ranked = rank(
            Policy.PREFIX_AND_LOAD, [busy, idle], tokens=tokens, block_size=UNIT, request_tokens=tokens
        )
        assert [found.score for found in ranked] == pytest.approx([0.1, 0.05])


def test_idle_pods_are_balanced_by_the_work_given_lately() -> None:
    """What is as dear everywhere goes where least was computed."""
    shared = held(1_600, gpu=40)
    pods = [candidate(name, shared, work=work) for name, work in (("a", 9_000), ("b", 1_000), ("c", 5_000))]
    assert order(Policy.PREFIX_AND_LOAD, *pods) == ["b", "c", "a"]


@pytest.mark.parametrize(("more", "first"), [(1, "home"), (-1, "fresh")])
def test_an_excess_is_worth_less_than_a_history(more: int, first: str) -> None:
    """2 * BALANCE_WEIGHT of a prompt lie between the pod that did everything and the others."""
    depth = int(100 * 2 * BALANCE_WEIGHT) + more
    home = candidate("home", held(1_600, gpu=depth), work=1e9)
    others = [candidate(name, work=0.0) for name in ("fresh", "new", "other")]
    assert order(Policy.PREFIX_AND_LOAD, home, *others)[0] == first


def test_one_request_is_no_trend() -> None:
    """The second prompt of its kind goes where the first one went."""
    first = candidate("first", held(1_600, gpu=99), work=1_600, turn=1)
    assert order(Policy.PREFIX_AND_LOAD, first, *(candidate(name) for name in "bcdefgh"))[0] == "first"


def test_excess_is_bounded_and_zero_where_nothing_is_known() -> None:
    assert excess(0.0, 0.0, 0.0) == 0
    assert excess(0.0, 500.0, 1_000.0) == -0.5
    assert excess(1e9, 1_000.0, 500.0) == 1
    assert excess(0.0, 1_000.0, 500.0) == -1


def test_longest_prefix_minds_no_load_but_between_equals() -> None:
    long = candidate("long", held(1_600, gpu=90), load=Load(running=500))
    short = candidate("short", held(1_600, gpu=89))
    announced = candidate("announced", held(1_600, gpu=1, announced=95))
    assert order(Policy.LONGEST_PREFIX, long, short, announced) == ["announced", "long", "short"]
    equal = candidate("equal", held(1_600, gpu=90), load=Load(running=499))
    assert order(Policy.LONGEST_PREFIX, long, equal) == ["equal", "long"]


@pytest.mark.parametrize("policy", [Policy.LONGEST_PREFIX, Policy.PREFIX_AND_LOAD, Policy.LEAST_LOADED])
def test_between_equals_it_is_the_turn_of_who_was_chosen_longest_ago(policy: Policy) -> None:
    """Not of whose name comes first: one pod would have all that nobody knows anything of."""
    pods = [candidate(name, turn=turn) for name, turn in {"a": 2, "b": 1, "c": 3, "d": 1}.items()]
    assert order(policy, *pods) == ["b", "d", "a", "c"]


def test_round_robin_takes_turns() -> None:
    turns = {"a": 3, "b": 1, "c": 2, "d": 0}
    pods = [candidate(name, held(1_600, gpu=turn), turn=turn) for name, turn in turns.items()]
    assert order(Policy.ROUND_ROBIN, *pods) == ["d", "b", "c", "a"]


def test_least_loaded_counts_own_choices_too() -> None:
    pods = [
        candidate("a", load=Load(running=2)),
        candidate("b", own=1.5),
        candidate("c", load=Load(running=1), own=1.2),
    ]
    assert order(Policy.LEAST_LOADED, *pods) == ["b", "a", "c"]


@pytest.mark.parametrize("policy", Policy)
def test_a_rank_that_is_down_comes_last(policy: Policy) -> None:
    down = candidate("a", held(1_600, gpu=90, state=SourceState.DOWN), state=SourceState.DOWN)
    assert order(policy, down, candidate("b", load=Load(running=50), turn=9)) == ["b", "a"]
    assert order(policy, down) == ["a"]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("tokens", [0, 1, 15])
def test_prompt_without_a_full_block(policy: Policy, tokens: int) -> None:
    assert order(policy, candidate("a", own=1.0, turn=1), candidate("b"), tokens=tokens) == ["b", "a"]


def test_reason_is_a_sentence() -> None:
    row = held(1_600, gpu=50, announced=60)
    load = Load(running=3, waiting=1, kv_usage=0.4)
    (ranked,) = rank(
        Policy.PREFIX_AND_LOAD, [candidate("a", row, load=load, own=2.0, state=SourceState.DEGRADED)],
        tokens=1_600, block_size=UNIT, request_tokens=1,
    )  # fmt: skip
    assert reason(ranked, tokens=1_600) == (
        "holds 800 of 1600 tokens, 10 more blocks announced, 3 running, 1 waiting, 40 % of its KV in use, "
        "2.0 chosen by us since, degraded"
    )
