"""The native parsers against Python's own readers of msgpack and JSON."""

from __future__ import annotations

import array
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import _native
from tests.captures import plain_hashes, plain_tokens

EDGES = [2**bits + offset for bits in (0, 5, 7, 8, 15, 16, 31, 32, 63, 64) for offset in (-1, 0, 1)]
tokens = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([edge for edge in EDGES if 0 <= edge < 2**32]))
integers = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([sign * edge for edge in EDGES for sign in (1, -1) if -(2**63) <= sign * edge < 2**64]),
)
hashes = st.one_of(integers, st.binary(min_size=1, max_size=40))
spaces = st.text(" \t\r\n", max_size=3)


def wide(values: list[int]) -> bytes:
    """msgpack with every integer in its widest form."""
    head = b"\xdd" + len(values).to_bytes(4, "big")
    return head + b"".join(
        b"\xd3" + value.to_bytes(8, "big", signed=True)
        if value < 2**63
        else b"\xcf" + value.to_bytes(8, "big")
        for value in values
    )


@given(st.lists(tokens, max_size=70))
def test_token_ids_of_msgpack(values: list[int]) -> None:
    assert _native.msgpack_token_ids(msgspec.msgpack.encode(values)) == plain_tokens(values)
    assert _native.msgpack_token_ids(wide(values)) == plain_tokens(values)


@given(st.lists(hashes, max_size=40))
def test_hashes_of_msgpack(values: list[int | bytes]) -> None:
    assert _native.msgpack_hashes(msgspec.msgpack.encode(values)) == plain_hashes(values)


@given(st.lists(tokens, max_size=40), spaces, spaces)
def test_token_ids_of_json(values: list[int], before: str, between: str) -> None:
    text = f"{before}[{between}{f'{between},{before}'.join(map(str, values))}{before}]{between}"
    assert _native.json_token_ids(text.encode()) == plain_tokens(values)


@given(st.lists(hashes, max_size=40), st.booleans())
def test_hashes_of_json(values: list[int | bytes], upper: bool) -> None:
    def text(value: int | bytes) -> int | str:
        return value if isinstance(value, int) else value.hex().upper() if upper else value.hex()

    body = json.dumps([text(value) for value in values]).encode()
    assert _native.json_hashes(body) == plain_hashes(values)


json_texts = st.one_of(
    st.text('0123456789-+.eE, []"atrunlfs{}', max_size=24),
    st.lists(st.text("0123456789-", max_size=22), max_size=4).map(lambda items: f"[{','.join(items)}]"),
)


@given(json_texts)
def test_json_text_is_accepted_exactly_when_python_reads_integers_in_range(text: str) -> None:
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    integers_only = isinstance(value, list) and all(type(item) is int for item in value)
    fits_token = integers_only and all(0 <= item < 2**32 for item in value)
    fits_hash = integers_only and all(-(2**63) <= item < 2**64 for item in value)
    if fits_token:
        assert _native.json_token_ids(text.encode()) == plain_tokens(value)
    else:
        with pytest.raises(_native.WireError):
            _native.json_token_ids(text.encode())
    if fits_hash:
        assert _native.json_hashes(text.encode()) == plain_hashes(value)


@given(st.binary(max_size=64))
def test_msgpack_bytes_are_accepted_exactly_when_msgspec_reads_integers(data: bytes) -> None:
    try:
        value: Any = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = None
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**32 for item in value):
        assert _native.msgpack_token_ids(data) == plain_tokens(value)
    else:
        with pytest.raises(_native.WireError):
            _native.msgpack_token_ids(data)


