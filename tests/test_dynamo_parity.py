"""This service and Dynamo's standalone indexer on the same frames: needs the dependency group bench-peers."""

from __future__ import annotations

import pytest

from benchmarks.dynamo_parity import CAPTURES, Right, compare
from benchmarks.dynamo_peer import dynamo_is_installed

pytestmark = pytest.mark.skipif(
    not dynamo_is_installed(), reason="Dynamo's indexer is not installed: pip install --group bench-peers"
)


def test_captured_traffic_is_answered_alike() -> None:
    names = ["v0.32.0", "v0.32.0-lora", "v0.32.0-dp2"]
    compared = compare([CAPTURES / name for name in names])
    assert [(found.same, found.requests) for found in compared] == [(29, 29), (30, 30), (29, 29)]


def test_a_workload_with_evictions_is_answered_alike_where_salts_and_copies_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVINDEXER_COUNT_COPIES", "false")
    [compared] = compare([CAPTURES / "core" / "v0.33.0.jsonl"], without_salts=True)
    assert (compared.same, compared.requests) == (184, 184)


def test_where_answers_differ_the_engine_agrees_with_this_one() -> None:
    """Dynamo is right in no case but requests inside a reset window, which no indexer can know."""
    workload, core = compare([CAPTURES / "v0.32.0-workload", CAPTURES / "core" / "v0.33.0.jsonl"])
    inside_reset_windows = 4
    tally = workload.tally()
    assert tally[Right.HERE] > 0
    assert tally[Right.DYNAMO] + tally[Right.NEITHER] <= inside_reset_windows
    tally = core.tally()
    assert (tally[Right.HERE] > 0, tally[Right.DYNAMO], tally[Right.NEITHER]) == (True, 0, 0)
