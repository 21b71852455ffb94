"""A guarded indexer as a process of its own: keys that change, doors that are open, and what it says of secrets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serving.test_serving import DEADLINE_S, connected, finished, serving

READ, WRITE = "reading-key-0123456789", "writing-key-0123456789"


def ask(
    port: int, method: str, path: str, key: str | None, body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Status, and everything that came back as text, headers included."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    with connected(port) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, f"{response.msg}\n{response.read().decode()}"


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_keys_change_without_a_restart(tmp_path: Path) -> None:
    """Rotated as a mounted secret is: a link that is moved to a new folder."""
    first, second, link = tmp_path / "1", tmp_path / "2", tmp_path / "current"
    for folder, keys in ((first, "old-key-0123456789:write\n"), (second, "new-key-0123456789:write\n")):
        folder.mkdir()
        (folder / "keys").write_text(keys)
    link.symlink_to(first)
    with serving("serve", "--port", "0", KVINDEXER_API_KEYS_FILE=str(link / "keys")) as (_, port):
        assert ask(port, "GET", "/v1/pods", "old-key-0123456789")[0] == 200
        assert ask(port, "GET", "/v1/pods", "new-key-0123456789")[0] == 401
        live = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        with contextlib.closing(live):
            live.request("GET", "/v1/live", headers={"Authorization": "Bearer old-key-0123456789"})
            feed = live.getresponse()
            assert feed.readline().startswith(b": kvindexer")
            moved = tmp_path / "moved"
            moved.symlink_to(second)
            moved.rename(link)
            wait_until(
                lambda: ask(port, "GET", "/v1/pods", "new-key-0123456789")[0] == 200,
                "the new key was never taken",
            )
            assert ask(port, "GET", "/v1/pods", "old-key-0123456789")[0] == 401
            assert feed.read() == b"\n", "what a revoked key had opened goes on"
        (second / "keys").write_text("broken\n")

        def is_counted() -> bool:
            text = ask(port, "GET", "/metrics", "new-key-0123456789")[1]
            return "kvindexer_access_reload_failures_total 0.0" not in text

        wait_until(is_counted, "a broken file went unseen")
        assert ask(port, "GET", "/v1/pods", "new-key-0123456789")[0] == 200


TARGETS = [
    "/v1/pods",
    "//v1/pods",
    "/v1/pods?/healthz",
    "/v1/pods#/healthz",
    "/healthz/../v1/pods",
    "/healthz/%2e%2e/v1/pods",
    "/dashboard/../v1/pods",
    "/dashboard/..%2fv1%2fpods",
    "/dashboard/%2e%2e/%2e%2e/main.py",
    "/v1/%70ods",
    "/%2fv1/pods",
    "http://indexer/v1/pods",
    "http://indexer/healthz/../v1/pods",
    "/healthz%00/v1/pods",
    "/healthz;/v1/pods",
    "*",
]


@pytest.fixture(scope="module")
def guarded_port() -> Iterator[int]:
    with serving("serve", "--port", "0", KVINDEXER_API_KEYS=f"{READ}:read,{WRITE}:write") as (_, port):
        yield port


def sent(port: int, request: str) -> list[int]:
    """The statuses of all answers to these bytes; the connection ends with the last."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as wire:
        wire.sendall(request.encode())
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := wire.recv(65_536):
                received += chunk
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH"])
def test_no_target_on_the_wire_goes_around_it(guarded_port: int, method: str, target: str) -> None:
    body = '{"pod":"pod-z","model":"m","events":[]}'
    head = f"Host: indexer\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    (status,) = sent(guarded_port, f"{method} {target} HTTP/1.1\r\n{head}\r\n{body}") or [400]
    # 404 and 405 are of the dashboard's files; 400: no target at all.
    assert status in ((401, 404, 405) if target.startswith("/dashboard/") else (401, 400))
    (status,) = sent(
        guarded_port, f"{method} {target} HTTP/1.1\r\nAuthorization: Bearer {READ}\r\n{head}\r\n{body}"
    ) or [400]
    assert status != 401
    listed = ask(guarded_port, "GET", "/v1/pods", READ)[1]
    assert "pod-z" not in listed


