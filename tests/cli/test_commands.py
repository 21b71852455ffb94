"""Every command against a running indexer: what it prints for people, for scripts, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.hashing import prefix_hashes
from tests.serving.test_serving import DEADLINE_S, ROOT, finished, serving

TOKENS = "1,2,3,4,5,6,7,8,9"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("serve", "--port", "0") as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def _pods(request: pytest.FixtureRequest) -> Iterator[None]:
    """pod-a holds two blocks of TOKENS, and afterwards there is no pod."""
    if "url" not in request.fixturenames:
        yield
        return
    with httpx.Client(base_url=request.getfixturevalue("url")) as http:
        event = {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
            "block_size": 4,
        }
        body = {"pod": "pod-a", "model": "m", "seq": 7, "events": [event]}
        assert http.post("/v1/events", json=body).status_code == 200
        yield
        for pod in http.get("/v1/pods").json()["pods"]:
            assert http.delete(f"/v1/pods/{pod['pod']}").status_code == 204


def done(url: str, *arguments: str) -> str:
    code, out, err = finished(*arguments, KVINDEXER_URL=url)
    assert code == 0, err
    assert err == ""
    return out


def document(url: str, *arguments: str) -> Any:
    """Standard output is one JSON document and nothing else."""
    return json.loads(done(url, *arguments, "--json"))


def test_match(url: str) -> None:
    assert document(url, "match", "-m", "m", "-t", TOKENS)["matches"][0]["matched_blocks"] == 2
    assert document(url, "match", "-m", "m", "-t", TOKENS, "--pod", "pod-b")["matches"] == []
    assert document(url, "match", "-m", "m", "-t", TOKENS, "--cache-salt", "s")["matches"] == []
    assert "pod-a" in done(url, "match", "-m", "m", "-t", "1 2 3 4")


def test_a_model_that_nobody_serves_is_told(url: str) -> None:
    code, out, err = finished("match", "-m", "mm", "-t", TOKENS, KVINDEXER_URL=url)
    assert (code, err) == (0, "no pod serves 'mm'; they serve: m\n")
    assert "9 tokens" in out
    assert document(url, "match", "-m", "mm", "-t", TOKENS)["matches"] == []  # a script reads one document
    assert "no pod serves" not in done(url, "match", "-m", "m", "-t", "91,92,93,94")


def test_pods_that_are_not_live_are_told_with_their_cause(url: str) -> None:
    body = {"pod": "pod-b", "model": "m", "incomplete": True, "events": []}
    assert httpx.post(f"{url}/v1/events", json=body).status_code == 200
    listed = done(url, "pods", "list")
    assert "pod-b rank 0 is degraded: its sender says that the picture is not whole" in listed
    assert "pod-a rank 0 is" not in listed


def test_prompt_of_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text("[1, 2,\n 3, 4]\n")
    assert document(url, "match", "-m", "m", "-f", str(file))["tokens"] == 4
    process = subprocess.run(
        [sys.executable, "-m", "app", "match", "-m", "m", "-f", "-", "--json"],
        cwd=ROOT,
        env={**os.environ, "KVINDEXER_URL": url},
        input="1 2 3 4 5",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert json.loads(process.stdout)["tokens"] == 5


def test_fuzzy(url: str) -> None:
    moved = "71,72,73,1,2,3,4"
    answer = document(url, "fuzzy", "-m", "m", "-t", moved, "--sliding", "--limit", "1")
    [block] = answer["blocks"]
    assert (block["token_offset"], block["kind"], block["matches"][0]["pod"]) == (3, "exact", "pod-a")
    assert answer["pods"][0]["reusable_tokens"] == 4
    assert document(url, "fuzzy", "-m", "m", "-t", moved, "--sliding", "--exclude", "pod-a")["blocks"] == []
    table = done(url, "fuzzy", "-m", "m", "-t", moved, "--sliding", "--max-distance", "0")
    assert "7 tokens, blocks of 4" in table
    assert "57.1 %" in table
    assert "exact" in table


def test_owners(url: str) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
    body = {"pod": "pod-a", "model": "m", "owner": "agent1:system", "events": [event]}
    assert httpx.post(f"{url}/v1/events", json=body).status_code == 200
    expected = {"owners": [{"owner": "agent1:system", "blocks": 1}]}
    assert document(url, "owners", "list") == expected
    assert "agent1:system" in done(url, "owners", "list")
    assert "agent1:system" in done(url, "fuzzy", "-m", "m", "-t", "1,2,3,4")
    assert document(url, "fuzzy", "-m", "m", "-t", "1,2,3,4", "--exclude", "agent1")["blocks"] == []
    assert document(url, "owners", "clear", "agent1") == expected
    assert document(url, "owners", "list") == {"owners": []}
    code, out, err = finished("owners", "clear", "agent1", KVINDEXER_URL=url)
    assert (code, out) == (1, "")
    assert "no owner named" in err


def test_hash_is_that_of_the_indexer(url: str) -> None:
    options = ["-m", "m", "--block-size", "4", "-t", TOKENS]
    for more in ([], ["--lora", "tuned"], ["--cache-salt", "s"]):
        said = document(url, "hash", *options, *more)["prefix_hashes"]
        asked = {"model": "m", "block_size": 4, "token_ids": [int(token) for token in TOKENS.split(",")]}
        asked |= {more[0].strip("-").replace("-", "_"): more[1]} if more else {}
        assert httpx.post(f"{url}/v1/hashes", json=asked).json()["prefix_hashes"] == said
        assert len(said) == 2
    bare = int.from_bytes(prefix_hashes("m", None, 4, b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"), "little")
    assert str(bare) in done(url, "hash", *options)


def test_pods(url: str) -> None:
    added = document(
        url, "pods", "add", "tcp://h:1/x", "-m", "m", "--block-size", "8", "--lora", "tuned", "--dp-size", "2"
    )
    assert (added["pod"], added["block_size"], added["lora"], len(added["ranks"])) == (
        "tcp://h:1/x",
        8,
        "tuned",
        2,
    )
    names = [pod["pod"] for pod in document(url, "pods", "list")["pods"]]
    assert names == ["pod-a", "tcp://h:1/x"]
    listed = done(url, "pods", "list")
    assert "tcp://h:1/x" in listed
    assert "live" in listed
    assert document(url, "pods", "remove", "tcp://h:1/x") == {"removed": "tcp://h:1/x"}
    code, out, err = finished("pods", "remove", "tcp://h:1/x", KVINDEXER_URL=url)
    assert (code, out) == (1, "")
    assert "no pod named" in err


def test_route(url: str) -> None:
    chosen = document(url, "route", "-m", "m", "-t", TOKENS, "--policy", "longest_prefix", "--reserve")
    assert (chosen["pod"], chosen["policy"], chosen["candidates"][0]["matched_blocks"]) == (
        "pod-a",
        "longest_prefix",
        2,
    )
    assert "-> pod-a rank 0" in done(url, "route", "-m", "m", "-t", TOKENS)
    code, _, err = finished("route", "-m", "m", "-t", TOKENS, "--policy", "nonsense", KVINDEXER_URL=url)
    assert code == 1
    assert "policy" in err


def test_a_route_that_only_looks_is_no_load(url: str) -> None:
    """Who looks into a fleet at night must not move its traffic."""
    done(url, "pods", "add", "asleep", "-m", "quiet")

    def load() -> float:
        answer = document(url, "route", "-m", "quiet", "-t", TOKENS, "--dry-run")
        return float(answer["candidates"][0]["own_requests"])

    assert (load(), load()) == (0.0, 0.0)
    document(url, "route", "-m", "quiet", "-t", TOKENS)
    assert load() > 0.0


def test_stats(url: str) -> None:
    assert document(url, "stats")["index"]["prefixes"] == 2
    assert "prefixes" in done(url, "stats")


def test_dump_and_load(url: str, tmp_path: Path) -> None:
    file = tmp_path / "index.ndjson"
    assert document(url, "dump", "-o", str(file)) == {"file": str(file), "batches": 2, "blocks": 2}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [json.loads(line) for line in done(url, "dump").splitlines()] == lines
    assert document(url, "dump") == lines
    assert document(url, "dump", "--pod", "pod-a") == lines
    done(url, "pods", "remove", "pod-a")
    assert document(url, "dump") == []
    assert document(url, "load", str(file)) == {"batches": 2, "blocks": 2, "rejected": 0}
    assert document(url, "match", "-m", "m", "-t", TOKENS)["matches"][0]["matched_blocks"] == 2
    assert document(url, "pods", "list")["pods"][0]["ranks"][0]["last_seq"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["index.ndjson"]


@contextlib.contextmanager
def following(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`kvindexer events` that listens already."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "events", *options, "--url", url],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        with httpx.Client(base_url=url) as http:
            while not http.get("/v1/stats").json()["streams"]["live_subscribers"]:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "the command never listened"
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("as_json", [True, False])
def test_events(as_json: bool) -> None:
    event = {"type": "BlockStored", "block_hashes": [5], "token_ids": [1, 2, 3, 4], "block_size": 4}
    options = ["-n", "2", "--pod", "pod-a", *(["--json"] if as_json else [])]
    with serving("serve", "--port", "0") as (_, port):
        url = f"http://127.0.0.1:{port}"
        with following(url, *options) as process, httpx.Client(base_url=url) as http:
            for pod in ("pod-z", "pod-a"):
                body = {"pod": pod, "model": "m", "events": [event]}
                assert http.post("/v1/events", json=body).status_code == 200
            out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    if as_json:
        added, batch = json.loads(out)["events"]
        assert (added["event"], added["pod"]) == ("pod_added", "pod-a")
        assert (batch["event"], batch["pod"], batch["stored_blocks"]) == ("batch", "pod-a", 1)
    else:
        assert [line.split()[1] for line in out.splitlines()] == ["pod_added", "batch"]
        assert "stored_blocks=1" in out


def test_interrupted_events_are_whole_json() -> None:
    with (
        serving("serve", "--port", "0") as (_, port),
        following(f"http://127.0.0.1:{port}", "--json") as process,
    ):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, json.loads(out), err) == (0, {"events": []}, "")


def test_the_end_of_the_feed_before_its_time_is_a_failure() -> None:
    with (
        serving("serve", "--port", "0") as (server, port),
        following(f"http://127.0.0.1:{port}", "-n", "1") as process,
    ):
        server.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "the feed ended after 0 of 1 events" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["match", "-m", "m"],
        ["match", "-m", "m", "-t", "1", "-f", "x"],
        ["match", "-m", "m", "-t", "1", "--text", "x"],
        ["match", "-t", "1"],
        ["match", "-m", "m", "-t", "1,x"],
        ["match", "-m", "m", "-t", "4294967296"],
        ["match", "-m", "m", "-f", "/no/such/file"],
        ["hash", "-m", "m", "-t", "1", "--block-size", "0"],
        ["pods", "add", "pod-a"],
        ["pods", "nonsense"],
        ["load", "/no/such/file"],
        ["stats", "--url", "nonsense"],
        ["events", "-n", "0"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    code, out, err = finished(*arguments)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [["match", "-m", "m", "-t", "1"], ["pods", "list"], ["stats"], ["dump"], ["events"], ["load", "-"]],
)
def test_nobody_there(arguments: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "app", *arguments, "--url", "http://127.0.0.1:9"],
        cwd=ROOT,
        input="{}\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 1
    assert "no answer from http://127.0.0.1:9" in process.stderr
    assert "Traceback" not in process.stderr


def test_what_the_indexer_refuses_is_said(url: str) -> None:
    code, out, err = finished("pods", "add", "pod-x", "-m", "m", "--zmq", "nonsense", KVINDEXER_URL=url)
    assert (code, out) == (1, "")
    assert "nonsense" in err


@pytest.mark.parametrize(
    "command",
    [["match"], ["route"], ["fuzzy"], ["hash"], ["pods", "add"], ["events"], ["stats"], ["dump"], ["load"]],
)
def test_help_has_examples(command: list[str]) -> None:
    code, out, _ = finished(*command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"kvindexer {' '.join(command)}" in out


def test_completion() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "app"],
        cwd=ROOT,
        env={
            **os.environ,
            "_KVINDEXER_COMPLETE": "complete_bash",
            "COMP_WORDS": "kvindexer po",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "pods" in completed.stdout.split()
