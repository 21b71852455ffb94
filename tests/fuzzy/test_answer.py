"""Windows and holdings to an answer: what is excluded, what counts once, what comes first."""

from collections.abc import Collection, Mapping, Sequence

from app.fuzzy.answer import (
    FuzzyAnswer,
    Holding,
    Holdings,
    OwnerSummary,
    PodSummary,
    Run,
    assemble,
    is_named,
)
from app.fuzzy.fuzzy_index import Match, Window, finish

HELD = {
    1: [Holding("a"), Holding("b", 1)],
    2: [Holding("a"), Holding("agent1:system")],
    3: [Holding("agent1"), Holding("agent10")],
}


class Lookup:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, prefix_hashes: Collection[int]) -> Mapping[int, Sequence[Holding]]:
        self.asked += prefix_hashes
        return {prefix_hash: HELD[prefix_hash] for prefix_hash in prefix_hashes if prefix_hash in HELD}


def holdings(*exclude: str) -> Holdings:
    return Holdings(Lookup(), exclude)


def test_an_agent_is_named_with_its_roles_and_no_other() -> None:
    assert is_named("agent1", ["agent1"])
    assert is_named("agent1:system", ["x", "agent1"])
    assert not is_named("agent10", ["agent1"])
    assert not is_named("agent1", ["agent1:system"])
    assert not is_named("agent1", [])


def assembled(
    windows: Sequence[Window], held: Holdings, *, block_size: int, tokens: int, limit_per_block: int
) -> FuzzyAnswer:
    return finish(
        assemble(windows, held, block_size=block_size, tokens=tokens, limit_per_block=limit_per_block)
    )


def test_what_nobody_left_holds_is_not_usable() -> None:
    assert holdings().usable({1, 2, 3, 4}) == {1, 2, 3}
    left = holdings("agent1", "agent10", "a")
    assert left.usable({1, 2, 3, 4}) == {1}
    assert left.of(1) == (Holding("b", 1),)


def test_every_prefix_hash_is_looked_up_once() -> None:
    lookup = Lookup()
    asking = Holdings(lookup)
    asking.usable({1, 4})
    asking.usable({1, 2, 4})
    assert sorted(lookup.asked) == [1, 2, 4]


def test_a_pod_counts_once_a_window_with_its_best_match() -> None:
    left = holdings()
    left.usable({1, 2, 3})
    window = Window(16, (Match(2, 0, True), Match(1, 3, False), Match(3, 8, False)))
    answer = assembled([window], left, block_size=16, tokens=40, limit_per_block=10)
    [block] = answer.blocks
    assert (block.block_index, block.token_offset, block.kind) == (1, 16, "exact")
    assert [(m.pod, m.dp_rank, m.cached_block_hash, m.kind) for m in block.matches] == [
        ("a", 0, 2, "exact"),
        ("agent1:system", 0, 2, "exact"),
        ("b", 1, 1, "near"),
        ("agent1", 0, 3, "near"),
        ("agent10", 0, 3, "near"),
    ]
    assert [m.confidence for m in block.matches] == [1.0, 1.0, 1 - 3 / 64, 1 - 8 / 64, 1 - 8 / 64]


def test_a_summary_counts_what_the_limit_hides() -> None:
    left = holdings()
    left.usable({1, 2, 3})
    windows = [Window(0, (Match(1, 0, True),)), Window(20, (Match(2, 4, False),))]
    answer = assembled(windows, left, block_size=16, tokens=64, limit_per_block=1)
    assert [len(block.matches) for block in answer.blocks] == [1, 1]
    assert [block.block_index for block in answer.blocks] == [0, None]
    assert answer.pods == (
        PodSummary("a", 2, 32, 0.5, (1 + 1 - 4 / 64) / 2),
        PodSummary("b", 1, 16, 0.25, 1.0),
        PodSummary("agent1:system", 1, 16, 0.25, 1 - 4 / 64),
    )


def test_neighbouring_blocks_of_one_kind_are_a_run() -> None:
    left = holdings()
    left.usable({1})
    exact, near = (Match(1, 0, True),), (Match(1, 2, False),)
    windows = [Window(3, exact), Window(7, exact), Window(11, near), Window(16, near), Window(20, near)]
    answer = assembled(windows, left, block_size=4, tokens=24, limit_per_block=1)
    assert answer.runs == (Run(3, 8, "exact"), Run(11, 4, "near"), Run(16, 8, "near"))


def test_nothing_found_is_an_empty_answer() -> None:
    answer = assembled([], holdings(), block_size=16, tokens=5, limit_per_block=4)
    assert (answer.blocks, answer.runs, answer.pods, answer.owners) == ((), (), (), ())


OWNED = {
    1: [Holding("a", 0, ("agent1:system", "agent2")), Holding("b", 0, ("agent1",))],
    2: [Holding("a", 0, ("agent1:system", "agent2")), Holding("c")],
}


def test_what_is_held_for_several_owners_counts_for_those_that_are_left() -> None:
    left = Holdings(lambda _: OWNED, ["agent1"])
    assert left.usable({1, 2}) == {1, 2}
    assert left.of(1) == (Holding("a", 0, ("agent2",)),)
    assert left.of(2) == (Holding("a", 0, ("agent2",)), Holding("c"))
    assert Holdings(lambda _: OWNED, ["agent1", "agent2"]).usable({1, 2}) == {2}
    assert Holdings(lambda _: OWNED, ["agent1:system"]).usable({1}) == {1}


def test_owners_are_summed_up_over_all_pods() -> None:
    left = Holdings(lambda _: OWNED)
    left.usable({1, 2})
    windows = [Window(0, (Match(1, 0, True), Match(2, 2, False))), Window(16, (Match(2, 4, False),))]
    answer = assembled(windows, left, block_size=16, tokens=64, limit_per_block=1)
    assert answer.blocks[0].matches[0].owners == ("agent1:system", "agent2")
    both = (2, 32, 0.5, (1 + 1 - 4 / 64) / 2)
    assert answer.owners == (
        OwnerSummary("agent1:system", *both),
        OwnerSummary("agent2", *both),
        OwnerSummary("agent1", 1, 16, 0.25, 1.0),
    )
