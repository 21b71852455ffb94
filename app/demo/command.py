"""`kvindexer demo` and `kvindexer traffic`: the command lines. What they need is loaded when they run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Group

    from app.demo.router import Router
    from app.demo.runner import DemoOutcome, Show
    from app.experiment.trace import Trace

POLICY_HELP = "Policy to route by; given several times, each has pods and the same traffic of its own."
RATE_HELP = "Conversations that begin in a second."
TRACE_HELP = "Send the requests of this trace (Mooncake or pdelta, plain or .gz) instead of made-up ones."
SPEED_HELP = "Seconds of the trace in one second; the pods stay as fast as they are."
PLAIN_INTERVAL_S = 5.0

TraceOption = Annotated[Path | None, typer.Option(help=TRACE_HELP)]
SpeedOption = Annotated[float, typer.Option(min=0.01, max=1_000, help=SPEED_HELP)]


def demo(
    seconds: Annotated[float, typer.Option(min=0.5, help="How long traffic runs.")] = 60.0,
    pods: Annotated[int, typer.Option(min=1, max=64, help="Simulated pods for each policy.")] = 4,
    blocks: Annotated[int, typer.Option(min=256, help="Blocks of KV cache a pod has.")] = 2_000,
    block_size: Annotated[
        int | None, typer.Option(min=4, help="Tokens in a block; without it 16, or those of the trace.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.01, help=RATE_HELP)] = 3.0,
    trace: TraceOption = None,
    speed: SpeedOption = 1.0,
    policy: Annotated[list[str] | None, typer.Option(help=POLICY_HELP)] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the indexer and its dashboard; 0: a free one.")
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the tables as they last were into this file (.svg).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """An indexer, simulated pods and traffic on this machine, routing by prefix beside round robin. Ctrl-C ends it."""
    from app.demo.runner import DemoSettings, run_demo

    read = _read_trace(trace)
    settings = DemoSettings(
        policies=_policies(policy),
        pods=pods,
        blocks=blocks,
        block_size=block_size or (read.block_tokens if read is not None else DemoSettings().block_size),
        rate=rate,
        seconds=seconds,
        port=port,
        trace=read,
        speed=speed,
    )
    if picture is not None and picture.suffix != ".svg":
        raise typer.BadParameter("a file that ends in .svg", param_hint="--picture")
    with _screen(quiet=as_json) as show, _drawn(picture, show) as watched:
        outcome = asyncio.run(run_demo(settings, watched))
    _sum_up(outcome, as_json=as_json)


def traffic(
    indexer: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            envvar="KVINDEXER_URL",
            help="The indexer to route by, http://127.0.0.1:8080 without; given several times, all in turn.",
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVINDEXER_API_KEY", help="A key of scope `read` or `write`.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.5, help="How long; without it, until interrupted.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.01, help=RATE_HELP)] = 3.0,
    trace: TraceOption = None,
    speed: SpeedOption = 1.0,
    policy: Annotated[str, typer.Option(help="Policy to route by.")] = "prefix_and_load",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Route made-up conversations to the simulated pods that an indexer knows (`kvindexer simulate`)."""
    from app.demo.runner import DemoSettings, run_traffic

    settings = DemoSettings(
        policies=_policies([policy]), rate=rate, seconds=seconds, trace=_read_trace(trace), speed=speed
    )
    urls = [url.rstrip("/") for url in indexer or ["http://127.0.0.1:8080"]]
    with _screen(quiet=as_json) as show:
        outcome = asyncio.run(run_traffic(settings, urls, api_key, show))
    _sum_up(outcome, as_json=as_json)


def _read_trace(path: Path | None) -> Trace | None:
    """Raises InvalidInput."""
    if path is None:
        return None
    from app.experiment.trace import load_trace

    return load_trace(path)


def _policies(given: list[str] | None) -> tuple[str, ...]:
    from app.demo.runner import DemoSettings
    from app.experiment.runner import POLICIES

    for name in given or ():
        if name not in POLICIES:
            raise typer.BadParameter(f"one of {', '.join(POLICIES)}", param_hint="--policy")
    return tuple(dict.fromkeys(given)) if given else DemoSettings().policies


@contextlib.contextmanager
def _screen(*, quiet: bool) -> Iterator[Callable[[Sequence[Router], float, str], None]]:
    """Tables on a terminal, lines elsewhere, nothing where standard output is a document's."""
    from rich.console import Console
    from rich.live import Live

    from app.demo.screen import build_tables, plain_line

    console = Console()
    if quiet:
        yield lambda _routers, _elapsed_s, _dashboard: None
    elif console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            yield lambda routers, elapsed_s, dashboard: live.update(
                build_tables(routers, elapsed_s=elapsed_s, dashboard=dashboard), refresh=True
            )
    else:
        said_s = -PLAIN_INTERVAL_S

        def say(routers: Sequence[Router], elapsed_s: float, dashboard: str) -> None:
            nonlocal said_s
            if said_s < 0:
                print(f"dashboard {dashboard}", flush=True)
            if elapsed_s - said_s >= PLAIN_INTERVAL_S:
                said_s = elapsed_s
                print(plain_line(routers, elapsed_s=elapsed_s), flush=True)

        yield say


@contextlib.contextmanager
def _drawn(picture: Path | None, show: Show) -> Iterator[Show]:
    """`show` that remembers what it was last given, for the picture; the tables are gone by the end."""
    if picture is None:
        yield show
        return
    from app.demo.screen import build_tables, draw

    tables: list[Group] = []

    def watched(routers: Sequence[Router], elapsed_s: float, dashboard: str) -> None:
        show(routers, elapsed_s, dashboard)
        tables[:] = [build_tables(routers, elapsed_s=elapsed_s, dashboard=dashboard)]

    yield watched
    if tables:
        draw(tables[0], picture)


def _sum_up(outcome: DemoOutcome, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_document(outcome)))
        return
    from rich.console import Console

    from app.demo.screen import policy_table

    console = Console()
    if outcome.routers:
        console.print(policy_table(outcome.routers))
    ending = "interrupted" if outcome.interrupted else "done"
    if outcome.dashboard:
        console.print(f"{ending}; the dashboard was at {outcome.dashboard}", highlight=False)
    else:
        console.print(f"{ending} before the indexer was up", highlight=False)


def _document(outcome: DemoOutcome) -> dict[str, Any]:
    from app.experiment.runner import percentile

    policies = {}
    for router in outcome.routers:
        figures = router.figures
        delays = sorted(router.delays_s)
        prompt = sum(pod.prompt_tokens for pod in figures.values())
        policies[router.policy] = {
            "requests": sum(pod.requests for pod in figures.values()),
            "failed": sum(pod.failed for pod in figures.values()),
            "routed_alone": router.alone,
            "hit_rate": sum(pod.cached_tokens for pod in figures.values()) / prompt if prompt else 0.0,
            "ttft_p50_s": percentile(delays, 0.5),
            "ttft_p99_s": percentile(delays, 0.99),
            "requests_per_pod": {name: pod.requests for name, pod in figures.items()},
        }
    return {"interrupted": outcome.interrupted, "dashboard": outcome.dashboard, "policies": policies}
