"""Examples of the contract worked by hand, for the oracle (so that it may judge) and for the native core alike."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import InvalidInput
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.reference import ReferenceIndex

GPU, CPU = 0, 1
TTL = 100

# model "m", no adapter, 2 tokens a block, tokens 1, 2, 3, ... ; printed by the xxhash package, once.
H0, H1, H2, H3 = 0x6B9E09B6DB1E435F, 0x4FADE8B9ACD46AB0, 0xF630DC6614356CCA, 0xCD1827909CE24A34
SALT = bytes.fromhex("91a473616c74")  # msgpack ["salt"]
H0_SALTED, H1_SALTED = 0x60ED51532CBA3509, 0x0C95501299A4C3B5
H0_LORA = 0x2E676DDBF3E77BDF


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def tokens(first_block: int, count: int) -> bytes:
    """The tokens of `count` blocks of the prompt 1, 2, 3, ... from block `first_block` on."""
    start = 2 * first_block + 1
    return struct.pack(f"<{2 * count}I", *range(start, start + 2 * count))


PROMPT = tokens(0, 4)


class Fleet:
    """An index with one context and helpers that speak of blocks of one prompt; block i is named 10 + i."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.context = self.index.context("m", None, 2, 0)
        self.a = self.index.add_source()
        self.b = self.index.add_source()

    def store(
        self,
        first: int,
        count: int = 1,
        *,
        source: int | None = None,
        tier: int = GPU,
        group: int = 0,
        now: int = 0,
        parent: int | None = None,
        names: tuple[int, ...] = (),
        extra_keys: tuple[bytes, ...] | None = None,
        count_copies: bool = True,
    ) -> tuple[int, int]:
        """(stored blocks, blocks that wait)"""
        result = self.index.store(
            self.a if source is None else source,
            self.context,
            tier=tier,
            group=group,
            engine_hashes=uint64s(*(names or range(10 + first, 10 + first + count))),
            parent=9 + first if first and parent is None else parent,
            token_ids=tokens(first, count),
            extra_keys=extra_keys,
            now=now,
            count_copies=count_copies,
        )
        assert result.unknown_blocks == 0
        return result.stored_blocks, result.orphan_blocks

    def remove(
        self, *names: int, source: int | None = None, tier: int = GPU, now: int = 0
    ) -> tuple[int, int]:
        result = self.index.remove(
            self.a if source is None else source, tier=tier, group=0, engine_hashes=uint64s(*names), now=now
        )
        return result.removed_blocks, result.unknown_blocks

    def place(self, *names: int, tier: int, now: int = 0) -> tuple[int, int]:
        result = self.index.place(self.a, tier=tier, group=0, engine_hashes=uint64s(*names), now=now)
        return result.stored_blocks, result.unknown_blocks

    def depths(self, now: int = 0) -> dict[int, tuple[tuple[int, int, int, int], int]]:
        rows = self.index.match_tokens(self.context, PROMPT, None, now)
        return {row.source: (row.tiers, row.speculative) for row in rows}

    def gpu_depth(self, source: int | None = None, now: int = 0) -> int:
        tiers, _ = self.depths(now).get(self.a if source is None else source, ((0, 0, 0, 0), 0))
        return tiers[GPU]


MakeFleet = Callable[..., Fleet]


@pytest.fixture(params=[ReferenceIndex, PrefixIndex], ids=["oracle", "native"])
def make_fleet(request: pytest.FixtureRequest) -> MakeFleet:
    def make(ttl_ticks: int = TTL, **limits: Any) -> Fleet:
        return Fleet(request.param(IndexLimits(ttl_ticks=ttl_ticks, **limits)))

    return make


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet()


# -- hashes


def test_prefix_hashes_are_those_of_the_documented_chain(fleet: Fleet) -> None:
    assert fleet.index.prefix_hashes("m", None, 2, PROMPT, None) == uint64s(H0, H1, H2, H3)


def test_extra_keys_follow_the_tokens_of_their_block(fleet: Fleet) -> None:
    assert fleet.index.prefix_hashes("m", None, 2, tokens(0, 2), (SALT,)) == uint64s(H0_SALTED, H1_SALTED)


def test_adapter_changes_the_seed_and_the_empty_name_is_no_adapter(fleet: Fleet) -> None:
    assert fleet.index.prefix_hashes("m", "tuned", 2, tokens(0, 1), None) == uint64s(H0_LORA)
    assert fleet.index.prefix_hashes("m", "", 2, tokens(0, 1), None) == uint64s(H0)
    assert fleet.index.context("m", "", 2, 0) == fleet.context


