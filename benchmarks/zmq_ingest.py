"""Ingest over ZMQ: blocks a second, CPU a batch, and how long a match waits meanwhile.

    python -m benchmarks.zmq_ingest [--seconds 5] [--rate 1000000] [--pods 8] [--blocks 256]

`kvindexer serve` in one process follows the sockets of another process, which store new blocks only. First as
many batches as fit into the time at `--rate` blocks a second, then the same number as fast as they come, while a
third process asks for the depth of a 4,096-token prompt all the time and looks at the queue. Half of the cores are the
server's; of the others one is the publisher's alone, which spins to keep its pace. Before a number is
printed: every batch was applied, no source saw a gap, and prompts of the beginning, middle and end of each run are
found whole on their pod and on no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from http.client import HTTPConnection

from benchmarks import prompts
from benchmarks.measure import Goal, print_line, print_machine
from benchmarks.processes import Server, free_port, running
from benchmarks.zmq_publisher import Publisher, publishing, tokens_of

PROBE_PAUSE_S = 0.002
PROBES_A_LOOK = 50  # matches between two looks at the queue
_METRIC = re.compile(rb"^kvindexer_(\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    messages: int
    seconds: float  # from the first message to the last one applied
    cpu_us: float  # of the server, a batch, with the probes
    queued_max: int
    probes_us: list[float]


def main() -> int:
    options = _options()
    print_machine()
    queue_max = 8_192
    print(
        f"settings: {vars(options)}, fuzzy={os.environ.get('KVINDEXER_FUZZY', 'true')}, queue {queue_max} batches"
    )
    cores = sorted(os.sched_getaffinity(0))
    server_cores, other_cores = set(cores[len(cores) // 2 :]), set(cores[: len(cores) // 2])
    publisher_cores = None
    if len(other_cores) > 1:
        publisher_cores = {other_cores.pop()}
    if len(cores) > 1:
        os.sched_setaffinity(0, other_cores)
    messages = max(1, int(options.rate * options.seconds / options.blocks))
    for name, per_s in (("paced", options.rate / options.blocks), ("as fast as they come", 0.0)):
        with publishing(options.pods, options.blocks, cores=publisher_cores) as publisher:
            pods = ";".join(
                f"pod-{n}=tcp://127.0.0.1:{port},model=m" for n, port in enumerate(publisher.ports)
            )
            port = free_port()
            command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--log-level", "error"]
            os.environ["KVINDEXER_PODS"] = pods
            with running(command, port, server_cores if len(cores) > 1 else None) as server:
                run = _measure(server, publisher, options, messages, per_s)
        rate = run.messages * options.blocks / run.seconds
        probes = sorted(run.probes_us)
        p50, p99 = probes[len(probes) // 2], probes[len(probes) * 99 // 100]
        paced = per_s > 0
        print_line(
            f"{run.messages} batches of {options.blocks} blocks, {name}",
            f"{rate / 1e6:5.2f} M blocks/s   {run.cpu_us:6.1f} us CPU a batch   queued at most {run.queued_max}",
            None if paced else Goal(rate / 1e6, 1, "M blocks/s", at_least=True),
        )
        print_line(
            "  a match meanwhile",
            f"p50 {p50:6.0f} us   p99 {p99:6.0f} us   max {probes[-1]:6.0f} us",
            Goal(p99, 2_000, "us") if paced else None,
        )
        assert run.queued_max <= queue_max, "the queue is bounded"
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=1e6, help="blocks a second of the paced run")
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=256, help="of a batch")
    return parser.parse_args()


def _measure(
    server: Server, publisher: Publisher, options: argparse.Namespace, messages: int, per_s: float
) -> Run:
    connection = server.connect()
    first = (
        options.pods
    )  # one batch a pod, so that what is measured goes over streams that are known to be there
    publisher.wait_for_subscribers()
    publisher.start(first, 0)
    publisher.done()
    _wait_for_batches(connection, first)
    for message in range(first):
        _check(connection, message, options)
    query = prompts.packed(tokens_of(0, options.blocks)) * (prompts.BLOCKS // options.blocks)
    cpu_s, began = server.cpu_s(), time.perf_counter()
    publisher.start(messages, per_s)
    probes_us: list[float] = []
    queued_max, applied = 0, 0.0
    while applied < first + messages:
        for _ in range(PROBES_A_LOOK):
            asked = time.perf_counter()
            _ask(connection, query)
            probes_us.append((time.perf_counter() - asked) * 1e6)
            time.sleep(PROBE_PAUSE_S)
        figures = _metrics(connection)
        applied = figures["zmq_batches_applied_total"]
        queued_max = max(queued_max, int(figures["zmq_queued_batches"]))
        assert time.perf_counter() - began < 30 * options.seconds + 30, f"{applied} batches came"
    seconds, cpu_s = time.perf_counter() - began, server.cpu_s() - cpu_s
    told = publisher.done()
    if per_s and told["lag_s"] > 0.5:
        print_line("  the publisher itself was late", f"{told['lag_s']:.2f} s")
    assert _metrics(connection)["source_gaps_total"] == 0, "no batch was lost"
    for message in (first, first + messages // 2, first + messages - 1):
        _check(connection, message, options)
    return Run(messages, seconds, cpu_s / messages * 1e6, queued_max, probes_us)


def _check(connection: HTTPConnection, message: int, options: argparse.Namespace) -> None:
    answer = json.loads(_ask(connection, prompts.packed(tokens_of(message, options.blocks))))
    depths = {row["pod"]: row["matched_blocks"] for row in answer["matches"]}
    assert depths == {f"pod-{message % options.pods}": options.blocks}, (message, depths)


def _ask(connection: HTTPConnection, tokens: bytes) -> bytes:
    connection.request("POST", "/v1/match?model=m", tokens, {"Content-Type": "application/octet-stream"})
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    return text


def _metrics(connection: HTTPConnection) -> dict[str, float]:
    """Figures by name, those of the same name added up."""
    connection.request("GET", "/metrics")
    figures: dict[str, float] = {}
    for name, value in _METRIC.findall(connection.getresponse().read()):
        figures[name.decode()] = figures.get(name.decode(), 0.0) + float(value)
    return figures


def _wait_for_batches(connection: HTTPConnection, count: int) -> None:
    deadline = time.monotonic() + 30
    while _metrics(connection)["zmq_batches_applied_total"] < count:
        assert time.monotonic() < deadline, "the first batches never came"
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
