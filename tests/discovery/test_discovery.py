"""The whole of it: an indexer that nobody told its pods, simulated engines, and places that change under it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.rcode
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.wiring import wired
from app.config import load_settings
from app.discovery import dns_names
from app.discovery.discovery import end
from app.discovery.pods_file import PodsFile
from app.errors import InvalidSettings
from app.main import create_app
from app.pods import Pod, SourceState
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import RunningPod
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.pod import PodSettings
from tests.discovery.dns_server import DnsServer, free_port
from tests.discovery.kubernetes_api import NAMESPACE, TOKEN, KubernetesApi
from tests.discovery.waiting import put, until
from tests.serving.test_serving import serving

PROMPT = list(range(20))
ENGINE = EngineSettings(cache=KVCacheSettings(capacity_pages=50, block_size=4))


class Indexer:
    """An application with its life, asked over its own HTTP face."""

    def __init__(self, http: httpx.AsyncClient, app: Any) -> None:
        self.http = http
        self._service = wired(app).service

    @property
    def pods(self) -> dict[str, Pod]:
        return dict(self._service.pods)

    def is_live(self, name: str) -> bool:
        sources = self.pods[name].sources.values() if name in self.pods else []
        return bool(sources) and all(source.state is SourceState.LIVE for source in sources)

    async def holds(self, name: str) -> int:
        """Blocks of PROMPT."""
        answer = await self.http.post("/v1/match", json={"model": "m", "token_ids": PROMPT})
        held: dict[str, int] = {row["pod"]: row["matched_blocks"] for row in answer.json()["matches"]}
        return held.get(name, 0)

    async def until_holds(self, name: str, blocks: int) -> None:
        async def holds() -> bool:
            return await self.holds(name) == blocks

        await until(holds, f"{name} holds {blocks} blocks")

    async def has_begun(self) -> bool:
        return (await self.http.get("/v1/stats")).status_code == 200

    async def place(self) -> dict[str, Any]:
        """The first one's."""
        place: dict[str, Any] = (await self.http.get("/v1/stats")).json()["discovery"][0]
        return place

    async def until_place(self, key: str, value: object) -> None:
        async def is_so() -> bool:
            return bool((await self.place())[key] == value)

        await until(is_so, f"{key} is {value}")

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self.http.get("/readyz")).status_code == 200

        await until(is_ready, "it is ready")


@contextlib.asynccontextmanager
async def indexer(**settings: Any) -> AsyncIterator[Indexer]:
    app = create_app(
        load_settings(
            **{"discovery_interval_s": 0.05, "discovery_deadline_s": 0.2, "fuzzy": False, **settings}
        )
    )
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://indexer") as http,
    ):
        index = Indexer(http, app)
        await until(index.has_begun, "its snapshot is read")
        yield index


@contextlib.asynccontextmanager
async def engine(host: str = "127.0.0.1", port: int = 0, **more: Any) -> AsyncIterator[RunningPod]:
    running = RunningPod(
        PodSettings(name="sim", model="m", engine=ENGINE, speed=float("inf"), host=host, **more), port
    )
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def prompt(running: RunningPod) -> None:
    """The engine holds the blocks of PROMPT from now on."""
    async with httpx.AsyncClient(timeout=20.0) as http:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        (await http.post(f"{running.url}/v1/completions", json=body)).raise_for_status()


def srv(server: DnsServer, **engines: RunningPod) -> None:
    """One target for each engine, all of them on this machine."""
    records = [f"0 1 {one.url.rpartition(':')[2]} {name}.vllm.test." for name, one in engines.items()]
    server.put("_http._tcp.vllm.test", "SRV", *records)
    for name in engines:
        server.put(f"{name}.vllm.test", "A", "127.0.0.1")


def name_of(target: str, running: RunningPod) -> str:
    return f"{target}.vllm.test:{running.url.rpartition(':')[2]}"


