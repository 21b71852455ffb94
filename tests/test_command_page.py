"""docs/commands.md is what the commands say of themselves, and the README names each of them."""

from __future__ import annotations

import pytest

from tests.command_page import PAGE, commands, page
from tests.serving.test_serving import finished
from tests.test_readme import section

WORDS = [words for words, _ in commands()]


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.command_page`"


def test_the_readme_names_every_command() -> None:
    assert [words for words in WORDS if f"`{words}`" not in section("Command line")] == []


def test_it_lists_what_help_lists() -> None:
    """Commands as the program lists them to people, and not only as the page's own walk finds them."""
    code, out, _ = finished("--help", COLUMNS="200", NO_COLOR="1", TERM="dumb")
    assert code == 0
    for words in WORDS:
        assert words.split()[1] in out, words
    code, out, _ = finished("match", "--help", COLUMNS="200", NO_COLOR="1", TERM="dumb")
    assert code == 0
    for option in ("--tokens-file", "--cache-salt", "--api-key"):
        assert option in out
        assert f"`{option}`" in PAGE.read_text()


@pytest.mark.parametrize("words", WORDS)
def test_every_command_has_an_option_for_scripts(words: str) -> None:
    if words != "kvindexer serve":
        [command] = [command for name, command in commands() if name == words]
        assert any("--json" in option.opts for option in command.params)
