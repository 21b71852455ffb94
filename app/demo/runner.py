"""The demo: an indexer, a fleet of simulated pods for each policy, and the same traffic for all of them.

Everything lives inside one task. A signal cancels that task once; leaving its blocks ends the traffic, the pods
and the indexer, in that order, and what was measured until then is still summed up. A second signal does not
disturb that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from app.client import AsyncClient, ClientSettings
from app.demo.indexer_process import running_indexer
from app.demo.router import Router
from app.demo.source import Source, TraceSource, TrafficSource
from app.errors import InvalidInput, Unresponsive
from app.experiment.trace import Trace
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.pod import PodSettings

MODEL = "simulated"
POD_TIMEOUT_S = 60.0
INDEXER_BUDGET_S = 2.0  # pods, indexer and router share one machine here, and it may be a busy one
PODS_INTERVAL_S = 2.0  # between two looks at which pods the indexer knows
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Show = Callable[[Sequence[Router], float, str], None]  # routers, elapsed seconds, address of the dashboard


@dataclasses.dataclass(frozen=True, slots=True)
class DemoSettings:
    """`rate` is sessions a second, of some four requests on average; `seconds` None runs until a signal.

    With a `trace` its requests are the traffic instead, `speed` seconds of it in one.
    """

    policies: tuple[str, ...] = ("prefix_and_load", "round_robin")
    pods: int = 4
    blocks: int = 2_000
    block_size: int = 16
    rate: float = 3.0
    seconds: float | None = 60.0
    refresh_s: float = 0.5
    port: int = 0
    seed: int = 1
    trace: Trace | None = None
    speed: float = 1.0


@dataclasses.dataclass(slots=True)
class DemoOutcome:
    """Filled while the demo runs."""

    dashboard: str = ""
    routers: list[Router] = dataclasses.field(default_factory=list)
    interrupted: bool = False


async def run_demo(settings: DemoSettings, show: Show) -> DemoOutcome:
    """With an indexer and pods of its own."""
    outcome = DemoOutcome()
    outcome.interrupted = await _until_signal(_with_own_fleets(settings, outcome, show))
    return outcome


async def run_traffic(
    settings: DemoSettings, indexer_urls: Sequence[str], api_key: str | None, show: Show
) -> DemoOutcome:
    """Through indexers that run already, replicas of one another, to all pods of the model that say where their
    metrics are."""
    outcome = DemoOutcome(dashboard=f"{indexer_urls[0]}/")

    async def body() -> None:
        async with _clients(indexer_urls, api_key) as (indexers, http):
            urls = await _wait_for_pods(http, indexer_urls, api_key)
            for policy in settings.policies:
                outcome.routers.append(Router(indexers, http, MODEL, urls, policy))
            follower = asyncio.create_task(_follow_pods(http, indexer_urls, api_key, outcome.routers))
            try:
                await _drive(settings, outcome, show)
            finally:
                follower.cancel()
                await asyncio.gather(follower, return_exceptions=True)

    outcome.interrupted = await _until_signal(body())
    return outcome


async def _until_signal(body: Coroutine[Any, Any, None]) -> bool:
    """True when a signal ended it."""
    task = asyncio.create_task(body)
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def cancel(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return bool(received)


async def _with_own_fleets(settings: DemoSettings, outcome: DemoOutcome, show: Show) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(running_indexer(settings.port))
        outcome.dashboard = f"{url}/"
        indexers, http = await stack.enter_async_context(_clients([url], None))
        for policy in settings.policies:
            fleet = await stack.enter_async_context(Fleet(_fleet_settings(settings, policy, url)))
            urls = {running.name: running.url for running in fleet.pods}
            outcome.routers.append(Router(indexers, http, MODEL, urls, policy))
        await _drive(settings, outcome, show)


def _fleet_settings(settings: DemoSettings, policy: str, url: str) -> FleetSettings:
    cache = KVCacheSettings(capacity_pages=settings.blocks, block_size=settings.block_size)
    pod = PodSettings(
        name=policy.replace("_", "-"), model=MODEL, engine=EngineSettings(cache=cache, waiting_max=10_000)
    )
    return FleetSettings(pods=settings.pods, pod=pod, indexer_urls=(url,))


@contextlib.asynccontextmanager
async def _clients(
    urls: Sequence[str], api_key: str | None
) -> AsyncIterator[tuple[list[AsyncClient], httpx.AsyncClient]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with contextlib.AsyncExitStack() as stack:
        settings = ClientSettings(budget_s=INDEXER_BUDGET_S)
        indexers = [
            await stack.enter_async_context(AsyncClient(url, api_key=api_key, settings=settings))
            for url in urls
        ]
        http = httpx.AsyncClient(timeout=POD_TIMEOUT_S, limits=limits, trust_env=False)
        yield indexers, await stack.enter_async_context(http)


async def _drive(settings: DemoSettings, outcome: DemoOutcome, show: Show) -> None:
    """Traffic through every router until time is up, or a trace."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    sources = [
        asyncio.create_task(_source(settings, router).run(), name=router.policy) for router in outcome.routers
    ]
    me = asyncio.current_task()
    assert me is not None, "it runs in a task"
    try:
        while settings.seconds is None or loop.time() - began_s < settings.seconds:
            if (
                me.cancelling()
            ):  # the signal came before: Python 3.11 can lose a cancellation in asyncio.wait_for
                raise asyncio.CancelledError
            show(outcome.routers, loop.time() - began_s, outcome.dashboard)
            done, open_sources = await asyncio.wait(sources, timeout=settings.refresh_s)
            for task in done:
                await task  # made-up traffic only ends for a fault of ours
            if not open_sources:
                break
    finally:
        for task in sources:
            task.cancel()
        await asyncio.gather(*sources, return_exceptions=True)


