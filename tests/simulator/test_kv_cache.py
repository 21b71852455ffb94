"""The paged KV cache: what it shares, what it says, and that its books balance after any history."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

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
    restated, new = kv.drain_events()
    assert isinstance(restated, Stored)
    assert isinstance(new, Stored)
    assert (len(restated.block_hashes), restated.parent_block_hash) == (2, None)
    assert (len(new.block_hashes), new.parent_block_hash) == (1, restated.block_hashes[-1])
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

BASES = ([0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0])
KEYS = ((None, None), (None, None), (None, None), ("salt", None), (None, "adapter"))
STEPS = 400

Prefix = tuple[Any, ...]
Keys = tuple[str | None, str | None]


class History:
    """The cache against a plain model: what sequences hold, and what an indexer would know from events."""

    def __init__(self, pages: int, seed: int) -> None:
        self.kv = PagedKVCache(KVCacheSettings(capacity_pages=pages, block_size=2))
        self.pages = pages
        self.draw = random.Random(seed)
        self.held: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.keys: dict[str, Keys] = {}
        self.copies: Counter[Prefix] = Counter()
        self.prefixes: dict[Any, Prefix] = {}
        self.read_only: dict[tuple[int, bytes], tuple[int, ...]] = {}

    def step(self) -> str:
        """One operation and its name."""
        names = sorted(self.held)
        settled = [name for name in names if not self.drafts[name]]
        choices = ["attach", "detach", "reset"]
        choices += ["append", "draft", "draft", "accept", "accept"] if names else []
        choices += ["write", "fork"] if settled else []
        match self.draw.choice(choices):
            case "attach":
                self.attach(self.draw.choice("abc"), self.text(), self.draw.choice(KEYS))
                return "attach"
            case "detach":
                self.detach(self.draw.choice("abc"))
                return "detach"
            case "reset":
                assert self.kv.reset() is not bool(self.held)
                self.listen()
                return "reset"
            case "append":
                self.append(self.draw.choice(names), self.few())
                return "append"
            case "draft":
                name, text = self.draw.choice(names), self.few()
                if self.attempt(self.kv.draft, name, text) is not None:
                    self.drafts[name] += text
                return "draft"
            case "accept":
                name = self.draw.choice(names)
                self.accept(name, self.draw.randint(0, len(self.drafts[name])))
                return "accept"
            case "write":
                name = self.draw.choice(settled)
                self.write(name, self.draw.randrange(len(self.held[name])), self.draw.randrange(2))
                return "write"
            case _:
                self.fork(self.draw.choice(settled), self.draw.choice("abc"))
                return "fork"

    def text(self) -> list[int]:
        """Mostly the beginning of one of two texts, so that prefixes are often shared."""
        base = self.draw.choice(BASES)
        return base[: self.draw.randint(0, len(base))] + self.few()

    def few(self) -> list[int]:
        return [self.draw.randrange(2) for _ in range(self.draw.randint(1, 5))]

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

    def attach(self, name: str, text: list[int], keys: Keys) -> None:
        salt, lora = keys
        expected = self.predicted(text, keys)
        attached = self.attempt(self.kv.attach, name, text, salt=salt, lora=lora)
        if attached is not None:
            assert attached == Attached(expected, len(text) - expected)
            self.held[name], self.drafts[name], self.keys[name] = list(text), [], keys

    def append(self, name: str, text: list[int]) -> None:
        if self.drafts[name]:
            with pytest.raises(InvalidInput):
                self.kv.append(name, text)
        elif self.attempt(self.kv.append, name, text) is not None:
            self.held[name] += text

    def accept(self, name: str, count: int) -> None:
        assert self.attempt(self.kv.accept_drafts, name, count) is not None
        self.held[name] += self.drafts[name][:count]
        self.drafts[name] = []

    def write(self, name: str, position: int, token: int) -> None:
        if self.attempt(self.kv.write, name, position, token) is not None:
            self.held[name][position] = token

    def fork(self, name: str, child: str) -> None:
        assert self.attempt(self.kv.fork, name, child) is not None
        self.held[child], self.drafts[child] = list(self.held[name]), []
        self.keys[child] = self.keys[name]

    def detach(self, name: str) -> None:
        assert self.kv.detach(name) is (name in self.held)
        self.held.pop(name, None)
        self.drafts.pop(name, None)

    # -- what an indexer hears

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
        if event.parent_block_hash is None:
            prefix: Prefix = (tuple((event.extra_keys or [None])[0] or ()),)
        else:
            prefix = self.prefixes[event.parent_block_hash]
        for block, name in enumerate(event.block_hashes):
            prefix = (*prefix, *list(event.token_ids)[block * 2 : block * 2 + 2])
            assert self.prefixes.setdefault(name, prefix) == prefix, "one name for two prefixes"
            self.copies[prefix] += 1

    def predicted(self, text: list[int], keys: Keys) -> int:
        for end in range(2, len(text), 2):
            if not self.copies[self.prefix(text[:end], keys)]:
                return end - 2
        return (len(text) - 1) // 2 * 2

    def prefix(self, text: list[int], keys: Keys) -> Prefix:
        salt, lora = keys
        return (tuple(key for key in (lora, salt) if key is not None), *text)

    # -- what must hold after every step

    def check(self) -> None:
        self.check_contents()
        self.check_books()
        self.check_read_only_pages()

    def check_contents(self) -> None:
        for name, held in self.held.items():
            assert self.kv.get(name) == (*held, *self.drafts[name])
            for end in range(2, len(held) + 1, 2):
                assert self.copies[self.prefix(held[:end], self.keys[name])] > 0, "nobody heard of it"

    def check_books(self) -> None:
        runs = {name: self.kv.pages(name) for name in self.held}
        references = Counter(page for run in runs.values() for page in run)
        assert all(len(set(run)) == len(run) for run in runs.values())
        stats = self.kv.stats()
        assert stats.page_references == references.total()
        assert stats.pages_allocated == len(references)
        assert stats.pages_allocated + stats.pages_free == self.pages
        assert stats.shared_pages == sum(count > 1 for count in references.values())
        assert stats.sequences == len(self.held)
        assert stats.prefix_map_size == sum(count > 0 for count in self.copies.values())
        for name, run in runs.items():
            length = len(self.held[name]) + len(self.drafts[name])
            assert len(run) == -(-length // 2), "a page too many or too few"

    def check_read_only_pages(self) -> None:
        pool = self.kv._pool
        now = {(page, name): pool.content(page) for page in range(self.pages) if (name := pool.name(page))}
        for key, content in now.items():
            assert self.read_only.get(key, content) == content
            assert len(content) == 2
        named = Counter(name for _, name in now)
        assert named.total() == self.copies.total(), "copies told and copies held differ"
        self.read_only = now


@pytest.mark.parametrize("pages", [1, 3, 6, 9, 16])
@pytest.mark.parametrize("seed", range(8))
def test_any_history(pages: int, seed: int) -> None:
    history = History(pages, seed)
    done: Counter[str] = Counter()
    for _ in range(STEPS):
        done[history.step()] += 1
        history.check()
    assert len(done) == 8, "every operation was tried"
    for name in sorted(history.held):
        history.detach(name)
    assert history.kv.stats().pages_free == pages, "a page leaked"
