"""Indexers as processes over a real Redis, and engines that publish over ZMQ: whoever follows a stream may be killed,
may leave, may be cut off; the picture is that of a lone process that was fed the same batches."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from app.config import Settings
from app.events import Envelope
from app.index.prefix_index import PrefixIndex
from app.ingest.vllm import decode_batch
from app.pods import PodSpec
from app.service import IndexerService, index_limits
from tests.ingest.publisher import Publisher
from tests.replication.questions import Questions
from tests.replication.redis_server import RedisServer
from tests.replication.test_replicas import agree, depths, is_ready, post, stats, wait_until
from tests.serving.test_serving import serving

DEADLINE_S = 30.0
EXACT_S = 5.0
SOURCES = 8
HASTY = {
    "KVINDEXER_REDIS_TIMEOUT_S": "1",
    "KVINDEXER_REDIS_ANSWER_TIMEOUT_S": "1",
    "KVINDEXER_SNAPSHOT_INTERVAL_S": "1",
    "KVINDEXER_READY_GRACE_S": "30",
    "KVINDEXER_REDIS_KEEP_S": "0.5",
}


class Replica:
    """A process, and a way to end it in the middle of the test."""

    def __init__(self, url: str, number: int, *arguments: str, **settings: str) -> None:
        self._way = contextlib.ExitStack()
        self.process: subprocess.Popen[str]
        self.process, port = self._way.enter_context(
            serving(
                "serve",
                "--port",
                "0",
                *arguments,
                KVINDEXER_REDIS_URL=url,
                KVINDEXER_REPLICA_ID=f"replica-{number}",
                **{**HASTY, **settings},
            )
        )
        self.http = self._way.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
        )

    @property
    def leases(self) -> dict[str, int]:
        found = stats(self.http)["replication"]["leases"]
        assert isinstance(found, dict)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def leave(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        _, told = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, told

    def close(self) -> None:
        self._way.close()


class Fleet:
    """Replicas over one Redis, and the engines whose streams they follow."""

    def __init__(self, url: str, sources: int) -> None:
        self._url = url
        self._started = 0
        self.publishers = {f"pod-{number}": Publisher() for number in range(sources)}
        self.replicas: list[Replica] = []
        self.posted: dict[str, list[dict[str, Any]]] = {}  # pod -> events, one a batch

    def post(self, http: httpx.Client, pod: str, event: dict[str, Any], **more: Any) -> None:
        """With the next number of the pod."""
        events = self.posted.setdefault(pod, [])
        post(http, pod, event, seq=len(events), **more)
        events.append(event)

    def start(self, count: int = 1, *, url: str | None = None, **settings: str) -> list[Replica]:
        pods = [
            argument
            for name, publisher in self.publishers.items()
            for argument in (
                "--pod",
                f"{name}=tcp://127.0.0.1:{publisher.port},model=m,"
                f"replay=tcp://127.0.0.1:{publisher.replay_port}",
            )
        ]
        for _ in range(count):
            self.replicas.append(Replica(url or self._url, self._started, *pods, **settings))
            self._started += 1
        return self.replicas[-count:]

    def publish(self, count: int) -> None:
        for publisher in self.publishers.values():
            publisher.publish(count)

    def forget(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        replica.close()

    @property
    def clients(self) -> list[httpx.Client]:
        return [replica.http for replica in self.replicas]

    def reference(self) -> tuple[str, int]:
        """(digest, stored blocks) of a service that was fed with what the engines published."""
        settings = Settings()
        service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=time.monotonic)
        for name, publisher in self.publishers.items():
            service.register(PodSpec(name, "m"))
            for seq, payload in enumerate(publisher.batches):
                service.apply(name, 0, decode_batch(payload), seq=seq)
        for name, events in self.posted.items():
            for seq, event in enumerate(events):
                batch = decode_batch(msgspec.msgpack.encode([0.0, [event], 0]))
                service.post(Envelope(pod=name, model="m", seq=seq), batch)
        found = service.stats()
        return found["digest"], found["totals"]["stored_blocks"]

    def until_exact(self, within_s: float = DEADLINE_S) -> None:
        """Every replica has the picture of the reference, all sources live, no block counted twice."""
        digest, blocks = self.reference()
        live = len(self.publishers) + len(self.posted)
        began_s = time.monotonic()
        while True:
            found = [stats(http) for http in self.clients]
            if all(one["digest"] == digest and one["sources"].get("live") == live for one in found):
                break
            told = [
                (one["digest"] == digest, one["sources"], one["totals"], one["replication"]) for one in found
            ]
            assert time.monotonic() - began_s < within_s, (blocks, told)
            time.sleep(0.02)
        assert all(one["index"]["copies"] == 0 for one in found), "a block was counted twice"
        assert all(one["totals"]["gaps"] == one["totals"]["restarts"] == 0 for one in found)

    def until_shared(self) -> None:
        """Every pod has a holder, and every replica holds some."""
        wait_until(
            lambda: (
                sorted(pod for replica in self.replicas for pod in replica.leases) == sorted(self.publishers)
                and all(replica.leases for replica in self.replicas)
            ),
            "each pod is held by one replica",
        )


@contextlib.contextmanager
def fleet(url: str, sources: int = SOURCES) -> Iterator[Fleet]:
    made = Fleet(url, sources)
    try:
        yield made
    finally:
        for replica in made.replicas:
            replica.close()
        for publisher in made.publishers.values():
            publisher.kill()


def test_the_holder_is_killed_under_load(redis_server: RedisServer) -> None:
    with fleet(redis_server.url) as all_:
        all_.publish(20)
        all_.start(3)
        wait_until(lambda: all(map(is_ready, all_.clients)), "three replicas are ready")
        all_.until_shared()
        all_.until_exact()
        victim = max(all_.replicas, key=lambda replica: len(replica.leases))
        assert victim.leases
        for number in range(40):
            all_.publish(5)
            if number == 20:
                victim.kill()
        all_.forget(victim)
        all_.until_exact(EXACT_S)
        all_.until_shared()
        assert agree(all_.clients)


def test_a_rolling_restart(redis_server: RedisServer) -> None:
    with fleet(redis_server.url, 4) as all_, Questions(all_.publishers) as questions:
        all_.publish(10)
        all_.start(2)
        wait_until(lambda: all(map(is_ready, all_.clients)), "ready")
        all_.until_exact()
        questions.of(all_.clients)
        for replica in list(all_.replicas):
            all_.publish(10)
            all_.start()
            wait_until(lambda: is_ready(all_.replicas[-1].http), "the new one is ready")
            others = [each.http for each in all_.replicas if each is not replica]
            assert all(depths(others[-1], name) for name in range(1, 11)), "ready, and not empty"
            questions.of(others)
            all_.publish(5)
            replica.leave()
            all_.forget(replica)
            all_.publish(5)
            all_.until_exact(EXACT_S)
            published = {name: len(publisher.batches) for name, publisher in all_.publishers.items()}
            for http in others:
                for name in range(1, max(published.values()) + 2):
                    truth = {pod: 1 for pod, count in published.items() if count >= name}
                    assert depths(http, name) == truth, "quiet, and just what the engines have"
        assert len(all_.replicas) == 2
        assert not questions.wrong
        asked_of = {str(http.base_url) for http in all_.clients}
        assert asked_of < questions.answers.keys(), "those that stayed, and those that left"


def test_a_pod_that_nobody_follows_is_down(redis_server: RedisServer) -> None:
    with fleet(redis_server.url, 0) as all_:
        (replica,) = all_.start()
        wait_until(lambda: is_ready(replica.http), "ready")
        spec = {"model": "m", "zmq_endpoint": "tcp://127.0.0.1:9"}
        assert replica.http.put("/v1/pods/a", json=spec).status_code == 200
        assert replica.http.get("/v1/pods/a").json()["ranks"][0]["state"] == "down"


def test_a_pod_that_comes_back_is_learned_from_the_beginning(redis_server: RedisServer) -> None:
    with fleet(redis_server.url, 1) as all_:
        all_.publish(10)
        all_.start(2)
        all_.until_exact()
        ((name, publisher),) = all_.publishers.items()
        spec = {
            "model": "m",
            "zmq_endpoint": f"tcp://127.0.0.1:{publisher.port}",
            "replay_endpoint": f"tcp://127.0.0.1:{publisher.replay_port}",
        }
        for number in range(3):
            assert all_.clients[0].delete(f"/v1/pods/{name}").status_code == 204
            all_.publish(3)
            assert all_.clients[number % 2].put(f"/v1/pods/{name}", json=spec).status_code == 200
            all_.until_exact()
