"""What passes for a plain head natively is the same request to the server's own parser."""

from __future__ import annotations

from typing import Any

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app import _native

ASKED = {b"content-type", b"content-encoding", b"accept", b"authorization", b"x-request-id", b"traceparent"}


class Seen:
    """What uvicorn would learn from its parser."""

    def __init__(self, data: bytes) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.heads = self.messages = 0
        self.parser: Any = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads += 1
        self.method, self.version = self.parser.get_method(), self.parser.get_http_version()
        self.keeps_alive, self.upgrades = self.parser.should_keep_alive(), self.parser.should_upgrade()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1


def check(data: bytes) -> bool:
    """False for what is not plain."""
    read = _native.request_head(data)
    if read is None:
        return False
    path, query, headers, head_bytes, body_bytes = read
    seen = Seen(data[:head_bytes] + b"x" * body_bytes)
    url = httptools.parse_url(seen.url)
    assert (seen.heads, seen.messages, seen.method, seen.version) == (1, 1, b"POST", "1.1")
    assert (seen.keeps_alive, seen.upgrades) == (True, False)
    assert (url.path, url.query or b"") == (path.encode(), query)
    assert [header for header in seen.headers if header[0] in ASKED] == headers
    assert seen.body == b"x" * body_bytes
    assert not {b"transfer-encoding", b"expect", b"upgrade", b"forwarded"} & {
        name for name, _ in seen.headers
    }
    return True


LINES = st.sampled_from(
    [
        b"Host: indexer", b"content-type: application/json", b"Content-Type:application/octet-stream",
        b"ACCEPT: */*", b"X-Request-ID: a-b", b"traceparent: 00-1-2-01", b"authorization: Bearer k",
        b"Connection: keep-alive", b"connection: Keep-Alive", b"connection: close", b"Content-Length: 5",
        b"content-length: 005", b"content-length: +5", b"content-length: 5 ", b"content-length: 5, 5",
        b"content-length: 99999999999999999999", b"Transfer-Encoding: chunked", b"transfer-encoding : chunked",
        b"Upgrade: h2c", b"Expect: 100-continue", b"X-Forwarded-For: 1.2.3.4", b"forwarded: for=x", b"x:", b"x: ",
        b"x:\ty", b"x: y\tz", b" folded: x", b"no colon", b": no name", b"a\x00b: c", b"a: b\x00c", b"a: \xff",
        b"a: b\rc", b"a b: c", b"content-encoding: br", b"te: trailers",
    ]
)  # fmt: skip
TARGETS = st.sampled_from(
    [
        b"/v1/match", b"/v1/match?model=m", b"/v1/match?a=b?c", b"/v1/match?", b"/v1/match#x", b"/v1/match?a#b", b"*",
        b"/", b"//v1/match", b"/v1/../match", b"/v1/%6datch", b"http://h/v1/match", b"/v1/m\x80", b"/v1/match ", b"",
        b"/v1/match?a=\x7f", b"/a:b@c",
    ]
)  # fmt: skip
HEADS = st.builds(
    lambda method, target, version, lines, ending: b"%b%b%b%b%b%b" % (
        method, target, version, ending, b"".join(line + ending for line in lines), ending
    ),
    st.sampled_from([b"POST ", b"POST ", b"POST ", b"post ", b"GET ", b"POST\t", b"\r\nPOST "]),
    st.one_of(st.just(b"/v1/match"), TARGETS),
    st.sampled_from([b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b" http/1.1", b""]),
    st.lists(LINES, max_size=4).map(lambda lines: [b"Content-Length: 3", *lines]),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"]),
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    head = draw(HEADS)
    place = draw(st.integers(0, len(head)))
    return head[:place] + draw(st.one_of(st.just(b""), st.binary(max_size=2))) + head[place:]


@settings(max_examples=600, deadline=None)
@given(damaged())
@example(b"POST /v1/match?x=1 HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
def test_what_is_plain_is_the_same_to_the_server(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize(
    "more",
    [b"", b"Host: h\r\n", b"Content-Type: application/json\r\nX-Request-ID: 1\r\nconnection: Keep-Alive\r\n"],
)
def test_plain_heads_are_taken(more: bytes) -> None:
    assert check(b"POST /v1/match?model=m HTTP/1.1\r\n" + more + b"Content-Length: 12\r\n\r\n")


@pytest.mark.parametrize(
    "line",
    [
        b"Transfer-Encoding: chunked",
        b"Content-Length: 3",
        b"Expect: 100-continue",
        b"Upgrade: websocket",
        b"Connection: close",
        b"Connection: keep-alive, upgrade",
        b"X-Forwarded-For: 1.2.3.4",
        b"Forwarded: for=x",
        b"a: b\r\n c",
        b"a: b\nc: d",
        b"a : b",
        b"x: " + b"y" * 8_192,
        b"\r\n".join([b"x: y"] * 64),
    ],
)
def test_what_is_unusual_is_left_to_the_server(line: bytes) -> None:
    assert not check(b"POST /v1/match HTTP/1.1\r\nContent-Length: 3\r\n" + line + b"\r\n\r\n")


def test_a_head_that_is_not_whole_is_left_alone() -> None:
    whole = b"POST /v1/match HTTP/1.1\r\nContent-Length: 3\r\nHost: x\r\n\r\n"
    assert check(whole)
    assert not any(check(whole[:length]) for length in range(len(whole)))


# -- heads that came before


def of_head(data: bytes) -> Any:
    """What two heads have in common that mean the same; None for those of one request only."""
    read = _native.request_head(data)
    if read is None or b"seq=" in read[1]:
        return None
    if {name for name, _ in read[2]} & {b"authorization", b"x-request-id", b"traceparent"}:
        return None
    return read[0], read[1], tuple(read[2])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(HEADS, damaged()), max_size=12))
def test_heads_have_one_number_where_they_mean_the_same(heads: list[bytes]) -> None:
    book = _native.HeadBook()
    numbers: dict[Any, int] = {}
    for data in heads:
        read, meaning = _native.request_head(data), of_head(data)
        for seen in (book.find(data), book.put(data), book.find(data)):
            if read is None:
                assert seen is None
                continue
            assert seen is not None
            assert seen[1:] == read[3:]
            if seen[0] is None:
                assert meaning not in numbers
            else:
                assert meaning is not None
                assert numbers.setdefault(meaning, seen[0]) == seen[0]
        assert meaning is None or meaning in numbers
    assert sorted(numbers.values()) == list(range(len(numbers)))


def test_heads_past_the_bound_are_forgotten() -> None:
    book = _native.HeadBook()

    def head(number: int) -> bytes:
        return b"POST /v1/match?model=%d HTTP/1.1\r\nContent-Length: 3\r\n\r\n" % number

    def number_of(seen: tuple[int | None, int, int] | None) -> int | None:
        assert seen is not None
        return seen[0]

    for number in range(1_024):
        assert number_of(book.put(head(number))) == number
    assert number_of(book.put(head(7))) == 7
    assert number_of(book.put(head(5_000))) == 0
    assert number_of(book.find(head(7))) is None
    long = b"POST /v1/match?model=" + b"m" * 1_024 + b" HTTP/1.1\r\nContent-Length: 3\r\n\r\n"
    assert number_of(book.put(long)) is None
