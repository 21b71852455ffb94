"""Prefix hashes outside the index are those of the index and of a third implementation."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from app.errors import InvalidInput
from app.extra_keys import query_extra_keys
from app.hashing import context_seed, prefix_hashes

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(
    model=st.text(min_size=1, max_size=8),
    lora=st.none() | st.text(max_size=8),
    block_size=st.integers(1, 9),
    tokens=token_lists,
    salt=st.none() | st.text(max_size=4),
)
# Blocks of 16 tokens are hashed by code of their own.
@example(model="m", lora=None, block_size=16, tokens=list(range(50)), salt=None)
@example(model="m", lora=None, block_size=16, tokens=list(range(50)), salt="s")
@example(model="m", lora=None, block_size=17, tokens=list(range(50)), salt=None)
@example(model="m", lora=None, block_size=32, tokens=list(range(70)), salt=None)
def test_as_described(
    model: str, lora: str | None, block_size: int, tokens: list[int], salt: str | None
) -> None:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    keys = query_extra_keys(None, lora=lora, cache_salt=salt)
    chain = xxhash.xxh64_intdigest(msgspec.msgpack.encode([model, lora or None, block_size]), seed=0)
    assert context_seed(model, lora, block_size) == chain
    expected = []
    for block in range(len(tokens) // block_size):
        content = packed[block * block_size * 4 : (block + 1) * block_size * 4]
        if block == 0 and salt:
            content += msgspec.msgpack.encode([salt])
        chain = xxhash.xxh64_intdigest(content, seed=chain)
        expected.append(chain)
    got = prefix_hashes(model, lora, block_size, packed, keys)
    assert list(struct.unpack(f"<{len(got) // 8}Q", got)) == expected


def test_adapter_is_part_of_it_and_an_empty_one_is_none() -> None:
    tokens = struct.pack("<4I", 1, 2, 3, 4)
    assert prefix_hashes("m", "", 4, tokens) == prefix_hashes("m", None, 4, tokens)
    assert prefix_hashes("m", "tuned", 4, tokens) != prefix_hashes("m", None, 4, tokens)


def test_bad_input() -> None:
    with pytest.raises(InvalidInput, match="block_size"):
        prefix_hashes("m", None, 0, b"")
    with pytest.raises(InvalidInput, match="4 bytes"):
        prefix_hashes("m", None, 4, b"12345")
