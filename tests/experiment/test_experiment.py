"""The whole experiment: a generated trace, a real indexer in a process of its own, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidInput, Unresponsive
from app.experiment.bounds import hit_rate
from app.experiment.indexer_link import IndexerLink
from app.experiment.runner import POLICIES, FleetShape, PolicyRun, percentile
from app.experiment.trace import Trace, load_trace
from app.replay.indexer import own_indexer
from tests.experiment.traces import conversations, write_mooncake

SHAPE = FleetShape(pods=3, blocks=30, block_size=512)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    return load_trace(write_mooncake(path, conversations(sessions=25, turns=6)))


def run(url: str, trace: Trace, shape: FleetShape, policy: str) -> Any:
    with IndexerLink(url, "m") as link:
        return PolicyRun(trace, shape, link, policy).run(lambda _: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_prediction_is_what_the_pod_reuses_while_blocks_are_evicted(
    url: str, trace: Trace, policy: str
) -> None:
    result = run(url, trace, SHAPE, policy)
    assert result.requests == len(trace.requests) == 150
    assert (result.over, result.under) == (0, 0)
    assert result.exact == 150 - result.waited > 0
    assert 0 < result.hit_rate < hit_rate(trace, block_size=512, capacity_blocks=None)
    assert 0 < result.ttft_p50_s <= result.ttft_p99_s
    assert sum(result.requests_per_pod) == 150


def test_prefix_and_load_finds_more_than_round_robin_and_keeps_pods_even(url: str, trace: Trace) -> None:
    ours = run(url, trace, SHAPE, "prefix_and_load")
    plain = run(url, trace, SHAPE, "round_robin")
    assert ours.hit_rate > 1.3 * plain.hit_rate
    assert plain.requests_per_pod == (50, 50, 50)
    assert ours.imbalance < 1.6


def test_blocks_of_the_trace_can_be_cut_into_engine_blocks(url: str, trace: Trace) -> None:
    cut = FleetShape(pods=3, blocks=30 * 32, block_size=16)
    result = run(url, trace, cut, "prefix_and_load")
    assert (result.over, result.under) == (0, 0)
    assert result.exact > 100
    assert result.hit_rate > 0.2


def test_what_can_never_fit_is_counted_and_left_out(url: str, trace: Trace) -> None:
    result = run(url, trace, FleetShape(pods=2, blocks=8, block_size=512), "round_robin")
    assert result.refused > 0
    assert result.requests + result.refused == 150


def test_the_pods_are_gone_from_the_indexer_afterwards(url: str, trace: Trace) -> None:
    with IndexerLink(url, "m") as link:
        with pytest.raises(InvalidInput, match="404"):
            link.drop("pod-0")
        with pytest.raises(InvalidInput, match="policy"):
            PolicyRun(trace, SHAPE, link, "no such policy").run(lambda _: None)
        with pytest.raises(InvalidInput, match="404"):
            link.drop("pod-0")


def test_nobody_there_is_one_sentence() -> None:
    with IndexerLink("http://127.0.0.1:9", "m") as link, pytest.raises(Unresponsive, match="no answer"):
        link.register("pod-0", 16)
    with pytest.raises(InvalidInput, match="not the address"):
        IndexerLink("localhost:8080", "m")


@pytest.mark.parametrize(("part", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles(part: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], part) == value
    assert percentile([], part) == 0.0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "experiment", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_prints_one_json_document_and_draws(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "t.jsonl.gz", conversations(sessions=6, turns=4))
    plot = tmp_path / "plot.svg"
    done = command("--trace", str(path), "--pods", "2", "--blocks", "40", "--plot", str(plot), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said["policies"]) == set(POLICIES)
    for result in said["policies"].values():
        assert result["predicted_exact"] == 1.0
        assert {"hit_rate", "imbalance", "ttft_p50_s", "ttft_p99_s"} <= set(result)
    assert set(said["bounds"]) == {"shared_lru", "infinite"}
    assert said["bounds"]["shared_lru"]["hit_rate"] <= said["bounds"]["infinite"]["hit_rate"]
    drawn = plot.read_text()
    assert "prefix and load" in drawn
    assert drawn.rstrip().endswith("</svg>")


def test_command_prints_a_table_of_the_policies_that_were_asked_for(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "t.jsonl", conversations(sessions=3, turns=3))
    done = command("--trace", str(path), "--pods", "2", "--requests", "5", "--policy", "round_robin")
    assert done.returncode == 0, done.stderr
    assert "5 requests, 2 pods" in done.stdout
    assert "round_robin" in done.stdout
    assert "100.0" in done.stdout
    assert "longest_prefix" not in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--trace", "missing.jsonl"), 1, "cannot be read"),
        (("--trace", "t.jsonl", "--policy", "best"), 2, "--policy"),
        (("--trace", "t.jsonl", "--block-size", "24"), 2, "--block-size"),
        (("--trace", "t.jsonl", "--pods", "0"), 2, "--pods"),
        ((), 2, "--trace"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    write_mooncake(tmp_path / "t.jsonl", conversations(sessions=1, turns=1))
    placed = [str(tmp_path / a) if a.endswith(".jsonl") else a for a in arguments]
    done = command(*placed)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
