"""The command `kvindexer serve` as a process of its own: what it prints, how it ends, what it does on sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.publisher import Publisher

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 30.0


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(*arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = start(*arguments, **environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"kvindexer \S+ listens on https?://\S+:(\d+)\n", line)
        assert found, (line, process.poll())
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        yield connection


def metric(port: int, name: str) -> int:
    with connected(port) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.search(rf"^{name} (\d+)", text, re.MULTILINE)
    assert found, name
    return int(found[1])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("serve", "--port", "0", "--body-bytes-max", "65536") as (_, port):
        yield port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_orderly_end(number: signal.Signals) -> None:
    with serving(KVINDEXER_PORT="0") as (process, port):
        with connected(port) as connection:
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err


def test_clients_that_hold_it_up_are_cut() -> None:
    """One never ends its body, one reads no answer, one is silent: no more than the grace, and one line about it."""
    query = b'{"model":"m","token_ids":[%b],"include_hashes":true,"block_size":1}' % b",".join([b"1"] * 1_000)
    batch = b'{"queries":[%b]}' % b",".join([query] * 400)  # its answer: 8 MB
    head = b"POST /v1/match/batch HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with (
        contextlib.ExitStack() as opened,
        serving("serve", KVINDEXER_PORT="0", KVINDEXER_SHUTDOWN_GRACE_S="1") as (process, port),
    ):
        for said in (head % 1_000 + b"{", head % len(batch) + batch, b""):
            slow = opened.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            slow.sendall(said)
        with connected(port) as connection:
            connection.request("GET", "/healthz")  # read behind what the others have sent
            assert connection.getresponse().read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert "ERROR" not in err
    assert "connections were cut: they were in use still shutdown_grace_s = 1 s after" in err


def test_taken_port_is_one_sentence() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        code, out, err = finished("serve", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (1, "")
    assert "cannot listen" in err
    assert "Address already in use" in err
    assert "Traceback" not in err


def test_impossible_host() -> None:
    code, _, err = finished("serve", "--host", "no.such.host.invalid")
    assert code == 1
    assert "cannot listen on no.such.host.invalid" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["serve", "--port", "99999"], {}, "--port=99999"),
        (["serve", "--pod", "pod-a=tcp://h:1"], {}, "model"),
        (["serve", "--pod", "a=,model=m", "--pod", "a=,model=m"], {}, "'a'"),
        (["serve", "--pods-file", "/no/such/file"], {}, "/no/such/file"),
        (["serve"], {"KVINDEXER_TTL": "5"}, "KVINDEXER_TTL='5'"),
        (["serve"], {"KVINDEXER_TTL_S": "soon"}, "KVINDEXER_TTL_S='soon'"),
        (["serve", "--nonsense"], {}, "--nonsense"),
        (["serve", "--port", "x"], {}, "port"),
        (["nonsense"], {}, "nonsense"),
    ],
)
def test_wrong_usage(arguments: list[str], environment: dict[str, str], said: str) -> None:
    code, out, err = finished(*arguments, **environment)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_missing_native_core_is_one_sentence() -> None:
    """The core is hidden from the import system of a process of its own."""
    hide = (
        "import sys; sys.modules['app._native'] = None\n"
        "from app.cli import main; main(['serve', '--port', '0'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "native core is not built" in done.stderr
    assert "pip install ." in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help() -> None:
    assert finished("--version")[0] == 0
    code, out, _ = finished("serve", "--help")
    assert code == 0
    assert "--pods-file" in out


def test_pods_of_options_and_file_are_there_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "pods"
    file.write_text("# ours\n\npod-b=tcp://127.0.0.1:2,model=m,dp_size=2\n")
    arguments = ["serve", "--port", "0", "--pod", "pod-a=,model=m", "--pods-file", str(file)]
    with serving(*arguments, KVINDEXER_READY_GRACE_S="600") as (_, port), connected(port) as connection:
        for path, status, said in [
            ("/v1/pods/pod-a", 200, b'"model":"m"'),
            ("/v1/pods/pod-b", 200, b"tcp://127.0.0.1:2"),
            ("/readyz", 503, b"pod-b"),
        ]:
            connection.request("GET", path)
            response = connection.getresponse()
            assert (response.status, said in response.read()) == (status, True), path


# -- bodies on the wire


def send_raw(port: int, *parts: bytes) -> bytes:
    """Everything that comes back before the connection ends or says nothing for a while."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as wire:
        for part in parts:
            try:
                wire.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
        received = b""
        while chunk := _receive(wire):
            received += chunk
            if b"\r\n\r\n" in received and received.endswith(b"}"):
                break
        return received


