"""The choice over a real service: who is a candidate, and what our own choices and reservations do to the next."""

from __future__ import annotations

import array
from collections import Counter
from typing import Any

import pytest

from app.config import load_settings
from app.errors import LimitExceeded, NoCandidate
from app.events import BlockStored, EventBatch, Tier
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec
from app.routing.router import Polled, Router
from app.routing.routing import LOAD_WEIGHT, Load, Policy
from app.service import IndexerService, MatchQuery, index_limits


class Fleet:
    """A router over pods named `pods`, with a clock that only moves when told."""

    def __init__(self, *pods: str, polled: Polled | None = None, **settings: Any) -> None:
        self.now_s = 50.0
        read = load_settings(**settings)
        self.service = IndexerService(read, PrefixIndex(index_limits(read)), clock=lambda: self.now_s)
        for pod in pods:
            self.service.register(PodSpec(pod, "m", block_size=4))
        more = {} if polled is None else {"polled": polled}
        self.router = Router(read, self.service, clock=lambda: self.now_s, **more)

    def hold(self, pod: str, token_ids: list[int], *, dp_rank: int = 0) -> None:
        count = len(token_ids) // 4
        event = BlockStored(
            block_hashes=array.array("Q", range(1, count + 1)).tobytes(),
            parent_block_hash=None,
            token_ids=packed(token_ids),
            block_size=4,
            tier=Tier.GPU,
        )
        self.service.apply(pod, dp_rank, EventBatch(events=(event,), positions=(0,)), seq=None)

    def choose(
        self,
        token_ids: list[int],
        *,
        policy: Policy = Policy.PREFIX_AND_LOAD,
        loads: dict[str, Load] | None = None,
        reserve: bool = False,
        ttl_s: float = 2.0,
        **query: Any,
    ) -> str:
        asked = MatchQuery(**{"model": "m", "token_ids": packed(token_ids), **query})
        result = self.router.route(asked, policy=policy, loads=loads or {}, reserve=reserve, ttl_s=ttl_s)
        self.last = result
        return result.ranked[0].candidate.pod

    def depths(self, token_ids: list[int]) -> dict[str, tuple[int, int]]:
        rows = self.service.match(MatchQuery(model="m", token_ids=packed(token_ids))).matches
        return {row.pod: (row.matched_blocks, row.speculative_blocks) for row in rows}


def packed(token_ids: list[int]) -> bytes:
    return array.array("I", token_ids).tobytes()


PROMPT = list(range(100, 140))  # ten blocks


def test_the_pod_that_has_it() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.hold("b", PROMPT)
    assert fleet.choose(PROMPT) == "b"
    assert [found.candidate.pod for found in fleet.last.ranked] == ["b", "a", "c"]


def test_a_pod_that_comes_back_is_a_new_one() -> None:
    fleet = Fleet("a", "b")
    for _ in range(20):
        fleet.choose(PROMPT, pods=frozenset({"a"}))
    assert fleet.choose(PROMPT) == "b"
    fleet.service.drop_pod("a")
    fleet.service.register(PodSpec("a", "m", block_size=4))
    fleet.choose(PROMPT)
    before = {found.candidate.pod: found.candidate for found in fleet.last.ranked}
    assert (before["a"].work, before["a"].own, before["a"].turn) == (0, 0, 0)


# -- candidates


def test_candidates_are_those_that_serve_the_model_and_the_adapter() -> None:
    fleet = Fleet("a", "b")
    fleet.service.register(PodSpec("other", "n"))
    fleet.service.register(PodSpec("only-sql", "m", lora="sql"))
    fleet.service.register(PodSpec("ranks", "m", dp_size=2))

    def places(**query: Any) -> set[tuple[str, int]]:
        fleet.choose(PROMPT, **query)
        return {found.candidate.place for found in fleet.last.ranked}

    everywhere = {("a", 0), ("b", 0), ("ranks", 0), ("ranks", 1)}
    assert places() == everywhere
    assert places(lora="sql") == everywhere | {("only-sql", 0)}
    assert places(pods=frozenset({"b", "other", "only-sql"})) == {("b", 0)}


def test_a_pod_that_only_the_request_knows_can_be_chosen() -> None:
    fleet = Fleet("a")
    assert fleet.choose(PROMPT, pods=frozenset({"new"}), reserve=True) == "new"
    assert fleet.last.reserved_blocks == 0


@pytest.mark.parametrize(
    "query", [{"model": "n"}, {"pods": frozenset[str]()}, {"pods": frozenset({"other"})}]
)
def test_nobody_to_choose(query: dict[str, Any]) -> None:
    fleet = Fleet("a")
    fleet.service.register(PodSpec("other", "x"))
    with pytest.raises(NoCandidate, match="serves model"):
        fleet.choose(PROMPT, **query)


def test_ranks_are_chosen_apart() -> None:
    fleet = Fleet()
    fleet.service.register(PodSpec("a", "m", block_size=4, dp_size=3))
    fleet.hold("a", PROMPT, dp_rank=2)
    fleet.choose(PROMPT)
    assert fleet.last.ranked[0].candidate.place == ("a", 2)
    fleet.choose(PROMPT, loads={"a": Load(running=6)})
    assert [found.candidate.load for found in fleet.last.ranked] == [Load(running=2)] * 3


# -- bursts


@pytest.mark.parametrize("policy", [Policy.ROUND_ROBIN, Policy.LEAST_LOADED, Policy.PREFIX_AND_LOAD])
def test_a_burst_of_strangers_spreads_evenly(policy: Policy) -> None:
    fleet = Fleet(*"abcd")
    chosen = Counter(fleet.choose([n * 1_000 + i for i in range(40)], policy=policy) for n in range(40))
    assert chosen == dict.fromkeys("abcd", 10)


