"""What balance and hit rate an assignment of whole sessions could reach, which no router can know in advance.

    python -m benchmarks.sticky_sessions tau_bench_gpt4o_airline.pdelta.jsonl.gz --pods 8 --blocks 4000

Each session of a pdelta trace (docs/experiment.md) goes as a whole to the pod that has computed least so far, told
where a session begins and ends. Pods are LRU caches as in benchmarks/routing_policies.py. Checked on the way: no
request hits more blocks than it has, and one pod as large as all of them hits at least as many.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from app.experiment.trace import Trace, load_trace
from benchmarks.measure import print_line, print_machine
from benchmarks.routing_policies import LruPod, TraceRequest


def read_sessions(path: Path) -> list[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        next(lines)
        return [json.loads(line)[1] for line in lines if line.strip()]


def assign(trace: Trace, sessions: Sequence[str], pods: int, blocks: int) -> tuple[float, float, float]:
    """Hit rate, and the busiest pod over the mean in tokens computed and in requests."""
    size = trace.block_tokens
    fleet = [LruPod(blocks) for _ in range(pods)]
    computed = [0] * pods
    chosen: dict[str, int] = {}
    hit = asked = 0
    for request, session in zip(trace.requests, sessions, strict=True):
        pod = chosen.setdefault(session, computed.index(min(computed)))
        asking = TraceRequest(request.at_s, request.prompt_tokens, request.output_tokens, request.block_ids)
        depth = fleet[pod].take(asking, 10_000.0, 0.01)
        assert depth <= len(request.block_ids), "nothing is found that was not asked for"
        usable = min(depth, (request.prompt_tokens - 1) // size)
        computed[pod] += request.prompt_tokens - usable * size
        hit += usable
        asked += -(-request.prompt_tokens // size)
    requests = [pod.requests for pod in fleet]
    return hit / asked, max(computed) * pods / sum(computed), max(requests) * pods / sum(requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4_000, help="of each pod's cache")
    options = parser.parse_args()
    print_machine()
    trace, sessions = load_trace(options.trace), read_sessions(options.trace)
    hit_rate, computed, requests = assign(trace, sessions, options.pods, options.blocks)
    alone, _, _ = assign(trace, sessions, 1, options.pods * options.blocks)
    assert alone >= hit_rate, "no fleet has a better memory than one large cache"
    print_line("sessions", f"{len(set(sessions))} of {len(sessions)} requests")
    print_line("one cache as large as all", f"hit {100 * alone:5.2f} %")
    print_line(
        "whole sessions to the least worked pod",
        f"hit {100 * hit_rate:5.2f} %   busiest / mean: requests {requests:.2f}, computed {computed:.2f}",
    )


if __name__ == "__main__":
    main()
