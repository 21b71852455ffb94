"""`kvindexer events` and `stats`: what happens, and what has happened."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from app.cli import screen
from app.cli.connection import DEFAULT_URL, ApiKey, AsJson, Connection, Url
from app.errors import Unresponsive


def events(
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Leave after so many.")] = None,
    pod: Annotated[list[str] | None, typer.Option("--pod", help="Only of this pod; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Follow what happens: batches, states, pods that come and go. Ctrl-C ends it.

    Examples:

        kvindexer events --pod pod-a

        kvindexer events -n 100 --json
    """
    with Connection(url, api_key) as indexer:
        followed = _follow(indexer, frozenset(pod or ()))
        wanted = itertools.islice(followed, count)
        shown = _show_json(wanted) if as_json else _show_lines(wanted)
    if count is not None and shown is not None and shown < count:
        raise Unresponsive(f"the feed ended after {shown} of {count} events")


def _follow(indexer: Connection, pods: frozenset[str]) -> Iterator[dict[str, Any]]:
    with indexer.stream("/v1/live", params={}, endless=True) as response:
        kind = ""
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                data = json.loads(value)
                if not pods or data.get("pod") in pods or kind == "dropped":
                    yield {"event": kind, **data}


def _show_lines(followed: Iterable[dict[str, Any]]) -> int | None:
    """How many; None when the user had enough."""
    shown = 0
    try:
        for event in followed:
            kind, ts = event.pop("event"), event.pop("ts", None)
            when = time.strftime("%H:%M:%S", time.localtime(ts))
            said = "  ".join(f"{name}={value}" for name, value in event.items() if value is not None)
            typer.echo(f"{when}  {kind:<11}  {said}")
            shown += 1
    except KeyboardInterrupt:
        return None
    return shown


def _show_json(followed: Iterable[dict[str, Any]]) -> int | None:
    """One document, written as it grows: {"events":[...]}."""
    shown = 0
    interrupted = False
    typer.echo('{"events":[', nl=False)
    try:
        for event in followed:
            typer.echo(("," if shown else "") + json.dumps(event), nl=False)
            shown += 1
    except KeyboardInterrupt:
        interrupted = True
    finally:
        typer.echo("]}")
    return None if interrupted else shown


def stats(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Figures of the index, the sources and the queries since the start.

    Examples:

        kvindexer stats

        kvindexer stats --json | jq .index.prefixes
    """
    with Connection(url, api_key) as indexer:
        answer = indexer.get("/v1/stats")
    if as_json:
        return screen.print_json(answer)
    rows = [("", "uptime", f"{answer['uptime_s']:.0f} s"), ("", "pods", answer["pods"])]
    for name, group in answer.items():
        if isinstance(group, dict):
            rows += [(name, key, value) for key, value in group.items()]
    for context in answer.get("contexts", []):
        adapter = f" + {context['lora']}" if context["lora"] else ""
        what = f"{context['model']}{adapter}, blocks of {context['block_size']}"
        rows.append(("context", what, f"{context['prefixes']} prefixes"))
    return screen.print_table(("of", "what", "#value"), rows)
