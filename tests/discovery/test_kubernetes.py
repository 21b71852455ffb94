"""Kubernetes pods over real sockets: pages, watches that end, versions that are forgotten, pods that change."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from app.discovery import kubernetes
from app.discovery.kubernetes import Account, KubernetesPods, may_carry_token
from tests.discovery.kubernetes_api import NAMESPACE, TOKEN, KubernetesApi
from tests.discovery.waiting import Told, until, watching


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi() as started:
        yield started


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


Test = Callable[[Told], Awaitable[None]]


def watch(api: KubernetesApi, account: Path, test: Test, *, namespace: str | None = None) -> None:
    place = KubernetesPods(
        "app=vllm",
        engines="port=8000",
        api_url=api.url,
        account=Account(account),
        namespace=namespace,
        interval_s=0.02,
    )

    async def run() -> None:
        async with watching(place) as told:
            await test(told)
            api.end_watches()

    asyncio.run(run())


def lists(api: KubernetesApi) -> int:
    return sum("watch" not in query and "continue" not in query for query in api.requests)


def test_pods_of_the_selector_with_an_address_that_run(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")
    api.put("other", labels={"app": "redis"})
    api.put("pending", ip=None, phase="Pending")
    api.put("done", phase="Succeeded")

    async def test(told: Told) -> None:
        await until(lambda: told.pictures, "a picture")
        assert told.names == {"vllm-0"}
        assert told.pictures[0]["vllm-0"].url == "http://10.0.0.1:8000"
        api.put("pending", ip="10.0.0.2", phase="Running")
        await until(lambda: told.names == {"vllm-0", "pending"}, "one that got its address")
        api.put("vllm-0", phase="Failed")
        await until(lambda: told.names == {"pending"}, "one that failed")
        assert told.deleted == ["done", "vllm-0"]
        count = len(told.pictures)
        api.put("pending", ip="10.0.0.2", phase="Running", labels={"app": "vllm", "other": "one"})
        api.put("vllm-1", ip="10.0.0.3")
        await until(lambda: "vllm-1" in told.names, "another one")
        assert len(told.pictures) == count + 1, "a label more changes nothing"

    watch(api, account, test)


def test_a_list_of_many_pages(api: KubernetesApi, account: Path) -> None:
    api.page_max = 3
    for number in range(10):
        api.put(f"vllm-{number}", uid=f"uid-{number}")

    async def test(told: Told) -> None:
        await until(lambda: told.pictures, "a picture")
        assert told.names == {f"vllm-{number}" for number in range(10)}
        assert len(told.pictures) == 1, "half a list is no picture"

    watch(api, account, test)


def test_a_page_that_is_forgotten_costs_a_new_list(api: KubernetesApi, account: Path) -> None:
    api.page_max = 1
    api.faults.gone_pages = 1
    api.put("vllm-0")
    api.put("vllm-1")

    async def test(told: Told) -> None:
        await until(lambda: told.names == {"vllm-0", "vllm-1"}, "the whole list")
        assert lists(api) == 2
        assert told.failures == []

    watch(api, account, test)


def test_pods_come_change_and_go(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        api.put("vllm-1", uid="uid-2", ip="10.0.0.2")
        await until(lambda: told.names == {"vllm-0", "vllm-1"}, "one more")
        before = told.pictures[-1]["vllm-0"]
        api.put("vllm-0", ip="10.0.0.7")
        await until(lambda: told.pictures[-1]["vllm-0"].host == "10.0.0.7", "another address")
        assert told.pictures[-1]["vllm-0"].incarnation != before.incarnation
        api.delete("vllm-1")
        await until(lambda: told.names == {"vllm-0"}, "one less")
        assert told.deleted == ["vllm-1"]
        api.delete("vllm-0")
        api.put("vllm-0", uid="uid-9")
        await until(lambda: told.names == {"vllm-0"} and len(told.deleted) == 2, "the name again")
        assert told.pictures[-1]["vllm-0"].incarnation.startswith("uid-9")
        assert lists(api) == 1

    watch(api, account, test)


def test_a_watch_that_ends_goes_on_where_it_was(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        api.put("vllm-1", uid="uid-2")
        await until(lambda: told.names == {"vllm-0", "vllm-1"}, "one more")
        for number in range(2, 5):
            api.end_watches()
            api.put(f"vllm-{number}", uid=f"uid-{number}")
            await until(lambda number=number: f"vllm-{number}" in told.names, "what came in between")  # type: ignore[misc]
        assert told.failures == []
        assert lists(api) == 1

    watch(api, account, test)


def test_a_bookmark_moves_the_version_on(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        version = api.bookmark()
        count = len(api.requests)
        api.end_watches()
        await until(lambda: len(api.requests) > count, "the next watch")
        assert api.requests[-1]["resourceVersion"] == str(version)
        assert api.requests[-1]["allowWatchBookmarks"] == "true"
        assert told.pictures[-1] == told.pictures[0], "a bookmark is no change"

    watch(api, account, test)


@pytest.mark.parametrize("as_event", [False, True])
def test_a_version_that_is_forgotten_costs_a_new_list(
    api: KubernetesApi, account: Path, as_event: bool
) -> None:
    api.faults.gone_as_event = as_event
    api.put("vllm-0")
    api.put("vllm-1", uid="uid-2")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        api.delete_unseen("vllm-1")
        api.forget()
        api.end_watches()
        await until(lambda: told.names == {"vllm-0"}, "the new list")
        assert told.deleted == [], "nobody saw it deleted: it has its deadline"
        assert told.failures == [], "410 is no failure"
        api.put("vllm-2", uid="uid-3")
        await until(lambda: told.names == {"vllm-0", "vllm-2"}, "the watch goes on")

    watch(api, account, test)


def test_a_connection_that_breaks_is_said_and_made_good(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        api.end_watches(cut=True)
        await until(lambda: told.failures, "a failure")
        assert "does not answer" in told.failures[0]
        api.put("vllm-1", uid="uid-2")
        await until(lambda: told.names == {"vllm-0", "vllm-1"}, "a new list")

    watch(api, account, test)


def test_a_renewed_token_is_used(api: KubernetesApi, account: Path) -> None:
    api.put("vllm-0")

    async def test(told: Told) -> None:
        await until(lambda: api.watches == 1, "a watch")
        api.tokens = {"renewed"}
        api.end_watches()
        await until(lambda: told.failures, "refused")
        assert "the token is not accepted" in told.failures[0]
        (account / "token").write_text("renewed")
        count = len(told.pictures)
        await until(lambda: len(told.pictures) > count, "accepted")

    watch(api, account, test)


def failing(api: KubernetesApi, account: Path, *, namespace: str | None = None) -> str:
    said: list[str] = []

    async def test(told: Told) -> None:
        await until(lambda: told.failures, "a failure")
        assert told.pictures == []
        said.append(told.failures[0])

    watch(api, account, test, namespace=namespace)
    return said[0]


def test_what_fails_says_why(api: KubernetesApi, account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs list and watch of pods" in failing(api, account, namespace="elsewhere")
    api.faults.status = 500
    assert "answered 500: a fault" in failing(api, account)
    with monkeypatch.context() as bounded:
        bounded.setattr(kubernetes, "LINE_BYTES_MAX", 20)  # less than its problem has
        assert "answered 500: no reason given" in failing(api, account)
    api.faults.status = None
    api.faults.garbage = b"<html>"
    assert "did not answer with a list of pods" in failing(api, account)
    api.faults.garbage = b" " * 5_000
    monkeypatch.setattr(kubernetes, "PAGE_BYTES_MAX", 4_000)
    assert "more than 4000 bytes" in failing(api, account)
    (account / "namespace").unlink()
    assert "no namespace" in failing(api, account)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (b"{nonsense}\n", "brought what is no event"),
        (b'{"type":"ADDED","object":{"metadata":{"name":7}}}\n', "brought what is no event"),
        (b"x" * 5_000, "more than 4000 bytes"),
    ],
)
def test_an_event_that_is_none(
    api: KubernetesApi, account: Path, monkeypatch: pytest.MonkeyPatch, event: bytes, fault: str
) -> None:
    monkeypatch.setattr(kubernetes, "LINE_BYTES_MAX", 4_000)
    api.put("vllm-0")
    api.faults.garbage_event = event

    async def test(told: Told) -> None:
        await until(lambda: told.failures, "a failure")
        assert fault in told.failures[0]
        api.faults.garbage_event = None
        api.put("vllm-1", uid="uid-2")
        await until(lambda: told.names == {"vllm-0", "vllm-1"}, "the picture")

    watch(api, account, test)


def test_a_token_goes_encrypted_or_nowhere() -> None:
    fit = ("https://kubernetes.default.svc", "http://127.0.0.1:8001", "http://[::1]:8001", "http://localhost")
    unfit = (
        "http://kubernetes.default.svc",
        "http://10.0.0.1",
        "http://127.0.0.1.example.org",
        "http://localhost@evil.test",
    )
    assert all(map(may_carry_token, fit))
    assert not any(map(may_carry_token, unfit))


def test_the_certificate_of_the_account_is_asked_for(account: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        assert "CI" not in os.environ, "openssl is missing"
        pytest.skip("openssl makes the certificate")
    pem = tmp_path / "server.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/key.pem -out {tmp_path}/ca.crt",
        shell=True,
        check=True,
        capture_output=True,
    )
    pem.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "ca.crt").read_text())
    with KubernetesApi(pem) as api:
        api.put("vllm-0")

        async def test(told: Told) -> None:
            await until(lambda: told.names == {"vllm-0"}, "a picture over TLS")

        watch(api, account, test)
        (account / "ca.crt").rename(account / "other.crt")
        assert "CERTIFICATE_VERIFY_FAILED" in failing(api, account)
        (account / "ca.crt").write_text("nonsense")
        assert "is no certificate" in failing(api, account)
