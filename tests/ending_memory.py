"""Memory that ends where a test wants it to: the n-th time that the native core asks for some (native/ending_memory.hpp).

A call is made again and again on the same state, each time with one more thing that it gets memory for, until it needs
no more. What it leaves where it fails is for the test to judge.

Objects of the core are made beforehand: nanobind ends the process where there is no memory for one.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from app import _native

_end_memory: Callable[[int, int], int] | None = getattr(_native, "end_memory", None)
FOR_EVER = 2**64 - 1

MARK = pytest.mark.skipif(
    _end_memory is None, reason="memory ends where a test wants it in the sanitizer build only: make sanitize"
)

State = TypeVar("State")


def fails(call: Callable[[], object], found: int, missing: int) -> tuple[bool, int]:
    """Whether the call raises MemoryError where the core finds memory so many times and then so many times none, and how
    often it found none. On a thread of its own: what the core keeps for a thread is not there yet."""
    raised: list[BaseException] = []
    missed = 0

    def run() -> None:
        nonlocal missed
        assert _end_memory is not None
        _end_memory(found, missing)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)
        finally:
            missed = _end_memory(FOR_EVER, 0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised and not isinstance(raised[0], MemoryError):
        raise raised[0]
    return bool(raised), missed


def attempts(
    build: Callable[[], State], call: Callable[[State], object], missing: int
) -> Iterator[tuple[State, bool]]:
    """Each way in which the call finds no memory, so many times in a row: the state behind it, and whether it failed."""
    for found in itertools.count():
        state = build()
        failed, missed = fails(functools.partial(call, state), found, missing)
        if missed == 0:
            assert not failed, "the core says that there is no memory where there is"
            return
        yield state, failed


def insist(call: Callable[[], State], missing: int) -> State:
    """Makes the call until it finds memory for all that it wants, each time for one thing more; answers what it does."""
    answers: list[State] = []
    for found in itertools.count():
        failed, missed = fails(lambda: answers.append(call()), found, missing)
        if not failed and missed == 0:
            break
    return answers[-1]
