"""The fuzzy index against looking at everything: recall 1, no wrong exact match, whatever came and went."""

import itertools
import os
import random
import struct
from array import array
from collections.abc import Iterator, Set

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app import _native
from app.errors import InvalidInput
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits, Window, finish
from tests.fuzzy.reference import ReferenceIndex

CONTEXT = 7
BLOCK = 16


def everything(prefix_hashes: Set[int]) -> Set[int]:
    return prefix_hashes


STATES = ("asleep", "awake", "waking")


def wake_slices(index: FuzzyIndex) -> Iterator[int]:
    """What a question does first, slice by slice: how many blocks are left that it has to put in the tables."""
    tokens = bytes(4 * 64)
    while index.core.exact(CONTEXT, tokens, 1, 0, 1)[1] == 0:
        yield index.stats().backlog


class Pair:
    """The index and the reference, kept alike."""

    def __init__(
        self, block_size: int = BLOCK, shingle: int = 1, matches_max: int = 100_000, scans: int = 0
    ) -> None:
        limits = FuzzyLimits(shingle=shingle, matches_per_window_max=matches_max, scans=scans)
        self.index = FuzzyIndex(limits)
        assert self.index.add_context(CONTEXT, block_size)
        self.reference = ReferenceIndex(block_size, shingle)
        self.told_twice = False  # of a block that was there: it may be there twice until it is in the tables

    def store(self, blocks: dict[int, tuple[int, ...]]) -> None:
        self.told_twice |= not self.reference.blocks.keys().isdisjoint(blocks)
        tokens = array("I", itertools.chain.from_iterable(blocks.values()))
        self.index.store(CONTEXT, array("Q", blocks).tobytes(), tokens.tobytes())
        self.reference.blocks.update(blocks)

    def store_in(self, state: str, blocks: dict[int, tuple[int, ...]]) -> None:
        """Asked before, not asked yet, or (`waking`) half of it while the other half is put in the tables."""
        half = dict(itertools.islice(blocks.items(), len(blocks) // 2)) if state == "waking" else {}
        rest = {p: block for p, block in blocks.items() if p not in half}
        if state == "awake":
            self.wake()
        self.store(half)
        if state == "waking":
            next(wake_slices(self.index), None)
        self.store(rest)

    def wake(self) -> None:
        for _ in wake_slices(self.index):
            pass
        assert self.index.stats().backlog == 0

    def remove(self, prefix_hashes: list[int]) -> None:
        self.index.remove(CONTEXT, array("Q", prefix_hashes).tobytes())
        for prefix_hash in prefix_hashes:
            self.reference.blocks.pop(prefix_hash, None)

    def check_contents(self) -> None:
        stored = self.index.prefix_hashes(CONTEXT)
        assert set(stored) == self.reference.blocks.keys()
        if not self.told_twice or self.index.stats().backlog == 0:
            assert len(stored) == len(self.reference.blocks), "every block once"

    def check_grid(self, tokens: list[int], max_distance: int) -> None:
        found = self.index.grid(CONTEXT, array("I", tokens).tobytes(), max_distance, everything)
        assert _sorted(found) == self.reference.grid(tokens, max_distance, self.reference.blocks.keys())


def _sorted(windows: list[Window]) -> list[Window]:
    """Blocks with one content lie at one distance, in no order: here by prefix hash."""
    key = {True: 0, False: 1}
    return [
        Window(
            window.token_offset,
            tuple(sorted(window.matches, key=lambda m: (key[m.exact], m.distance, m.prefix_hash))),
        )
        for window in windows
    ]


def edited(tokens: tuple[int, ...], changes: int, chance: random.Random) -> tuple[int, ...]:
    result = list(tokens)
    for place in chance.sample(range(len(tokens)), changes):
        result[place] = chance.randrange(32_000)
    return tuple(result)


def random_hashes(count: int, chance: random.Random) -> list[int]:
    hashes = {chance.randrange(1, 2**64) for _ in range(count)}
    assert len(hashes) == count
    return list(hashes)


def random_block(chance: random.Random, vocabulary: int = 32_000) -> tuple[int, ...]:
    return tuple(chance.randrange(vocabulary) for _ in range(BLOCK))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("max_distance", range(9))
def test_finds_everything_within_the_distance_among_edited_blocks(max_distance: int, state: str) -> None:
    chance = random.Random(max_distance)
    pair = Pair()
    originals = [random_block(chance) for _ in range(150)]
    blocks = [edited(block, chance.randrange(4), chance) for block in originals for _ in range(20)]
    blocks += [random_block(chance) for _ in range(1_500)]  # grows the tables twice
    prefix_hashes = random_hashes(len(blocks), chance)
    pair.store_in(state, dict(zip(prefix_hashes, blocks, strict=True)))
    query = [edited(block, chance.randrange(4), chance) for block in originals[:40]]
    pair.check_grid(list(itertools.chain.from_iterable(query)), max_distance)
    pair.check_grid(list(originals[0]), max_distance)


@pytest.mark.parametrize("scans", [0, 1, 2, 3])
@pytest.mark.parametrize("queries", [1, 63, 64, 200])
def test_few_and_many_windows_are_answered_alike_by_every_scan(queries: int, scans: int) -> None:
    chance = random.Random(queries)
    pair = Pair(scans=scans)
    blocks = [random_block(chance, vocabulary=6) for _ in range(2_000)]  # many within distance 8
    pair.store(dict(zip(random_hashes(len(blocks), chance), blocks, strict=True)))
    query = [random_block(chance, vocabulary=6) for _ in range(queries)]
    pair.check_grid(list(itertools.chain.from_iterable(query)), 8)


def test_permutations_share_a_simhash_and_are_told_apart_by_content() -> None:
    chance = random.Random(1)
    pair = Pair()
    blocks = {prefix_hash: tuple(chance.sample(range(BLOCK), BLOCK)) for prefix_hash in range(1, 900)}
    pair.store(blocks)
    pair.check_grid(list(blocks[17]), 0)
    [window] = pair.index.grid(CONTEXT, array("I", blocks[17]).tobytes(), 0, everything)
    assert [match.prefix_hash for match in window.matches if match.exact] == [17]
    assert len(window.matches) == 899
    pair.remove(list(range(1, 890)))
    pair.check_contents()
    pair.check_grid(list(blocks[895]), 8)


def test_a_crowd_beyond_the_bound_is_counted_and_still_found_exactly() -> None:
    chance = random.Random(2)
    pair = Pair(matches_max=5_000)
    blocks = {prefix_hash: tuple(chance.sample(range(BLOCK), BLOCK)) for prefix_hash in range(1, 1_501)}
    pair.store(blocks)
    pair.check_contents()
    pair.wake()
    pair.check_contents()
    assert pair.index.stats().crowded == 1_500 - 1_024
    for prefix_hash, block in blocks.items():
        tokens = array("I", block).tobytes()
        [window] = pair.index.grid(CONTEXT, tokens, 8, everything)
        assert window.matches[0].exact
        assert window.matches[0].prefix_hash == prefix_hash
        if prefix_hash % 10 == 0:
            [window] = pair.index.sliding(CONTEXT, tokens, 8, everything)
            assert window.matches[0].prefix_hash == prefix_hash
    pair.store(blocks)  # again: nothing is new
    pair.remove(list(blocks))
    assert not pair.index.prefix_hashes(CONTEXT)
    assert pair.index.stats().crowded == 0


def test_one_content_behind_many_prefixes_is_found_once_for_each() -> None:
    pair = Pair(matches_max=64)
    block = tuple(range(100, 100 + BLOCK))
    pair.store(dict.fromkeys(range(1, 5001), block))
    pair.wake()
    stats = pair.index.stats()
    assert (stats.blocks, stats.same_content) == (5_000, 4_999)
    [window] = pair.index.grid(CONTEXT, array("I", block).tobytes(), 8, everything)
    assert len({match.prefix_hash for match in window.matches}) == 64
    assert all(match.exact for match in window.matches)
    assert pair.index.stats().matches_dropped >= 1
    pair.remove([prefix_hash for prefix_hash in range(1, 5_001) if prefix_hash != 2_500])
    pair.check_contents()
    [window] = pair.index.grid(CONTEXT, array("I", block).tobytes(), 8, everything)
    assert [match.prefix_hash for match in window.matches] == [2_500]


def test_bounded_matches_are_the_best_ones() -> None:
    chance = random.Random(3)
    pair = Pair(matches_max=10)
    block = random_block(chance)
    blocks = {p: edited(block, chance.randrange(3), chance) for p in range(1, 2_001)}
    pair.store(blocks)
    [window] = pair.index.grid(CONTEXT, array("I", block).tobytes(), 8, everything)
    expected = pair.reference.matches(block, 8, pair.reference.blocks.keys())
    assert [m.distance for m in window.matches] == [m.distance for m in expected[:10]]
    assert pair.index.stats().matches_dropped > 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("seed", range(4))
def test_histories_of_stores_and_removals_leave_what_they_should(seed: int, state: str) -> None:
    """Through several growths, with few contents behind many prefixes, and prefixes that come back."""
    chance = random.Random(seed)
    pair = Pair()
    if state == "awake":
        pair.wake()
    contents = [random_block(chance) for _ in range(3_000)]
    block_of = {p: chance.choice(contents) for p in random_hashes(12_000, chance)}
    prefix_hashes = list(block_of)
    for step in range(60):
        if chance.random() < 0.6:
            chosen = chance.sample(prefix_hashes, chance.choice([1, 16, 31, 32, 33, 900]))
            pair.store({p: block_of[p] for p in chosen})
        elif step % 20 == 19:
            pair.remove(list(pair.reference.blocks))
        else:
            chosen = chance.sample(prefix_hashes, chance.choice([1, 16, 900, 4_000]))
            pair.remove(chosen)
        if step % 6 == 0:
            pair.check_contents()
            if state == "awake" or (state == "waking" and step == 30):
                pair.check_grid(list(itertools.chain.from_iterable(contents[:5])), 8)
    pair.check_contents()
    assert pair.index.stats().asleep == (state == "asleep")
    pair.check_grid(list(itertools.chain.from_iterable(contents[:50])), 8)
    pair.check_contents()
    stats = pair.index.stats()
    assert stats.unswept <= stats.blocks + 12_000


@pytest.mark.parametrize("state", ["asleep", "awake"])
def test_removals_are_swept_and_their_memory_is_used_again(state: str) -> None:
    chance = random.Random(5)
    pair = Pair()
    if state == "awake":
        pair.wake()
    sizes = []
    for generation in range(8):
        blocks = {generation * 5_000 + i + 1: random_block(chance) for i in range(5_000)}
        pair.store(blocks)
        pair.remove(list(blocks))
        stats = pair.index.stats()
        assert stats.unswept <= 1_500, "the sweep keeps pace with removals"
        sizes.append(stats.bytes)
    assert sizes[-1] <= sizes[2] * 1.2


@pytest.mark.parametrize("oldest_first", [True, False])
def test_asleep_a_block_takes_no_more_than_forty_bytes_as_others_come_and_go(oldest_first: bool) -> None:
    chance = random.Random(10)
    index = FuzzyIndex(FuzzyLimits())
    assert index.add_context(CONTEXT, BLOCK)
    live, batch = 102_400, 256
    held: list[bytes] = []
    for turn in range(4 * live // batch):
        held.append(chance.randbytes(8 * batch))
        index.store(CONTEXT, held[-1], chance.randbytes(4 * BLOCK * batch))
        if len(held) > live // batch:
            index.remove(CONTEXT, held.pop(0 if oldest_first else chance.randrange(len(held))))
            assert index.stats().bytes / live < 40, turn
    assert set(index.prefix_hashes(CONTEXT)) == {
        int.from_bytes(each[at : at + 8], "little") for each in held for at in range(0, 8 * batch, 8)
    }


@pytest.mark.parametrize(("state", "most"), [("asleep", 0.36), ("awake", 0.15)])
def test_removed_blocks_are_a_bounded_part_of_all_as_others_come_and_go(state: str, most: float) -> None:
    chance = random.Random(13)
    index = FuzzyIndex(FuzzyLimits())
    assert index.add_context(CONTEXT, BLOCK)
    held: list[bytes] = []
    for turn in range(600):
        if state == "awake" and turn % 50 == 0:
            for _ in wake_slices(index):
                pass
        held.append(chance.randbytes(8 * 256))
        index.store(CONTEXT, held[-1], chance.randbytes(4 * BLOCK * 256))
        if len(held) > 100:
            index.remove(CONTEXT, held.pop(chance.randrange(len(held))))
            stats = index.stats()
            assert stats.unswept <= stats.blocks * most, turn


@pytest.mark.parametrize("state", STATES)
def test_a_block_whose_removal_was_told_twice_comes_back(state: str) -> None:
    """Before the sweep has seen it: nothing of the second removal may be left to hide it."""
    chance = random.Random(11)
    pair = Pair()
    blocks = {p: random_block(chance) for p in random_hashes(20_000, chance)}
    pair.store_in(state, blocks)
    for gone in (chance.sample(list(blocks), 20), chance.sample(list(blocks), 200)):
        pair.remove(gone * 2)
        pair.remove(gone)
        pair.check_contents()
        assert pair.index.stats().unswept <= 240
        pair.store({p: blocks[p] for p in gone})
        pair.check_contents()
    pair.remove(list(blocks)[:10_000])
    pair.check_contents()


def test_memory_of_many_that_are_removed_in_one_call_is_used_again() -> None:
    chance = random.Random(12)
    index = FuzzyIndex(FuzzyLimits())
    assert index.add_context(CONTEXT, BLOCK)
    sizes = []
    for _ in range(12):
        passing = chance.randbytes(8 * 100_000)
        index.store(CONTEXT, passing, chance.randbytes(4 * BLOCK * 100_000))
        index.remove(CONTEXT, passing)
        sizes.append(index.stats().bytes)
    assert sizes[-1] <= sizes[2] * 1.2


def test_what_goes_and_comes_back_at_once_does_not_pile_up() -> None:
    """Asleep, nothing is looked up: a block that is stored again before it was swept must not stay twice for ever."""
    chance = random.Random(6)
    pair = Pair()
    blocks = {p: random_block(chance) for p in random_hashes(3_000, chance)}
    pair.store(blocks)
    for _ in range(120):
        churned = chance.sample(sorted(blocks), 300)
        pair.remove(churned)
        pair.store({p: blocks[p] for p in churned})
    pair.check_contents()
    stats = pair.index.stats()
    assert stats.asleep == 1
    assert stats.blocks <= 2 * len(blocks), "once in the backlog and once in the tables, at the most"
    pair.wake()
    pair.check_contents()
    assert pair.index.stats().blocks == len(blocks)


def test_an_index_that_is_not_asked_any_more_falls_asleep_and_wakes_again() -> None:
    chance = random.Random(7)
    pair = Pair()
    hashes = random_hashes(80_000, chance)
    simple = {
        p: (p & 0xFFFFFFFF, *range(BLOCK - 1)) for p in hashes
    }  # crowded: exact matches find all the same
    blocks = {p: random_block(chance) for p in hashes[:3_000]}
    pair.store(blocks)
    pair.wake()
    assert pair.index.stats().asleep == 0
    generation = 6_000
    for first in range(3_000, 75_000, generation):  # so much comes and goes that it holds little at any time
        passing = hashes[first : first + generation]
        pair.store({p: simple[p] for p in passing})
        pair.remove(passing)
    pair.check_contents()
    stats = pair.index.stats()
    assert (stats.asleep, stats.contexts) == (1, 1)
    last = {p: random_block(chance) for p in hashes[-3_000:]}
    pair.store(last)
    assert pair.index.stats().backlog >= 3_000
    asked = [*chance.sample(list(blocks.values()), 20), *chance.sample(list(last.values()), 20)]
    pair.check_grid(list(itertools.chain.from_iterable(asked)), 8)
    pair.check_contents()
    stats = pair.index.stats()
    assert (stats.asleep, stats.backlog) == (0, 0)


def test_an_index_that_is_asked_once_and_only_grows_falls_asleep() -> None:
    """And one that is asked now and then stays awake, and has few blocks that wait for their place in the tables."""
    chance = random.Random(8)
    index = FuzzyIndex(FuzzyLimits())
    assert index.add_context(CONTEXT, BLOCK)
    for _ in wake_slices(index):
        pass
    for number in range(300):
        index.store(CONTEXT, chance.randbytes(8 * 256), chance.randbytes(4 * BLOCK * 256))
        stats = index.stats()
        assert stats.asleep == (stats.blocks > 65_536), number
        assert stats.asleep or stats.backlog <= 1_024 + 256
    assert stats.backlog > 300 * 256 - 65_536 - 2_048
    for _ in wake_slices(index):
        pass
    for number in range(200):
        index.store(CONTEXT, chance.randbytes(8 * 2_048), chance.randbytes(4 * BLOCK * 2_048))
        stats = index.stats()
        assert stats.asleep == 0
        assert stats.backlog <= max(1_024, min(4_096, stats.blocks // 64)) + 2_048
        if number % 30 == 29:
            for _ in wake_slices(index):
                pass
    assert stats.blocks == 300 * 256 + 200 * 2_048


def test_a_block_takes_no_more_than_forty_bytes_at_any_size() -> None:
    """From 100,000 contents on, while tables grow and words are made anew; asked often enough to stay awake."""
    chance = random.Random(9)
    index = FuzzyIndex(FuzzyLimits())
    assert index.add_context(CONTEXT, BLOCK)
    blocks, batch = 0, 1_024
    blocks_max = 300_000 if os.environ.get("TEST_CORE") else 3_000_000  # sanitizers do not count bytes
    while blocks < blocks_max:
        if blocks % 16_384 == 0:
            for _ in wake_slices(index):
                pass
        index.store(CONTEXT, chance.randbytes(8 * batch), chance.randbytes(4 * BLOCK * batch))
        blocks += batch
        stats = index.stats()
        if blocks >= 100_000:
            assert stats.bytes / blocks < 40, blocks
    assert (stats.blocks, stats.asleep) == (blocks, 0)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_come_and_go_while_many_are_put_in_the_tables(seed: int) -> None:
    """So many that they are spread by their SimHashes first; a question that is not waited for leaves the rest."""
    chance = random.Random(seed)
    pair = Pair()
    contents = [random_block(chance) for _ in range(12_000)]
    block_of = {p: chance.choice(contents) for p in random_hashes(30_000, chance)}
    stored = list(block_of)[:22_000]
    pair.store({p: block_of[p] for p in stored})
    pair.remove(chance.sample(stored, 3_000))
    slices = 0
    for left in wake_slices(pair.index):
        slices += 1
        held = sorted(pair.reference.blocks)
        gone = chance.sample(held, 150)
        pair.remove(gone)
        back = chance.sample(gone, 30) + chance.sample(sorted(block_of), 200)
        pair.store({p: block_of[p] for p in back if p not in pair.reference.blocks})
        if slices % 5 == 0:
            pair.check_contents()
        if seed == 1 and left < 9_000:
            break  # whoever asked has gone
    assert slices >= (3 if seed == 1 else 10)
    while pair.index.stats().backlog > 1_024:  # then what comes brings it on
        pair.store(
            {p: block_of[p] for p in chance.sample(sorted(block_of), 9) if p not in pair.reference.blocks}
        )
    pair.check_contents()
    asked = chance.sample(contents, 40)
    pair.check_grid(list(itertools.chain.from_iterable(asked)), 8)
    pair.check_contents()
    assert pair.index.stats().blocks >= len(pair.reference.blocks)


class Histories(RuleBasedStateMachine):
    """Short histories over few prefixes and fewer contents, where everything meets everything."""

    contents = [tuple(range(i, i + 4)) for i in range(5)] + [(3, 2, 1, 0), (0, 0, 0, 0), (0, 0, 0, 1)]

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(block_size=4)

    @staticmethod
    def content_of(prefix_hash: int) -> tuple[int, ...]:
        return Histories.contents[prefix_hash % len(Histories.contents)]

    @rule(prefix_hashes=st.lists(st.integers(1, 40), unique=True, max_size=40))
    def store(self, prefix_hashes: list[int]) -> None:
        self.pair.store({p: self.content_of(p) for p in prefix_hashes})

    @rule(prefix_hashes=st.lists(st.integers(1, 45), unique=True, max_size=45))
    def remove(self, prefix_hashes: list[int]) -> None:
        self.pair.remove(prefix_hashes)

    @rule()
    def wake_a_little(self) -> None:
        next(wake_slices(self.pair.index), None)

    @rule(content=st.sampled_from(contents), max_distance=st.integers(0, 8))
    def ask(self, content: tuple[int, ...], max_distance: int) -> None:
        self.pair.check_grid(list(content), max_distance)

    @invariant()
    def holds_what_it_should(self) -> None:
        self.pair.check_contents()


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("shingle", [1, 2, 3])
@pytest.mark.parametrize("block_size", [3, 16, 33])
def test_sliding_finds_moved_blocks(shingle: int, block_size: int) -> None:
    chance = random.Random(block_size)
    pair = Pair(block_size, shingle)
    document = [chance.randrange(500) for _ in range(block_size * 40)]
    blocks = [tuple(document[i : i + block_size]) for i in range(0, len(document), block_size)]
    pair.store(dict(enumerate(blocks, 1)))
    moved = (
        [9_999] * 5 + document[block_size * 4 : block_size * 20] + [9_999] * 7 + document[: block_size * 3]
    )
    windows = pair.index.sliding(CONTEXT, array("I", moved).tobytes(), 8, everything)
    exact = {window.token_offset: window for window in windows if window.exact}
    expected = [5 + block_size * i for i in range(16)]
    expected += [5 + block_size * 16 + 7 + block_size * i for i in range(3)]
    assert exact.keys() == set(expected)
    for offset, window in exact.items():
        tokens = tuple(moved[offset : offset + block_size])
        assert all(pair.reference.blocks[m.prefix_hash] == tokens for m in window.matches if m.exact)


@pytest.mark.parametrize("seed", range(6))
def test_sliding_keeps_windows_that_do_not_overlap_and_cover_most(seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair(block_size=8)
    pool = [tuple(chance.randrange(40) for _ in range(8)) for _ in range(40)]
    pair.store(dict(enumerate(pool, 1)))
    tokens: list[int] = []
    while len(tokens) < 200:
        block = chance.choice(pool)
        cut = chance.choice([8, 8, 8, 5])
        tokens += block[:cut]
        if chance.random() < 0.4:
            tokens[-1] = chance.randrange(40)
    windows = pair.index.sliding(CONTEXT, array("I", tokens).tobytes(), 8, everything)
    offsets = [window.token_offset for window in windows]
    assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(offsets))
    usable = pair.reference.blocks.keys()
    for window in windows:
        part = tokens[window.token_offset : window.token_offset + 8]
        assert list(_sorted([window])[0].matches) == pair.reference.matches(part, 8, usable)
    matches = [pair.reference.matches(tokens[i : i + 8], 8, usable) for i in range(len(tokens) - 7)]
    exact = {offset for offset, found in enumerate(matches) if found and found[0].exact}
    assert sum(window.exact for window in windows) == _most(exact, len(tokens), 8)
    chosen = {window.token_offset for window in windows if window.exact}
    free = {
        offset
        for offset, found in enumerate(matches)
        if found and not found[0].exact and all(abs(offset - other) >= 8 for other in chosen)
    }
    assert sum(not window.exact for window in windows) == _most(free, len(tokens), 8)


def _most(offsets: set[int], tokens: int, block_size: int) -> int:
    """The largest number of windows that do not overlap: always take the one that ends first."""
    count, free = 0, 0
    for offset in sorted(offsets):
        if offset >= free:
            count, free = count + 1, offset + block_size
    return count


def test_what_is_not_usable_takes_no_place() -> None:
    pair = Pair(block_size=4)
    pair.store({1: (1, 2, 3, 4), 2: (2, 3, 4, 5), 3: (1, 2, 3, 4)})
    tokens = array("I", [1, 2, 3, 4, 5]).tobytes()
    [window] = pair.index.sliding(CONTEXT, tokens, 0, everything)
    assert window.token_offset == 0
    [window] = pair.index.sliding(CONTEXT, tokens, 0, lambda found: found & {2})
    assert (window.token_offset, [m.prefix_hash for m in window.matches]) == (1, [2])
    [window] = pair.index.grid(CONTEXT, tokens, 0, lambda found: found & {3})
    assert [m.prefix_hash for m in window.matches] == [3]
    assert pair.index.sliding(CONTEXT, tokens, 0, lambda found: found - {1, 2, 3}) == []


def test_prompts_shorter_than_a_block_match_nothing() -> None:
    pair = Pair()
    pair.store({1: tuple(range(BLOCK))})
    for length in (0, 1, BLOCK - 1):
        tokens = array("I", range(length)).tobytes()
        assert pair.index.grid(CONTEXT, tokens, 8, everything) == []
        assert pair.index.sliding(CONTEXT, tokens, 8, everything) == []


def test_contexts_are_apart_and_can_be_dropped() -> None:
    index = FuzzyIndex(FuzzyLimits())
    tokens = array("I", range(BLOCK)).tobytes()
    for context in (1, 2):
        assert index.add_context(context, BLOCK)
        index.store(context, array("Q", [context]).tobytes(), tokens)
    [window] = index.grid(1, tokens, 8, everything)
    assert [m.prefix_hash for m in window.matches] == [1]
    index.drop_context(1)
    assert not index.has_context(1)
    assert index.stats().blocks == 1
    for _ in range(10):  # takes it apart
        index.store(2, array("Q", [2]).tobytes(), tokens)
    assert index.add_context(1, BLOCK)
    assert index.grid(1, tokens, 8, everything) == []


def test_input_that_does_not_fit_is_refused() -> None:
    index = FuzzyIndex(FuzzyLimits(shingle=4))
    assert not index.add_context(1, 3), "a block of 3 tokens has no shingle of 4"
    assert not index.add_context(1, 65_536)
    assert index.add_context(1, BLOCK)
    with pytest.raises(InvalidInput, match="60 bytes of token ids do not fit 1 blocks of 16 tokens"):
        index.store(1, bytes(8), bytes(60))
    with pytest.raises(InvalidInput, match="max_distance must be between 0 and 8, not 9"):
        index.grid(1, bytes(64), 9, everything)
    with pytest.raises(InvalidInput, match="63 bytes are not whole"):
        index.grid(1, bytes(63), 8, everything)
    index.store(1, bytes(8), bytes(64))
    assert index.stats().blocks == 0, "prefix hash 0 is refused"


@pytest.mark.parametrize("state", ["asleep", "awake"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("queries", [20, 120])
def test_what_is_there_all_the_while_is_found_though_the_index_changes(
    queries: int, seed: int, state: str
) -> None:
    """Asked in the smallest slices. Between them blocks come and go, so that tables grow and records move."""
    chance = random.Random(seed)
    pair = Pair()
    originals = [random_block(chance) for _ in range(60)]
    # Few contents behind many prefixes, so that records are inherited; below the first growth, and far above it.
    contents = [edited(block, chance.randrange(3), chance) for block in originals for _ in range(8)]
    held = {p: chance.choice(contents) for p in random_hashes(600, chance)}
    held |= {p: random_block(chance) for p in random_hashes(2_300, chance)}
    pair.store(held)
    if state == "awake":
        pair.wake()
    prompt = [edited(chance.choice(originals), chance.randrange(2), chance) for _ in range(queries)]
    tokens = array("I", itertools.chain.from_iterable(prompt)).tobytes()
    offsets = array("I", range(0, BLOCK * queries, BLOCK)).tobytes()
    query = _native.NearQuery(pair.index.core, CONTEXT, tokens, offsets, 8, 100_000)
    throughout, ever = set(held), dict(held)
    slices = 0
    while not query.step(1):
        slices += 1
        gone = chance.sample(sorted(pair.reference.blocks), 40)
        pair.remove(gone)
        new = {
            p: chance.choice([chance.choice(contents), random_block(chance)])
            for p in random_hashes(60, chance)
        }
        new |= {p: ever[p] for p in chance.sample(gone, 5)}  # what went comes back
        pair.store(new)
        throughout -= set(gone)
        ever |= new
    assert slices >= (100 if queries > 64 else 2)
    found: dict[int, dict[int, tuple[int, bool]]] = {}
    done = False
    while not done:
        rows, done = query.take(1)
        for offset, distance, exact, prefix_hash in struct.iter_unpack("<IHHQ", rows):
            of_window = found.setdefault(offset // BLOCK, {})
            assert prefix_hash not in of_window, "a block is found once"
            of_window[prefix_hash] = (distance, bool(exact))
    now = pair.reference.blocks.keys()
    expected = {
        window.token_offset // BLOCK: {m.prefix_hash: (m.distance, m.exact) for m in window.matches}
        for window in pair.reference.grid(list(itertools.chain.from_iterable(prompt)), 8, now)
    }
    assert expected.keys() >= found.keys()
    for window in range(queries):
        here, all_near = found.get(window, {}), expected.get(window, {})
        assert here.keys() <= all_near.keys(), "only what is there when it is taken"
        assert all(all_near[prefix_hash] == match for prefix_hash, match in here.items())
        assert all_near.keys() & throughout <= here.keys()


def test_a_context_that_goes_meanwhile_ends_the_question() -> None:
    pair = Pair()
    pair.store({1: tuple(range(BLOCK))})
    tokens = array("I", range(BLOCK)).tobytes()
    slices = pair.index.sliding_slices(CONTEXT, tokens, 8, everything)
    next(slices)
    pair.index.drop_context(CONTEXT)
    assert finish(slices) == []