def test_only_full_blocks_are_hashed(fleet: Fleet) -> None:
    assert fleet.index.prefix_hashes("m", None, 2, struct.pack("<3I", 1, 2, 3), None) == uint64s(H0)
    assert fleet.index.prefix_hashes("m", None, 2, struct.pack("<I", 1), None) == b""


def test_buffers_that_do_not_fit_are_refused_and_change_nothing(fleet: Fleet) -> None:
    for hashes, ids, keys in [
        (b"\0" * 7, tokens(0, 1), None),
        (uint64s(1), tokens(0, 2), None),
        (uint64s(1), tokens(0, 1)[:-4], None),
        (uint64s(1), tokens(0, 1), (b"", b"")),
    ]:
        with pytest.raises(InvalidInput):
            fleet.index.store(
                fleet.a,
                fleet.context,
                tier=GPU,
                group=0,
                engine_hashes=hashes,
                parent=None,
                token_ids=ids,
                extra_keys=keys,
                now=0,
            )
    assert fleet.depths() == {}


# -- depth


def test_match_stops_at_the_first_hole_and_a_filled_hole_counts_again(fleet: Fleet) -> None:
    assert fleet.store(0, 4) == (4, 0)
    assert fleet.gpu_depth() == 4
    assert fleet.remove(11) == (1, 0)
    assert fleet.gpu_depth() == 1
    assert fleet.store(1) == (1, 0)
    assert fleet.gpu_depth() == 4


def test_only_the_last_block_is_depth_zero(fleet: Fleet) -> None:
    fleet.store(0, 4)
    fleet.remove(10, 11, 12)
    assert fleet.depths() == {}
    assert fleet.index.holders(fleet.context, H3, 0) == [(fleet.a, GPU, 0)]


def test_sources_are_counted_apart(fleet: Fleet) -> None:
    fleet.store(0, 3)
    fleet.store(0, 1, source=fleet.b, names=(77,))
    assert fleet.depths() == {fleet.a: ((3, 3, 3, 3), 3), fleet.b: ((1, 1, 1, 1), 1)}
    assert fleet.index.holders(fleet.context, H0, 0) == [(fleet.a, GPU, 0), (fleet.b, GPU, 0)]


def test_salted_blocks_are_other_blocks(fleet: Fleet) -> None:
    fleet.store(0, 2, extra_keys=(SALT, b""))
    assert fleet.depths() == {}
    rows = fleet.index.match_tokens(fleet.context, PROMPT, (SALT,), 0)
    assert [row.tiers[GPU] for row in rows] == [2]
    assert fleet.index.match_hashes(fleet.context, uint64s(H0_SALTED, H1_SALTED), 0) == rows


# -- parents and orphans


def test_unknown_parent_never_counts_as_a_root(fleet: Fleet) -> None:
    assert fleet.store(0, 2, parent=99) == (0, 2)
    assert fleet.depths() == {}
    assert fleet.index.orphan_blocks(fleet.a) == 2


def test_orphans_of_several_levels_chain_when_the_root_comes(fleet: Fleet) -> None:
    assert fleet.store(3) == (0, 1)
    assert fleet.store(2) == (0, 1)
    assert fleet.store(1) == (0, 1)
    assert fleet.store(0) == (4, 0)
    assert fleet.gpu_depth() == 4
    assert fleet.index.orphan_blocks(fleet.a) == 0


