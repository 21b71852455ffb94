"""Fixed pages with counted references, names by which they are found again, and reuse of the oldest free one.

This is the bookkeeping of an engine's block pool, after vLLM's `block_pool.py`. A page without references
is free, but keeps its content and its name until it is taken for something else: only then is it evicted.
Pages are taken from the head of the free list and returned to its tail, so whoever returns a run tail
first loses its leaf first. A page that nobody can find again (it has no name) goes to the head instead, in
recent releases. Several pages may carry one name (physical copies of one block); each eviction is told.

A page that has a name or more than one reference is read-only: `extend` and `shrink` refuse it with an
assertion. Every operation is O(1) in the size of the pool.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from app.errors import InvalidSettings, LimitExceeded

Name = bytes  # digest of a block and everything before it


@dataclasses.dataclass(frozen=True, slots=True)
class TakenPage:
    """A page to write to, and the name that was evicted for it."""

    page: int
    evicted: Name | None


class PagePool:
    """`free` counts pages that can be taken now, named ones included."""

    def __init__(self, capacity_pages: int, *, nameless_first: bool = True) -> None:
        if capacity_pages < 1:
            raise InvalidSettings(f"a cache needs at least one page, not {capacity_pages} (capacity_pages)")
        self.capacity_pages = capacity_pages
        self._nameless_first = nameless_first
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(
            range(capacity_pages)
        )
        self._references = [0] * capacity_pages
        self._names: list[Name | None] = [None] * capacity_pages
        self._contents: list[list[int]] = [[] for _ in range(capacity_pages)]
        self._pages_by_name: dict[Name, dict[int, None]] = {}

    # -- reading

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def names(self) -> int:
        """Distinct names, each of at least one page."""
        return len(self._pages_by_name)

    def references(self, page: int) -> int:
        return self._references[page]

    def name(self, page: int) -> Name | None:
        return self._names[page]

    def content(self, page: int) -> tuple[int, ...]:
        return tuple(self._contents[page])

    def find(self, name: Name) -> int | None:
        """The oldest page of that name."""
        return next(iter(self._pages_by_name.get(name, ())), None)

    def is_writable(self, page: int) -> bool:
        return self._references[page] == 1 and self._names[page] is None

    def used_pages(self) -> Iterator[int]:
        return (page for page, references in enumerate(self._references) if references)

    # -- changing

    def take(self) -> TakenPage:
        """The page that has been free for longest, empty and nameless, with one reference."""
        if not self._free:
            raise LimitExceeded(
                f"all {self.capacity_pages} pages are in use (capacity_pages)", bound="capacity_pages"
            )
        page, _ = self._free.popitem(last=False)
        evicted = self._names[page]
        if evicted is not None:
            self._unname(page, evicted)
        self._references[page] = 1
        self._contents[page] = []
        return TakenPage(page, evicted)

    def share(self, page: int) -> None:
        """One more reference; a free page leaves the free list with its content and name."""
        if self._references[page] == 0:
            del self._free[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} was released more often than it was taken"
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free[page] = None
            if self._nameless_first and self._names[page] is None:
                self._free.move_to_end(page, last=False)

    def extend(self, page: int, token_ids: Sequence[int]) -> None:
        assert self.is_writable(page), f"page {page} is shared or named, so it must not change"
        self._contents[page].extend(token_ids)

    def shrink(self, page: int, tokens: int) -> None:
        assert self.is_writable(page), f"page {page} is shared or named, so it must not change"
        del self._contents[page][tokens:]

    def give_name(self, page: int, name: Name) -> None:
        """From here on the page is found by `name` and never changes."""
        assert self._names[page] is None, f"page {page} has a name already"
        self._names[page] = name
        self._pages_by_name.setdefault(name, {})[page] = None

    def forget_names(self) -> None:
        self._names = [None] * self.capacity_pages
        self._pages_by_name.clear()

    def _unname(self, page: int, name: Name) -> None:
        copies = self._pages_by_name[name]
        del copies[page]
        if not copies:
            del self._pages_by_name[name]
        self._names[page] = None
