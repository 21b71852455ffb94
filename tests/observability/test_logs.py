"""One line a record, in either format, whatever is in it; and the same for all that a running indexer says."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import LogFormat, Settings
from app.observability import logs
from app.observability.correlation import CURRENT, Correlation, Trace
from app.serving.connections import ConnectionLimits
from tests.api.conftest import stored
from tests.processes import ROOT
from tests.serving.test_serving import send_raw, serving

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
CONSOLE_LINE = re.compile(rf"{STAMP} (DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: .*")
REQUEST = Correlation("r-1", Trace("ab" * 16, "cd" * 8, True))


@pytest.fixture
def untouched() -> Iterator[None]:
    """Loggers at their defaults, and afterwards as they were before."""
    loggers = [
        logging.getLogger(name)
        for name in ("", "uvicorn", "uvicorn.error", "app.serving.connections", "httpx", "httpcore")
    ]
    before = [(one.handlers[:], one.filters[:], one.propagate, one.level) for one in loggers]
    for one in loggers[1:]:  # a server that an earlier test ran has set them up in its own way
        one.handlers[:], one.filters[:], one.propagate = [], [], True
        one.setLevel(logging.NOTSET)
    yield
    for one, (handlers, filters, propagate, level) in zip(loggers, before, strict=True):
        one.handlers[:], one.filters[:], one.propagate = handlers, filters, propagate
        one.setLevel(level)
    logging.captureWarnings(False)


def formatted(form: LogFormat, message: str, *, request: bool = False, **record: Any) -> str:
    formatter = logs.JsonFormatter() if form == "json" else logs.ConsoleFormatter()
    made = logging.makeLogRecord(
        {"name": "app.test", "levelno": 30, "levelname": "WARNING", "msg": message, **record}
    )

    def write() -> str:
        CURRENT.set(REQUEST if request else None)
        return formatter.format(made)

    return contextvars.Context().run(write)


def failure() -> Any:
    try:
        raise ValueError("first\n2026-01-01T00:00:00.000Z ERROR app: forged")
    except ValueError as error:
        return type(error), error, error.__traceback__


def test_json_has_the_fields_and_the_ids() -> None:
    line = json.loads(formatted("json", "said\n", request=True, pod="pod-a", dp_rank=3, level="mine"))
    assert re.fullmatch(STAMP, line.pop("ts"))
    assert line == {
        "level": "warning",
        "logger": "app.test",
        "message": "said",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
        "pod": "pod-a",
        "dp_rank": 3,
    }


def test_console_has_the_ids_behind_the_message() -> None:
    line = formatted("console", "said", request=True)
    assert re.fullmatch(CONSOLE_LINE, line)
    assert line.endswith(f"WARNING app.test: said [request_id=r-1 trace_id={'ab' * 16} span_id={'cd' * 8}]")
    assert formatted("console", "said").endswith("WARNING app.test: said")


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_cannot_be_taken_for_lines(form: LogFormat) -> None:
    text = formatted(form, "failed", exc_info=failure())
    first, *others = text.split("\n")
    assert "forged" in text
    if form == "json":
        assert others == []
        assert json.loads(first)["traceback"].startswith("Traceback")
    else:
        assert others
        assert all(line.startswith("    ") for line in others)


@given(message=st.text(max_size=200), value=st.text(max_size=50), form=st.sampled_from(["console", "json"]))
def test_whatever_is_logged_is_one_line(message: str, value: str, form: LogFormat) -> None:
    text = formatted(form, "pod %s", args=(message,), pod=value)
    assert len(text.splitlines()) == 1
    if form == "json":
        assert text.isascii()
        line = json.loads(text)
        assert (line["message"], line["pod"]) == (f"pod {message}".rstrip("\n"), value)


@pytest.mark.parametrize("form", ["console", "json"])
def test_long_lines_are_cut(form: LogFormat) -> None:
    text = formatted(form, "x" * 100_000, pod="y" * 100_000)
    assert len(text) < 3 * logs.CHARS_MAX
    assert "(100000 characters)" in text


def test_fields_that_json_does_not_know_are_written_as_text() -> None:
    assert json.loads(formatted("json", "said", at=frozenset({1})))["at"] == "frozenset({1})"


@pytest.mark.usefixtures("untouched")
def test_libraries_and_warnings_are_in_the_format_and_requests_of_ours_are_not_told() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[1mStarted"})
    logging.getLogger("httpx").info("HTTP Request: GET http://pod/metrics")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "py.warnings"]
    assert "color_message" not in lines[0]


# -- what a running indexer says


def said(form: str, *, every: int = 1, level: str = "info") -> list[str]:
    """All lines of an indexer with a source that gets a gap, an answer that fails and one that does not."""
    environment = {
        "KVINDEXER_LOG_FORMAT": form,
        "KVINDEXER_LOG_LEVEL": level,
        "KVINDEXER_ACCESS_LOG_EVERY": str(every),
    }
    with serving("serve", "--port", "0", **environment) as (process, port):
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as http:
            for seq in (0, 4):
                events = [stored([seq + 1], list(range(4)))]
                body = {"pod": "pod-a", "model": "m", "seq": seq, "events": events}
                http.post("/v1/events", json=body, headers={"x-request-id": f"post-{seq}"})
            refused = http.post(
                "/v1/match?salt=secret", json={"model": 1}, headers={"x-request-id": "bad-one"}
            )
            assert refused.json()["request_id"] == refused.headers["x-request-id"] == "bad-one"
        process.terminate()
        _, text = process.communicate(timeout=30)
    return text.splitlines()


def test_every_line_of_a_running_indexer_is_json() -> None:
    lines = [json.loads(line) for line in said("json")]
    for line in lines:
        assert {"ts", "level", "logger", "message"} <= set(line), line
    assert {"uvicorn.error", "app.service.registry", "app.access"} <= {line["logger"] for line in lines}
    [change] = [line for line in lines if line["logger"] == "app.service.registry"]
    assert (change["pod"], change["dp_rank"], change["from"], change["to"]) == (
        "pod-a",
        0,
        "live",
        "degraded",
    )
    assert change["cause"] == "batches 1 to 3 never came"
    assert change["remedy"]
    assert (change["request_id"], change["trace_id"]) == ("post-4", "ab" * 16), "the request that told of it"
    access = [line for line in lines if line["logger"] == "app.access"]
    assert [(line["request_id"], line["status"], line["route"]) for line in access] == [
        ("post-0", 200, "/v1/events"),
        ("post-4", 200, "/v1/events"),
        ("bad-one", 422, "/v1/match"),
    ]
    assert "secret" not in json.dumps(lines)


def test_every_line_of_a_running_indexer_is_for_people_by_default() -> None:
    lines = said("console", every=2)
    assert all(CONSOLE_LINE.fullmatch(line) for line in lines), lines
    [change] = [line for line in lines if " app.service.registry: " in line]
    assert "source pod-a rank 0 is degraded (was live): batches 1 to 3 never came; remedy: " in change
    assert sum(" app.access: " in line for line in lines) == 1, "every second of three"


def test_no_line_for_a_request_unless_it_is_asked_for() -> None:
    lines = [json.loads(line) for line in said("json", every=0)]
    assert [line["logger"] for line in lines if line["logger"].startswith("app.")] == ["app.service.registry"]


def test_level_is_a_setting() -> None:
    lines = [json.loads(line) for line in said("json", level="warning")]
    assert {line["level"] for line in lines} == {"warning"}
    assert [line["logger"] for line in lines] == ["app.service.registry"]


def test_a_fault_is_one_line_with_its_request_and_its_traceback() -> None:
    """The server logs it when the application is through; a method that fails is put into a process of its own."""
    program = (
        "from app.service import IndexerService\n"
        "def fail(way):\n"
        "    raise RuntimeError(f'made on the {way} way')\n"
        "IndexerService.match_json = lambda *_: fail('short')\n"
        "IndexerService.match = lambda *_: fail('long')\n"
        "from app.cli import main\n"
        "main(['serve', '--port', '0', '--log-format', 'json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        for kind in ("application/json", "Application/JSON"):  # the short way, the long one
            answer = httpx.post(
                f"{url}/v1/match",
                content=b'{"model":"m","token_ids":[1]}',
                headers={"content-type": kind, "x-request-id": "r-1"},
            )
            assert (answer.status_code, answer.json()["request_id"]) == (500, "r-1")
    finally:
        process.terminate()
        _, text = process.communicate(timeout=30)
    faults = [line for line in map(json.loads, text.splitlines()) if line["level"] == "error"]
    assert [line["request_id"] for line in faults] == ["r-1", "r-1"]
    for line, way in zip(faults, ("short", "long"), strict=True):
        assert f"RuntimeError: made on the {way} way" in line["traceback"]


def test_what_a_peer_does_wrong_is_said_ever_more_rarely() -> None:
    with serving("serve", "--port", "0", KVINDEXER_LOG_FORMAT="json") as (process, port):
        for _ in range(11):
            assert b"400" in send_raw(port, b"this is no HTTP\r\n\r\n")
        process.terminate()
        _, text = process.communicate(timeout=30)
    lines = [json.loads(line) for line in text.splitlines()]
    said = [line["message"] for line in lines if line["level"] == "warning"]
    assert said == [f"Invalid HTTP request received. ({count} in all)" for count in (1, 2, 4, 8)]


@pytest.mark.usefixtures("untouched")
def test_a_crowd_does_not_fill_the_log() -> None:
    said = io.StringIO()
    logs.configure("info", "console", said)
    limits = ConnectionLimits(Settings(connections_max=4))
    for _ in range(1_000):
        limits.refuse()
    assert limits.counters()["refused"] == 1_000
    assert len(said.getvalue().splitlines()) == 10, "the 1st, 2nd, 4th ... 512th"
