"""Several simulated pods in one process: one event loop, one HTTP server a pod, told to an indexer if there
is one.

Each pod has a hash seed of its own, so no two agree on the name of a block, as with engines before vLLM
0.29: an indexer that compares names across pods fails here at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Self

import httpx
import uvicorn

from app.errors import InvalidInput, InvalidSettings, Unresponsive
from app.simulator.pod import Pod, PodSettings
from app.simulator.server import PodServer

PODS_MAX = 1_024
INDEXER_DEADLINE_S = 10.0
INDEXER_PAUSE_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class FleetSettings:
    """`pod` is what all have in common; its name gets the pod's number, its ports the pod's place.

    `http_port` is that of the first pod, 0 takes free ones. Pods are registered at each of
    `indexer_urls`.
    """

    pods: int = 4
    pod: PodSettings = dataclasses.field(default_factory=lambda: PodSettings(name="pod"))
    http_port: int = 0
    indexer_urls: tuple[str, ...] = ()
    api_key: str | None = None
    same_hash_seed: bool = False


class RunningPod:
    """A pod with its HTTP face; `url` is where it answers."""

    def __init__(self, settings: PodSettings, http_port: int) -> None:
        self.pod = Pod(settings)
        self.server = PodServer(self.pod)
        self._listener = _listen(settings.host, http_port)
        self._uvicorn = _QuietServer(
            uvicorn.Config(
                self.server.app, lifespan="off", log_level="warning", ws="none", timeout_graceful_shutdown=1
            )
        )
        self._task: asyncio.Task[None] | None = None
        port = self._listener.getsockname()[1]
        self.url = f"http://{settings.host}:{port}"

    @property
    def name(self) -> str:
        return self.pod.settings.name

    async def start(self) -> None:
        await self.pod.start()
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.001)
            if self._task.done():
                await self._task

    async def stop(self) -> None:
        await self.pod.stop()
        self._uvicorn.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()

    def registration(self) -> dict[str, Any]:
        """The body of PUT /v1/pods/{name}."""
        its = self.pod.settings
        about: dict[str, Any] = {
            "model": its.model,
            "block_size": its.engine.cache.block_size,
            "dp_size": its.dp_size,
            "metrics_url": f"{self._advertised(self.url)}/metrics",
        }
        if self.pod.zmq_endpoint is not None:
            about |= {
                "zmq_endpoint": self._advertised(self.pod.zmq_endpoint),
                "replay_endpoint": self._advertised(self.pod.replay_endpoint or ""),
                "topic": its.topic,
            }
        return about

    def _advertised(self, address: str) -> str:
        its = self.pod.settings
        if its.advertised_host is None:
            return address
        return address.replace(f"//{its.host}:", f"//{its.advertised_host}:", 1)


class Fleet:
    """`async with Fleet(settings) as fleet`: pods are up and registered inside, and gone afterwards."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self.settings = settings or FleetSettings()
        if not 1 <= self.settings.pods <= PODS_MAX:
            raise InvalidSettings(f"a fleet has 1 to {PODS_MAX} pods, not {self.settings.pods} (pods)")
        self.pods: list[RunningPod] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(self.settings.pods):
                running = RunningPod(self._pod_settings(number), self._port(self.settings.http_port, number))
                stack.push_async_callback(running.stop)
                await running.start()
                self.pods.append(running)
            for url in self.settings.indexer_urls:
                await self._announce_first(url)
            if self.settings.indexer_urls:
                await self._wait_until_heard()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _announce_first(self, url: str) -> None:
        """An indexer that is started together with the pods may need a moment longer than they do."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + INDEXER_DEADLINE_S
        while True:
            try:
                return await announce(url, self.pods, api_key=self.settings.api_key)
            except Unresponsive:
                if clock() > deadline:
                    raise
            await asyncio.sleep(INDEXER_PAUSE_S)

    async def _wait_until_heard(self) -> None:
        """Some indexer listens to every pod that publishes by ZMQ; of several, not each needs to."""
        for running in self.pods:
            for publisher in running.pod.publishers:
                if not await asyncio.to_thread(publisher.wait_subscribed, 10.0):
                    raise Unresponsive(f"no indexer subscribed to {publisher.endpoint} within 10 s")

    def _pod_settings(self, number: int) -> PodSettings:
        common = self.settings.pod
        seed = b"" if self.settings.same_hash_seed else f"{common.name}-{number}".encode()
        cache = dataclasses.replace(common.engine.cache, hash_seed=seed)
        return dataclasses.replace(
            common,
            name=f"{common.name}-{number}",
            engine=dataclasses.replace(common.engine, cache=cache),
            zmq_port=self._port(common.zmq_port, number * common.dp_size),
            replay_port=self._port(common.replay_port, number * common.dp_size),
        )

    @staticmethod
    def _port(first: int, offset: int) -> int:
        return first + offset if first else 0


async def announce(url: str, pods: Sequence[RunningPod], *, api_key: str | None = None) -> None:
    """Tell an indexer where the pods' events are. Idempotent; one that has restarted may have forgotten it."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0) as http:
        for running in pods:
            try:
                response = await http.put(f"/v1/pods/{running.name}", json=running.registration())
            except httpx.HTTPError as error:
                raise Unresponsive(f"no answer from the indexer at {url}: {error}") from error
            if response.is_error:
                raise InvalidInput(f"the indexer refused {running.name}: {response.text[:500]}")


class _QuietServer(uvicorn.Server):
    """Leaves signals to whoever runs the fleet."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2_048)
    except OSError as error:
        raise InvalidSettings(f"cannot listen on {host}:{port}: {error.strerror}") from error
