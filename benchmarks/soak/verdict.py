"""What the soak found, judged and written down: bounds on what the process uses, the table, the JSON document."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from typing import Any

from benchmarks.soak.conductor import Conductor, Life, Plan

# A life is judged when it has had so many rounds; its first ones are its warm-up.
WARM_UP_PART = 0.34
ROUNDS_MIN = 9
RESIDENT_GROWTH_MIB_MAX = 12.0
RESIDENT_GROWTH_PART_MAX = 0.06
DESCRIPTORS_GROWTH_MAX = 48  # as many as slow clients and floods have open at one moment and not at another
THREADS_GROWTH_MAX = 1
LOOP_P99_S_MAX = 0.5
LOOP_S_MAX = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Flatness:
    """Medians of the first rounds behind the warm-up and of the last ones."""

    name: str
    warm: float
    end: float
    growth_max: float

    @property
    def is_flat(self) -> bool:
        return self.end - self.warm <= self.growth_max


def flatness(life: Life) -> list[Flatness]:
    """Nothing for a life too short to be warm."""
    if len(life.usages) < ROUNDS_MIN:
        return []
    warm = life.usages[int(len(life.usages) * WARM_UP_PART) :]
    part = max(1, len(warm) // 3)

    def of(name: str, growth_max: float, growth_part_max: float = 0.0) -> Flatness:
        first, last = (
            statistics.median(getattr(usage, name) for usage in usages)
            for usages in (warm[:part], warm[-part:])
        )
        return Flatness(name, first, last, growth_max + growth_part_max * first)

    return [
        of("resident_mib", RESIDENT_GROWTH_MIB_MAX, RESIDENT_GROWTH_PART_MAX),
        of("descriptors", DESCRIPTORS_GROWTH_MAX),
        of("threads", THREADS_GROWTH_MAX),
    ]


def judge(conductor: Conductor, *, with_timings: bool = True) -> None:
    """Adds the violations that only the whole shows."""
    findings = conductor.findings
    for number, life in enumerate(conductor.lives, 1):
        for row in flatness(life):
            if not row.is_flat:
                findings.violation(
                    "growth",
                    f"process {number}: {row.name} {row.warm:.1f} -> {row.end:.1f}, at most +{row.growth_max:.1f}",
                )
    for part, bound_s in ((0.99, LOOP_P99_S_MAX), (1.0, LOOP_S_MAX)):
        took_s = findings.quantile("loop", part)
        if with_timings and took_s > bound_s:
            findings.violation(
                "loop lag", f"quantile {part:g} of /healthz is {took_s:.3f} s, at most {bound_s:g} s"
            )
    counts = findings.counts()
    for needed in (
        "rounds", "answers held against the truth", "queries answered", "engines killed", "caches cleared",
        "losses said and healed", "keys rotated", "wrong keys refused", "malformed HTTP requests",
        "malformed ZMQ messages", "restarts of the indexer",
    ):  # fmt: skip
        if not counts.get(needed):
            findings.violation("soak", f"nothing was tried of: {needed}")


def document(conductor: Conductor, plan: Plan) -> dict[str, Any]:
    findings = conductor.findings
    return {
        "passed": not findings.violations_seen(),
        "plan": dataclasses.asdict(plan),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "lives": [
            {
                "lasted_s": round(life.lasted_s, 1),
                "rounds": [dataclasses.asdict(usage) for usage in life.usages],
                "flatness": [{**dataclasses.asdict(row), "is_flat": row.is_flat} for row in flatness(life)],
            }
            for life in conductor.lives
        ],
        "orderly_ends_s": conductor.end_s,
        "latencies_s": {
            name: {str(part): findings.quantile(name, part) for part in (0.5, 0.99, 1.0)}
            for name in ("query", "loop", "settle")
        },
        "counts": dict(findings.counts()),
        "metrics": conductor.metrics,
        "violations_seen": dict(findings.violations_seen()),
        "violations": dict(findings.violations()),
    }


def table(conductor: Conductor) -> list[tuple[str, str]]:
    """Rows of what was done, what was used, what was found."""
    findings = conductor.findings
    rows = [(name, f"{count:,}") for name, count in findings.counts().items()]
    for name, said in (
        ("query", "a query"),
        ("loop", "`/healthz`, the loop's lag"),
        ("settle", "catching up"),
    ):
        figures = " / ".join(f"{findings.quantile(name, part) * 1e3:.1f}" for part in (0.5, 0.99, 1.0))
        rows.append((f"{said}: median / p99 / longest, ms", figures))
    for number, life in enumerate(conductor.lives, 1):
        rows.append((f"process {number}: seconds", f"{life.lasted_s:.0f}"))
        rows.extend(
            (
                f"process {number}: {row.name}, warm -> end (may grow by)",
                f"{row.warm:.1f} -> {row.end:.1f} ({row.growth_max:.1f})",
            )
            for row in flatness(life)
        )
    rows.append(("orderly ends, s", " / ".join(f"{took_s:.1f}" for took_s in conductor.end_s)))
    seen = findings.violations_seen()
    rows.append(("violations", f"{sum(seen.values()):,}"))
    rows.extend((f"violations: {kind}", f"{count:,}") for kind, count in seen.items())
    return rows