def test_orphan_chains_of_thousands_of_levels_are_possible(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    blocks = [struct.pack("<2I", i, i) for i in range(3000)]
    for i in reversed(range(3000)):
        result = fleet.index.store(
            fleet.a,
            fleet.context,
            tier=GPU,
            group=0,
            engine_hashes=uint64s(i),
            parent=i - 1 if i else None,
            token_ids=blocks[i],
            extra_keys=None,
            now=0,
        )
    assert result.stored_blocks == 3000
    assert fleet.index.match_tokens(fleet.context, b"".join(blocks), None, 0)[0].tiers[GPU] == 3000


def test_another_source_does_not_lend_its_names(fleet: Fleet) -> None:
    fleet.store(0)
    assert fleet.store(1, source=fleet.b) == (0, 1)


def test_parent_is_found_on_another_tier_of_the_same_source(fleet: Fleet) -> None:
    fleet.store(0)
    assert fleet.store(1, tier=CPU) == (1, 0)
    assert fleet.depths() == {fleet.a: ((1, 2, 2, 2), 2)}


def test_removed_orphan_block_is_never_indexed_but_its_children_chain(fleet: Fleet) -> None:
    fleet.store(1, 2)
    fleet.store(3)
    assert fleet.remove(12) == (1, 0)
    assert fleet.remove(12) == (0, 1)
    assert fleet.store(0) == (3, 0)
    assert fleet.gpu_depth() == 2
    assert fleet.index.holders(fleet.context, H2, 0) == []
    assert fleet.index.holders(fleet.context, H3, 0) == [(fleet.a, GPU, 0)]


def test_orphans_past_the_bound_push_out_the_oldest_and_are_reported(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(orphan_blocks_max=2)
    fleet.store(3)
    fleet.store(2, source=fleet.b)
    assert fleet.store(1) == (0, 1)
    assert fleet.index.orphan_drops() == [(fleet.a, 1)]
    assert fleet.index.orphan_drops() == []
    assert fleet.store(1, 3) == (0, 0)
    assert fleet.index.orphan_drops() == [(fleet.a, 3)]
    assert fleet.store(0) == (2, 0)
    assert fleet.gpu_depth() == 2


def test_orphans_of_one_parent_chain_oldest_first_and_depth_first(fleet: Fleet) -> None:
    """Two orphans claim the name 12: the later one gets it, after the first one's own child was chained."""
    fleet.store(1, names=(12,), parent=10)
    fleet.store(2, names=(13,), parent=12)
    fleet.index.store(
        fleet.a,
        fleet.context,
        tier=GPU,
        group=0,
        engine_hashes=uint64s(12),
        parent=10,
        token_ids=struct.pack("<2I", 7, 7),
        extra_keys=None,
        now=0,
    )
    assert fleet.store(0) == (4, 0)
    assert fleet.index.holders(fleet.context, H1, 0) == []
    assert fleet.index.holders(fleet.context, H2, 0) == [(fleet.a, GPU, 0)]


def test_removal_takes_the_copy_of_the_oldest_orphan(fleet: Fleet) -> None:
    fleet.store(1, names=(40,), parent=10)
    fleet.store(2, names=(40,), parent=11)
    assert fleet.remove(40) == (1, 0)
    assert fleet.store(0) == (1, 0)
    assert fleet.index.holders(fleet.context, H1, 0) == []
    assert fleet.store(1) == (2, 0)
    assert fleet.index.holders(fleet.context, H2, 0) == [(fleet.a, GPU, 0)]


def test_parent_of_several_meanings_is_the_one_of_the_fastest_other_tier(fleet: Fleet) -> None:
    fleet.store(0, tier=3, names=(50,))
    fleet.store(0)
    fleet.store(1, tier=CPU, names=(50,))
    fleet.store(2, names=(60,), parent=50)
    assert fleet.index.holders(fleet.context, H2, 0) == [(fleet.a, GPU, 0)]


def test_parent_of_several_meanings_is_first_the_one_of_the_same_slot(fleet: Fleet) -> None:
    fleet.store(0, 2)
    fleet.store(0, tier=CPU, names=(11,))
    assert fleet.store(2, tier=CPU) == (1, 0)
    assert fleet.index.holders(fleet.context, H2, 0) == []
    fleet.store(2)
    assert fleet.index.holders(fleet.context, H2, 0) == [(fleet.a, GPU, 0)]


# -- copies and names


def test_copies_are_counted(fleet: Fleet) -> None:
    fleet.store(0, 2)
    fleet.store(1)
    assert fleet.remove(11) == (1, 0)
    assert fleet.gpu_depth() == 2
    assert fleet.remove(11) == (1, 0)
    assert fleet.gpu_depth() == 1
    assert fleet.remove(11) == (0, 1)


def test_copies_are_not_counted_when_the_engine_removes_once(fleet: Fleet) -> None:
    fleet.store(0, count_copies=False)
    fleet.store(0, count_copies=False)
    fleet.remove(10)
    assert fleet.gpu_depth() == 0


def test_newest_use_of_a_name_wins_with_all_its_copies(fleet: Fleet) -> None:
    fleet.store(0, 2)
    fleet.store(1)
    assert fleet.store(2, names=(11,), parent=11) == (1, 0)
    assert fleet.index.holders(fleet.context, H1, 0) == []
    assert fleet.index.holders(fleet.context, H2, 0) == [(fleet.a, GPU, 0)]
    fleet.remove(11)
    assert fleet.index.holders(fleet.context, H2, 0) == []


def test_two_names_of_one_prefix_hold_it_until_both_go(fleet: Fleet) -> None:
    fleet.store(0)
    fleet.store(0, names=(50,))
    fleet.remove(10)
    assert fleet.gpu_depth() == 1
    assert fleet.index.blocks_by_tier(fleet.a) == (1, 0, 0, 0)
    fleet.remove(50)
    assert fleet.gpu_depth() == 0


def test_groups_hold_apart(fleet: Fleet) -> None:
    fleet.store(0, group=1)
    assert fleet.remove(10) == (0, 1)
    assert fleet.gpu_depth() == 1


def test_removal_reaches_every_context_that_uses_the_name(fleet: Fleet) -> None:
    fleet.store(0)
    other = fleet.index.context("m", "tuned", 2, 0)
    fleet.index.store(
        fleet.a,
        other,
        tier=GPU,
        group=0,
        engine_hashes=uint64s(10),
        parent=None,
        token_ids=tokens(0, 1),
        extra_keys=None,
        now=0,
    )
    assert fleet.index.holders(other, H0_LORA, 0) == [(fleet.a, GPU, 0)]
    assert fleet.remove(10) == (2, 0)
    assert fleet.index.holders(other, H0_LORA, 0) == []


# -- tiers, placeholders, clears


def test_tiers_are_cumulative_and_fill_each_others_holes(fleet: Fleet) -> None:
    fleet.store(0, 4)
    fleet.store(1, tier=CPU)
    fleet.remove(11)
    assert fleet.depths() == {fleet.a: ((1, 4, 4, 4), 4)}


def test_placeholder_finds_the_name_on_another_tier(fleet: Fleet) -> None:
    fleet.store(0, 2)
    assert fleet.place(10, 11, 99, tier=CPU) == (2, 1)
    fleet.remove(10, 11)
    assert fleet.depths() == {fleet.a: ((0, 2, 2, 2), 2)}


def test_clear_of_gpu_leaves_cpu(fleet: Fleet) -> None:
    fleet.store(0, 3)
    fleet.place(10, 11, tier=CPU)
    fleet.store(3, parent=999)
    fleet.index.clear(fleet.a, tier=GPU)
    assert fleet.depths() == {fleet.a: ((0, 2, 2, 2), 2)}
    assert fleet.index.orphan_blocks(fleet.a) == 0
    assert fleet.index.blocks_by_tier(fleet.a) == (0, 2, 0, 0)


def test_clear_of_one_source_leaves_the_others(fleet: Fleet) -> None:
    fleet.store(0, 2)
    fleet.store(0, 2, source=fleet.b)
    fleet.index.clear(fleet.a)
    assert fleet.depths() == {fleet.b: ((2, 2, 2, 2), 2)}
    assert fleet.store(1) == (0, 1)


def test_dropped_source_is_a_bug_to_use(fleet: Fleet) -> None:
    fleet.store(0)
    fleet.index.drop_source(fleet.a)
    assert fleet.depths() == {}
    with pytest.raises(AssertionError):
        fleet.store(0)
    assert fleet.index.add_source() not in (fleet.a, fleet.b)


# -- time


def test_entry_lives_to_the_tick_before_its_ttl(fleet: Fleet) -> None:
    fleet.store(0, now=5)
    assert fleet.index.holders(fleet.context, H0, 5 + TTL - 1) == [(fleet.a, GPU, 0)]
    assert fleet.index.holders(fleet.context, H0, 5 + TTL) == []
    assert fleet.index.holders(fleet.context, H0, 5 + TTL + 1) == []


def test_match_refreshes_the_matched_blocks_only(fleet: Fleet) -> None:
    fleet.store(0, 4)
    fleet.remove(12)
    assert fleet.gpu_depth(now=TTL - 1) == 2
    assert fleet.gpu_depth(now=TTL) == 2
    assert fleet.index.holders(fleet.context, H3, TTL) == []
    assert fleet.gpu_depth(now=2 * TTL - 1) == 2
    assert fleet.gpu_depth(now=3 * TTL - 1) == 0


def test_expired_block_cannot_be_a_parent_nor_be_removed(fleet: Fleet) -> None:
    fleet.store(0)
    assert fleet.store(1, now=TTL) == (0, 1)
    assert fleet.remove(10, now=TTL) == (0, 1)


def test_copies_do_not_survive_expiry(fleet: Fleet) -> None:
    fleet.store(0)
    fleet.store(0)
    fleet.store(0, now=TTL)
    fleet.remove(10, now=TTL)
    assert fleet.gpu_depth(now=TTL) == 0


def test_orphans_expire_by_the_tick_they_came(make_fleet: MakeFleet) -> None:
    for now, chained in ((TTL - 1, 2), (TTL, 1), (TTL + 1, 1)):
        fleet = make_fleet()
        fleet.store(1)
        assert fleet.store(0, now=now) == (chained, 0)
        assert fleet.index.orphan_drops() == []


def test_ttl_zero_keeps_everything(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(ttl_ticks=0)
    fleet.store(0)
    assert fleet.gpu_depth(now=10**9) == 1


# -- speculative marks


def mark(fleet: Fleet, *hashes: int, ttl: int = 20, now: int = 0) -> int:
    return fleet.index.add_speculative(fleet.context, fleet.a, uint64s(*hashes), ttl, now)


def test_speculative_marks_extend_the_confirmed_run_and_expire_alone(fleet: Fleet) -> None:
    fleet.store(0, 2)
    assert mark(fleet, H0, H1, H2) == 1
    assert fleet.depths(19) == {fleet.a: ((2, 2, 2, 2), 3)}
    assert fleet.depths(20) == {fleet.a: ((2, 2, 2, 2), 2)}


def test_speculative_marks_alone_make_a_row_without_confirmed_depth(fleet: Fleet) -> None:
    mark(fleet, H0)
    assert fleet.depths() == {fleet.a: ((0, 0, 0, 0), 1)}
    assert fleet.index.holders(fleet.context, H0, 0) == []


def test_later_deadline_wins(fleet: Fleet) -> None:
    mark(fleet, H0, ttl=20)
    assert mark(fleet, H0, ttl=5) == 1
    assert fleet.depths(19) == {fleet.a: ((0, 0, 0, 0), 1)}
    mark(fleet, H0, ttl=2, now=19)
    assert fleet.depths(20) == {fleet.a: ((0, 0, 0, 0), 1)}
    assert fleet.depths(21) == {}


def test_confirmed_block_takes_its_mark_with_it(fleet: Fleet) -> None:
    mark(fleet, H0)
    fleet.store(0)
    fleet.remove(10)
    assert fleet.depths() == {}


def test_clear_of_gpu_takes_marks_and_clear_of_cpu_does_not(fleet: Fleet) -> None:
    mark(fleet, H0)
    fleet.index.clear(fleet.a, tier=CPU)
    assert fleet.depths() == {fleet.a: ((0, 0, 0, 0), 1)}
    fleet.index.clear(fleet.a, tier=GPU)
    assert fleet.depths() == {}


def test_surplus_marks_are_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(speculative_blocks_max=2)
    assert mark(fleet, H0, H1, H2) == 2
    assert mark(fleet, H0) == 1
    assert fleet.index.stats().speculative_refused == 1


# -- capacity


def test_full_context_evicts_the_least_recently_seen(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(prefixes_per_context_max=3)
    fleet.store(0, now=0)
    fleet.store(1, now=1)
    fleet.store(2, now=2)
    fleet.index.match_hashes(fleet.context, uint64s(H0), 3)
    fleet.store(3, now=4)
    held = [bool(fleet.index.holders(fleet.context, h, 4)) for h in (H0, H1, H2, H3)]
    assert held == [True, False, True, True]
    assert fleet.index.stats().evicted == 1


def test_surplus_context_drops_the_least_recently_used_with_all_it_had(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(contexts_max=2)
    fleet.store(0)
    fleet.store(2)
    mark(fleet, H1)
    second = fleet.index.context("n", None, 2, 0)
    fleet.gpu_depth()
    third = fleet.index.context("o", None, 2, 0)
    assert [info.id for info in fleet.index.contexts()] == [fleet.context, third]
    assert second not in (fleet.context, third)
    fleet.index.context("p", None, 2, 0)
    assert fleet.index.find_contexts("m", None) == []
    assert fleet.index.blocks_by_tier(fleet.a) == (0, 0, 0, 0)
    assert fleet.index.orphan_blocks(fleet.a) == 0
    assert fleet.index.stats().speculative_blocks == 0
    assert fleet.index.stats().contexts_evicted == 2


def test_contexts_of_one_model_are_found_by_adapter(fleet: Fleet) -> None:
    chunks = fleet.index.context("m", None, 4, 0)
    fleet.index.context("m", "tuned", 2, 0)
    fleet.store(0, 2)
    found = fleet.index.find_contexts("m", None)
    assert [(info.id, info.block_size, info.prefixes) for info in found] == [
        (fleet.context, 2, 2),
        (chunks, 4, 0),
    ]