@pytest.mark.parametrize(
    ("values", "fault", "index"),
    [
        ([1, 2**32], "range", 1),
        ([-1], "range", 0),
        ([1, 2, 1.5], "float", 2),
        ([True], "boolean", 0),
        ([1, None], "null", 1),
        (["5"], "text", 0),
        ([7, b"\0"], "bytes", 1),
        ([[1, 2], [2, 3]], "nested_array", 0),
        ([1, {"a": 1}], "other", 1),
        ({"a": 1}, "not_array", 0),
        (5, "not_array", 0),
    ],
)
def test_a_bad_token_is_named(values: Any, fault: str, index: int) -> None:
    notations = [(_native.msgpack_token_ids, msgspec.msgpack.encode(values))]
    if fault != "bytes":
        notations.append((_native.json_token_ids, json.dumps(values).encode()))
    for parse, data in notations:
        with pytest.raises(_native.WireError) as caught:
            parse(data)
        assert (caught.value.fault, caught.value.index) == (fault, index)
        place = "the value" if fault == "not_array" else f"element {index}"
        assert str(caught.value).startswith(f"{place} is ")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[01]", "syntax"),
        ("[-01]", "syntax"),
        ("[00]", "syntax"),
        ("[+1]", "syntax"),
        ("[1.0]", "float"),
        ("[1e3]", "float"),
        ("[12345678.5]", "float"),
        ("[1,]", "syntax"),
        ("[,1]", "syntax"),
        ("[1 2]", "syntax"),
        ("[-]", "syntax"),
        ("[1", "truncated"),
        ("[1,", "truncated"),
        ("[", "truncated"),
        ("", "truncated"),
        ("[1] 2", "trailing"),
        ("[18446744073709551616]", "range"),
        ("[184467440737095516150]", "range"),
        ("[-9223372036854775809]", "range"),
        ('["0x10"]', "hex"),
        ('["abc"]', "hex"),
        ('[""]', "empty"),
        ('["ab', "truncated"),
        ('["a\\u0062"]', "hex"),
    ],
)
def test_json_that_is_no_array_of_hashes(text: str, fault: str) -> None:
    with pytest.raises(_native.WireError) as caught:
        _native.json_hashes(text.encode())
    assert caught.value.fault == fault


def test_text_is_no_hash_in_msgpack() -> None:
    with pytest.raises(_native.WireError, match="element 1 is not an integer but text"):
        _native.msgpack_hashes(msgspec.msgpack.encode([1, "ab"]))
    with pytest.raises(_native.WireError, match="element 0 is empty"):
        _native.msgpack_hashes(msgspec.msgpack.encode([b""]))


@given(st.lists(hashes, min_size=1, max_size=8), st.data())
def test_a_cut_array_is_never_read_past_its_end(values: list[int | bytes], data: st.DataObject) -> None:
    encoded = msgspec.msgpack.encode(values)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(_native.WireError):
        _native.msgpack_hashes(encoded[:cut])
    with pytest.raises(_native.WireError):
        _native.msgpack_hashes(encoded + b"\0")


def test_lengths_without_bytes_behind_them_cost_nothing() -> None:
    for head in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdf\x80\x00\x00\x00",
        b"\xc6\xff\xff\xff\xff",
    ):
        for parse in (_native.msgpack_token_ids, _native.msgpack_hashes):
            with pytest.raises(_native.WireError):
                parse(head + b"\0" * 100)
        with pytest.raises(_native.WireError):
            _native.msgpack_children(head + b"\0" * 100, 2**62)
        with pytest.raises(_native.WireError):
            _native.msgpack_children(b"\x91" + head + b"\0" * 100, 2**62)


def test_whatever_holds_bytes_is_read() -> None:
    data = msgspec.msgpack.encode([1, 2])
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode([[1, 2]]), type=list[msgspec.Raw])[0]
    for holder in (data, bytearray(data), memoryview(b"x" + data)[1:], raw):
        assert _native.msgpack_token_ids(holder) == plain_tokens([1, 2])
    with pytest.raises(TypeError):
        _native.msgpack_token_ids("[1]")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        _native.msgpack_token_ids(memoryview(array.array("I", [1, 2, 3, 4]))[::2])


scalars = st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.text() | st.binary()
# From 16 on a container has another header: those hold scalars here, or nearly all the time would go into drawing trees.
containers = st.lists(scalars, max_size=20) | st.dictionaries(st.text(max_size=9), scalars, max_size=20)
values = st.recursive(
    scalars | containers,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)


@given(st.lists(values, max_size=20) | st.dictionaries(st.text(), values, max_size=20))
def test_children_are_the_spans_of_the_values(value: Any) -> None:
    children = _native.msgpack_children(msgspec.msgpack.encode(value), 1_000)
    if isinstance(children, dict):
        assert {name: msgspec.msgpack.decode(raw) for name, raw in children.items()} == value
    else:
        assert [msgspec.msgpack.decode(raw) for raw in children] == value


@given(st.lists(values, max_size=20))
def test_grandchildren_are_opened_one_level_more(value: list[Any]) -> None:
    opened = _native.msgpack_grandchildren(msgspec.msgpack.encode(value), 1_000)
    decode = msgspec.msgpack.decode

    assert isinstance(opened, list)

    def read(child: _native.Opened) -> Any:
        if isinstance(child, bytes):
            return decode(child)
        if isinstance(child, list):
            return [decode(raw) for raw in child]
        return {name: decode(raw) for name, raw in child.items()}

    assert [read(child) for child in opened] == value