def _receive(wire: socket.socket) -> bytes:
    try:
        return wire.recv(65_536)
    except ConnectionResetError:
        return b""


HEAD = b"POST /v1/match HTTP/1.1\r\nHost: indexer\r\nContent-Type: application/json\r\n"


def test_declared_length_past_the_bound_is_refused_before_the_body(port: int) -> None:
    received = send_raw(port, HEAD + b"Content-Length: 99999999999\r\n\r\n{")
    assert received.startswith(b"HTTP/1.1 413")
    assert b'"bound":"body_bytes_max"' in received
    assert b"connection: close" in received.lower()


def test_chunked_body_past_the_bound_is_refused_while_it_comes(port: int) -> None:
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    received = send_raw(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 17)
    assert received.startswith(b"HTTP/1.1 413")


def test_endless_chunked_body_is_not_held(port: int) -> None:
    """64 MiB towards a bound of 64 KiB: the sender is cut off, and the process still answers."""
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    received = send_raw(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 64)
    assert received == b"" or received.startswith(b"HTTP/1.1 413")
    with connected(port) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200


def test_chunked_body_within_the_bound(port: int) -> None:
    body = b'{"model":"m","token_ids":[1,2,3]}'
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in body) + b"0\r\n\r\n"
    received = send_raw(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert received.startswith(b"HTTP/1.1 200")


def test_sender_that_leaves_in_the_middle_harms_nobody(port: int) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as wire:
        wire.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    deadline = time.monotonic() + DEADLINE_S
    name = b'kvindexer_http_request_seconds_count{method="POST",route="/v1/match",status="499"}'
    while True:
        with connected(port) as connection:
            connection.request("GET", "/metrics")
            if name in connection.getresponse().read():
                break
        assert time.monotonic() < deadline, "the request that was left never ended"


def test_descriptors_up_to_the_hard_bound() -> None:
    """The soft bound, 1,024 on most systems, is not what limits the pods that can be followed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    pods = ";".join(f"pod-{i}=tcp://127.0.0.1:1,model=m" for i in range(40))
    command = ["bash", "-c", f'ulimit -Sn 64; exec "{sys.executable}" -m app serve --port 0']
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "KVINDEXER_PODS": pods}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "listens on" in process.stdout.readline()
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, most)
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def test_streams_leave_descriptors_for_requests(publisher: Publisher) -> None:
    """More ranks than there are descriptors for: those beyond are `down` and say why, and everybody is answered."""
    pods = ";".join(f"pod-{i}=tcp://127.0.0.1:{publisher.port},model=m" for i in range(100))
    process = subprocess.Popen(
        ["bash", "-c", f'ulimit -n 256; exec "{sys.executable}" -m app serve --port 0'],
        cwd=ROOT,
        env={**os.environ, "KVINDEXER_PODS": pods},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        deadline = time.monotonic() + DEADLINE_S
        ranks: list[dict[str, Any]] = []
        followed: list[dict[str, Any]] = []
        while len(followed) < 20 or not any("Too many open files" in rank["cause"] for rank in ranks):
            assert time.monotonic() < deadline, "some are followed, and the others say why they are not"
            with connected(port) as connection:
                connection.request("GET", "/v1/pods")
                ranks = [pod["ranks"][0] for pod in json.load(connection.getresponse())["pods"]]
            followed = [rank for rank in ranks if rank["state"] != "down"]
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
