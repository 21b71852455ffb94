"""`kvindexer owners`: whom blocks were stored for."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from app.cli import screen
from app.cli.connection import DEFAULT_URL, ApiKey, AsJson, Connection, Url

group = typer.Typer(help="List and clear the owners of blocks.", no_args_is_help=True)


@group.command("list")
def list_owners(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Every owner that posted events named, and how many blocks it has.

    Examples:

        kvindexer owners list

        kvindexer owners list --json | jq '.owners[].owner'
    """
    with Connection(url, api_key) as indexer:
        answer = indexer.get("/v1/owners")
    return _show(answer, as_json)


@group.command()
def clear(
    owner: Annotated[str, typer.Argument(help="The owner; its roles are cleared too.", metavar="OWNER")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Forget that blocks were stored for an owner and its roles; the blocks stay.

    Examples:

        kvindexer owners clear agent1
    """
    with Connection(url, api_key) as indexer:
        answer = indexer.delete(f"/v1/owners/{quote(owner, safe='')}")
    return _show(answer, as_json)


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return screen.print_json(answer)
    rows = [(row["owner"], row["blocks"]) for row in answer["owners"]]
    return screen.print_table(("owner", "#blocks"), rows)
