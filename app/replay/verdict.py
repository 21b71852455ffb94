"""Prediction against truth: which requests can be judged, how each came out, and the sums.

A request is judged `outside` reset windows or `inside` one (between a reset and the pod's next frame the
engine has told nobody, so no indexer can know), or as `concurrent`: it was in the engine together with
others, so only the engine knows which frames came before it, and it counts as exact when any answer of
that time fits. Only what is judged outside decides whether the indexer passes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any


class Scope(enum.StrEnum):
    OUTSIDE = "outside_windows"
    INSIDE = "inside_windows"
    CONCURRENT = "concurrent"


class Unjudged(enum.StrEnum):
    NOT_REPORTED = "not_reported"  # the engine did not say how much it had cached
    SALT_HIDDEN = (
        "salt_hidden"  # the release does not publish the cache salt, so nobody can tell tenants apart
    )
    POD_SILENT = "pod_silent"  # the pod never published anything


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`predicted` is the answer nearest to the truth among those that are possible."""

    request: int
    pod: str
    dp_rank: int | None
    scope: Scope
    predicted_tokens: int
    cached_tokens: int

    @property
    def outcome(self) -> str:
        if self.predicted_tokens == self.cached_tokens:
            return "exact"
        return "over" if self.predicted_tokens > self.cached_tokens else "under"


def nearest(predictions: Collection[int], truth: int) -> int:
    return min(predictions, key=lambda predicted: (abs(predicted - truth), predicted))


@dataclasses.dataclass(slots=True)
class Report:
    """What a replay found. `passed`: requests were judged outside reset windows, and all are exact."""

    capture: str
    model: str
    block_size: int
    frames: int = 0
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    unjudged: dict[Unjudged, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Unjudged, 0))

    def tally(self, scope: Scope | None = None) -> dict[str, int]:
        outcomes = [v.outcome for v in self.verdicts if scope is None or v.scope is scope]
        return {
            "requests": len(outcomes),
            **{outcome: outcomes.count(outcome) for outcome in ("exact", "over", "under")},
        }

    @property
    def passed(self) -> bool:
        outside = self.tally(Scope.OUTSIDE)
        return 0 < outside["requests"] == outside["exact"]

    def as_json(self) -> dict[str, Any]:
        wrong = [verdict for verdict in self.verdicts if verdict.outcome != "exact"]
        return {
            "capture": self.capture,
            "model": self.model,
            "block_size": self.block_size,
            "frames": self.frames,
            **self.tally(),
            **{scope.value: self.tally(scope) for scope in Scope},
            "unjudged": {reason.value: count for reason, count in self.unjudged.items()},
            "passed": self.passed,
            "mismatches": [
                {**dataclasses.asdict(verdict), "scope": verdict.scope.value, "outcome": verdict.outcome}
                for verdict in wrong
            ],
        }
