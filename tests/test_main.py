"""Everything wired together, with a real publisher: configured, connected, ready, matched, measured."""

from __future__ import annotations

import contextlib
import time

import httpx

from tests.ingest.publisher import Publisher
from tests.serving.test_serving import serving

DEADLINE_S = 20.0


def wait_for(http: httpx.Client, path: str, status: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (response := http.get(path)).status_code != status:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.01)


def test_ready_once_the_configured_pod_has_been_replayed(publisher: Publisher) -> None:
    """What was published before the start is seen by the first match after /readyz says so."""
    publisher.publish(5)
    pod = f"pod-a=tcp://127.0.0.1:{publisher.port},model=m,replay=tcp://127.0.0.1:{publisher.replay_port}"
    with contextlib.ExitStack() as stack:
        arguments = ["serve", "--port", "0", "--pod", pod]
        _, port = stack.enter_context(serving(*arguments, KVINDEXER_READY_GRACE_S="600"))
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        wait_for(http, "/readyz", 200)
        answer = http.post("/v1/match", json={"model": "m", "token_ids": [3] * 4}).json()
        assert [row["matched_blocks"] for row in answer["matches"]] == [1]
        (rank,) = http.get("/v1/pods/pod-a").json()["ranks"]
        assert (rank["last_seq"], rank["state"]) == (4, "live")
        text = http.get("/metrics").text
        assert "kvindexer_zmq_batches_applied_total 5.0" in text
        assert "kvindexer_event_lag_seconds_count 5.0" in text
        assert 'kvindexer_source_state{dp_rank="0",pod="pod-a",state="live"} 1.0' in text


def test_ready_once_connected_where_nothing_can_be_replayed() -> None:
    """An idle engine without a replay endpoint is not waited for until the end of the time of grace."""
    publisher = Publisher(replay=False)
    try:
        arguments = ["serve", "--port", "0", "--pod", f"pod-a=tcp://127.0.0.1:{publisher.port},model=m"]
        with (
            serving(*arguments, KVINDEXER_READY_GRACE_S="600") as (_, port),
            httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
        ):
            wait_for(http, "/readyz", 200)
            (rank,) = http.get("/v1/pods/pod-a").json()["ranks"]
            assert rank["state"] == "catching_up"
            assert "without a replay endpoint" in rank["cause"]
    finally:
        publisher.kill()
