"""Extra keys of a block, in one canonical encoding: what else than its tokens makes a block's cache its own.

A cache salt, an image, a prompt embedding: two prompts with the same tokens and different extra keys must not
share a block. The engine publishes them in its events, a router gives them with its query, and both have to
arrive at the same bytes, because these go into the prefix hash behind the block's token ids (app/index).

The encoding of a block's keys, which any language can compute:
  1. In the order lora, multimodal, salt, embeddings (vLLM's generate_block_hash_extra_keys has it so), where
       lora        the adapter's name, in every block; left out when it is the adapter of the event or the
                   query, because the adapter is part of the context already
       multimodal  [identifier, offset], for every item that the block touches
       salt        the cache salt, a text, in the first block of a prompt only; an empty one is none
       embeddings  the digest of the block's prompt embeddings, bytes
     Tagged keys (as vLLM 0.32 hashes them) are untagged first: ["lora", name, path] is name,
     ["mm", id, offset] is [id, offset], ["cache_salt", s] is s, ["prompt_embeds", digest] is digest.
  2. No keys: no bytes. Else: the array of the keys in msgpack, all in its shortest form (floats in 64 bits).

Keys are null, booleans, integers of 64 bits, floats, text, bytes and arrays of these. Maps are refused, as
their order says nothing. SGLang's `cache_salt` field of an event is the salt of a block without parent.
Bounds: KEYS_MAX a block, DEPTH_MAX arrays in one another, BYTES_MAX encoded bytes a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.errors import InvalidInput

KEYS_MAX = 1_024
DEPTH_MAX = 4
BYTES_MAX = 65_536

Key = bool | int | float | str | bytes | Sequence["Key"] | None

_encoder = msgspec.msgpack.Encoder()


def event_extra_keys(
    extra_keys: Sequence[Sequence[Key] | None] | None,
    *,
    block_count: int,
    lora: str | None,
    root_salt: str | None = None,
) -> tuple[bytes, ...] | None:
    """Encodings of an event's `extra_keys`, one a block; None when no block has any.

    `root_salt` is the `cache_salt` field of an event whose first block has no parent.
    Raises InvalidInput when the list has not one entry a block or a key is refused.
    """
    if extra_keys is not None and len(extra_keys) != block_count:
        raise InvalidInput(
            f"extra_keys has {len(extra_keys)} entries for {block_count} blocks", field="extra_keys"
        )
    encoded = _encode_blocks(extra_keys, lora=lora, root_salt=root_salt)
    if encoded is None or len(encoded) == block_count:
        return encoded
    return encoded + (b"",) * (block_count - len(encoded))


def query_extra_keys(
    extra_keys: Sequence[Sequence[Key] | None] | None, *, lora: str | None, cache_salt: str | None = None
) -> tuple[bytes, ...] | None:
    """Encodings of a query's extra keys, from its first block on; None when no block has any.

    `extra_keys` are the keys of each block as the engine publishes them; `cache_salt` is added to the first
    block, where the engine has it. A first key that equals `lora` is taken for the adapter's name: pass
    a salt as `cache_salt`, never as a bare first key. Raises InvalidInput when a key is refused.
    """
    return _encode_blocks(extra_keys, lora=lora, root_salt=cache_salt)


def _encode_blocks(
    extra_keys: Sequence[Sequence[Key] | None] | None, *, lora: str | None, root_salt: str | None
) -> tuple[bytes, ...] | None:
    blocks = extra_keys or ()
    if not root_salt and not any(blocks):
        return None
    # An adapter without images or salt repeats this in every block.
    only_lora = [] if lora is None else [lora]
    encoded = [
        b"" if not keys or keys == only_lora else _encode_block(keys, index, lora=lora)
        for index, keys in enumerate(blocks)
    ]
    if root_salt:
        first = _encode_block(blocks[0] or () if blocks else (), 0, lora=lora, salt=root_salt)
        encoded[:1] = [first]
    return tuple(encoded) if any(encoded) else None


def _encode_block(keys: Sequence[Key], index: int, *, lora: str | None, salt: str | None = None) -> bytes:
    place = f"extra_keys[{index}]"
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise InvalidInput("the extra keys of a block are an array or null", field=place)
    if len(keys) > KEYS_MAX:
        raise InvalidInput(f"more than {KEYS_MAX} extra keys in a block", field=place)
    for position, key in enumerate(keys):
        _check(key, f"{place}[{position}]", DEPTH_MAX)
    before_embeddings: list[Key] = []
    embeddings: list[Key] = []
    for position, key in enumerate(keys):
        plain, is_embedding = _untag(key)
        if position == 0 and lora is not None and plain == lora:
            continue
        (embeddings if is_embedding or embeddings else before_embeddings).append(plain)
    canonical = [*before_embeddings, *([salt] if salt else []), *embeddings]
    if not canonical:
        return b""
    try:
        encoded = _encoder.encode(canonical)
    except UnicodeEncodeError as error:
        raise InvalidInput("an extra key is not text that UTF-8 can carry", field=place) from error
    if len(encoded) > BYTES_MAX:
        raise InvalidInput(f"extra keys of more than {BYTES_MAX} bytes in a block", field=place)
    return encoded


def _check(key: Key, place: str, depth: int) -> None:
    if key is None or isinstance(key, (bool, float, str, bytes)):
        return
    if isinstance(key, int):
        if not -(2**63) <= key < 2**64:
            raise InvalidInput("an extra key is an integer of more than 64 bits", field=place)
        return
    if not isinstance(key, (list, tuple)):
        raise InvalidInput(f"an extra key cannot be a {type(key).__name__}", field=place)
    if depth <= 1:
        raise InvalidInput(f"extra keys nested deeper than {DEPTH_MAX} arrays", field=place)
    for position, inner in enumerate(key):
        _check(inner, f"{place}[{position}]", depth - 1)


def _untag(key: Key) -> tuple[Key, bool]:
    """The key without its tag, and whether it is an embedding's digest.

    An untagged multimodal key is [text, integer], so no tagged form can be taken for one.
    """
    match key:
        case bytes():
            return key, True
        case ["lora", str(name), _]:
            return name, False
        case ["mm", identifier, int(offset)]:
            return [identifier, offset], False
        case ["cache_salt", str(salt)]:
            return salt, False
        case ["prompt_embeds", (str() | bytes()) as digest]:
            return digest, True
    return key, False
