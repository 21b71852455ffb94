"""What was chosen lately, by place (pod, rank): app/routing/router.py keeps these books, app/routing/routing.py says
what they weigh.

Pure: time is an argument, a book is bounded and costs O(1) a call.
"""

from __future__ import annotations

import math

from app.routing.routing import SEAT_SHARE


class Outstanding:
    """Choices not seen in any load yet: one each, less by a factor e every `decay_s`. O(1) a call.

    Bounded by `places_max`: past it the place longest unused is forgotten, which then counts as idle.
    """

    def __init__(self, *, decay_s: float, places_max: int) -> None:
        self._decay_s = decay_s
        self._places_max = places_max
        self._counts: dict[tuple[str, int], tuple[float, float, int]] = {}  # count, at, turn
        self._turns = 0

    def add(self, place: tuple[str, int], now_s: float) -> None:
        self._turns += 1
        count = self.count(place, now_s) + 1.0
        self._counts.pop(place, None)
        self._counts[place] = (count, now_s, self._turns)
        if len(self._counts) > self._places_max:
            del self._counts[next(iter(self._counts))]

    def count(self, place: tuple[str, int], now_s: float) -> float:
        count, at_s, _ = self._counts.get(place, (0.0, now_s, 0))
        return count * math.exp(-(now_s - at_s) / self._decay_s)

    def turn(self, place: tuple[str, int]) -> int:
        """Number of the last choice of it, 0 for none."""
        return self._counts.get(place, (0.0, 0.0, 0))[2]

    def forget(self, place: tuple[str, int]) -> None:
        """A newer load has them in it. Its turn is kept."""
        if place in self._counts:
            _, at_s, turn = self._counts[place]
            self._counts[place] = (0.0, at_s, turn)

    def drop(self, place: tuple[str, int]) -> None:
        """It is gone, its turn with it."""
        self._counts.pop(place, None)

    def __len__(self) -> int:
        return len(self._counts)


class RecentWork:
    """Work by place, in tokens, fading with the number of choices since and not with time: an idle hour changes no
    balance. O(1) a call.

    Bounded by `places_max`: past it the place longest unused is forgotten, which then counts as new.
    """

    def __init__(self, *, choices: int, places_max: int) -> None:
        self._fade = math.exp(-1 / choices)
        self._places_max = places_max
        self._choices = 0
        self._work: dict[tuple[str, int], tuple[float, int]] = {}  # work, at which choice

    def add(self, place: tuple[str, int], *, uncached: float, tokens: int) -> None:
        """A choice of it for a prompt of `tokens`."""
        self._choices += 1
        work = self.work(place) + uncached + SEAT_SHARE * tokens
        self._work.pop(place, None)
        self._work[place] = (work, self._choices)
        if len(self._work) > self._places_max:
            del self._work[next(iter(self._work))]

    def drop(self, place: tuple[str, int]) -> None:
        """It is gone; who comes by its name is new."""
        self._work.pop(place, None)

    def work(self, place: tuple[str, int]) -> float:
        work, at = self._work.get(place, (0.0, self._choices))
        return work * self._fade ** (self._choices - at)

    def __len__(self) -> int:
        return len(self._work)


def mean(before: float, value: float, *, share: float) -> float:
    """The next value of a running mean; a `before` of 0 is none yet."""
    return value if before <= 0 else before + share * (value - before)
