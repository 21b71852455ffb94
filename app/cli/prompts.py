"""`kvindexer match`, `route` and `fuzzy`: questions about one prompt."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import screen
from app.cli.connection import DEFAULT_URL, ApiKey, AsJson, Connection, Url
from app.schemas.bounds import BLOCK_SIZE_MAX, FUZZY_DISTANCE_MAX, FUZZY_MATCHES_MAX, TOKEN_ID_MAX

Model = Annotated[str, typer.Option("--model", "-m", help="The model's name, as the pods have it.")]
Lora = Annotated[str | None, typer.Option("--lora", help="LoRA adapter; none is the bare model.")]
Tokens = Annotated[
    str | None, typer.Option("--tokens", "-t", help="Token ids, separated by commas or spaces.")
]
TokensFile = Annotated[
    Path | None,
    typer.Option("--tokens-file", "-f", help="A file of token ids (a JSON array, or numbers); - is stdin."),
]
Text = Annotated[str | None, typer.Option("--text", help="The prompt as text; the indexer tokenises it.")]
Salt = Annotated[str | None, typer.Option("--cache-salt", help="The request's cache salt.")]
BlockSize = Annotated[
    int | None, typer.Option(min=1, max=BLOCK_SIZE_MAX, help="Tokens a block; the model's when absent.")
]
PodNames = Annotated[list[str] | None, typer.Option("--pod", help="Only this pod; may be repeated.")]


def match(
    model: Model,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    text: Text = None,
    lora: Lora = None,
    cache_salt: Salt = None,
    block_size: BlockSize = None,
    pod: PodNames = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Which pods hold the longest leading part of a prompt?

    Examples:

        kvindexer match -m llama-3 -t "1,2,3,4,5,6,7,8"

        kvindexer match -m llama-3 -f prompt.json --pod pod-a --pod pod-b --json
    """
    body = _prompt(model, tokens, tokens_file, text, lora, cache_salt, block_size, pod)
    with Connection(url, api_key) as indexer:
        answer = indexer.post("/v1/match", body)
        served = None if answer["matches"] or as_json else _served(indexer)
    if as_json:
        return screen.print_json(answer)
    if served is not None and model not in served:
        typer.echo(
            f"no pod serves {model!r}; they serve: {', '.join(sorted(served)) or 'nothing yet'}", err=True
        )
    title = f"{answer['tokens']} tokens, {answer['blocks']} blocks of {answer['block_size']}"
    rows = [
        (
            row["pod"],
            row["dp_rank"],
            row["matched_blocks"],
            row["reusable_tokens"],
            f"{row['percent']:.1f} %",
            screen.tiers(row["tiers"]),
            row["state"],
            screen.age(row["last_event_age_s"]),
        )
        for row in answer["matches"]
    ]
    columns = (
        "pod",
        "#rank",
        "#blocks",
        "#reusable tokens",
        "#match",
        "depth by tier",
        "state",
        "#last event",
    )
    return screen.print_table(columns, rows, title=title)


