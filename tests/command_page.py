"""Writes docs/commands.md: `python -m tests.command_page`; tests/test_command_page.py holds it equal.

Everything on it is what `--help` says, read from the commands themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from app.cli import command_line

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"

HEAD = """\
# Commands

What `kvindexer COMMAND --help` says, for reading and searching (written by `python -m tests.command_page`).

Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted before it began. `--json` prints one document on
standard output and nothing else there. `kvindexer --install-completion` completes in your shell.
"""


def commands(command: Any = None, words: tuple[str, ...] = ("kvindexer",)) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its words, in the order of `--help`."""
    if command is None:
        command = typer.main.get_command(command_line())
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(words), command
        return
    for name, child in below.items():
        yield from commands(child, (*words, name))


def page() -> str:
    return HEAD + "".join(_section(words, command) for words, command in commands())


def _section(words: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join(
        [words, *(_metavar(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])]
    )
    text, *examples = inspect.cleandoc(command.help).split("Examples:\n")
    lines = [f"\n## {words}\n", text.strip() + "\n", f"```\n{usage}\n```\n"]
    if examples:
        shown = [line.strip() for line in examples[0].splitlines() if line.strip()]
        lines.append("\n".join(["```sh", *shown, "```\n"]))
    if arguments or options:
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{_metavar(a)}` | {'needed' if a.required else ''} | {_cell(a.help)} |" for a in arguments
        ]
        lines += [_option(option) for option in options]
        lines.append("")
    return "\n".join(lines)


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    variable = f" (`{option.envvar}`)" if option.envvar else ""
    return f"| {names}{variable} | {_default(option)} | {_cell(option.help)} |"


def _default(option: Any) -> str:
    if option.required:
        return "needed"
    if option.default in (None, False, "", [], ()):
        return ""
    if option.default is True:
        return f"`{option.opts[0]}`"
    shown = getattr(option.default, "value", option.default)
    return f"`{shown}`"


def _cell(text: str | None) -> str:
    assert text, "every argument and option says what it is"
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
