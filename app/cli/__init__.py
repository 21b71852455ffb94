"""The command `kvindexer`. Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted before it began.

One file a group of commands. Those that talk to an indexer do it by HTTP (connection.py) and import neither
the service nor the index; `hash` computes here (app/hashing.py). Every command takes `--json`: one JSON
document on standard output and nothing else there; tables, progress and complaints are for people.

    serve       serve.py, the only one that starts the service
    match, route, fuzzy                 prompts.py
    hash                                hashes.py
    pods, owners                        pods.py, owners.py
    events, stats                       watch.py
    dump, load                          dumps.py
    replay, simulate, experiment        app/replay, app/simulator, app/experiment
    demo, traffic                       app/demo

What needs the native core is imported late: a missing core must be one sentence and no traceback. And of all
commands only the one that a command line names is imported: most load half as much.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer

from app import __version__
from app.errors import IndexerError, InvalidSettings, NativeCoreMissing

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

# In the order of `--help`; each is a function, or a group of commands, of that module.
COMMANDS = {
    "serve": ("app.cli.serve", "serve"),
    "match": ("app.cli.prompts", "match"),
    "route": ("app.cli.prompts", "route"),
    "fuzzy": ("app.cli.prompts", "fuzzy"),
    "hash": ("app.cli.hashes", "hash_prompt"),
    "pods": ("app.cli.pods", "group"),
    "owners": ("app.cli.owners", "group"),
    "events": ("app.cli.watch", "events"),
    "stats": ("app.cli.watch", "stats"),
    "dump": ("app.cli.dumps", "dump"),
    "load": ("app.cli.dumps", "load"),
    "replay": ("app.replay.command", "replay"),
    "simulate": ("app.simulator.command", "simulate"),
    "experiment": ("app.experiment.command", "experiment"),
    "demo": ("app.demo.command", "demo"),
    "traffic": ("app.demo.command", "traffic"),
}


def main(arguments: Sequence[str] | None = None, *, loaded: Callable[[], None] = lambda: None) -> None:
    """Runs the command line and exits; calls `loaded` before the command has its turn."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        program = command_line(words[:1] if words and words[0] in COMMANDS else COMMANDS)
        loaded()
        program(args=words, prog_name="kvindexer")
    except KeyboardInterrupt:  # before the command had its turn; it knows better what to do with one
        sys.exit(INTERRUPTED)
    except InvalidSettings as error:
        _say(f"kvindexer: {error}")
        sys.exit(WRONG_USAGE)
    except IndexerError as error:
        _say(f"kvindexer: {error}")
        sys.exit(FAILED)


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """With these commands. Some need the native core, which may not be there."""
    if importlib.util.find_spec("app._native") is None:
        raise NativeCoreMissing
    program = typer.Typer(
        name="kvindexer",
        help="Which pod already holds the KV cache of the longest leading part of a prompt?",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    program.callback(invoke_without_command=True)(_about)
    for name in names:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            program.add_typer(command, name=name)
        else:
            program.command(name)(command)
    return program


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)
    ] = False,
) -> None:
    if version:
        print(f"kvindexer {__version__}")
        raise typer.Exit(DONE)
