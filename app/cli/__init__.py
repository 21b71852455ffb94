"""The command `kvindexer`. Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted before it began.

One file a group of commands. Those that talk to an indexer do it by HTTP (connection.py) and import neither
the service nor the index; `hash` computes here (app/hashing.py). Every command takes `--json`: one JSON
document on standard output and nothing else there; tables, progress and complaints are for people.

    serve       serve.py, the only one that starts the service
    match, route, fuzzy, hash           prompts.py
    pods, owners                        pods.py, owners.py
    events, stats                       watch.py
    dump, load                          dumps.py
    replay, simulate, experiment        app/replay, app/simulator, app/experiment
    demo, traffic                       app/demo

What needs the native core is imported late: a missing core must be one sentence and no traceback.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from app import __version__
from app.errors import IndexerError, InvalidSettings, NativeCoreMissing

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

cli = typer.Typer(
    name="kvindexer",
    help="Which pod already holds the KV cache of the longest leading part of a prompt?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None, *, loaded: Callable[[], None] = lambda: None) -> None:
    """Runs the command line and exits; calls `loaded` before the command has its turn."""
    try:
        _add_commands()
        loaded()
        cli(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="kvindexer")
    except KeyboardInterrupt:  # before the command had its turn; it knows better what to do with one
        sys.exit(INTERRUPTED)
    except InvalidSettings as error:
        _say(f"kvindexer: {error}")
        sys.exit(WRONG_USAGE)
    except IndexerError as error:
        _say(f"kvindexer: {error}")
        sys.exit(FAILED)


def _add_commands() -> None:
    """Adds the commands, some of which need the native core, which may not be there."""
    if importlib.util.find_spec("app._native") is None:
        raise NativeCoreMissing
    if cli.registered_commands:
        return
    from app.cli import dumps, owners, pods, prompts, serve, watch
    from app.demo.command import demo, traffic
    from app.experiment.command import experiment
    from app.replay.command import replay
    from app.simulator.command import simulate

    cli.command()(serve.serve)
    cli.command()(prompts.match)
    cli.command()(prompts.route)
    cli.command()(prompts.fuzzy)
    cli.command("hash")(prompts.hash_prompt)
    cli.add_typer(pods.group, name="pods")
    cli.add_typer(owners.group, name="owners")
    cli.command()(watch.events)
    cli.command()(watch.stats)
    cli.command()(dumps.dump)
    cli.command()(dumps.load)
    cli.command("replay")(replay)
    cli.command("simulate")(simulate)
    cli.command("experiment")(experiment)
    cli.command("demo")(demo)
    cli.command("traffic")(traffic)


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
