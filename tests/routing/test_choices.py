from __future__ import annotations

import math
import random

import pytest

from app.routing.choices import Outstanding, RecentWork, mean
from app.routing.routing import SEAT_SHARE


def test_choices_fade() -> None:
    books = Outstanding(decay_s=10.0, places_max=9)
    place = ("a", 0)
    for _ in range(2):
        books.add(place, 100.0)
    assert books.count(place, 100.0) == 2
    assert books.count(place, 110.0) == pytest.approx(2 / 2.718281828)
    books.add(place, 110.0)
    assert books.count(place, 110.0) == pytest.approx(1 + 2 / 2.718281828)
    assert books.count(("b", 0), 110.0) == 0


def test_a_forgotten_count_keeps_its_turn() -> None:
    books = Outstanding(decay_s=10.0, places_max=9)
    for name in "ab":
        books.add((name, 0), 0.0)
    books.forget(("a", 0))
    books.forget(("never", 0))
    assert [books.count((name, 0), 0.0) for name in "ab"] == [0, 1]
    assert [books.turn((name, 0)) for name in ("a", "b", "never")] == [1, 2, 0]


def test_books_are_bounded() -> None:
    books = Outstanding(decay_s=10.0, places_max=3)
    for name in "abcad":
        books.add((name, 0), 0.0)
    assert len(books) == 3
    assert [books.turn((name, 0)) for name in "abcd"] == [4, 0, 3, 5]


def test_work_fades_with_choices_and_not_with_places() -> None:
    books = RecentWork(choices=10, places_max=2)
    books.add(("a", 0), uncached=100.0, tokens=400)
    assert books.work(("a", 0)) == 100 + 400 * SEAT_SHARE
    for _ in range(10):
        books.add(("b", 0), uncached=0.0, tokens=0)
    assert books.work(("a", 0)) == pytest.approx((100 + 400 * SEAT_SHARE) / math.e)
    books.add(("c", 0), uncached=1.0, tokens=1)
    assert (books.work(("a", 0)), len(books)) == (0, 2)


def test_mean_follows() -> None:
    found = 0.0
    generator = random.Random(1)
    for _ in range(2_000):
        found = mean(found, generator.uniform(50, 150), share=0.02)
    assert found == pytest.approx(100, rel=0.1)
    assert mean(0.0, 7.0, share=0.02) == 7.0
