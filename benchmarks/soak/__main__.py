"""`python -m benchmarks.soak`: runs it, prints the table, writes the JSON, and fails on any violation."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import print_machine
from benchmarks.soak.conductor import Conductor, Plan
from benchmarks.soak.verdict import document, judge, table

SHOWN_MAX = 5  # violations of a kind


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=300.0, help="how long the load lasts")
    arguments.add_argument("--round-seconds", type=float, default=8.0, help="load between two checks")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path, help="where the findings are written")
    given = arguments.parse_args()
    plan = Plan(given.seconds, given.round_seconds, given.seed)
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        conductor = Conductor(plan, Path(folder))
        conductor.run()
    judge(conductor)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(document(conductor, plan), indent=1))
    rows = table(conductor)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"| {name:<{width}} | {value:>28} |")
    for kind, details in conductor.findings.violations().items():
        for detail in details[:SHOWN_MAX]:
            print(f"VIOLATION {kind}: {detail}", file=sys.stderr)
    return 1 if conductor.findings.violations_seen() else 0


if __name__ == "__main__":
    sys.exit(main())