def test_a_burst_of_equal_prompts_goes_together_and_then_spreads() -> None:
    fleet = Fleet(*"abcd")
    chosen = [fleet.choose(PROMPT, reserve=True) for _ in range(32)]
    assert len(set(chosen[:3])) == 1, "the second sees the first before any event"
    assert set(chosen) == set("abcd"), "and no pod has them all"
    assert max(Counter(chosen).values()) <= 2 / LOAD_WEIGHT


def test_without_reservation_a_burst_of_equal_prompts_is_a_burst_of_strangers() -> None:
    fleet = Fleet(*"abcd")
    assert Counter(fleet.choose(PROMPT) for _ in range(16)) == dict.fromkeys("abcd", 4)


def test_own_choices_fade() -> None:
    fleet = Fleet("a", "b", route_decay_s=10)
    fleet.hold("a", PROMPT)
    for _ in range(40):
        fleet.choose(PROMPT, pods=frozenset("a"))
    assert fleet.choose(PROMPT) == "b"
    fleet.now_s += 100
    assert fleet.choose(PROMPT) == "a"


# -- loads


def test_loads_of_the_request() -> None:
    fleet = Fleet("a", "b")
    fleet.hold("a", PROMPT)
    assert fleet.choose(PROMPT, loads={"a": Load(running=50), "b": Load()}) == "b"
    assert fleet.choose(PROMPT, loads={"a": Load(running=1), "b": Load()}) == "a"


def test_a_load_that_says_the_same_again_does_not_hide_our_choices() -> None:
    fleet = Fleet(*"ab")
    loads = {"a": Load(running=1), "b": Load(running=1)}
    assert Counter(fleet.choose(PROMPT, loads=loads) for _ in range(10)) == {"a": 5, "b": 5}


def test_a_new_load_has_our_choices_in_it() -> None:
    fleet = Fleet(*"ab")
    for _ in range(10):
        fleet.choose(PROMPT, pods=frozenset("a"))
    fleet.choose(PROMPT, loads={"a": Load(running=0), "b": Load(running=1)}, policy=Policy.LEAST_LOADED)
    assert fleet.last.ranked[0].candidate.place == ("a", 0)
    assert fleet.last.ranked[0].candidate.own == 0


def test_loads_that_were_read_stand_in_for_those_of_the_request() -> None:
    known = {("a", 0): Load(running=9), ("b", 0): Load(running=1)}
    fleet = Fleet("a", "b", polled=lambda pod, dp_rank: known.get((pod, dp_rank)))
    assert fleet.choose(PROMPT, policy=Policy.LEAST_LOADED) == "b"
    assert fleet.choose(PROMPT, policy=Policy.LEAST_LOADED, loads={"b": Load(running=20)}) == "a"


def test_a_load_that_was_read_anew_is_new_even_when_it_says_the_same() -> None:
    known = {("a", 0): Load(running=1), ("b", 0): Load(running=1)}
    fleet = Fleet("a", "b", polled=lambda pod, dp_rank: known[pod, dp_rank])
    assert [fleet.choose(PROMPT, policy=Policy.LEAST_LOADED) for _ in range(3)] == ["a", "b", "a"]
    known = {place: Load(running=1) for place in known}
    fleet.choose(PROMPT, policy=Policy.LEAST_LOADED)
    assert [found.candidate.own for found in fleet.last.ranked] == [0, 0]


# -- reservations


def test_a_reservation_ends_by_itself() -> None:
    fleet = Fleet("a", "b")
    pod = fleet.choose(PROMPT, reserve=True, ttl_s=2.0)
    assert fleet.last.reserved_blocks == 10
    assert fleet.depths(PROMPT) == {pod: (0, 10)}
    fleet.now_s += 2.1
    assert fleet.depths(PROMPT) == {}


def test_confirmed_blocks_outlive_a_reservation_and_take_its_place() -> None:
    fleet = Fleet("a")
    fleet.choose(PROMPT, reserve=True, ttl_s=2.0)
    fleet.hold("a", PROMPT[:20])
    assert fleet.depths(PROMPT) == {"a": (5, 10)}
    fleet.now_s += 2.1
    assert fleet.depths(PROMPT) == {"a": (5, 5)}
    fleet.choose(PROMPT, reserve=True)
    assert fleet.last.reserved_blocks == 5, "what is held is not announced"


def test_no_choice_is_booked_for_a_reservation_that_is_refused() -> None:
    fleet = Fleet("a")
    with pytest.raises(LimitExceeded, match="speculative_ttl_s_max"):
        fleet.choose(PROMPT, reserve=True, ttl_s=1e6)
    assert sum(fleet.router.counters().values()) == 0
    fleet.choose(PROMPT)
    assert fleet.last.ranked[0].candidate.own == 0


def test_filters_of_what_is_shown_do_not_change_the_choice() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.hold("b", PROMPT[:8])
    fleet.hold("c", PROMPT[:12])
    assert fleet.choose(PROMPT, min_blocks=9, top_k=1) == "c"
    assert len(fleet.last.ranked) == 3


def test_counters() -> None:
    fleet = Fleet("a")
    fleet.choose(PROMPT, reserve=True)
    fleet.choose(PROMPT, policy=Policy.ROUND_ROBIN)
    counted = fleet.router.counters()
    assert (counted["choices_prefix_and_load"], counted["choices_round_robin"]) == (1, 1)
    assert counted["reserved_blocks"] == 10