def test_second_request_of_a_connection_needs_its_own_key(guarded_port: int) -> None:
    """What is smuggled behind a request with a key is a request without one."""
    first = f"GET /v1/pods HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {WRITE}\r\n"
    second = "DELETE /v1/pods/pod-a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert sent(guarded_port, f"{first}\r\n{second}") == [200, 401]
    assert sent(guarded_port, f"{first}Content-Length: 0\r\n\r\n{second}") == [200, 401]
    both = f"{first}Content-Length: {len(second)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}"
    assert 404 not in sent(guarded_port, both), "the second was let through"


@pytest.mark.parametrize(
    ("host", "settings", "said"),
    [
        ("127.0.0.1", {}, None),
        ("::1", {}, None),
        ("0.0.0.0", {}, "no API keys are set"),
        ("0.0.0.0", {"KVINDEXER_API_KEYS": f"{READ}:read"}, "plain text"),
        ("127.0.0.1", {"KVINDEXER_API_KEYS": f"{READ}:read"}, None),
    ],
)
def test_open_doors_are_said(host: str, settings: dict[str, str], said: str | None) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving("serve", "--port", "0", "--host", host, **settings) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    warnings = [line for line in err.splitlines() if " WARNING app.serving.serving" in line]
    assert len(warnings) == (said is not None), err
    assert said is None or said in warnings[0]


def test_listens_on_loopback_unless_told() -> None:
    with serving("serve", "--port", "0") as (process, port):
        listeners = Path(f"/proc/{process.pid}/net/tcp").read_text()
        assert f"0100007F:{port:04X} " in listeners
        assert f"00000000:{port:04X} " not in listeners


def test_no_secret_is_ever_said(tmp_path: Path) -> None:
    """Whatever goes wrong: nothing that is logged or answered has a key or a password in it."""
    unknown, filed, broken = "unknown-key-0123456789", "filed-key-0123456789", "broken-key-0123456789"
    password = "pa55word-of-metrics"
    keys = tmp_path / "keys"
    keys.write_text(f"{filed}:write\n")
    settings = {
        "KVINDEXER_API_KEYS": f"{READ}:read,{WRITE}:write",
        "KVINDEXER_API_KEYS_FILE": str(keys),
        "KVINDEXER_LOG_LEVEL": "debug",
        "KVINDEXER_LOADS_INTERVAL_S": "0.05",
        "KVINDEXER_PODS": f"pod-a=,model=m,metrics=http://user:{password}@127.0.0.1:9/metrics",
        "KVINDEXER_BODY_BYTES_MAX": "4096",
    }
    said = []
    with serving("serve", "--port", "0", **settings) as (process, port):
        json_kind = {"Content-Type": "application/json"}
        for key in (None, unknown, READ, WRITE, filed, f"{WRITE}\tx", f"{READ},{WRITE}"):
            for method, path, body in [
                ("GET", "/v1/pods", None),
                ("GET", "/v1/stats", None),
                ("GET", "/metrics", None),
                ("GET", "/openapi.json", None),
                ("GET", "/nothing", None),
                ("PATCH", "/v1/pods", b"{}"),
                (
                    "PUT",
                    "/v1/pods/pod-b",
                    b'{"model":"m","metrics_url":"http://u:' + password.encode() + b'@h h/"}',
                ),
                ("POST", "/v1/match", b"{" * 1_000),
                ("POST", "/v1/match", b"x" * 5_000),
                ("POST", "/v1/events", json.dumps({"pod": "pod-a", "events": [{"type": key}]}).encode()),
            ]:
                if key is not None and key in (body or b"").decode():
                    body = b'{"pod":"pod-a","events":[{"type":"?"}]}'
                said.append(ask(port, method, path, key, body, **json_kind)[1])
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as wire:
            wire.sendall(f"GET / HTTP/9\r\nAuthorization: Bearer {WRITE}\r\nno header\r\n\r\n".encode())
            said.append(wire.recv(65_536).decode())
        keys.write_text(f"{filed}:write\n{broken}\n")

        def has_polled_and_read() -> bool:
            text = ask(port, "GET", "/metrics", WRITE)[1]
            zero = ("kvindexer_access_reload_failures_total 0.0", "kvindexer_loads_failures_total 0.0")
            return not any(line in text for line in zero)

        wait_until(has_polled_and_read, "neither the broken file nor the pod's metrics were looked at")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert "cannot be read again" in err
    assert "pod-a cannot be read at http://***@127.0.0.1:9/metrics" in err
    everything = "\n".join([out, err, *said])
    for secret in (unknown, filed, broken, READ, WRITE, password):
        assert secret not in everything


