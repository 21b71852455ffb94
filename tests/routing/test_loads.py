"""Loads as real pages of metrics tell them, read from a real HTTP server."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.config import load_settings
from app.pods import PodSpec
from app.routing.loads import Loads, read_loads
from app.routing.routing import Load
from tests.discovery.waiting import until
from tests.serving.test_serving import serving

PAGE = b"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


def test_page_of_two_ranks() -> None:
    assert read_loads(PAGE) == {0: Load(3, 1, 0.25), 1: Load(4, 0, 0.5)}


def test_page_of_an_older_release() -> None:
    page = b'vllm:num_requests_running{model_name="m"} 2\nvllm:gpu_cache_usage_perc{model_name="m"} 0.75\n'
    assert read_loads(page) == {0: Load(2, 0, 0.75)}


def test_models_of_one_rank_are_added_up() -> None:
    page = b'vllm:num_requests_running{model_name="m"} 2\nvllm:num_requests_running{model_name="n"} 3\n'
    assert read_loads(page) == {0: Load(running=5)}


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not metrics</html>",
        b"vllm:num_requests_running{ 3",
        b'vllm:num_requests_running{engine="0"} many\n',
        b'vllm:num_requests_running{engine="0"} NaN\n',
        b'vllm:num_requests_running{engine="0"} -1\n',
        b'vllm:num_requests_running{engine="x"} 1\n',
        b'vllm:num_requests_running{engine="\xff"} 1\n',
        b"\n".join(b'vllm:num_requests_running{engine="%d"} 1' % rank for rank in range(1_100)),
    ],
)
def test_page_that_says_nothing(page: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_loads(page)


class Pod(http.server.BaseHTTPRequestHandler):
    page = PAGE
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *arguments: Any) -> None:
        """Nothing: a test says what it saw."""


@pytest.fixture
def pod() -> Iterator[tuple[type[Pod], str]]:
    class OnePod(Pod):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OnePod)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield OnePod, f"http://127.0.0.1:{server.server_address[1]}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


class Polling:
    """Loads of the pods that `urls` names, with a clock that only moves when told."""

    def __init__(self, **urls: str | None) -> None:
        self.now_s = 10.0
        self.urls = urls
        self.loads = Loads(
            load_settings(loads_stale_s=5, loads_bytes_max=4_096),
            pods=lambda: [PodSpec(name, "m", metrics_url=url) for name, url in self.urls.items()],
            clock=lambda: self.now_s,
        )

    def poll(self) -> None:
        async def once() -> None:
            async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
                await self.loads.poll(client)

        asyncio.run(once())

    @property
    def counts(self) -> tuple[int, int]:
        counters = self.loads.counters()
        return counters["polls"], counters["failures"]


def test_poll(pod: tuple[type[Pod], str]) -> None:
    polling = Polling(a=pod[1], b=None)
    assert polling.loads.load("a", 0) is None
    polling.poll()
    assert [polling.loads.load("a", rank) for rank in (0, 1, 2)] == [Load(3, 1, 0.25), Load(4, 0, 0.5), None]
    assert polling.loads.load("b", 0) is None
    assert polling.counts == (1, 0)
    assert polling.loads.gauges() == {"known": 1}


@pytest.mark.parametrize(("age_s", "known"), [(0, True), (4.9, True), (5.0, True), (5.1, False)])
def test_stale_loads_do_not_count(pod: tuple[type[Pod], str], age_s: float, known: bool) -> None:
    polling = Polling(a=pod[1])
    polling.poll()
    polling.now_s += age_s
    assert (polling.loads.load("a", 0) is not None) is known
    assert polling.loads.gauges() == {"known": int(known)}


@pytest.mark.parametrize(
    ("status", "page"), [(500, PAGE), (302, b""), (200, b"nothing"), (200, PAGE + b"#" * 5_000)]
)
def test_failures_are_counted_and_keep_the_last(
    pod: tuple[type[Pod], str], status: int, page: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    polling = Polling(a=pod[1])
    polling.poll()
    pod[0].status, pod[0].page = status, page
    polling.poll()
    polling.poll()
    assert polling.counts == (3, 2)
    assert polling.loads.load("a", 0) == Load(3, 1, 0.25)
    assert sum("cannot be read" in line for line in caplog.messages) == 1, "said once, not every second"


def test_a_pod_does_not_choose_what_is_asked(pod: tuple[type[Pod], str]) -> None:
    """Another answer than its own load may be behind a redirect, of a place that only this process can reach."""
    asked: list[str] = []

    def do_get(self: Pod) -> None:
        asked.append(self.path)
        self.status = 302 if self.path == "/metrics" else 200
        Pod.do_GET(self)

    pod[0].do_GET = do_get  # type: ignore[method-assign]
    polling = Polling(a=pod[1])

    async def play() -> None:
        polling.loads.start()
        await until(lambda: polling.counts[1] or polling.loads.load("a", 0), "it was asked")
        await polling.loads.stop()

    asyncio.run(play())
    assert set(asked) == {"/metrics"}
    assert polling.loads.load("a", 0) is None


def test_pod_that_is_gone_or_moved_is_forgotten(pod: tuple[type[Pod], str]) -> None:
    polling = Polling(a=pod[1], b=pod[1])
    polling.poll()
    polling.urls = {"b": "http://127.0.0.1:1/metrics"}
    polling.poll()
    assert [polling.loads.load(name, 0) for name in "ab"] == [None, None]


def test_impossible_addresses_are_failures() -> None:
    polling = Polling(
        a="http://127.0.0.1:1/metrics", b="http://no-such-host.invalid/metrics", c="http://[::1/"
    )
    polling.poll()
    assert polling.counts == (3, 3)


def test_a_choice_goes_by_what_was_read(pod: tuple[type[Pod], str]) -> None:
    """Everything wired together: the running service asks the pod by itself."""
    deadline_s = time.monotonic() + 20
    arguments = ["serve", "--port", "0", "--pod", f"a=,model=m,metrics={pod[1]}"]
    with (
        serving(*arguments, KVINDEXER_LOADS_INTERVAL_S="0.05") as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        while True:
            answer = client.post("/v1/route", json={"model": "m", "token_ids": [1, 2, 3]}).json()
            if answer["candidates"][0]["load"] is not None:
                break
            assert time.monotonic() < deadline_s, answer
            time.sleep(0.01)
        assert answer["candidates"][0]["load"] == {"running": 3, "waiting": 1, "kv_usage": 0.25}
        assert "kvindexer_loads_known 1.0" in client.get("/metrics").text
