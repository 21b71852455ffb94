"""The native SimHash against its plain twin, and the vectors that docs/fuzzy-match.md promises."""

import random
import re
import struct
from array import array
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from app import _native
from tests.fuzzy.reference import simhash

TOKEN = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
DOCUMENT = Path(__file__).parents[2] / "docs" / "fuzzy-match.md"


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


@given(st.lists(TOKEN, min_size=1, max_size=70), st.integers(1, 8))
def test_simhash_equals_its_plain_twin(tokens: list[int], shingle: int) -> None:
    shingle = min(shingle, len(tokens))
    assert _native.simhash(packed(tokens), shingle) == simhash(tokens, shingle)


@given(st.lists(TOKEN, max_size=60), st.integers(1, 33), st.integers(1, 4))
def test_a_sliding_simhash_is_that_of_each_window(tokens: list[int], block_size: int, shingle: int) -> None:
    shingle = min(shingle, block_size)
    sliding = array("Q", _native.sliding_simhashes(packed(tokens), block_size, shingle))
    windows = [tokens[i : i + block_size] for i in range(len(tokens) - block_size + 1)]
    assert list(sliding) == [simhash(window, shingle) for window in windows]


@given(st.permutations(list(range(16))))
def test_the_order_of_tokens_counts_with_shingles_only(tokens: list[int]) -> None:
    ordered = packed(list(range(16)))
    assert _native.simhash(packed(tokens)) == _native.simhash(ordered)
    if tokens != list(range(16)):
        assert _native.simhash(packed(tokens), 16) != _native.simhash(ordered, 16)


def vectors() -> list[tuple[str, int, int]]:
    rows = re.findall(r"^\| `(.+?)` \| (\d+) \| `0x([0-9a-f]{16})` \|$", DOCUMENT.read_text(), re.MULTILINE)
    return [(expression, int(shingle), int(value, 16)) for expression, shingle, value in rows]


def test_the_document_has_vectors() -> None:
    assert len(vectors()) >= 6


@pytest.mark.parametrize(("expression", "shingle", "value"), vectors())
def test_the_vectors_of_the_document_hold(expression: str, shingle: int, value: int) -> None:
    tokens = _tokens(expression)
    assert simhash(tokens, shingle) == value
    assert _native.simhash(packed(tokens), shingle) == value


def _tokens(expression: str) -> list[int]:
    """`a, b, c`, `a..b` (both included) or `a x n` (n times)."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", expression):
        return list(range(int(match[1]), int(match[2]) + 1))
    if match := re.fullmatch(r"(\d+) x (\d+)", expression):
        return [int(match[1])] * int(match[2])
    return [int(token) for token in expression.split(", ")]


@pytest.mark.parametrize(("block_size", "shingle"), [(16, 1), (16, 2), (8, 1)])
@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 63])
def test_blocks_are_hashed_together_as_one_by_one(blocks: int, block_size: int, shingle: int) -> None:
    chance = random.Random(blocks)
    ends = [0, 1, 2**31, 2**32 - 1]
    tokens = [
        [chance.choice([chance.choice(ends), chance.randrange(2**32)]) for _ in range(block_size)]
        for _ in range(blocks)
    ]
    packed = [struct.pack(f"<{block_size}I", *block) for block in tokens]
    expected = [
        value
        for block, content in zip(tokens, packed, strict=True)
        for value in (simhash(block, shingle), xxhash.xxh64_intdigest(content))
    ]
    found = _native.content_hashes(b"".join(packed), block_size, shingle)
    assert list(struct.unpack(f"<{2 * blocks}Q", found)) == expected
