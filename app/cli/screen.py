"""What a command prints: a table for people, or one JSON document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDE = 240  # where nobody looks at the width: a cut cell would be a lost fact


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Columns whose name begins with '#' are numbers."""
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        is_number = column.startswith("#")
        table.add_column(column.lstrip("#"), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False)
    console.print(table)


def progress() -> Progress:
    """A bar on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def age(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"


def tiers(blocks: dict[str, int]) -> str:
    """`gpu 12, cpu 40`: tiers without blocks are left out."""
    return ", ".join(f"{tier} {count}" for tier, count in blocks.items() if count) or "-"
