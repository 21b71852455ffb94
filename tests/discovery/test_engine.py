"""What engines tell of themselves: the answers of a real vLLM, of simulated pods, and what cannot be followed."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.discovery.engine import learn, read_answers
from app.discovery.sightings import Said, Sighting, sight
from app.errors import IndexerError, InvalidInput, Unresponsive
from app.pods import PodSpec
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.pod import PodSettings

REAL = Path(__file__).parent.parent / "data" / "captures" / "v0.32.0-http"
SOURCES = (REAL / "kv_event_sources.json").read_bytes()
PAGE = (REAL / "metrics.txt").read_bytes()


def seen(address: str = "10.0.0.7", **said: Any) -> Sighting:
    return sight("pod", "", address, Said(**said))


def source(**more: Any) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:6557",
        "topic": "",
        **more,
    }


def answer(*sources: dict[str, Any]) -> bytes:
    return json.dumps({str(dp_rank): one for dp_rank, one in enumerate(sources)}).encode()


def test_a_real_vllm_on_this_machine() -> None:
    learned = read_answers(seen("127.0.0.1"), SOURCES, PAGE)
    assert learned.notes == ()
    assert learned.spec == PodSpec(
        "pod",
        model="tiny",
        block_size=32,
        zmq_endpoint="tcp://127.0.0.1:15557",
        replay_endpoint="tcp://127.0.0.1:15657",
        topic="kv@127.0.0.1@tiny",
        metrics_url="http://127.0.0.1:8000/metrics",
    )


def test_a_replay_on_the_engines_own_loopback_is_left_out_and_said() -> None:
    learned = read_answers(seen(), SOURCES, PAGE)
    assert learned.spec.zmq_endpoint == "tcp://10.0.0.7:15557"
    assert learned.spec.replay_endpoint is None
    assert "is not bound to 10.0.0.7: lost batches stay lost" in learned.notes[0]
    elsewhere = read_answers(seen(), answer(source(replay_endpoint="tcp://10.9.9.9:22")), PAGE)
    assert elsewhere.spec.replay_endpoint is None, "no engine sends us to another machine"
    without = read_answers(seen(), answer(source(replay_endpoint=None)), PAGE)
    assert without.notes == ("it has no replay endpoint: lost batches stay lost",)


def test_ranks_at_the_ports_behind_the_first_or_all_told_as_the_base() -> None:
    own = answer(source(), source(endpoint="tcp://*:5558", replay_endpoint="tcp://*:6558"))
    for sources in (own, answer(source(), source())):
        spec = read_answers(seen("fd00::7"), sources, PAGE).spec
        assert (spec.zmq_endpoint, spec.replay_endpoint) == ("tcp://[fd00::7]:5557", "tcp://[fd00::7]:6557")
        assert spec.dp_size == 2
        assert spec.metrics_url == "http://[fd00::7]:8000/metrics"


def test_what_is_said_stands_above_what_is_learned() -> None:
    spec = read_answers(seen(model="alias", lora="a", block_size=64, port=9000), SOURCES, PAGE).spec
    assert (spec.model, spec.lora, spec.block_size) == ("alias", "a", 64)
    assert spec.metrics_url == "http://10.0.0.7:9000/metrics"


@pytest.mark.parametrize(
    ("labels", "block_size"),
    [
        ('block_size="16"', 16),
        ('block_size="16",hash_block_size="None"', 16),
        ('block_size="16",hash_block_size="32"', None),
        ('block_size="16",effective_attention_block_size="16"', 16),
        ('block_size="None"', None),
        ('block_size="0"', None),
        ('block_size="many"', None),
        ('other="1"', None),
    ],
)
def test_a_block_size_is_taken_only_when_the_page_is_of_one_mind(labels: str, block_size: int | None) -> None:
    page = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
        "# TYPE vllm:cache_config_info gauge\n"
        f"vllm:cache_config_info{{{labels}}} 1\n"
    )
    assert read_answers(seen(), answer(source()), page.encode()).spec.block_size == block_size


TWO_MODELS = PAGE + b'vllm:num_requests_running{engine="1",model_name="other"} 0\n'


@pytest.mark.parametrize(
    ("sources", "page", "fault"),
    [
        (b"<html>", PAGE, "not what an engine answers"),
        (b"[]", PAGE, "not what an engine answers"),
        (b"{}", PAGE, "has the ranks none"),
        (b'{"1":{}}', PAGE, "has the ranks 1, not"),
        (b'{"a":{}}', PAGE, "has the ranks a, not"),
        (answer(source(enable_kv_cache_events=False)), PAGE, "rank 0 does not publish"),
        (answer(source(), source(publisher="null")), PAGE, "rank 1 does not publish"),
        (answer(source(endpoint=None)), PAGE, "rank 0 does not publish"),
        (answer(source(endpoint="tcp://indexer:5557")), PAGE, "connects to tcp://indexer:5557 to publish"),
        (answer(source(endpoint="ipc:///tmp/x")), PAGE, "not an endpoint"),
        (answer(source(), source(endpoint="tcp://*:5559")), PAGE, "not at consecutive ports"),
        (answer(source(), source(topic="other")), PAGE, "different topics"),
        (answer(source(), source(replay_endpoint="tcp://*:6559")), PAGE, "replay_endpoints of its ranks"),
        (
            answer(source(replay_endpoint="tcp://*:5558"), source(replay_endpoint="tcp://*:5558")),
            PAGE,
            "overlap",
        ),
        (answer(source()), b"", "name no model, or several"),
        (answer(source()), TWO_MODELS, "name no model, or several"),
        (
            answer(source()),
            b'vllm:num_requests_running{model_name="' + b"m" * 5_000 + b'"} 0\n',
            "its model is none",
        ),
        (answer(source(topic="a\n")), PAGE, "its topic is none"),
        (answer(source()), b"vllm:num_requests_running{ 3\n", "not Prometheus' text"),
    ],
)
def test_what_cannot_be_followed_says_why(sources: bytes, page: bytes, fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        read_answers(seen(), sources, page)


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_simulated_pod_tells_what_an_operator_would_have_written(dp_size: int) -> None:
    engine = EngineSettings(cache=KVCacheSettings(capacity_pages=50, block_size=4))
    pod = PodSettings(name="sim", model="m", engine=engine, dp_size=dp_size, topic="kv@sim@m")

    async def run() -> None:
        async with (
            Fleet(FleetSettings(pods=1, pod=pod)) as fleet,
            httpx.AsyncClient(timeout=20.0) as client,
        ):
            [running] = fleet.pods
            port = int(running.url.rpartition(":")[2])
            learned = await learn(client, seen("127.0.0.1", port=port), metrics_bytes_max=1 << 20)
            assert learned.notes == ()
            assert learned.spec == PodSpec("pod", **running.registration())
            await running.pod.crash()
            with pytest.raises(Unresponsive, match="answered 503"):
                await learn(client, seen("127.0.0.1", port=port), metrics_bytes_max=1 << 20)

    asyncio.run(run())


class Engine(http.server.BaseHTTPRequestHandler):
    status = 200
    sources = SOURCES

    def do_GET(self) -> None:
        body = self.sources if self.path == "/kv_event_sources" else PAGE
        self.send_response(self.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[type[Engine]]:
    class Own(Engine):
        port = 0

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        Own.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Own
        server.shutdown()
        thread.join()


def refused(port: int, *, metrics_bytes_max: int = 1 << 20) -> IndexerError:
    async def run() -> None:
        async with httpx.AsyncClient(timeout=20.0) as client:
            await learn(client, seen("127.0.0.1", port=port), metrics_bytes_max=metrics_bytes_max)

    with pytest.raises((Unresponsive, InvalidInput)) as caught:
        asyncio.run(run())
    return caught.value


def test_what_is_no_answer(engine: Any) -> None:
    engine.status = 404
    assert "older than vLLM 0.32, so say zmq_port= and model=" in str(refused(engine.port))
    engine.status = 302
    assert "answered 302" in str(refused(engine.port))
    engine.status = 200
    assert "more than 1000 bytes" in str(refused(engine.port, metrics_bytes_max=1_000))
    engine.sources = b" " * (1024 * 1024 + 1)
    assert "more than 1048576 bytes" in str(refused(engine.port))
    assert "does not answer" in str(refused(1))