def test_engines_behind_a_dns_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_names, "PAUSE_S_MIN", 0.01)

    async def run(server: DnsServer) -> None:
        async with engine() as one, engine(dp_size=2, topic="kv@two@m") as two:
            await prompt(one)
            srv(server, one=one, two=two)
            first, second = name_of("one", one), name_of("two", two)
            async with indexer(
                discovery_dns="_http._tcp.vllm.test", discovery_dns_server=server.address
            ) as index:
                await until(lambda: index.is_live(first) and index.is_live(second), "both are followed")
                await index.until_holds(first, 5)
                assert index.pods[second].spec.dp_size == 2
                assert index.pods[second].spec.block_size == 4
                assert index.pods[first].spec.metrics_url == f"{one.url}/metrics"

                server.faults.rcode = dns.rcode.SERVFAIL
                await index.until_place("state", "failing")
                assert "SERVFAIL" in (await index.place())["cause"]
                server.faults.rcode = None
                srv(server, one=one)
                await until(lambda: second not in index.pods, "the second is dropped")
                assert await index.holds(first) == 5

    with DnsServer() as server:
        asyncio.run(run(server))


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(NAMESPACE)
    return tmp_path


def test_pods_of_kubernetes(account: Path) -> None:
    port = free_port()

    async def run(api: KubernetesApi) -> None:
        async with contextlib.AsyncExitStack() as life:
            one = await life.enter_async_context(engine("127.0.0.2", port))
            await prompt(one)
            api.put("vllm-0", uid="uid-1", ip="127.0.0.2")
            api.put("vllm-1", uid="uid-2", ip="127.0.0.3")  # its engine does not answer yet
            async with indexer(
                discovery_kubernetes="app=vllm",
                discovery_kubernetes_engines=f"port={port}",
                discovery_kubernetes_api_url=api.url,
                discovery_kubernetes_account=account,
            ) as index:
                await until(lambda: index.is_live("vllm-0"), "the first is followed")
                await index.until_holds("vllm-0", 5)
                place = await index.place()
                assert place["place"] == "kubernetes:app=vllm"
                assert place["state"] == "working"
                assert place["pods"] == {"registered": 1, "waiting": 1, "vanished": 0, "refused": 0}
                assert "does not answer" in place["waiting"]["vllm-1"]

                two = await life.enter_async_context(engine("127.0.0.3", port))
                await prompt(two)
                await index.until_holds("vllm-1", 5)

                # The same name and address, another engine that holds nothing.
                await two.stop()
                api.put("vllm-1", uid="uid-3", ip="127.0.0.3")
                await until(lambda: "vllm-1" not in index.pods, "the old one is forgotten")
                three = await life.enter_async_context(engine("127.0.0.3", port))
                await until(lambda: index.is_live("vllm-1"), "the new one is followed")
                assert await index.holds("vllm-1") == 0
                await prompt(three)
                await index.until_holds("vllm-1", 5)

                api.put("vllm-0", uid="uid-1", ip="127.0.0.3")
                await until(
                    lambda: (
                        "vllm-0" in index.pods and "127.0.0.3" in str(index.pods["vllm-0"].spec.zmq_endpoint)
                    ),
                    "another address",
                )
                api.delete("vllm-0")
                await until(lambda: "vllm-0" not in index.pods, "deleted")
                shown = (await index.http.get("/v1/pods/vllm-1")).json()
                assert shown["discovered_by"] == "kubernetes:app=vllm"
                api.end_watches()

    with KubernetesApi() as api:
        asyncio.run(run(api))


