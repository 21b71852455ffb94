"""What the soak counts and what it finds wrong; written by many threads, read by one at the end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

VIOLATIONS_KEPT_MAX = 50  # of each kind; all are counted
SAMPLES_MAX = 200_000  # of a latency; later ones are left out, and that is counted


class Findings:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._violations: dict[str, list[str]] = {}
        self._violations_seen: Counter[str] = Counter()
        self._samples: dict[str, list[float]] = {}

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def violation(self, kind: str, detail: str) -> None:
        with self._lock:
            self._violations_seen[kind] += 1
            kept = self._violations.setdefault(kind, [])
            if len(kept) < VIOLATIONS_KEPT_MAX:
                kept.append(detail[:2_000])

    def sample(self, name: str, value: float) -> None:
        with self._lock:
            kept = self._samples.setdefault(name, [])
            if len(kept) < SAMPLES_MAX:
                kept.append(value)
            else:
                self._counts[f"{name} samples left out"] += 1

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))

    def violations(self) -> Mapping[str, list[str]]:
        with self._lock:
            return {kind: list(details) for kind, details in self._violations.items()}

    def violations_seen(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._violations_seen)

    def quantile(self, name: str, part: float) -> float:
        """0 where nothing was sampled."""
        with self._lock:
            values = sorted(self._samples.get(name, ()))
        return values[min(len(values) - 1, int(len(values) * part))] if values else 0.0
