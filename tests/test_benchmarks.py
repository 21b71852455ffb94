"""`python -m benchmarks` runs every benchmark that has a goal, and tells which goals were missed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import benchmarks
from app.api.short_way import read_notation
from benchmarks import http
from benchmarks.__main__ import ALL, WITH_PEER
from benchmarks.measure import GOAL, MISSED, Goal, print_line
from benchmarks.wrk import Load

SOURCES = {
    path.stem: path.read_text()
    for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py")
    if path.stem != "measure"
}


def using(pattern: str) -> set[str]:
    return {name for name, source in SOURCES.items() if re.search(pattern, source)}


def test_every_benchmark_with_a_goal_is_run() -> None:
    assert using(r"\bGoal\(") <= set(ALL)
    assert using(r"\badd_peer_option\(parser\)") - {"dynamo_peer"} == set(WITH_PEER)


def test_the_long_way_is_what_its_figure_is_of() -> None:
    assert read_notation([(b"content-type", http.JSON.encode())], 1) == http.JSON
    assert read_notation([(b"content-type", http.JSON_LONG_WAY.encode())], 1) is None


def test_a_line_ends_with_what_is_asked_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("match", "5 us", Goal(5, 10, "us"))
    print_line("rate", "5 M/s", Goal(5, 10, "M/s", at_least=True))
    print_line("floor", "4 us")
    met, missed, floor = capsys.readouterr().out.splitlines()
    assert met.endswith(f"5 us{GOAL}at most 10 us, met")
    assert missed.endswith(f"{GOAL}at least 10 M/s, {MISSED}")
    assert GOAL not in floor


def test_runs_in_turns_weigh_by_their_requests() -> None:
    runs = [Load(100, 1.0, 10, 50, 20.0), Load(300, 1.0, 30, 90, 40.0)]
    assert Load.of(runs) == Load(400, 2.0, 20, 70, 35.0)
