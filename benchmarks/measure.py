"""How every benchmark measures and prints: CPU time a call, median and p99.

Timings of one run are comparable with each other; machines are shared and noisy, so compare ratios, not runs.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

GOAL = "   goal: "  # behind it a line says what is asked of its figure, and whether that is met
MISSED = "MISSED"


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call."""

    median_us: float
    p99_us: float
    slowest_us: tuple[float, ...]  # the three longest calls, or as many as there were, the longest first
    calls: int

    @property
    def max_us(self) -> float:
        return self.slowest_us[0]

    def __str__(self) -> str:
        return (
            f"median {self.median_us:8.2f} us   p99 {self.p99_us:8.2f} us   "
            f"max {self.max_us:9.2f} us   {self.calls} calls"
        )


def time_calls(call: Callable[[T], object], arguments: Iterable[T]) -> Timing:
    """CPU time of single calls of this thread, less what reading the clock costs (some tenths of a microsecond)."""
    clock_ns = statistics.median(_sample(_nothing, None) for _ in range(100))
    samples = sorted(max(0.0, _sample(call, argument) - clock_ns) for argument in arguments)
    return Timing(
        statistics.median(samples) / 1e3,
        samples[min(len(samples) - 1, len(samples) * 99 // 100)] / 1e3,
        tuple(sample / 1e3 for sample in samples[:-4:-1]),
        len(samples),
    )


def _sample(call: Callable[[T], object], argument: T) -> int:
    begin = time.thread_time_ns()
    call(argument)
    return time.thread_time_ns() - begin


def _nothing(_: object) -> None: ...


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def print_machine() -> None:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    print(f"machine: {cpu}, {platform.system()} {platform.release()}, Python {sys.version.split()[0]}")


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """What is asked of a figure."""

    measured: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        asked = f"{'at least' if self.at_least else 'at most'} {self.bound:,g} {self.unit}"
        return f"{asked}, {'met' if self.is_met else MISSED}"


def print_line(name: str, value: object, goal: Goal | None = None) -> None:
    print(f"{name:<58} {value}{'' if goal is None else f'{GOAL}{goal}'}", flush=True)


def print_timing(name: str, timing: Timing, at_most_us: float) -> None:
    """What is asked is asked of the median."""
    print_line(name, timing, Goal(timing.median_us, at_most_us, "us"))
