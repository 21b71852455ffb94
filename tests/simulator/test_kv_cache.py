"""The paged KV cache: what it shares, what it says, and that its books balance after any history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.errors import InvalidInput, InvalidSettings, LimitExceeded
from app.ingest.vllm import Cleared, Removed, Stored, WireEvent
from app.simulator.kv_cache import Attached, KVCacheSettings, PagedKVCache
from app.simulator.pages import PagePool

BLOCK = 4


def cache(pages: int = 8, **more: Any) -> PagedKVCache:
    return PagedKVCache(KVCacheSettings(capacity_pages=pages, block_size=BLOCK, **more))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def kinds(events: list[WireEvent]) -> list[str]:
    return [f"{type(event).__name__} {len(getattr(event, 'block_hashes', ()))}" for event in events]


# -- what engines do, case by case (each seen in captured frames)


def test_short_prompt_says_nothing() -> None:
    kv = cache()
    assert kv.attach("a", tokens(3)) == Attached(0, 3)
    assert kv.drain_events() == []


def test_prompt_is_one_run_and_decoded_blocks_come_one_by_one() -> None:
    kv = cache()
    kv.attach("a", tokens(9))
    (stored,) = kv.drain_events()
    assert isinstance(stored, Stored)
    assert (list(stored.token_ids), stored.parent_block_hash) == (tokens(8), None)
    for token in range(9, 16):
        kv.append("a", [token])
    third, fourth = kv.drain_events()
    assert isinstance(third, Stored)
    assert isinstance(fourth, Stored)
    assert third.parent_block_hash == stored.block_hashes[-1]
    assert fourth.parent_block_hash == third.block_hashes[0]
    assert list(fourth.token_ids) == tokens(4, 12)


def test_shared_prefix_costs_no_pages_and_only_the_rest_is_stored() -> None:
    kv = cache()
    kv.attach("a", tokens(10))
    kv.drain_events()
    assert kv.attach("b", [*tokens(8), 99, 98, 97, 96]) == Attached(8, 4)
    (stored,) = kv.drain_events()
    assert isinstance(stored, Stored)
    assert len(stored.block_hashes) == 1
    assert kv.pages("a")[:2] == kv.pages("b")[:2]
    stats = kv.stats()
    assert (stats.pages_allocated, stats.shared_pages, stats.page_references) == (4, 2, 6)
    assert (stats.prefix_shares, stats.prefix_map_size) == (2, 3)


def test_exact_repeat_of_an_aligned_prompt_computes_its_last_block_again() -> None:
    kv = cache()
    kv.attach("a", tokens(8))
    first = kv.drain_events()[0]
    kv.detach("a")
    assert kv.attach("a", tokens(8)) == Attached(4, 4)
    (again,) = kv.drain_events()
    assert isinstance(first, Stored)
    assert isinstance(again, Stored)
    assert again.block_hashes == first.block_hashes[1:]
    assert kv.stats().prefix_map_size == 2


def test_evictions_are_told_first_one_by_one_and_tail_first() -> None:
    kv = cache(pages=4)
    kv.attach("a", tokens(16))
    (stored,) = kv.drain_events()
    kv.detach("a")
    kv.attach("b", tokens(12, 100))
    events = kv.drain_events()
    assert kinds(events) == ["Removed 1", "Removed 1", "Removed 1", "Stored 3"]
    assert isinstance(stored, Stored)
    lost = [event.block_hashes[0] for event in events if isinstance(event, Removed)]
    assert lost == list(reversed(stored.block_hashes[1:]))
    assert kv.lookup(tokens(16)) == 4


def test_every_physical_copy_is_stored_and_removed_once() -> None:
    kv = cache(pages=3)
    for _ in range(3):
        kv.attach("a", tokens(4))
        kv.detach("a")
    assert kinds(kv.drain_events()) == ["Stored 1"] * 3
    assert kv.stats().prefix_map_size == 1
    kv.attach("b", tokens(12, 100))
    assert kinds(kv.drain_events()) == ["Removed 1"] * 3 + ["Stored 3"]


def test_salt_and_adapter_separate_equal_prompts() -> None:
    kv = cache()
    kv.attach("plain", tokens(8))
    assert kv.attach("salted", tokens(8), salt="tenant") == Attached(0, 8)
    assert kv.attach("adapted", tokens(8), lora="adapter") == Attached(0, 8)
    plain, salted, adapted = kv.drain_events()
    assert isinstance(plain, Stored)
    assert isinstance(salted, Stored)
    assert isinstance(adapted, Stored)
    assert (plain.extra_keys, plain.lora_name) == ([None, None], None)
    assert salted.extra_keys == [["tenant"], None]
    assert (adapted.extra_keys, adapted.lora_name) == ([["adapter"], ["adapter"]], "adapter")
    assert len({*plain.block_hashes, *salted.block_hashes, *adapted.block_hashes}) == 6


def test_full_report_states_reused_blocks_again_without_a_copy() -> None:
    kv = cache()
    kv.attach("a", tokens(9))
    kv.drain_events()
    assert kv.attach("b", tokens(13), restate=True) == Attached(8, 5)
    (restated,) = kv.drain_events()
    assert isinstance(restated, Stored)
    assert (len(restated.block_hashes), restated.parent_block_hash) == (3, None)
    assert kv.stats().prefix_map_size == 3


def test_reset_waits_for_idle_and_is_told_with_the_next_events() -> None:
    kv = cache()
    kv.attach("a", tokens(8))
    kv.drain_events()
    assert not kv.reset()
    assert kv.drain_events() == []
    kv.detach("a")
    assert kv.reset()
    assert kv.lookup(tokens(9)) == 0
    kv.attach("a", tokens(8))
    assert [type(event) for event in kv.drain_events()] == [Cleared, Stored]


def test_pods_with_different_seeds_agree_on_no_name() -> None:
    names = []
    for seed in (b"one", b"two"):
        kv = cache(hash_seed=seed)
        kv.attach("a", tokens(4))
        (stored,) = kv.drain_events()
        assert isinstance(stored, Stored)
        names.append(stored.block_hashes[0])
    assert names[0] != names[1]


def test_names_can_be_raw_bytes() -> None:
    kv = cache(hash_as_bytes=True)
    kv.attach("a", tokens(4))
    (stored,) = kv.drain_events()
    assert isinstance(stored, Stored)
    assert isinstance(stored.block_hashes[0], bytes)
    assert len(stored.block_hashes[0]) == 32


def test_prompt_in_chunks_stores_each_chunk() -> None:
    kv = cache()
    assert kv.attach("a", tokens(10), compute_max=6) == Attached(0, 6)
    kv.append("a", tokens(4, 6))
    assert kinds(kv.drain_events()) == ["Stored 1", "Stored 1"]
    assert kv.get("a") == tuple(tokens(10))


# -- copy on write, drafts


def test_fork_copies_only_the_page_that_is_written() -> None:
    kv = cache()
    kv.attach("a", tokens(6))
    kv.fork("a", "b")
    assert kv.pages("a") == kv.pages("b")
    kv.append("b", [60])
    assert kv.pages("a")[0] == kv.pages("b")[0]
    assert kv.pages("a")[1] != kv.pages("b")[1]
    kv.append("a", [61])
    assert kv.get("a") == (*tokens(6), 61)
    assert kv.get("b") == (*tokens(6), 60)


def test_write_leaves_the_named_page_as_it_was() -> None:
    kv = cache()
    kv.attach("a", tokens(10))
    kv.write("a", 1, 70)
    assert kv.get("a") == (0, 70, *tokens(8, 2))
    assert kv.lookup(tokens(10)) == 8
    assert kv.lookup([0, 70, *tokens(8, 2)]) == 8


def test_draft_is_invisible_until_accepted() -> None:
    kv = cache()
    kv.attach("a", tokens(6))
    kv.drain_events()
    kv.draft("a", tokens(6, 6))
    assert kv.drain_events() == []
    assert kv.lookup(tokens(13)) == 4
    kv.accept_drafts("a", 3)
    (stored,) = kv.drain_events()
    assert isinstance(stored, Stored)
    assert list(stored.token_ids) == tokens(4, 4)
    assert kv.get("a") == tuple(tokens(9))
    assert len(kv.pages("a")) == 3


def test_rolled_back_draft_returns_its_pages() -> None:
    kv = cache()
    kv.attach("a", tokens(6))
    kv.draft("a", tokens(10, 6))
    assert kv.stats().pages_allocated == 4
    kv.accept_drafts("a", 0)
    assert kv.stats().pages_allocated == 2
    kv.append("a", [50, 51])
    assert kv.get("a") == (*tokens(6), 50, 51)


# -- refusals


def test_prompt_that_does_not_fit_changes_nothing() -> None:
    kv = cache(pages=4)
    kv.attach("a", tokens(8))
    kv.drain_events()
    before = kv.stats()
    with pytest.raises(LimitExceeded, match="capacity_pages"):
        kv.attach("b", tokens(12, 100))
    assert (kv.stats(), kv.drain_events()) == (before, [])


def test_replacing_a_sequence_may_use_its_own_pages() -> None:
    kv = cache(pages=4)
    kv.attach("a", tokens(16))
    assert kv.attach("a", tokens(16, 100)) == Attached(0, 16)
    with pytest.raises(LimitExceeded):
        kv.attach("a", tokens(17, 200))
    assert kv.get("a") == tuple(tokens(16, 100))


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"]])
def test_impossible_token_is_refused(bad: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="token ids"):
        cache().attach("a", bad)


def test_refusals_name_what_is_wrong() -> None:
    kv = cache()
    with pytest.raises(InvalidInput, match="at least one token"):
        kv.attach("a", [])
    with pytest.raises(InvalidInput, match="'missing'"):
        kv.append("missing", [1])
    kv.attach("a", tokens(5))
    with pytest.raises(InvalidInput, match="position 5"):
        kv.write("a", 5, 1)
    kv.draft("a", [9])
    with pytest.raises(InvalidInput, match="drafts"):
        kv.append("a", [1])
    with pytest.raises(InvalidInput, match="there are 1"):
        kv.accept_drafts("a", 2)
    with pytest.raises(InvalidSettings, match="capacity_pages"):
        cache(pages=0)
    assert not kv.detach("missing")


def test_pool_asserts_what_no_caller_may_do() -> None:
    pool = PagePool(2)
    page = pool.take().page
    pool.give_name(page, b"name")
    with pytest.raises(AssertionError, match="must not change"):
        pool.extend(page, [1])
    pool.release(page)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(page)


# -- any history

PAGES = 7
SEQUENCES = st.sampled_from(["a", "b", "c"])
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=13)
FEW = st.lists(st.integers(0, 1), min_size=1, max_size=5)
KEYS = st.sampled_from([(None, None), (None, None), ("salt", None), (None, "adapter")])

Prefix = tuple[Any, ...]


class AnyHistory(RuleBasedStateMachine):
    """The cache against a plain model: what sequences hold, and what an indexer would know from events."""

    @initialize(pages=st.sampled_from([1, 3, PAGES]))
    def start(self, pages: int) -> None:
        self.kv = PagedKVCache(KVCacheSettings(capacity_pages=pages, block_size=2))
        self.pages = pages
        self.held: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.keys: dict[str, tuple[str | None, str | None]] = {}
        self.copies: Counter[Prefix] = Counter()
        self.prefixes: dict[Any, Prefix] = {}
        self.read_only: dict[tuple[int, bytes], tuple[int, ...]] = {}

    def attempt(self, operation: Any, *arguments: Any, **more: Any) -> Any:
        """The operation's result, or None when it did not fit and changed nothing."""
        before = self.kv.stats()
        try:
            done = operation(*arguments, **more)
        except LimitExceeded:
            assert self.kv.stats() == before
            assert self.kv.drain_events() == []
            return None
        self.listen()
        return True if done is None else done

    def listen(self) -> None:
        for event in self.kv.drain_events():
            match event:
                case Stored():
                    self.hear_stored(event)
                case Removed():
                    (name,) = event.block_hashes
                    assert self.copies[self.prefixes[name]] > 0, "removed more often than stored"
                    self.copies[self.prefixes[name]] -= 1
                case Cleared():
                    self.copies.clear()

    def hear_stored(self, event: Stored) -> None:
        keys = (event.extra_keys or [None])[0] if event.parent_block_hash is None else None
        root: Prefix = (tuple(keys or ()),)
        prefix = root if event.parent_block_hash is None else self.prefixes[event.parent_block_hash]
        for block, name in enumerate(event.block_hashes):
            prefix = (*prefix, *list(event.token_ids)[block * 2 : block * 2 + 2])
            assert self.prefixes.setdefault(name, prefix) == prefix, "one name for two prefixes"
            self.copies[prefix] += 1

    def predicted(self, text: list[int], salt: str | None, lora: str | None) -> int:
        prefix: Prefix = (tuple(key for key in (lora, salt) if key is not None),)
        for end in range(2, len(text), 2):
            prefix = (prefix[0], *text[:end])
            if not self.copies[prefix]:
                return end - 2
        return (len(text) - 1) // 2 * 2

    @rule(name=SEQUENCES, text=TEXT, keys=KEYS)
    def attach(self, name: str, text: list[int], keys: tuple[str | None, str | None]) -> None:
        salt, lora = keys
        expected = self.predicted(text, salt, lora)
        attached = self.attempt(self.kv.attach, name, text, salt=salt, lora=lora)
        if attached is not None:
            assert attached == Attached(expected, len(text) - expected)
            self.held[name], self.drafts[name], self.keys[name] = list(text), [], keys

    @precondition(lambda self: self.held)
    @rule(data=st.data(), text=FEW)
    def append(self, data: Any, text: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        if self.drafts[name]:
            with pytest.raises(InvalidInput):
                self.kv.append(name, text)
        elif self.attempt(self.kv.append, name, text) is not None:
            self.held[name] += text

    @precondition(lambda self: self.held)
    @rule(data=st.data(), text=FEW)
    def draft(self, data: Any, text: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        if self.attempt(self.kv.draft, name, text) is not None:
            self.drafts[name] += text

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def accept(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        count = data.draw(st.integers(0, len(self.drafts[name])))
        assert self.attempt(self.kv.accept_drafts, name, count) is not None
        self.held[name] += self.drafts[name][:count]
        self.drafts[name] = []

    @precondition(lambda self: any(not drafts for drafts in self.drafts.values()))
    @rule(data=st.data(), token=st.integers(0, 1))
    def write(self, data: Any, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, drafts in self.drafts.items() if not drafts)))
        position = data.draw(st.integers(0, len(self.held[name]) - 1))
        if self.attempt(self.kv.write, name, position, token) is not None:
            self.held[name][position] = token

    @precondition(lambda self: any(not drafts for drafts in self.drafts.values()))
    @rule(data=st.data(), child=SEQUENCES)
    def fork(self, data: Any, child: str) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, drafts in self.drafts.items() if not drafts)))
        assert self.attempt(self.kv.fork, name, child) is not None
        self.held[child], self.drafts[child] = list(self.held[name]), []
        self.keys[child] = self.keys[name]

    @rule(name=SEQUENCES)
    def detach(self, name: str) -> None:
        assert self.kv.detach(name) is (name in self.held)
        self.held.pop(name, None)
        self.drafts.pop(name, None)

    @rule()
    def reset(self) -> None:
        assert self.kv.reset() is not bool(self.held)
        self.listen()

    @invariant()
    def sequences_hold_what_was_written(self) -> None:
        for name, held in self.held.items():
            assert self.kv.get(name) == (*held, *self.drafts[name])

    @invariant()
    def books_balance(self) -> None:
        runs = [self.kv.pages(name) for name in self.held]
        references = Counter(page for run in runs for page in run)
        assert all(len(set(run)) == len(run) for run in runs)
        stats = self.kv.stats()
        assert stats.page_references == references.total()
        assert stats.pages_allocated == len(references)
        assert stats.pages_allocated + stats.pages_free == self.pages
        assert stats.shared_pages == sum(count > 1 for count in references.values())
        assert stats.sequences == len(self.held)
        for name, run in zip(self.held, runs, strict=True):
            length = len(self.held[name]) + len(self.drafts[name])
            assert len(run) == -(-length // 2), "a page too many or too few"

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        assert self.kv.stats().prefix_map_size == sum(count > 0 for count in self.copies.values())

    @invariant()
    def read_only_pages_never_change(self) -> None:
        pool = self.kv._pool
        now = {(page, name): pool.content(page) for page in range(self.pages) if (name := pool.name(page))}
        for key, content in now.items():
            assert self.read_only.get(key, content) == content
            assert len(content) == 2
        self.read_only = now


AnyHistory.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