def test_ready_when_what_was_there_at_the_start_is_followed() -> None:
    async def run(server: DnsServer) -> None:
        async with engine() as one:
            server.faults.rcode = dns.rcode.SERVFAIL
            srv(server, one=one)
            async with indexer(
                discovery_dns="_http._tcp.vllm.test",
                discovery_dns_server=server.address,
                ready_grace_s=3_600.0,
            ) as index:
                await until(lambda: server.questions, "it is asked")
                answer = await index.http.get("/readyz")
                assert answer.status_code == 503
                assert "dns:_http._tcp.vllm.test was not seen yet" in answer.json()["detail"]
                server.faults.rcode = None
                await index.until_ready()
                assert index.is_live(name_of("one", one))
                await one.stop()
                await until(lambda: not index.is_live(name_of("one", one)), "it is down")
                assert (await index.http.get("/readyz")).status_code == 200

    with DnsServer() as server:
        asyncio.run(run(server))


def test_not_ready_before_the_engines_of_the_first_picture_were_asked() -> None:
    async def run(server: DnsServer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
            port = silent.getsockname()[1]
            server.put("vllm.test", "A", "127.0.0.1")
            async with indexer(
                discovery_dns=f"vllm.test,port={port}",
                discovery_dns_server=server.address,
                ready_grace_s=3_600.0,
            ) as index:
                await index.until_place("state", "working")
                assert "1 pods of dns:vllm.test were not asked yet" in (await index.http.get("/readyz")).text

    with DnsServer() as server:
        asyncio.run(run(server))


def test_metrics_of_a_place(tmp_path: Path) -> None:
    file = tmp_path / "pods"
    put(file, "a=,model=m\nb=,model=m\n")

    async def run() -> None:
        async with indexer(pods_file=file, discovery_deadline_s=3_600.0) as index:
            await until(lambda: index.pods["b"].spec.discovered_by, "the file is watched")
            put(file, "a=,model=m\n")
            shown = {"registered": 1, "waiting": 0, "vanished": 1, "refused": 0}
            await index.until_place("pods", shown)
            put(file, "nonsense")
            await index.until_place("state", "failing")
            page = (await index.http.get("/metrics")).text
            found = {
                (
                    sample.name,
                    *(sample.labels[label] for label in sample.labels if label != "place"),
                ): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
                if sample.labels.get("place") == f"file:{file}"
            }
            assert found["kvindexer_discovery_state", "failing"] == 1
            assert found["kvindexer_discovery_pods", "registered"] == 1
            assert found["kvindexer_discovery_pods", "vanished"] == 1
            assert found["kvindexer_discovery_changes_total", "vanished"] == 1
            assert found["kvindexer_discovery_looks_total", "failed"] >= 1
            assert found[("kvindexer_discovery_seen_age_seconds",)] >= 0
            assert "does not begin with name=" in (await index.place())["cause"]

    asyncio.run(run())


def test_a_configured_pod_stays_when_the_file_beside_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "pods"
    put(file, "a=,model=m\n")

    async def run() -> None:
        async with indexer(pods_file=file, pods=("b=,model=m",)) as index:
            await until(lambda: index.pods["a"].spec.discovered_by, "the file is watched")
            put(file, "b=,model=other\n")
            await until(lambda: "a" not in index.pods, "its pod is dropped")
            assert index.pods["b"].spec.model == "m"
            assert (await index.place())["waiting"] == {"b": "a pod of this name is configured"}

    asyncio.run(run())


def test_a_snapshot_remembers_who_found_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the indexer was away one engine stayed, one left; later the place itself is configured no more."""
    monkeypatch.setattr(dns_names, "PAUSE_S_MIN", 0.01)

    async def run(server: DnsServer) -> None:
        place = {"discovery_dns": "_http._tcp.vllm.test", "discovery_dns_server": server.address}
        kept = {"snapshot_path": tmp_path / "snapshot"}
        async with engine() as one, engine() as two:
            srv(server, one=one, two=two)
            first, second = name_of("one", one), name_of("two", two)
            await prompt(one)
            async with indexer(**place, **kept) as index:
                await index.until_holds(first, 5)
                await until(lambda: index.is_live(second), "the second is followed")
            srv(server, one=one)
            server.faults.rcode = dns.rcode.SERVFAIL
            async with indexer(**place, **kept) as index:
                assert set(index.pods) == {first, second}, "restored before anything is asked"
                assert await index.holds(first) == 5
                server.faults.rcode = None
                await until(lambda: second not in index.pods, "the one that left is dropped")
                assert await index.holds(first) == 5
            async with indexer(**{**kept, "discovery_deadline_s": 2.0}) as index:
                assert set(index.pods) == {first}
                await until(lambda: not index.pods, "nobody says that it is there")

    with DnsServer() as server:
        asyncio.run(run(server))


def test_the_end_comes_although_a_cancellation_is_lost() -> None:
    async def run() -> None:
        lost = 0

        async def loses_two() -> None:
            nonlocal lost
            while True:
                try:
                    await asyncio.sleep(3_600)
                except asyncio.CancelledError:
                    lost += 1
                    if lost == 3:
                        raise

        task = asyncio.create_task(loses_two())
        await asyncio.sleep(0)
        await end([task])
        assert task.cancelled()
        assert lost == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"discovery_dns": "vllm;vllm,port=1"}, "dns:vllm is there 2 times"),
        ({"discovery_dns": "a..b"}, "is not a DNS name"),
        ({"discovery_dns": "vllm.inference.svc:8000"}, "is not a DNS name: a port is said behind it"),
        ({"discovery_dns": "http://vllm,port=8000"}, "is not a DNS name"),
        ({"discovery_dns": "a", "discovery_dns_server": "dns.test"}, "not the address of a DNS server"),
        ({"discovery_kubernetes": "a=b", "discovery_kubernetes_engines": "prot=1"}, "'prot' is none of"),
        ({"discovery_kubernetes_api_url": "kubernetes"}, "should match pattern"),
        ({"discovery_dns": ";".join(f"name-{number}" for number in range(300))}, "at most 256"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, str], fault: str) -> None:
    with pytest.raises(InvalidSettings, match=fault):
        create_app(load_settings(**settings))


def test_the_command_finds_engines_on_its_own_event_loop() -> None:
    """`kvindexer serve` runs on uvloop, and this answer of DNS is too long for UDP."""

    async def run(server: DnsServer) -> None:
        async with engine() as one:
            srv(server, one=one)
            server.faults.truncate = True
            options = ("--discovery-dns", "_http._tcp.vllm.test", "--discovery-dns", "other.test")
            asked = {"KVINDEXER_DISCOVERY_DNS_SERVER": server.address}
            with contextlib.ExitStack() as life:
                _, port = await asyncio.to_thread(
                    life.enter_context, serving("serve", "--port", "0", *options, **asked)
                )
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as http:

                    async def is_ready() -> bool:
                        return (await http.get("/readyz")).status_code == 200

                    await until(is_ready, "it is ready")
                    [pod] = (await http.get("/v1/pods")).json()["pods"]
                assert (pod["pod"], pod["ranks"][0]["state"]) == (name_of("one", one), "live")
                assert {transport for _, _, transport in server.questions} == {"udp", "tcp"}
                await asyncio.to_thread(life.close)

    with DnsServer() as server:
        asyncio.run(run(server))


def test_a_fault_of_ours_in_a_place_is_counted_said_and_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pods"
    file.write_text("a=,model=m\n")
    real, calls = PodsFile.look, []

    def look(self: PodsFile, seen: Any) -> Any:
        calls.append(seen)
        if len(calls) == 1:
            raise ZeroDivisionError("a fault")
        return real(self, seen)

    monkeypatch.setattr(PodsFile, "look", look)

    async def run() -> None:
        async with indexer(pods_file=file) as index:
            await until(lambda: len(calls) > 1, "it is looked again")
            put(file, "b=,model=m\n")
            await until(lambda: set(index.pods) == {"b"}, "it goes on")
            page = (await index.http.get("/metrics")).text
            assert 'kvindexer_discovery_questions_total{result="faults"} 1.0' in page

    asyncio.run(run())
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == f"discovery of file:{file} failed"
