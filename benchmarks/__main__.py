"""The benchmarks that have goals, one after the other, and at the end every goal that was missed.

    python -m benchmarks [--peer]         # `make bench`, `make bench PEER=1`

Each runs in a process of its own, as it does by its own name; a quarter of an hour in all, on a machine that does nothing
else. A miss is no failure: most machines are shared, so look at the floors beside the figures. `--peer` measures Dynamo
as well (pip install --group bench-peers).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.dynamo_peer import add_peer_option
from benchmarks.measure import GOAL, MISSED

WITH_PEER = ("prefix_index", "growth", "http")
ALL = ("prefix_index", "stalls", "growth", "http", "zmq_ingest", "replicas", "fuzzy_match")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_peer_option(parser)
    options = parser.parse_args()
    goals: list[tuple[str, str]] = []
    failed: list[str] = []
    for name in ALL:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if options.peer and name in WITH_PEER:
            command.append("--peer")
        print(f"\n== {' '.join(['python', *command[1:]])}", flush=True)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            goals += ((name, line) for line in shown(process) if GOAL in line)
        if process.returncode != 0:
            failed.append(f"benchmarks.{name} ended with {process.returncode}")
    missed = [(name, line) for name, line in goals if line.endswith(MISSED)]
    print(f"\n== {len(goals) - len(missed)} of {len(goals)} goals are met")
    for name, line in missed:
        print(f"{name}: {line}")
    for complaint in failed:
        print(complaint, file=sys.stderr)
    return 1 if failed else 0


def shown(process: subprocess.Popen[str]) -> Iterator[str]:
    """Its lines, printed as they come."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        yield line.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
