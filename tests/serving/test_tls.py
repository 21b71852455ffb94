"""TLS with real certificates and real handshakes, by every client that the project has."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from app.client import AsyncClient, Client, ClientSettings, Prompt
from app.config import load_settings
from app.errors import InvalidSettings
from app.experiment.indexer_link import IndexerLink
from app.serving.tls import ServerTls, server_tls
from tests.serving.test_serving import DEADLINE_S, finished, serving

KEY = "a-key-that-is-only-for-tests"
PATIENT = ClientSettings(budget_s=DEADLINE_S)


class Files:
    """An authority, a certificate of it for this machine, and one for a client."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server-key.pem"
        self.client = folder / "client.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.write_certificate(self.authority)
        self.authority.issue_cert("router@example.org").private_key_and_cert_chain_pem.write_to_path(
            str(self.client)
        )

    def write_certificate(self, authority: trustme.CA) -> None:
        made = authority.issue_cert("127.0.0.1", "localhost")
        made.private_key_pem.write_to_path(str(self.key))
        for number, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(str(self.certificate), append=number > 0)

    def trust(self, *, client: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if client:
            context.load_cert_chain(self.client)
        return context

    def settings(self) -> dict[str, str]:
        return {"KVINDEXER_TLS_CERTIFICATE": str(self.certificate), "KVINDEXER_TLS_KEY": str(self.key)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def port(files: Files) -> Iterator[int]:
    with serving("serve", "--port", "0", KVINDEXER_API_KEYS=f"{KEY}:write", **files.settings()) as (_, port):
        yield port


def status(port: int, context: ssl.SSLContext, path: str = "/healthz") -> int:
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", port, timeout=DEADLINE_S, context=context)
    ) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        response.read()
        return response.status


def test_handshake(port: int, files: Files) -> None:
    assert status(port, files.trust(), "/v1/pods") == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        status(port, ssl.create_default_context())


def test_old_versions_are_refused(port: int, files: Files) -> None:
    context = files.trust()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(port, context)


def test_plain_http_gets_nothing(port: int) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as wire:
        wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: indexer\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := wire.recv(65_536):
                received += chunk
    assert b"HTTP/1.1" not in received


def test_blocking_client(port: int, files: Files) -> None:
    url = f"https://localhost:{port}"
    with Client(url, api_key=KEY, tls=files.trust(), settings=PATIENT) as client:
        client.put_pod("pod-a", model="m", block_size=4)
        answer = client.match(Prompt(model="m", token_ids=[1, 2, 3, 4]))
        assert (answer.degraded, answer.blocks) == (False, 1)
    with Client(url, api_key=KEY, settings=PATIENT) as untrusting:
        assert "certificate" in untrusting.match(Prompt(model="m", token_ids=[1])).cause.lower()


def test_requests_that_do_not_wait_for_answers(port: int, files: Files) -> None:
    """Those that are answered where they are read, and others between them, in pieces that are records."""
    ids = iter(range(1_000))

    def request(line: str, *more: str, body: bytes = b"") -> bytes:
        lines = (f"{line} HTTP/1.1", "Host: h", f"Authorization: Bearer {KEY}", f"X-Request-ID: {next(ids)}")
        return "\r\n".join([*lines, *more, "", ""]).encode() + body

    body = b'{"model":"m","token_ids":[1,2,3,4]}'
    with (
        contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as plain,
        files.trust().wrap_socket(plain, server_hostname="localhost") as wire,
    ):
        for turn in range(40):
            length = f"Content-Length: {len(body)}"
            asked = request("POST /v1/match", "Content-Type: application/json", length, body=body)
            for piece in (asked[: -turn or None], asked[len(asked) - turn :], request("GET /healthz")):
                if piece:
                    wire.sendall(piece)
        received = b""
        while received.count(b"x-request-id: ") < 80 or not received.endswith(b"}"):
            received += wire.recv(65_536)
    assert [int(number) for number in re.findall(rb"x-request-id: (\d+)", received)] == list(range(80))
    assert received.count(b"HTTP/1.1 200 OK") == 80


def test_asynchronous_client(port: int, files: Files) -> None:
    async def ask() -> tuple[bool, int]:
        async with AsyncClient(
            f"https://localhost:{port}", api_key=KEY, tls=files.trust(), settings=PATIENT
        ) as client:
            answer = await client.match(Prompt(model="m", token_ids=[1, 2, 3, 4], block_size=4))
            return answer.degraded, answer.blocks

    assert asyncio.run(ask()) == (False, 1)


def test_commands(port: int, files: Files) -> None:
    """The key and the authority come from the environment."""
    environment = {"KVINDEXER_URL": f"https://localhost:{port}", "SSL_CERT_FILE": str(files.ca)}
    code, out, err = finished("pods", "list", "--json", KVINDEXER_API_KEY=KEY, **environment)
    assert (code, "pods" in json.loads(out)) == (0, True), err
    code, out, err = finished("pods", "list", "--json", **environment)
    assert (code, out) == (1, "")
    assert "401" in err
    code, _, err = finished("pods", "list", KVINDEXER_URL=environment["KVINDEXER_URL"], KVINDEXER_API_KEY=KEY)
    assert code == 1
    assert "certificate" in err.lower()


def test_experiment_link(port: int, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    with IndexerLink(f"https://localhost:{port}", "m", api_key=KEY) as link:
        link.register("pod-l", 4)
        link.drop("pod-l")


def test_client_certificates(files: Files) -> None:
    with serving("serve", "--port", "0", KVINDEXER_TLS_CLIENT_CA=str(files.ca), **files.settings()) as (
        _,
        port,
    ):
        assert status(port, files.trust(client=True)) == 200
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            status(port, files.trust())
        stranger = files.trust()
        other = trustme.CA().issue_cert("router@example.org")
        other.configure_cert(stranger)
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            status(port, stranger)


def test_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with serving("serve", "--port", "0", **files.settings()) as (process, port):
        assert status(port, files.trust()) == 200
        files.key.write_text("no key at all")  # a renewal in two steps, seen in the middle
        other = trustme.CA()
        files.write_certificate(other)
        other.cert_pem.write_to_path(str(files.ca))
        trust = files.trust()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(ssl.SSLCertVerificationError):
                if status(port, trust) == 200:
                    break
            assert time.monotonic() < deadline, "the new certificate was never used"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert "was renewed" in err


def test_certificate_that_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path)
    tls = ServerTls(files.certificate, files.key, None)
    assert not tls.renew()
    good = files.key.read_text()
    files.key.write_text(trustme.CA().issue_cert("localhost").private_key_pem.bytes().decode())
    assert not tls.renew()
    assert "the one from before stays" in caplog.text
    assert "PRIVATE KEY" not in caplog.text
    assert not tls.renew(), "said once"
    assert len(caplog.records) == 1
    assert _shakes_hands(tls.context, files.trust())
    files.key.write_text(good)
    assert tls.renew()
    assert _shakes_hands(tls.context, files.trust())


def _shakes_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = set()
    for _ in range(10):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done.add(end.server_side)
    return done == {False, True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_certificate": "/no/such/file"}, "KVINDEXER_TLS_CERTIFICATE='/no/such/file': No such file"),
        ({"tls_key": "/no/such/file"}, "KVINDEXER_TLS_KEY: there is no KVINDEXER_TLS_CERTIFICATE"),
        (
            {"tls_client_ca": "/no/such/file"},
            "KVINDEXER_TLS_CLIENT_CA: there is no KVINDEXER_TLS_CERTIFICATE",
        ),
        ({"tls_certificate": "certificate"}, "OpenSSL"),
        ({"tls_certificate": "ca", "tls_key": "key"}, "OpenSSL"),
        (
            {"tls_certificate": "certificate", "tls_key": "key", "tls_client_ca": "key"},
            "KVINDEXER_TLS_CLIENT_CA=",
        ),
    ],
)
def test_files_that_cannot_be_used(files: Files, settings: dict[str, str], said: str) -> None:
    paths = {name: str(getattr(files, value, value)) for name, value in settings.items()}
    with pytest.raises(InvalidSettings, match=said):
        server_tls(load_settings(**paths))


def test_wrong_file_is_one_sentence() -> None:
    code, out, err = finished("serve", "--port", "0", KVINDEXER_TLS_CERTIFICATE="/no/such/file")
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_key_with_a_passphrase_does_not_ask(files: Files, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"a passphrase"),
        )
    )
    with pytest.raises(InvalidSettings, match="passphrase"):
        server_tls(load_settings(tls_certificate=str(files.certificate), tls_key=str(locked)))
