"""`kvindexer hash`: the prefix hashes of a prompt, without an indexer."""

from __future__ import annotations

import array
from typing import Annotated

import typer

from app.cli import screen
from app.cli.connection import AsJson
from app.cli.prompts import Lora, Model, Salt, Tokens, TokensFile, read_token_ids
from app.config import Settings
from app.extra_keys import query_extra_keys
from app.schemas.bounds import BLOCK_SIZE_MAX


def hash_prompt(
    model: Model,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    lora: Lora = None,
    cache_salt: Salt = None,
    block_size: Annotated[int, typer.Option(min=1, max=BLOCK_SIZE_MAX, help="Tokens a block.")] = (
        Settings.model_fields["block_size_default"].default
    ),
    as_json: AsJson = False,
) -> None:
    """Prefix hashes of a prompt, computed here: what `prefix_hashes` of a match takes.

    Examples:

        kvindexer hash -m llama-3 --block-size 4 -t "1,2,3,4,5,6,7,8"

        kvindexer hash -m llama-3 --lora tuned --cache-salt tenant-7 -f prompt.json --json
    """
    # Imported here: the native core comes with it.
    from app.hashing import prefix_hashes

    token_ids = read_token_ids(tokens, tokens_file)
    keys = query_extra_keys(None, lora=lora or None, cache_salt=cache_salt)
    packed = prefix_hashes(model, lora, block_size, array.array("I", token_ids).tobytes(), keys)
    hashes = array.array("Q", packed).tolist()
    if as_json:
        return screen.print_json(
            {"model": model, "lora": lora or None, "block_size": block_size, "prefix_hashes": hashes}
        )
    rows = [
        (index, f"{index * block_size}-{(index + 1) * block_size - 1}", value)
        for index, value in enumerate(hashes)
    ]
    return screen.print_table(("#block", "tokens", "#prefix hash"), rows)
