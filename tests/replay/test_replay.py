"""`kvindexer replay` against a real indexer in a process of its own, over real sockets."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app.errors import InvalidInput, Unresponsive
from app.replay.formats import load_capture
from app.replay.indexer import IndexerUnderTest, own_indexer
from app.replay.runner import Replay
from app.replay.settings import ReplaySettings
from app.replay.verdict import Scope, Unjudged

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


@pytest.fixture
def indexer(url: str) -> Iterator[IndexerUnderTest]:
    with IndexerUnderTest(url) as reached:
        yield reached


@pytest.mark.parametrize(
    ("name", "outside", "inside", "concurrent"),
    [
        ("v0.32.0-workload", 396, 4, 0),
        ("v0.32.0-lora", 25, 1, 4),
        ("v0.32.0-bytes-cbor-seed42", 24, 1, 4),
        ("v0.32.0-dp2", 24, 1, 4),
        ("core/v0.17.1.jsonl", 200, 0, 0),
        ("core/v0.23.0.jsonl", 200, 0, 0),
        ("core/v0.33.0.jsonl", 200, 0, 0),
    ],
)
def test_real_engines_are_predicted_exactly(
    indexer: IndexerUnderTest, name: str, outside: int, inside: int, concurrent: int
) -> None:
    report = Replay(load_capture(CAPTURES / name), indexer, ReplaySettings()).run()
    assert report.tally(Scope.OUTSIDE) == {"requests": outside, "exact": outside, "over": 0, "under": 0}
    assert report.tally(Scope.INSIDE)["requests"] == inside
    assert report.tally(Scope.CONCURRENT)["exact"] == concurrent
    assert report.passed


def test_release_that_hides_salts_is_exact_as_far_as_can_be_known(indexer: IndexerUnderTest) -> None:
    """Its events show equal prompts of other tenants, but not whose they are."""
    report = Replay(load_capture(CAPTURES / "core" / "v0.9.2.jsonl"), indexer, ReplaySettings()).run()
    assert report.tally() == {"requests": 184, "exact": 178, "over": 6, "under": 0}
    assert report.unjudged[Unjudged.SALT_HIDDEN] == 16
    assert not report.passed


def test_pods_are_gone_afterwards_unless_kept(indexer: IndexerUnderTest) -> None:
    capture = load_capture(CAPTURES / "core" / "v0.33.0.jsonl")
    Replay(capture, indexer, ReplaySettings()).run()
    assert not indexer.has_pod("pod-a")
    Replay(capture, indexer, ReplaySettings(keep_pods=True)).run()
    assert indexer.has_pod("pod-a")
    with pytest.raises(InvalidInput, match="already has a pod 'pod-a'"):
        Replay(capture, indexer, ReplaySettings()).run()
    indexer.drop("pod-a")


def test_engine_that_starts_again_in_the_middle_is_followed(
    indexer: IndexerUnderTest, tmp_path: Path
) -> None:
    """The same capture twice in a row: the second time its numbers begin at 0 again, without a clear."""
    once = (CAPTURES / "core" / "v0.33.0.jsonl").read_text().splitlines()
    again = [json.loads(line) for line in once]
    for line in again:
        if "i" in line:
            line["i"] += 1_000
        if "frames" in line:
            line["frames"][2] = a_day_later(line["frames"][2])
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join([*once, *map(json.dumps, again)]))
    report = Replay(load_capture(path), indexer, ReplaySettings()).run()
    outside = report.tally(Scope.OUTSIDE)
    # The new process has an empty cache, but nobody knows before its first frame.
    assert (outside["requests"], outside["under"]) == (400, 0)
    assert outside["over"] <= 1


def a_day_later(payload: str) -> str:
    """The same batch from another process: a duplicate has the same time, a restart has not."""
    ts, *rest = msgspec.msgpack.decode(base64.b64decode(payload))
    return base64.b64encode(msgspec.msgpack.encode([ts + 86_400, *rest])).decode()


def test_indexer_that_does_not_follow_in_time_is_reported(indexer: IndexerUnderTest) -> None:
    """In no time at all: as a rule it has not even subscribed, on a busy machine it may just have."""
    capture = load_capture(CAPTURES / "core" / "v0.33.0.jsonl")
    with pytest.raises(Unresponsive, match=r"did not subscribe|published up to"):
        Replay(capture, indexer, ReplaySettings(deadline_s=0.0)).run()
    assert not indexer.has_pod("pod-a")


# -- the command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_starts_an_indexer_and_prints_one_document(url: str) -> None:
    done = command(str(CAPTURES / "v0.32.0-workload"), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["outside_windows"] == {"requests": 396, "exact": 396, "over": 0, "under": 0}
    assert document["passed"]
    assert [wrong["scope"] for wrong in document["mismatches"]] == ["inside_windows"] * 4


def test_command_prints_a_table_and_fails_when_not_exact(url: str) -> None:
    done = command(str(CAPTURES / "core" / "v0.9.2.jsonl"), "--url", url)
    assert done.returncode == 1
    assert "NOT exact" in done.stdout
    assert "16 not judged" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ((), 2, "Missing argument"),
        (("somewhere/else",), 1, "somewhere/else"),
        ((str(CAPTURES / "v0.32.0-dp2"), "--url", "http://127.0.0.1:1"), 1, "no answer"),
    ],
)
def test_command_says_what_is_wrong(arguments: tuple[str, ...], status: int, complaint: str) -> None:
    done = command(*arguments)
    assert done.returncode == status
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
