"""`kvindexer simulate`: the command line of the simulated fleet. What it needs is loaded when it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from app.errors import InvalidInput, Unresponsive

if TYPE_CHECKING:
    from app.simulator.fleet import Fleet, FleetSettings

ANNOUNCE_INTERVAL_S = 5.0  # an indexer that restarted without a snapshot knows no pods


def simulate(
    pods: Annotated[int, typer.Option(min=1, help="Number of pods.")] = 4,
    model: Annotated[str, typer.Option(help="Model name that the pods serve.")] = "simulated",
    adapter: Annotated[
        list[str] | None, typer.Option(help="LoRA adapter that the pods serve as well.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Pages of KV cache a rank has.")] = 4_000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of a pod.")] = 1,
    offload_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks that the offload tier of a rank keeps; 0: no such tier.")
    ] = 0,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a chunk of the offload tier.")] = 256,
    world_size: Annotated[int, typer.Option(min=1, help="Workers that share a chunk.")] = 1,
    connector: Annotated[
        bool, typer.Option(help="Report metadata beside blocks, and prefetch what hints name.")
    ] = True,
    offset_hints: Annotated[bool, typer.Option(help="With the connector: offset hints in it.")] = True,
    cla_metadata: Annotated[bool, typer.Option(help="With the connector: CLA groups in it.")] = True,
    draft_tokens: Annotated[int, typer.Option(min=0, help="Speculative tokens a decoding step tries.")] = 0,
    speed: Annotated[float, typer.Option(help="Simulated seconds in a second; inf does not wait.")] = 1.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    by_hostname: Annotated[
        bool,
        typer.Option(
            "--by-hostname", help="Name the pods after this machine and announce its name as their address."
        ),
    ] = False,
    port: Annotated[int, typer.Option(min=0, help="HTTP port of the first pod; 0: free ones.")] = 9_000,
    zmq_port: Annotated[int, typer.Option(min=0, help="First port for events; 0: free ones.")] = 0,
    replay_port: Annotated[int, typer.Option(min=0, help="First port for replays; 0: free ones.")] = 0,
    form: Annotated[str, typer.Option(help="Wire form of the events, by its first release.")] = "MAPS_0_33",
    indexer: Annotated[
        list[str] | None,
        typer.Option(help="Indexer to register the pods at; given several times, each follows them."),
    ] = None,
    publish_http: Annotated[
        bool, typer.Option(help="Post events to the (first) indexer instead of publishing them by ZMQ.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVINDEXER_API_KEY", help="A key of scope `write`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the pods as one JSON document.")] = False,
) -> None:
    """Run pods that behave like engines, without GPUs, until interrupted."""
    from app.ingest.vllm import WireForm
    from app.simulator.connector import ConnectorSettings
    from app.simulator.engine_settings import EngineSettings
    from app.simulator.fleet import FleetSettings
    from app.simulator.kv_cache import KVCacheSettings
    from app.simulator.offload import OffloadSettings
    from app.simulator.pod import PodSettings

    if form not in WireForm.__members__:
        raise typer.BadParameter(f"one of {', '.join(WireForm.__members__)}", param_hint="--form")
    if publish_http and not indexer:
        raise typer.BadParameter("needs --indexer", param_hint="--publish-http")
    offload = OffloadSettings(
        model=model, world_size=world_size, chunk_tokens=chunk_tokens, capacity_chunks=max(1, offload_chunks)
    )
    engine = EngineSettings(
        cache=KVCacheSettings(capacity_pages=blocks, block_size=block_size),
        offload=offload if offload_chunks else None,
        draft_tokens=draft_tokens,
        connector=ConnectorSettings(offset_hints=offset_hints, cla_metadata=cla_metadata)
        if connector
        else None,
    )
    hostname = socket.gethostname()
    pod = PodSettings(
        name=f"pod-{hostname}" if by_hostname else "pod",
        model=model,
        adapters=tuple(adapter or ()),
        engine=engine,
        form=WireForm[form],
        dp_size=dp_size,
        speed=speed,
        host=host,
        advertised_host=hostname if by_hostname else None,
        zmq_port=zmq_port,
        replay_port=replay_port,
        events_url=indexer[0] if publish_http and indexer else None,
        events_api_key=api_key,
    )
    settings = FleetSettings(
        pods=pods, pod=pod, http_port=port, indexer_urls=tuple(indexer or ()), api_key=api_key
    )
    asyncio.run(_run(settings, as_json=as_json))


async def _run(settings: FleetSettings, *, as_json: bool) -> None:
    from app.simulator.fleet import Fleet, announce

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with Fleet(settings) as fleet:
        typer.echo(json.dumps(_listing(fleet)) if as_json else _table(fleet))
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ANNOUNCE_INTERVAL_S)
            for url in settings.indexer_urls if not ended.is_set() else ():
                # An indexer that is away hears of them when it is back; one that refuses says so in its own log.
                with contextlib.suppress(Unresponsive, InvalidInput):
                    await announce(url, fleet.pods, api_key=settings.api_key)


def _listing(fleet: Fleet) -> list[dict[str, object]]:
    return [{"pod": running.name, "url": running.url, **running.registration()} for running in fleet.pods]


def _table(fleet: Fleet) -> str:
    lines = [
        f"{running.name}  {running.url}  events {running.pod.zmq_endpoint or 'by HTTP'}  "
        f"replay {running.pod.replay_endpoint or '-'}"
        for running in fleet.pods
    ]
    return "\n".join([*lines, "Ctrl-C ends them."])
