"""Extra keys: one block, one encoding, whoever says it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidInput
from app.extra_keys import BYTES_MAX, DEPTH_MAX, KEYS_MAX, event_extra_keys, query_extra_keys
from tests.captures import pack

IMAGE = ["c0ffee" * 10, 3]
DIGEST = bytes(range(32))


def event(keys: list[Any] | None, lora: str | None = None, salt: str | None = None) -> Any:
    return event_extra_keys([keys], block_count=1, lora=lora, root_salt=salt)


@pytest.mark.parametrize("keys", [None, []])
def test_no_keys_are_no_bytes(keys: list[Any] | None) -> None:
    assert event(keys) is None
    assert query_extra_keys([keys], lora=None) is None
    assert event_extra_keys([keys, ["s"]], block_count=2, lora=None) == (b"", pack(["s"]))


def test_the_encoding_is_the_one_that_is_documented() -> None:
    assert event(["salt"]) == (b"\x91\xa4salt",)
    assert event([["img", 5], "salt", b"\x01"]) == (b"\x93\x92\xa3img\x05\xa4salt\xc4\x01\x01",)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([127, 128, -32, -33, 255, 256, 2**16, 2**32, 2**64 - 1])
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=20), max_leaves=20)


@given(st.lists(st.none() | st.integers() | st.floats() | st.text(max_size=300), min_size=1, max_size=20))
def test_plain_keys_are_in_the_shortest_form(block: list[Any]) -> None:
    if all(not isinstance(key, int) or -(2**63) <= key < 2**64 for key in block):
        assert event(block) == (pack(block),)
    else:
        with pytest.raises(InvalidInput):
            event(block)


@given(st.lists(keys, max_size=8), st.text(max_size=4) | st.none())
def test_any_keys_encode_or_are_refused(block: list[Any], lora: str | None) -> None:
    try:
        encoded = event(block, lora)
    except InvalidInput:
        assert any(is_too_deep(key) for key in block)
    else:
        assert not any(is_too_deep(key) for key in block)
        assert encoded is None or (len(encoded) == 1 and encoded[0])


def is_too_deep(key: Any, depth: int = 1) -> bool:
    return isinstance(key, list) and (
        depth >= DEPTH_MAX or any(is_too_deep(inner, depth + 1) for inner in key)
    )


def test_tags_make_no_difference() -> None:
    untagged = ["ad", IMAGE, "salt", DIGEST]
    tagged = [["lora", "ad", "/path"], ["mm", *IMAGE], ["cache_salt", "salt"], ["prompt_embeds", DIGEST]]
    assert event(tagged) == event(untagged) == (pack(untagged),)
    assert event(tagged, lora="ad") == event(untagged, lora="ad") == (pack([IMAGE, "salt", DIGEST]),)


def test_what_only_looks_like_a_tag_stays() -> None:
    for key in (["cache_salt", 5], ["mm", "id"], ["lora", "ad"], ["prompt_embeds", 5], ["other", "x", 1]):
        assert event([key]) == (pack([key]),)


def test_only_the_adapter_in_front_is_left_out() -> None:
    """A salt that is spelled like the adapter separates tenants all the same."""
    assert event(["ad", "ad"], lora="ad") == (pack(["ad"]),)
    assert event(["ad"], lora="ad") is None
    assert event([["lora", "ad", None]], lora="ad") is None
    assert event(["ad"], lora="other") == (pack(["ad"]),)


@pytest.mark.parametrize("lora", [None, "ad"])
@pytest.mark.parametrize("images", [[], [IMAGE], [IMAGE, ["x", -4]]])
@pytest.mark.parametrize("embeds", [[], [DIGEST]])
@pytest.mark.parametrize("salt", [None, "", "tenant-1", "ad"])
def test_a_query_and_the_event_of_its_blocks_agree(
    lora: str | None, images: list[Any], embeds: list[bytes], salt: str | None
) -> None:
    adapter = [lora] if lora else []
    rest = adapter + images + embeds
    published = [adapter + images + ([salt] if salt else []) + embeds, rest, adapter]
    said = event_extra_keys(published, block_count=3, lora=lora)
    asked = query_extra_keys([images + embeds, images + embeds, None], lora=lora, cache_salt=salt)
    assert said == asked
    assert asked == query_extra_keys([rest, rest, adapter], lora=lora, cache_salt=salt)
    if not images and not embeds:
        sglang = event_extra_keys(None, block_count=3, lora=lora, root_salt=salt)
        alone = query_extra_keys(None, lora=lora, cache_salt=salt)
        assert sglang == said
        assert (alone or ()) == (said or ())[:1]


def test_a_salt_alone_is_the_key_of_the_first_block() -> None:
    assert query_extra_keys(None, lora=None, cache_salt="s") == (pack(["s"]),)
    assert query_extra_keys([None, ["x"]], lora=None, cache_salt="s") == (pack(["s"]), pack(["x"]))
    assert query_extra_keys([], lora="ad", cache_salt="s") == (pack(["s"]),)
    assert query_extra_keys(None, lora="ad") is None


def nested(depth: int) -> Any:
    key: Any = 1
    for _ in range(depth):
        key = [key]
    return key


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ([{"a": 1}], "extra_keys[0][0]"),
        ([1, [2, {"a": 1}]], "extra_keys[0][1][1]"),
        ([2**64], "extra_keys[0][0]"),
        ([-(2**63) - 1], "extra_keys[0][0]"),
        ([nested(DEPTH_MAX)], "extra_keys[0][0]" + "[0]" * (DEPTH_MAX - 1)),
        ([nested(10_000)], "extra_keys[0][0]" + "[0]" * (DEPTH_MAX - 1)),
        ([None] * (KEYS_MAX + 1), "extra_keys[0]"),
        (["x" * BYTES_MAX], "extra_keys[0]"),
        (["\ud800"], "extra_keys[0]"),
        ("salt", "extra_keys[0]"),
        (5, "extra_keys[0]"),
    ],
)
def test_what_is_no_extra_key_is_named(block: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        event(block)
    assert caught.value.field == field


def test_bounds_can_be_reached() -> None:
    assert event([nested(DEPTH_MAX - 1)]) == (pack([nested(DEPTH_MAX - 1)]),)
    assert event([None] * KEYS_MAX) == (pack([None] * KEYS_MAX),)
    assert event([b"x" * (BYTES_MAX - 4)]) is not None


def test_an_event_has_one_entry_a_block() -> None:
    with pytest.raises(InvalidInput, match="1 entries for 2 blocks"):
        event_extra_keys([["a"]], block_count=2, lora=None)