def test_a_map_with_other_keys_than_text_is_not_opened() -> None:
    odd = msgspec.msgpack.encode({1: 2})
    with pytest.raises(_native.WireError):
        _native.msgpack_children(odd, 100)
    assert _native.msgpack_grandchildren(b"\x91" + odd, 100) == [odd]


def test_a_container_of_too_many_values_is_refused() -> None:
    assert len(_native.msgpack_children(msgspec.msgpack.encode([0] * 10), 10)) == 10
    with pytest.raises(_native.WireError) as caught:
        _native.msgpack_children(msgspec.msgpack.encode([0] * 11), 10)
    assert caught.value.fault == "too_many"


def test_nesting_costs_no_stack() -> None:
    deep = b"\x91" * 1_000_000 + b"\xc0"
    assert _native.msgpack_children(deep, 10) == [deep[1:]]
    with pytest.raises(_native.WireError):
        _native.msgpack_children(deep[:-1], 10)


# -- JSON numbers, 64 bytes of text at a time

digit_runs = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([10**power + step for power in range(20) for step in (-1, 0)])
)


def scanned(text: str) -> list[int] | None:
    """What the scanners read, which must be the same with and without vector instructions, and for narrow numbers."""
    found = _native.scan_json(text.encode())
    assert found == _native.scan_json_by_words(text.encode())
    narrow = _native.scan_json_tokens(text.encode())
    values = None if found is None else memoryview(found).cast("Q").tolist()
    is_narrow = values is not None and max(values) < 2**32
    assert (None if narrow is None else memoryview(narrow).cast("I").tolist()) == (
        values if is_narrow else None
    )
    return values


@given(
    st.lists(digit_runs, min_size=1, max_size=90),
    st.sampled_from([",", ", ", ",\n  ", ",\t\r "]),
    st.sampled_from(["", " "]),
)
def test_scanner_reads_every_number(values: list[int], between: str, before: str) -> None:
    assert scanned(f"[{before}{between.join(map(str, values))}]") == values


@given(
    st.lists(
        st.one_of(
            st.integers(0, 150_000),
            st.sampled_from([10**power + step for power in range(10) for step in (-1, 0)]),
            st.sampled_from([0, 2**32 - 1, 2**32]),
        ),
        min_size=1,
        max_size=90,
    ),
    st.sampled_from([",", ", ", ",\n  "]),
    st.integers(0, 2_100),
)
def test_scanner_reads_token_ids_wherever_they_lie(values: list[int], between: str, blanks: int) -> None:
    """Blanks move them over the ends of blocks and pieces; a zero in front of one refuses it."""
    texts = [str(value) for value in values]
    assert scanned(f"[{' ' * blanks}{between.join(texts)}]") == values
    place = blanks % len(texts)
    texts[place] = "0" + texts[place]
    assert scanned(f"[{' ' * blanks}{between.join(texts)}]") is None


def test_scanner_reads_thousands_of_token_ids() -> None:
    values = [step * step % 150_001 for step in range(4_096)]
    for between in (",", ", "):
        assert scanned(f"[{between.join(map(str, values))}]") == values


@given(
    st.text('0123456789,, \n-.[]e"', max_size=200),
    st.lists(st.integers(0, 10**9), max_size=30),
    st.integers(0, 200),
)
def test_scanner_reads_nothing_else(noise: str, values: list[int], place: int) -> None:
    """Whatever it takes, Python's parser takes with the same result; what it refuses it may."""
    usual = ",".join(map(str, values))
    for text in (f"[{usual[:place]}{noise}{usual[place:]}]", f"[{noise}]", noise):
        found = scanned(text)
        if found is not None:
            assert found == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "[01]",
        "[1,02,3]",
        "[18446744073709551616]",
        "[1,,2]",
        "[1 2]",
        "[,1]",
        "[1,]",
        "[]",
        "[ ]",
        "[1",
        "1]",
        "[1.0]",
        "[-1]",
        "[+1]",
        "[1 ,2]",
        "[1\x00]",
        "[1,\x0b2]",
    ],
)
def test_scanner_refuses(text: str) -> None:
    assert scanned(text) is None
    assert scanned(text.replace("[", "[" + "7, " * 100, 1)) is None or text in ("[]", "[ ]", "1]")
