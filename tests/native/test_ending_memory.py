"""Books of the core beside its indexes, whichever time that they ask for memory and get none: they say what they said, or
what they say when they are told again; or, of what is under way, that nobody can be sure."""

from __future__ import annotations

import functools
import struct

import pytest

from app import _native
from tests import ending_memory

pytestmark = ending_memory.MARK

_UNTOUCHED, _UNSURE = 0, 2


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def answer(book: _native.AnswerBook, rows: list[tuple[int, int]]) -> bytes:
    packed = b"".join(struct.pack("<6I", source, depth, depth, depth, depth, depth) for source, depth in rows)
    text, _, _ = book.render(b"[", b"]", [(16, packed)], 16, 1_600, 100.0, None)
    return text


def put(book: _native.AnswerBook, source: int, state: str, name_bytes: int = 100) -> None:
    opening = b'{"pod":"' + b"p" * name_bytes + b'",'
    book.put(source, f"pod-{source}", opening, 0, 16, state, 90.0)


def answer_book() -> _native.AnswerBook:
    book = _native.AnswerBook()
    for source in range(1, 4):
        put(book, source, "live")
    answer(book, [(1, 3)])
    return book


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
def test_a_source_is_put_into_the_book_of_answers_as_a_whole(missing: int) -> None:
    """The longer opening, and the state that nobody had yet, of a row that is written next."""
    call = functools.partial(put, source=2, state="catching_up", name_bytes=4_000)
    whole = answer_book()
    call(whole)
    said = {answer(answer_book(), [(2, 4)]), answer(whole, [(2, 4)])}
    for book, _ in ending_memory.attempts(answer_book, call, missing):
        assert answer(book, [(2, 4)]) in said
        call(book)
        assert answer(book, [(2, 4)]) == answer(whole, [(2, 4)])


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
def test_no_row_of_an_answer_that_failed_is_in_the_next_one(missing: int) -> None:
    def call(book: _native.AnswerBook) -> bytes:
        return answer(book, [(3, 5), (1, 2), (2, 5)])

    failures = 0
    for book, failed in ending_memory.attempts(answer_book, call, missing):
        failures += failed
        assert answer(book, [(2, 4)]) == answer(answer_book(), [(2, 4)])
        assert call(book) == call(answer_book())
    assert failures > 0


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
@pytest.mark.parametrize("is_store", [True, False])
def test_what_is_under_way_is_put_down_as_a_whole_or_unsure(is_store: bool, missing: int) -> None:
    names, prefixes = uint64s(*range(1, 40)), uint64s(*range(101, 140))

    def under_way() -> _native.FlightBook:
        book = _native.FlightBook()
        book.store(1, 7, 0, 0, uint64s(1, 2), uint64s(901, 902))
        return book

    def call(book: _native.FlightBook) -> None:
        if is_store:
            book.store(2, 7, 0, 0, names, prefixes)
        else:
            book.touch(2, names)

    failures = 0
    for book, failed in ending_memory.attempts(under_way, call, missing):
        assert failed
        failures += 1
        for name in (1, 2, 3, 39, 77):
            before = under_way().meaning(7, 0, 0, name)
            assert book.meaning(7, 0, 0, name) in (before, (_UNSURE, 0))
        book.land(2)
        assert (book.is_empty(), book.blocks()) == (True, 0)
        assert book.meaning(7, 0, 0, 1)[0] == _UNTOUCHED
    assert failures > 0