def test_no_secret_in_what_stops_the_start(tmp_path: Path) -> None:
    secret = "pa55word-0123456789"
    keys = tmp_path / "keys"
    keys.write_text(f"{secret}\n")
    for name, value in [
        ("KVINDEXER_API_KEYS", f"{secret}:admin"),
        ("KVINDEXER_API_KEYS_FILE", str(keys)),
        ("KVINDEXER_API_KEYZ", f"{secret}:write"),
        ("KVINDEXER_REDIS_URLS", f"redis://user:{secret}@host:6379"),
        ("KVINDEXER_REDIS_URL", f"http://user:{secret}@host:6379"),
        ("KVINDEXER_PODS", f"pod-a=,model=m,metrics=http://u:{secret}@"),
    ]:
        code, out, err = finished("serve", "--port", "0", **{name: value})
        assert (code, out) == (2, ""), (name, err)
        assert secret not in err, name
        assert "Traceback" not in err


@pytest.mark.parametrize("form", ["console", "json"])
def test_password_of_redis_is_never_said(form: str) -> None:
    """Nobody listens there, so it is tried and complained about again and again."""
    password = "pa55word-of-redis"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        url = f"redis://user:{password}@127.0.0.1:{free.getsockname()[1]}/0"
    settings = {"KVINDEXER_REDIS_URL": url, "KVINDEXER_LOG_LEVEL": "debug", "KVINDEXER_LOG_FORMAT": form}
    settings |= {"KVINDEXER_REDIS_ANSWER_TIMEOUT_S": "0.5", "KVINDEXER_SHUTDOWN_GRACE_S": "1"}
    with serving("serve", "--port", "0", **settings) as (process, port):
        said = [ask(port, "GET", path, None)[1] for path in ("/readyz", "/v1/stats", "/v1/pods", "/metrics")]
        said.append(ask(port, "POST", "/v1/events", None, b'{"pod":"p","model":"m","events":[]}')[1])
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert "redis" in "\n".join([err, *said]).lower(), "nothing was said of Redis at all"
    assert password not in "\n".join([out, err, *said])


def test_key_of_the_environment_is_sent_by_commands() -> None:
    settings = {"KVINDEXER_API_KEYS": f"{READ}:read,{WRITE}:write"}
    with serving("serve", "--port", "0", **settings) as (_, port):
        url = f"http://127.0.0.1:{port}"
        environment = {"KVINDEXER_URL": url, "KVINDEXER_API_KEY": READ}
        for command in (
            ["stats"],
            ["pods", "list"],
            ["match", "--model", "m", "--tokens", "1,2,3"],
            ["dump"],
        ):
            code, _, err = finished(*command, "--json", **environment)
            assert code == 0, (command, err)
        code, _, err = finished("pods", "add", "pod-a", "--model", "m", **environment)
        assert code == 1, "a key for reading registered a pod"
        assert "needs write" in err
        code, _, err = finished(
            "pods", "add", "pod-a", "--model", "m", KVINDEXER_URL=url, KVINDEXER_API_KEY=WRITE
        )
        assert code == 0, err
    assert "KVINDEXER_API_KEY" not in os.environ, "the tests of this file would mean nothing"