def route(
    model: Model,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    text: Text = None,
    lora: Lora = None,
    cache_salt: Salt = None,
    block_size: BlockSize = None,
    pod: PodNames = None,
    policy: Annotated[
        str | None,
        typer.Option(help="prefix_and_load, longest_prefix, least_loaded or round_robin."),
    ] = None,
    reserve: Annotated[
        bool, typer.Option(help="Announce the prompt at the pod that is chosen, as a router does.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look: the choice does not count as load of its pod.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Where should a prompt go? Asks the indexer for its choice and the reasons for it.

    Examples:

        kvindexer route -m llama-3 -f prompt.json

        kvindexer route -m llama-3 --text "You are a helpful assistant." --policy longest_prefix --json
    """
    body = _prompt(model, tokens, tokens_file, text, lora, cache_salt, block_size, pod)
    body |= {} if policy is None else {"policy": policy}
    body |= {"reserve": True} if reserve else {}
    body |= {"dry_run": True} if dry_run else {}
    with Connection(url, api_key) as indexer:
        answer = indexer.post("/v1/route", body)
    if as_json:
        return screen.print_json(answer)
    candidates = answer.get("candidates", [])
    names = ("pod", "dp_rank", "score", "matched_blocks", "load", "reason")
    return screen.print_table(
        ("pod", "#rank", "#score", "#blocks", "load", "reason"),
        [[_cell(candidate.get(name)) for name in names] for candidate in candidates],
        title=f"-> {answer.get('pod')} rank {answer.get('dp_rank')}",
    )


def fuzzy(
    model: Model,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    text: Text = None,
    lora: Lora = None,
    block_size: BlockSize = None,
    sliding: Annotated[
        bool, typer.Option("--sliding", help="Look at every token offset, not only at the prompt's blocks.")
    ] = False,
    max_distance: Annotated[
        int | None,
        typer.Option(
            min=0, max=FUZZY_DISTANCE_MAX, help="Bits in which the SimHashes of near blocks may differ."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="A pod or an owner that does not count; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=FUZZY_MATCHES_MAX, help="Matches that are shown of a block.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """What of a prompt is held anywhere, exactly or nearly, even where its prefix differs?

    Examples:

        kvindexer fuzzy -m llama-3 -f prompt.json --sliding

        kvindexer fuzzy -m llama-3 --text "You are a helpful assistant." --exclude pod-a --json
    """
    body = _prompt(model, tokens, tokens_file, text, lora, None, block_size, None)
    body |= {"mode": "sliding"} if sliding else {}
    optional = {"max_distance": max_distance, "exclude": exclude or None, "limit_per_block": limit}
    body |= {name: value for name, value in optional.items() if value is not None}
    with Connection(url, api_key) as indexer:
        answer = indexer.post("/v1/fuzzy-match", body)
    if as_json:
        return screen.print_json(answer)
    return _print_reusable(answer)


def _served(indexer: Connection) -> set[str]:
    """Models of the registered pods: a misspelt one is held nowhere, which is no fault to the indexer."""
    return {pod["model"] for pod in indexer.get("/v1/pods")["pods"]}


def _print_reusable(answer: dict[str, Any]) -> None:
    """By pod, by owner where there are any, and by place of the prompt."""
    held = [
        (
            pod["pod"],
            pod["reusable_blocks"],
            pod["reusable_tokens"],
            f"{100 * pod['coverage']:.1f} %",
            f"{pod['mean_confidence']:.3f}",
        )
        for pod in answer["pods"]
    ]
    title = f"{answer['tokens']} tokens, blocks of {answer['block_size']}"
    columns = ("pod", "#blocks", "#reusable tokens", "#coverage", "#confidence")
    screen.print_table(columns, held, title=title)
    owned = [
        (row["owner"], row["reusable_blocks"], row["reusable_tokens"], f"{100 * row['coverage']:.1f} %")
        for row in answer["owners"]
    ]
    if owned:
        screen.print_table(("owner", "#blocks", "#reusable tokens", "#coverage"), owned)
    matches = [
        (
            block["token_offset"],
            row["kind"],
            row["hamming_distance"],
            row["pod"],
            row["dp_rank"],
            ", ".join(row["owners"]),
        )
        for block in answer["blocks"]
        for row in block["matches"]
    ]
    screen.print_table(("#token", "kind", "#distance", "pod", "#rank", "owners"), matches)


def _prompt(
    model: str,
    tokens: str | None,
    tokens_file: Path | None,
    text: str | None,
    lora: str | None,
    cache_salt: str | None,
    block_size: int | None,
    pods: list[str] | None,
) -> dict[str, Any]:
    if text is not None and (tokens is not None or tokens_file is not None):
        raise typer.BadParameter("give text or tokens, not both", param_hint="--text")
    body: dict[str, Any] = {"model": model}
    body |= {"text": text} if text is not None else {"token_ids": read_token_ids(tokens, tokens_file)}
    optional = {"lora": lora, "cache_salt": cache_salt, "block_size": block_size, "pods": pods or None}
    return body | {name: value for name, value in optional.items() if value is not None}


def read_token_ids(tokens: str | None, tokens_file: Path | None) -> list[int]:
    if (tokens is None) == (tokens_file is None):
        raise typer.BadParameter(
            "give the prompt by one of --tokens and --tokens-file", param_hint="--tokens"
        )
    if tokens is not None:
        return _numbers(tokens, "--tokens")
    assert tokens_file is not None
    try:
        said = sys.stdin.read() if str(tokens_file) == "-" else tokens_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{tokens_file}: {error}", param_hint="--tokens-file") from error
    return _numbers(said, "--tokens-file")


def _numbers(text: str, option: str) -> list[int]:
    """Of a JSON array, or of numbers with commas or spaces between them."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    found = []
    for word in filter(None, words):
        if not re.fullmatch(r"[0-9]{1,10}", word) or int(word) > TOKEN_ID_MAX:
            raise typer.BadParameter(f"{word[:40]!r} is not a token id", param_hint=option)
        found.append(int(word))
    return found


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.3f}"
    return json.dumps(value) if isinstance(value, dict | list) else value
