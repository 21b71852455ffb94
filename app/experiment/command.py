"""`kvindexer experiment`: the command line. What it needs is loaded when it runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from app.experiment.report import Report
    from app.experiment.runner import FleetShape, PolicyResult
    from app.experiment.trace import Trace

MODEL = "kvindexer-experiment"
# Every question brings loads of that very moment, in virtual time: what the indexer counts by itself in its own time
# between two loads would be noise.
OWN_DECAY_S = 1e-6


def experiment(
    trace: Annotated[Path, typer.Option(help="Trace file, Mooncake or pdelta, plain or .gz.")],
    pods: Annotated[int, typer.Option(min=1, max=1_024, help="Number of pods.")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that the KV cache of a pod has.")] = 4_000,
    block_size: Annotated[
        int | None, typer.Option(min=4, help="Tokens in an engine's block; without it, in one of the trace.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy; can be given several times.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first requests of the trace.")] = None,
    url: Annotated[
        str | None, typer.Option(help="The indexer to ask; without it, one is started for each policy.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVINDEXER_API_KEY", help="A key of scope `write`.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this file (.svg, .png).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What routing by prefix gains on a recorded trace: simulated pods in virtual time behind a real indexer.

    Exit status: 0 every prediction was exact, 1 otherwise, 2 wrong usage.
    """
    from app.experiment.report import build_table, draw
    from app.experiment.runner import POLICIES, FleetShape
    from app.experiment.trace import DIGITS, REQUESTS_MAX, load_trace

    for name in policy or ():
        if name not in POLICIES:
            raise typer.BadParameter(f"one of {', '.join(POLICIES)}", param_hint="--policy")
    loaded = load_trace(trace, requests_max=requests or REQUESTS_MAX)
    size = block_size or loaded.block_tokens
    if loaded.block_tokens % size or size % DIGITS:
        raise typer.BadParameter(
            f"blocks of {loaded.block_tokens} tokens are not made of blocks of {size}",
            param_hint="--block-size",
        )
    chosen = tuple(name for name in POLICIES if not policy or name in policy)
    report = _measure(loaded, FleetShape(pods, blocks, size), chosen, url, api_key)
    if plot is not None:
        draw(report, plot)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        from rich.console import Console

        Console().print(build_table(report))
    if not report.is_exact:
        raise typer.Exit(1)


def _measure(
    trace: Trace, shape: FleetShape, policies: tuple[str, ...], url: str | None, api_key: str | None
) -> Report:
    from app.experiment.bounds import hit_rate
    from app.experiment.report import Report

    with _progress() as progress:
        results = {name: _run(trace, shape, name, url, api_key, progress) for name in policies}
    size, pages = shape.block_size, shape.pods * shape.blocks
    return Report(
        trace=trace.name,
        requests=len(trace.requests),
        pods=shape.pods,
        blocks=shape.blocks,
        block_size=size,
        policies=results,
        bounds={
            "shared_lru": hit_rate(trace, block_size=size, capacity_blocks=pages),
            "infinite": hit_rate(trace, block_size=size, capacity_blocks=None),
        },
    )


def _run(
    trace: Trace, shape: FleetShape, policy: str, url: str | None, api_key: str | None, progress: Progress
) -> PolicyResult:
    from app.experiment.indexer_link import IndexerLink
    from app.experiment.runner import PolicyRun
    from app.replay.indexer import own_indexer

    task = progress.add_task(policy, total=len(trace.requests))
    with contextlib.ExitStack() as stack:
        address = url if url is not None else stack.enter_context(own_indexer(route_decay_s=OWN_DECAY_S))
        link = stack.enter_context(IndexerLink(address, MODEL, api_key=api_key))
        return PolicyRun(trace, shape, link, policy).run(lambda done: progress.update(task, completed=done))


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """On standard error, and only where somebody watches: standard output is the result's."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
