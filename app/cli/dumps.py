"""`kvindexer dump` and `load`: what an indexer holds, out of one and into another."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from app.cli import screen
from app.cli.connection import DEFAULT_URL, ApiKey, AsJson, Connection, Url
from app.errors import InvalidInput

LINE_BYTES_MAX = 64 * 1024 * 1024


def dump(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file; standard output when absent.")
    ] = None,
    pod: Annotated[list[str] | None, typer.Option("--pod", help="Only this pod; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Write what every pod holds, one batch of events a line, as `load` and POST /v1/events take it.

    With --json and --output the document is a summary; with --json alone it is an array of the batches.

    Examples:

        kvindexer dump -o index.ndjson

        kvindexer dump --pod pod-a | grep -c PrefixesStored
    """
    with Connection(url, api_key) as indexer, screen.progress() as bar:
        task = bar.add_task("blocks", total=_blocks_held(indexer, pod))
        params = {"pods": pod} if pod else {}
        with indexer.stream("/v1/dump", params=params, endless=False) as response, _sink(output) as sink:
            separator = b"[" if as_json and output is None else b""
            lines = blocks = 0
            for line in response.iter_lines():
                told = sum(len(event["block_hashes"]) for event in json.loads(line)["events"])
                sink.write(separator + line.encode() + b"\n")
                separator = separator and b","
                lines += 1
                blocks += told
                bar.advance(task, told)
            if separator:
                sink.write(b"]\n" if separator == b"," else b"[]\n")
    if output is None:
        return
    if as_json:
        screen.print_json({"file": str(output), "batches": lines, "blocks": blocks})
    else:
        typer.echo(f"{output}: {blocks} blocks in {lines} batches")


def load(
    file: Annotated[Path, typer.Argument(help="What `dump` wrote; - is standard input.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Post the batches of a dump to an indexer. Loading the same dump twice changes nothing.

    Examples:

        kvindexer load index.ndjson --url http://10.0.0.9:8080

        kvindexer dump --url http://10.0.0.8:8080 | kvindexer load - --url http://10.0.0.9:8080
    """
    batches = blocks = rejected = 0
    with Connection(url, api_key) as indexer, screen.progress() as bar, _source(file) as source:
        size = None if file == Path("-") else file.stat().st_size
        task = bar.add_task("bytes", total=size)
        while line := source.readline(LINE_BYTES_MAX):
            answer = indexer.post_text("/v1/events", line)
            batches += 1
            blocks += answer["stored_blocks"]
            rejected += len(answer["rejected"])
            bar.advance(task, len(line))
    if as_json:
        screen.print_json({"batches": batches, "blocks": blocks, "rejected": rejected})
    else:
        typer.echo(
            f"{blocks} blocks in {batches} batches" + (f", {rejected} events refused" if rejected else "")
        )
    if rejected:
        raise InvalidInput(f"{rejected} events of the dump were refused")


def _blocks_held(indexer: Connection, pods: list[str] | None) -> int:
    """About what a dump will have."""
    answer: dict[str, Any] = indexer.get("/v1/pods")
    wanted = [pod for pod in answer["pods"] if not pods or pod["pod"] in pods]
    return sum(sum(rank["blocks"].values()) for pod in wanted for rank in pod["ranks"])


@contextlib.contextmanager
def _sink(output: Path | None) -> Iterator[BinaryIO]:
    """A file gets its name when it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    part = output.with_name(output.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(output)
    except OSError as error:
        raise InvalidInput(f"{output} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _source(file: Path) -> Iterator[BinaryIO]:
    if file == Path("-"):
        yield sys.stdin.buffer
        return
    try:
        source = file.open("rb")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from error
    with source:
        yield source
