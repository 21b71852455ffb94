"""The command `kvindexer`. Exit status: 0 done, 1 the work failed, 2 wrong usage.

What needs the native core is imported late: a missing core must be one sentence and no traceback.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app import __version__
from app.config import PREFIX, Settings, load_settings
from app.errors import IndexerError, InvalidSettings, NativeCoreMissing

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
        _add_commands()
        cli(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="kvindexer")
    except InvalidSettings as error:
        _say(f"kvindexer: {error}")
        sys.exit(WRONG_USAGE)
    except IndexerError as error:
        _say(f"kvindexer: {error}")
        sys.exit(FAILED)


def _add_commands() -> None:
    """Adds what needs the native core, which may not be there."""
    if importlib.util.find_spec("app._native") is None:
        raise NativeCoreMissing
    from app.experiment.command import experiment
    from app.replay.command import replay
    from app.simulator.command import simulate

    if "replay" not in {command.name for command in cli.registered_commands}:
        cli.command("replay")(replay)
        cli.command("simulate")(simulate)
        cli.command("experiment")(experiment)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@cli.callback(invoke_without_command=True)
def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)
    ] = False,
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


@cli.command()
def serve(
    host: Annotated[str | None, _setting("host")] = None,
    port: Annotated[int | None, _setting("port")] = None,
    pod: Annotated[list[str] | None, _setting("pods", "--pod")] = None,
    pods_file: Annotated[Path | None, _setting("pods_file")] = None,
    ttl_s: Annotated[float | None, _setting("ttl_s")] = None,
    contexts_max: Annotated[int | None, _setting("contexts_max")] = None,
    prefixes_per_context_max: Annotated[int | None, _setting("prefixes_per_context_max")] = None,
    block_size_default: Annotated[int | None, _setting("block_size_default")] = None,
    body_bytes_max: Annotated[int | None, _setting("body_bytes_max")] = None,
    tokens_max: Annotated[int | None, _setting("tokens_max")] = None,
    zmq_disconnect_deadline_s: Annotated[float | None, _setting("zmq_disconnect_deadline_s")] = None,
    http_silence_deadline_s: Annotated[float | None, _setting("http_silence_deadline_s")] = None,
    log_level: Annotated[str | None, _setting("log_level")] = None,
) -> None:
    """Start the indexer: one process, no other service. Every setting has a KVINDEXER_... variable too."""
    options = {**locals(), "pods": tuple(pod) if pod else None}
    del options["pod"]
    settings = load_settings(**{name: value for name, value in options.items() if value is not None})
    # Imported here: the native core comes with it.
    from app.serving import run

    raise typer.Exit(DONE if run(settings) else FAILED)
