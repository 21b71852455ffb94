"""Spans: which requests have one, whose children they are, and that they arrive at a collector over OTLP."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.api.observation import RequestObservation
from app.api.short_way import ShortWay
from app.config import load_settings
from app.observability.correlation import CURRENT
from app.observability.tracing import Spans
from app.service import IndexerService
from tests.api.conftest import Clock, Indexer
from tests.serving.test_serving import ROOT, finished, serving
from tests.tokenizers import save_tokenizer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
MATCH = {"model": "m", "token_ids": [1, 2, 3, 4]}
DEADLINE_S = 30.0


class Traced:
    """An indexer on one of the two ways, whose spans are kept here."""

    def __init__(self, way: str, requests_every: int, **settings: Any) -> None:
        self.indexer = Indexer(load_settings(**settings), Clock())
        self._exporter = InMemorySpanExporter()
        self._spans = Spans(self._exporter, requests_every=requests_every)
        app = self.indexer.app
        wiring = app.state.wiring
        inner = ShortWay(app.framework, wiring=wiring) if way == "short" else app.framework
        app.front = RequestObservation(inner, metrics=wiring.metrics, spans=self._spans)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.indexer.post(path, body, headers=headers)

    def close(self) -> list[ReadableSpan]:
        self.indexer.close()
        self._spans.close()
        return list(self._exporter.get_finished_spans())


@pytest.fixture(params=["short", "long"])
def make(request: pytest.FixtureRequest) -> Callable[..., Traced]:
    return lambda requests_every=0, **settings: Traced(request.param, requests_every, **settings)


def test_the_caller_decides_where_it_sends_a_trace(make: Callable[..., Traced]) -> None:
    traced = make(requests_every=1)
    traced.post("/v1/match", MATCH, traceparent=SAMPLED, **{"x-request-id": "r-1"})
    traced.post("/v1/match", MATCH, traceparent=UNSAMPLED)
    [span] = traced.close()
    assert (span.name, span.kind.name) == ("POST /v1/match", "SERVER")
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/match",
        "http.response.status_code": 200,
        "url.path": "/v1/match",
        "kvindexer.request_id": "r-1",
    }
    assert span.resource.attributes["service.name"] == "kvindexer"


def test_one_of_so_many_begins_a_trace_of_its_own(make: Callable[..., Traced]) -> None:
    traced = make(requests_every=3)
    for _ in range(7):
        traced.post("/v1/match", MATCH)
    spans = traced.close()
    assert len(spans) == 2
    assert all(span.parent is None for span in spans)
    assert len({span.context.trace_id for span in spans}) == 2


def test_none_without_a_trace_where_none_is_asked_for(make: Callable[..., Traced]) -> None:
    traced = make(requests_every=0)
    traced.post("/v1/match", MATCH)
    traced.post("/v1/match", MATCH, traceparent="00-nonsense")
    assert traced.close() == []


def test_refusals_and_faults_end_their_spans(
    make: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("made by the test")

    traced = make(requests_every=1)
    traced.post("/v1/match", {"model": 7})
    traced.post("/no/such/path", {})
    monkeypatch.setattr(IndexerService, "match_json", fail)
    monkeypatch.setattr(IndexerService, "match", fail)
    traced.post("/v1/match", MATCH)
    assert [(span.name, span.status.is_ok, span.status.status_code.name) for span in traced.close()] == [
        ("POST /v1/match", True, "UNSET"),
        ("POST unmatched", True, "UNSET"),
        ("POST /v1/match", False, "ERROR"),
    ]


def test_the_wait_for_a_tokenizer_is_a_span_below(make: Callable[..., Traced], tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "m")
    traced = make(requests_every=1, tokenizers=f"m={tmp_path / 'm'}")
    assert traced.post("/v1/match", {"model": "m", "text": "the cat"}).status_code == 200
    assert traced.post("/v1/match", {"model": "m", "text": "the cat"}).status_code == 200
    first, *others = sorted(traced.close(), key=lambda span: span.name != "tokenize")
    assert [span.name for span in others] == ["POST /v1/match"] * 2, "the second was in the cache"
    assert first.parent is not None
    assert first.parent.span_id == others[0].context.span_id


def test_log_lines_name_our_span(make: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    stats = IndexerService.stats

    def look(self: IndexerService) -> Any:
        seen.append(CURRENT.get())
        return stats(self)

    monkeypatch.setattr(IndexerService, "stats", look)
    traced = make()
    traced.indexer.get("/v1/stats", headers={"traceparent": SAMPLED})
    [span] = traced.close()
    assert seen[0] is not None
    assert seen[0].trace is not None
    assert (seen[0].trace.trace_id, seen[0].trace.span_id) == (TRACE, f"{span.context.span_id:016x}")


# -- to a collector


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP; what it took is in `spans`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans: list[Any] = []
        self.paths: set[str] = set()


class _Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.headers["content-type"] == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(body)
        self.server.paths.add(self.path)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def test_spans_reach_a_collector_and_the_last_ones_at_the_end() -> None:
    with collecting() as collector:
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        environment = {"KVINDEXER_OTLP_ENDPOINT": endpoint, "KVINDEXER_OTLP_REQUESTS_EVERY": "0"}
        with serving("serve", "--port", "0", **environment) as (process, port):
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                for trace in (SAMPLED, UNSAMPLED, SAMPLED):
                    client.post("/v1/match", json=MATCH, headers={"traceparent": trace})
            process.terminate()
            _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert [(span.name, span.trace_id.hex()) for span in collector.spans] == [("POST /v1/match", TRACE)] * 2
    assert collector.paths == {"/v1/traces"}


def test_a_collector_that_does_not_answer_delays_neither_answers_nor_the_end() -> None:
    """It takes the connection and is silent: the worst that it can do."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        environment = {"KVINDEXER_OTLP_ENDPOINT": endpoint, "KVINDEXER_LOG_FORMAT": "json"}
        with serving("serve", "--port", "0", **environment) as (process, port):
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                for _ in range(20):
                    answer = client.post("/v1/match", json=MATCH, headers={"traceparent": SAMPLED})
                    assert answer.status_code == 200
            began_s = time.monotonic()
            process.terminate()
            _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert time.monotonic() - began_s < 20, (
        "a bound far above FLUSH_MS and EXPORT_TIMEOUT_S, and below patience"
    )
    for line in err.splitlines():
        json.loads(line)


def test_nothing_of_it_is_imported_without_an_endpoint() -> None:
    program = (
        "import sys\n"
        "from app.config import load_settings\n"
        "from app.main import create_app\n"
        "create_app(load_settings())\n"
        "assert not any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=DEADLINE_S)


def test_an_endpoint_without_the_packages_stops_the_start() -> None:
    hide = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from app.cli import main; main(['serve', '--port', '0'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide],
        cwd=ROOT,
        env={"KVINDEXER_OTLP_ENDPOINT": "http://127.0.0.1:1/v1/traces"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "kvindexer[otel]" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_that_is_none_stops_the_start() -> None:
    code, _, err = finished("serve", KVINDEXER_OTLP_ENDPOINT="collector:4318")
    assert code == 2
    assert "KVINDEXER_OTLP_ENDPOINT='collector:4318'" in err
