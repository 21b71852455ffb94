"""docs/reliability.md: every test that it names is one that this suite runs, and every fault has one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_every_fault_has_its_test() -> None:
    faults = [*rows("Faults"), *rows("Bytes")]
    assert len(faults) > 60
    assert {row.split("|")[1].strip() for row in rows("Faults")} == {"AIBrix", "llm-d", "Dynamo", "all"}
    for row in faults:
        assert NAMED.search(row), row


def test_every_named_test_is_collected(request: pytest.FixtureRequest) -> None:
    """As pytest knows them: a name alone would also be that of a test nobody runs."""
    named = NAMED.findall(PAGE)
    collected = {item.nodeid.partition("[")[0] for item in request.session.items}
    if not {path for path, _ in named} <= {test.partition("::")[0] for test in collected}:
        collected = asked_of_pytest(sorted({path for path, _ in named}))  # this is a run of a part
    missing = [f"{path}::{name}" for path, name in named if name and f"{path}::{name}" not in collected]
    assert not missing


def asked_of_pytest(paths: list[str]) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2_000:]
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
