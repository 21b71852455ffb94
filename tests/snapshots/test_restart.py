"""An indexer that ends, by a signal or without a word, and comes back: what it knew, and how far it is trusted."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from app.snapshots.file import SnapshotReader, previous_of
from tests.ingest.publisher import Publisher
from tests.serving.test_serving import serving

DEADLINE_S = 20.0


@contextlib.contextmanager
def indexer(path: Path, *arguments: str, kill: bool = False) -> Iterator[httpx.Client]:
    settings = {
        "KVINDEXER_SNAPSHOT_PATH": str(path),
        "KVINDEXER_SNAPSHOT_INTERVAL_S": "1" if kill else "3600",
        "KVINDEXER_READY_GRACE_S": "600",
    }
    with contextlib.ExitStack() as stack:
        process, port = stack.enter_context(serving("serve", "--port", "0", *arguments, **settings))
        url = f"http://127.0.0.1:{port}"
        http = stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S))
        wait_for(http, "/readyz", lambda response: response.status_code == 200)
        yield http
        if kill:
            process.kill()


def wait_for(http: httpx.Client, path: str, is_there: Any) -> httpx.Response:
    deadline = time.monotonic() + DEADLINE_S
    while not is_there(response := http.get(path)):
        assert time.monotonic() < deadline, response.text
        time.sleep(0.01)
    return response


def post(http: httpx.Client, pod: str, *names: int, seq: int | None) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": None,
        "token_ids": [name for name in names for _ in range(4)],
        "block_size": 4,
    }
    http.post("/v1/events", json={"pod": pod, "model": "m", "seq": seq, "events": [event]}).raise_for_status()


def rows(http: httpx.Client, *names: int) -> dict[str, tuple[int, str]]:
    tokens = [name for name in names for _ in range(4)]
    answer = http.post("/v1/match", json={"model": "m", "token_ids": tokens}).json()
    return {row["pod"]: (row["matched_blocks"], row["state"]) for row in answer["matches"]}


def digest(http: httpx.Client) -> str:
    return str(http.get("/v1/stats").json()["digest"])


def pod_argument(publisher: Publisher) -> str:
    return f"pod-z=tcp://127.0.0.1:{publisher.port},model=m,replay=tcp://127.0.0.1:{publisher.replay_port}"


def test_posted_events_outlive_an_orderly_end(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with indexer(path) as http:
        post(http, "pod-a", 1, 2, 3, seq=0)
        post(http, "pod-b", 1, 2, seq=None)
        before = digest(http)
    assert SnapshotReader(path).state.digest == before
    with indexer(path) as http:
        assert digest(http) == before
        assert rows(http, 1, 2, 3) == {"pod-a": (3, "live"), "pod-b": (2, "degraded")}
        post(http, "pod-a", 1, 2, 3, seq=0)  # the same again is known
        post(http, "pod-a", 4, seq=1)
        assert rows(http, 4) == {"pod-a": (1, "live")}
        assert digest(http) != before
        post(http, "pod-a", 5, seq=3)
        assert rows(http, 4) == {"pod-a": (1, "degraded")}


def test_owners_and_hints_outlive_an_orderly_end(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    blocks = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 4}
    event = {**blocks, "token_ids": [1] * 4 + [2] * 4, "metadata": {"agent_id": "planner"}}
    asked = {"model": "m", "token_ids": [2] * 4}

    def picture(http: httpx.Client) -> list[Any]:
        held = http.post("/v1/match", json={"model": "m", "token_ids": event["token_ids"]}).json()["matches"]
        found = [
            http.post("/v1/fuzzy-match", json={**asked, "exclude": exclude}).json()["blocks"]
            for exclude in ([], ["agent1"], ["agent1", "agent2"])
        ]
        return [http.get("/v1/owners").json(), [row["hints"] for row in held], found]

    with indexer(path) as http:
        for owner in ("agent1:system", "agent2", "gone"):
            body = {"pod": "pod-a", "model": "m", "events": [event], "owner": owner}
            http.post("/v1/events", json=body).raise_for_status()
        http.delete("/v1/owners/gone").raise_for_status()
        before = picture(http)
    assert before[0] == {
        "owners": [{"owner": "agent1:system", "blocks": 2}, {"owner": "agent2", "blocks": 2}]
    }
    assert [hint["metadata"] for (hint,) in before[1]] == [{"agent_id": "planner"}]
    assert [[match["owners"] for block in blocks for match in block["matches"]] for blocks in before[2]] == [
        [["agent1:system", "agent2"]],
        [["agent2"]],
        [],
    ]
    with indexer(path) as http:
        assert picture(http) == before


def test_killed_without_a_word_in_between_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with indexer(path, kill=True) as http:
        post(http, "pod-a", 1, 2, 3, seq=0)
        saved = "kvindexer_snapshot_saved_total"
        first = wait_for(http, "/metrics", lambda r: count(r.text, saved) >= 1)
        now = count(first.text, saved)
        wait_for(http, "/metrics", lambda r: count(r.text, saved) > now)
        before = digest(http)
    with indexer(path) as http:
        assert digest(http) == before
        assert rows(http, 1, 2, 3) == {"pod-a": (3, "live")}


def count(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_a_followed_stream_goes_on_where_it_was(tmp_path: Path, publisher: Publisher) -> None:
    """Published while nobody listened: all of it is there, and nothing is counted twice."""
    path = tmp_path / "snapshot"
    publisher.publish(5)
    with indexer(path, "--pod", pod_argument(publisher)) as http:
        before = digest(http)
    publisher.publish(3)
    served = publisher.replays_served
    with indexer(path, "--pod", pod_argument(publisher)) as http:
        assert publisher.replays_served > served
        (rank,) = http.get("/v1/pods/pod-z").json()["ranks"]
        assert (rank["last_seq"], rank["state"], rank["blocks"]["gpu"], rank["restarts"]) == (7, "live", 8, 0)
        assert digest(http) != before
        assert http.get("/v1/stats").json()["events"] == {"BlockStored": 3}  # and not from the beginning
        assert http.get("/v1/stats").json()["index"]["copies"] == 0


def test_an_engine_that_restarted_meanwhile_is_learned_anew(tmp_path: Path, publisher: Publisher) -> None:
    path = tmp_path / "snapshot"
    publisher.publish(5)
    with indexer(path, "--pod", pod_argument(publisher)) as http:
        assert rows(http, 3) == {"pod-z": (1, "live")}
    publisher.restart_in_place()
    publisher.publish(6)
    with indexer(path, "--pod", pod_argument(publisher)) as http:
        wait_for(http, "/v1/pods/pod-z", lambda r: r.json()["ranks"][0]["last_seq"] == 5)
        assert rows(http, 3) == {}
        assert rows(http, 1_000_003) == {"pod-z": (1, "live")}
        (rank,) = http.get("/v1/pods/pod-z").json()["ranks"]
        assert (rank["blocks"]["gpu"], rank["restarts"]) == (6, 1)


def test_a_damaged_file_is_refused_and_the_one_before_taken(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with indexer(path) as http:
        post(http, "pod-a", 1, 2, seq=0)
        before = digest(http)
    with indexer(path) as http:
        post(http, "pod-a", 3, seq=1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with indexer(path) as http:
        assert digest(http) == before
        assert rows(http, 1, 2) == {"pod-a": (2, "live")}
        assert count(http.get("/metrics").text, "kvindexer_snapshot_refused_total") == 1
    for file in (path, previous_of(path)):
        file.write_bytes(b"something else")
    with indexer(path) as http:
        assert rows(http, 1, 2) == {}
        assert count(http.get("/metrics").text, "kvindexer_snapshot_refused_total") == 2


def test_a_pod_comes_back_as_it_is_configured_now(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with indexer(path, "--pod", "gone=,model=m", "--pod", "kept=,model=m", "--pod", "other=,model=m") as http:
        for pod in ("gone", "kept", "other", "own"):
            post(http, pod, 1, seq=0)
    with indexer(path, "--pod", "kept=,model=m", "--pod", "other=,model=m,lora=tuned") as http:
        assert rows(http, 1) == {"kept": (1, "live"), "own": (1, "live")}
        assert {pod["pod"] for pod in http.get("/v1/pods").json()["pods"]} == {"kept", "other", "own"}


def test_probes_are_answered_while_the_snapshot_is_read(tmp_path: Path) -> None:
    """A pipe nobody writes into is a file that takes for ever to be read: alive, not ready, and no half a picture."""
    path = tmp_path / "snapshot"
    with indexer(path) as http:
        post(http, "pod-a", 1, 2, seq=0)
        before = digest(http)
    os.replace(path, previous_of(path))
    os.mkfifo(path)
    settings = {"KVINDEXER_SNAPSHOT_PATH": str(path), "KVINDEXER_SNAPSHOT_INTERVAL_S": "3600"}
    with (
        serving("serve", "--port", "0", **settings) as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http,
    ):
        assert http.get("/healthz").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert http.get("/readyz").json()["errors"] == [{"field": "", "detail": "the process is starting"}]
        for refused in (
            http.post("/v1/match", json={"model": "m", "token_ids": [1] * 4}),
            http.post("/v1/events", json={"pod": "pod-a", "model": "m", "events": []}),
            http.get("/v1/stats"),
        ):
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:kvindexer:problem:starting"
            assert refused.headers["Retry-After"] == "1"
        path.open("wb").close()  # an empty file: refused, and the one before is taken
        wait_for(http, "/readyz", lambda response: response.status_code == 200)
        assert digest(http) == before
        assert rows(http, 1, 2) == {"pod-a": (2, "live")}


def test_an_end_during_the_start_leaves_the_snapshots_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with indexer(path) as http:
        post(http, "pod-a", 1, 2, seq=0)
    os.replace(path, previous_of(path))
    kept = previous_of(path).read_bytes()
    os.mkfifo(path)
    settings = {"KVINDEXER_SNAPSHOT_PATH": str(path), "KVINDEXER_SNAPSHOT_INTERVAL_S": "3600"}
    with serving("serve", "--port", "0", **settings) as (process, port):
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        process.terminate()
        assert process.stderr is not None
        while "Application shutdown complete" not in process.stderr.readline():
            assert process.poll() is None, "it says when it is done"
        path.open("wb").close()  # lets the reading thread end
        assert process.wait(DEADLINE_S) == 0
    assert path.is_fifo()
    assert previous_of(path).read_bytes() == kept
