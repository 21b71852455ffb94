"""`kvindexer replay`: the command line of the check. Sockets and codec are loaded when it runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.replay.settings import ReplaySettings
from app.replay.verdict import Report, Scope, Unjudged

if TYPE_CHECKING:
    from rich.console import Console

SCOPE_TITLES = {
    Scope.OUTSIDE: "outside reset windows",
    Scope.INSIDE: "inside reset windows",
    Scope.CONCURRENT: "concurrent",
}
UNJUDGED_TITLES = {
    Unjudged.NOT_REPORTED: "the engine did not report cached_tokens",
    Unjudged.SALT_HIDDEN: "salted, and this release does not publish salts",
    Unjudged.POD_SILENT: "the pod never published an event",
}


def replay(
    capture: Annotated[
        Path, typer.Argument(help="A workload file, or a folder with a workload or a recording.")
    ],
    url: Annotated[
        str | None, typer.Option(help="The indexer to check; without it, one is started for the check.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVINDEXER_API_KEY", help="A key of scope `write`.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address at which the indexer reaches this machine.")] = (
        ReplaySettings().host
    ),
    deadline_s: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for the indexer to apply what was published.")
    ] = ReplaySettings().deadline_s,
    keep_pods: Annotated[bool, typer.Option(help="Leave the replayed pods registered.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Replay captured engine traffic and compare the indexer's answers with what the engines really reused.

    Exit status: 0 every request judged outside reset windows is exact, 1 otherwise, 2 wrong usage.
    """
    from app.replay.formats import load_capture
    from app.replay.indexer import IndexerUnderTest, own_indexer
    from app.replay.runner import Replay

    loaded = load_capture(capture)
    with contextlib.ExitStack() as stack:
        address = url if url is not None else stack.enter_context(own_indexer())
        indexer = stack.enter_context(IndexerUnderTest(address, api_key=api_key))
        report = Replay(loaded, indexer, ReplaySettings(host, deadline_s, keep_pods)).run()
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        from rich.console import Console

        print_report(report, Console())
    if not report.passed:
        raise typer.Exit(1)


def print_report(report: Report, console: Console) -> None:
    from rich.table import Table

    console.print(
        f"{report.capture}: {report.frames} frames, model {report.model}, block size {report.block_size}",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for column in ("requests", "exact", "over", "under"):
        table.add_column(column, justify="right")
    for scope, title in SCOPE_TITLES.items():
        tally = report.tally(scope)
        if tally["requests"] or scope is Scope.OUTSIDE:
            table.add_row(title, *(str(count) for count in tally.values()))
    table.add_section()
    table.add_row("all", *(str(count) for count in report.tally().values()), style="bold")
    console.print(table)
    for reason, count in report.unjudged.items():
        if count:
            console.print(f"{count} not judged: {UNJUDGED_TITLES[reason]}")
    console.print(
        "exact outside reset windows" if report.passed else "NOT exact outside reset windows",
        style="green" if report.passed else "red",
    )