def _source(settings: DemoSettings, router: Router) -> Source:
    if settings.trace is not None:
        return TraceSource(router, settings.trace, speed=settings.speed)
    return TrafficSource(router, rate=settings.rate, seed=settings.seed)


async def _wait_for_pods(
    http: httpx.AsyncClient, indexer_urls: Sequence[str], api_key: str | None, deadline_s: float = 60.0
) -> dict[str, str]:
    """Once there is one."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        try:
            urls = await _known_pods(http, indexer_urls, api_key)
            if urls:
                return urls
            cause = "it knows none of the model"
        except Unresponsive as error:
            cause = str(error)
        if loop.time() > deadline:
            raise Unresponsive(f"the indexer at {' and '.join(indexer_urls)} has no pods to send to: {cause}")
        await asyncio.sleep(0.2)


async def _follow_pods(
    http: httpx.AsyncClient, indexer_urls: Sequence[str], api_key: str | None, routers: Sequence[Router]
) -> None:
    while True:
        await asyncio.sleep(PODS_INTERVAL_S)
        with contextlib.suppress(Unresponsive, InvalidInput):
            urls = await _known_pods(http, indexer_urls, api_key)
            for router in routers if urls else ():
                router.set_pods(urls)


async def _known_pods(
    http: httpx.AsyncClient, indexer_urls: Sequence[str], api_key: str | None
) -> dict[str, str]:
    """Of the first that answers."""
    for url in indexer_urls[:-1]:
        with contextlib.suppress(Unresponsive):
            return await _served_pods(http, url, api_key)
    return await _served_pods(http, indexer_urls[-1], api_key)


async def _served_pods(http: httpx.AsyncClient, indexer_url: str, api_key: str | None) -> dict[str, str]:
    """Name -> address of the pods of the model; a pod serves where its metrics are."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = await http.get(f"{indexer_url}/v1/pods", headers=headers)
    except httpx.HTTPError as error:
        raise Unresponsive(f"it does not answer: {error}") from error
    if response.is_server_error:
        raise Unresponsive(f"it answers {response.status_code}")
    if response.is_error:
        raise InvalidInput(f"the indexer at {indexer_url} refused: {response.text[:500]}")
    found = {}
    for pod in response.json()["pods"]:
        if pod["model"] == MODEL and pod["metrics_url"] is not None:
            address = urlsplit(pod["metrics_url"])
            found[pod["pod"]] = f"{address.scheme}://{address.netloc}"
    return found
