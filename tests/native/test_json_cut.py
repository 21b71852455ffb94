"""The native cutter of JSON bodies: what it leaves is valid exactly when the body is, and means the same."""

from __future__ import annotations

import array
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app import _native
from tests.serving.test_serving import DEADLINE_S

_WIDTHS = {"token_ids": "I", "prefix_hashes": "Q", "block_hashes": "Q"}


def cut(body: bytes, numbers_max: int = 100, arrays_max: int = 100) -> tuple[bytes, list[bytes]] | None:
    return _native.json_cut(body, numbers_max, arrays_max)


def put_back(value: Any, arrays: list[bytes]) -> Any:
    """The parsed rest with the arrays in their places again."""
    if isinstance(value, list):
        return [put_back(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: array.array(_WIDTHS[name], arrays[item]).tolist()
        if name in _WIDTHS and item is not None
        else put_back(item, arrays)
        for name, item in value.items()
    }


def test_arrays_leave_their_numbers() -> None:
    taken = cut(b'{"a": {"token_ids" : [1, 2] }, "prefix_hashes":[18446744073709551615],"token_ids":null}')
    assert taken is not None
    rest, arrays = taken
    assert rest == b'{"a": {"token_ids" : 0  }, "prefix_hashes":1 ,"token_ids":null}'
    assert arrays == [b"\x01\0\0\0\x02\0\0\0", b"\xff" * 8]


@pytest.mark.parametrize(
    "body",
    [
        b'{"token_ids": 0}',
        b'{"token_ids": "x"}',
        b'{"token_ids": {}}',
        b'{"token_ids": [1, [2]]}',
        b'{"token_ids": [1.0]}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": [4294967296]}',
        b'{"token_ids": [01]}',
        b'{"token_ids": [1,]}',
        b'{"token_ids": [1',
        b'{"token_ids": ',
        b'{"token_ids":',
        b'{"prefix_hashes": ["ab"]}',
        b'{"prefix_hashes": [-1]}',
        b'{"block_hashes": [true]}',
        b'{"token\\u005fids": 0, "token_ids": [1]}',
        b'{"a\\"b": 0}',
        b'"open',
        b'"open\\',
    ],
)
def test_refused(body: bytes) -> None:
    assert cut(body) is None


@pytest.mark.parametrize(
    "body", [b'{"token_ids":[1]5}', b'{"token_ids":[1].5}', b'{"token_ids":[1]e5}', b'{"token_ids":5[1]}']
)
def test_number_does_not_join_what_follows(body: bytes) -> None:
    taken = cut(body)
    if taken is not None:
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(taken[0])


def test_text_is_no_array() -> None:
    body = b'{"a": "\\"token_ids\\": [1]", "b": ["token_ids", [1, 2]], "c": "token_ids"}'
    assert cut(body) == (body, [])


def test_bounds() -> None:
    assert cut(b'{"token_ids": [1, 2, 3]}', numbers_max=3) is not None
    assert cut(b'{"token_ids": [1, 2, 3]}', numbers_max=2) is None
    body = b'[{"token_ids": []}, {"token_ids": []}]'
    assert cut(body, arrays_max=2) is not None
    assert cut(body, arrays_max=1) is None


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=5)
)
names = st.one_of(
    st.sampled_from(["token_ids", "prefix_hashes", "block_hashes", "events"]), st.text(max_size=3)
)
documents = st.recursive(
    st.one_of(
        scalars,
        st.lists(st.one_of(st.integers(0, 300), st.sampled_from([2**32 - 1, 99_999_999])), max_size=9),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)


def unsigned(document: Any, name: str = "") -> Any:
    """Engine hashes that are negative are the same 64 bits as unsigned ones."""
    if isinstance(document, dict):
        return {key: unsigned(value, key) for key, value in document.items()}
    if not isinstance(document, list):
        return document
    if name == "block_hashes" and document and all(type(item) is int for item in document):
        return [item % 2**64 for item in document]
    return [unsigned(item) for item in document]


@given(documents, st.sampled_from([None, 1]), st.booleans())
@example({"block_hashes": [-1]}, None, True)
def test_cut_and_put_back(document: Any, indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    taken = cut(body)
    if taken is not None:
        rest, arrays = taken
        assert put_back(json.loads(rest), arrays) == unsigned(document)


@given(
    documents,
    st.integers(0, 200),
    st.sampled_from([b"", b'"', b"[", b"]", b"{", b",", b":", b"1", b"\\", b"\xff"]),
)
def test_damaged_stays_damaged(document: Any, place: int, piece: bytes) -> None:
    """Never does the cutter turn a text that is not JSON into one that is."""
    body = json.dumps(document).encode()
    place %= len(body)
    body = body[:place] + piece + body[place + 1 :]
    taken = cut(body)
    if taken is None:
        return
    try:
        left = msgspec.json.decode(taken[0])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert put_back(left, taken[1]) == msgspec.json.decode(body)


@given(documents)
def test_children_are_counted(document: Any) -> None:
    body = json.dumps(document).encode()
    expected = len(document) if isinstance(document, (list, dict)) else None
    if expected is not None:
        assert _native.json_child_count(body, 100) == expected
        assert _native.json_child_count(body, 1) == min(expected, 2)


def test_a_body_of_escapes_is_read_in_one_pass() -> None:
    """In a process that can be ended: where each escape is a pass of its own, 16 MiB of them take ten minutes."""
    script = """
from app import _native
text = b'{"model":"' + b"\\\\" * (8 << 20) + b'","token_ids":[1]}'
assert _native.json_cut(text, 1, 1) is not None
assert _native.json_child_count(text, 64) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S)
