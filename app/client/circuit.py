"""Whether it is worth asking an indexer that has not been answering.

Closed: every call goes through. After `failures_max` failed calls in a row it opens: for `open_s` no call is made at
all, so that a router does not wait for a dead indexer once a request. Then it is half open: one call goes through
as a trial while all others are still turned away; its success closes the circuit, its failure opens it again. A
trial that never reports back (its caller was cancelled) counts as failed after `open_s`. Cost: a lock a call.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class CircuitState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """Thread-safe. `clock` gives monotonic seconds. `turned_away` counts the calls that were not made."""

    def __init__(self, *, failures_max: int, open_s: float, clock: Callable[[], float]) -> None:
        assert failures_max >= 1, "a circuit opens after at least one failure"
        self.turned_away = 0
        self.opened = 0
        self._failures_max = failures_max
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at_s: float | None = None
        self._trial_at_s: float | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> CircuitState:
        with self._lock:
            if self._opened_at_s is None:
                return CircuitState.CLOSED
            return CircuitState.OPEN if self._wait_s() > 0 else CircuitState.HALF_OPEN

    def admit(self) -> bool:
        """Whether to make a call now. Each admitted call is followed by `succeed` or `fail`."""
        with self._lock:
            if self._opened_at_s is None:
                return True
            trial_is_out = self._trial_at_s is not None and self._clock() - self._trial_at_s < self._open_s
            if self._wait_s() > 0 or trial_is_out:
                self.turned_away += 1
                return False
            self._trial_at_s = self._clock()
            return True

    def succeed(self) -> None:
        with self._lock:
            self._failures = 0
            self._opened_at_s = self._trial_at_s = None

    def fail(self) -> None:
        with self._lock:
            self._failures += 1
            if self._opened_at_s is not None and self._trial_at_s is None:
                return  # a call from before it opened: it says nothing new
            if self._failures >= self._failures_max:
                self.opened += 1
                self._opened_at_s = self._clock()
                self._trial_at_s = None

    def _wait_s(self) -> float:
        assert self._opened_at_s is not None, "only an open circuit waits"
        return self._opened_at_s + self._open_s - self._clock()
