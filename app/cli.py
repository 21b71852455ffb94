"""The command `kvindexer`. Exit status: 0 done, 1 the work failed, 2 wrong usage.

What a command needs is imported when it runs: `kvindexer --help` must work, and a missing native core must be one
sentence and no traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from app import __version__
from app.config import PREFIX, Settings, load_settings
from app.errors import IndexerError, InvalidSettings

DONE, FAILED, WRONG_USAGE = 0, 1, 2

cli = typer.Typer(
    name="kvindexer",
    help="Which pod already holds the KV cache of the longest leading part of a prompt?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits."""
    try:
        cli(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="kvindexer")
    except InvalidSettings as error:
        _say(f"kvindexer: {error}")
        sys.exit(WRONG_USAGE)
    except IndexerError as error:
        _say(f"kvindexer: {error}")
        sys.exit(FAILED)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@cli.callback(invoke_without_command=True)
def _about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"kvindexer {__version__}")
        raise typer.Exit(DONE)


def _setting(name: str, *flags: str) -> Any:
    """An option whose meaning is that of a setting, said once in app/config.py."""
    field = Settings.model_fields[name]
    default = "" if field.default in ((), None) else f" Default {field.default}."
    return typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)),
        help=f"{field.description}{default} [{PREFIX}{name.upper()}]",
        show_default=False,
    )
