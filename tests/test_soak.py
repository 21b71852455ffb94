"""The soak of docs/reliability.md in short: everything happens at least once, and nothing of it is a violation."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak.conductor import Conductor, Plan
from benchmarks.soak.verdict import document, judge, table


def test_twenty_seconds(tmp_path: Path) -> None:
    plan = Plan(seconds=14.0, round_s=1.5)
    conductor = Conductor(plan, tmp_path)
    conductor.run()
    judge(conductor, with_timings=False)
    found = document(conductor, plan)
    assert found["violations"] == {}, found["violations"]
    assert found["passed"]
    assert found["counts"]["pod rows held against the truth"] > 100  # on whatever machine
    assert dict(table(conductor))["violations"] == "0"
