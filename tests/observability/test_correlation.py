"""Ids of requests: what is taken from a caller, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observability.correlation import REQUEST_ID_CHARS_MAX, correlate, read_traceparent

TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = b"00f067aa0ba902b7"
WHOLE = b"00-" + TRACE + b"-" + SPAN + b"-01"


@pytest.mark.parametrize(
    "sent", [b"a", b"x" * REQUEST_ID_CHARS_MAX, b"2fe1b2a4-9a63-4d9b", b"svc:1/2+3=.~@_"]
)
def test_plain_request_ids_are_kept(sent: bytes) -> None:
    assert correlate([(b"host", b"h"), (b"x-request-id", sent)]).request_id == sent.decode()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"x" * (REQUEST_ID_CHARS_MAX + 1),
        b"two words",
        b"line\nbreak",
        b'"quoted"',
        b"\xff",
        b"a\x00",
        b"<b>",
    ],
)
def test_others_are_replaced(sent: bytes) -> None:
    made = correlate([(b"x-request-id", sent)]).request_id
    assert made.encode() != sent
    assert correlate([(b"x-request-id", made.encode())]).request_id == made, "one of ours is a plain one"


def test_made_ids_are_all_different() -> None:
    assert len({correlate([]).request_id for _ in range(1_000)}) == 1_000


def test_traceparent_of_the_standard() -> None:
    trace = correlate([(b"traceparent", WHOLE)]).trace
    assert trace is not None
    assert (trace.trace_id, trace.span_id, trace.sampled) == (TRACE.decode(), SPAN.decode(), True)
    unsampled = read_traceparent(WHOLE[:-2] + b"00")
    assert unsampled is not None
    assert not unsampled.sampled


@pytest.mark.parametrize(
    "later", [b"01-" + TRACE + b"-" + SPAN + b"-01-what-the-future-holds", b"cc" + WHOLE[2:]]
)
def test_later_versions_are_read_as_far_as_they_are_known(later: bytes) -> None:
    trace = read_traceparent(later)
    assert trace is not None
    assert (trace.trace_id, trace.span_id, trace.sampled) == (TRACE.decode(), SPAN.decode(), True)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"00",
        WHOLE + b"-more",
        WHOLE + b"\n",
        b" " + WHOLE,
        b"ff" + WHOLE[2:],
        WHOLE.upper(),
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00-" + TRACE[:-1] + b"-" + SPAN + b"-01",
        WHOLE[:-1] + b"g",
    ],
)
def test_what_is_no_traceparent_counts_as_none(sent: bytes) -> None:
    assert correlate([(b"traceparent", sent)]).trace is None


def test_two_traceparents_are_none() -> None:
    assert correlate([(b"traceparent", WHOLE), (b"traceparent", WHOLE)]).trace is None


@given(st.lists(st.tuples(st.sampled_from([b"x-request-id", b"traceparent"]), st.binary(max_size=200))))
def test_any_header_is_survived(headers: list[tuple[bytes, bytes]]) -> None:
    correlation = correlate(headers)
    assert 0 < len(correlation.request_id) <= REQUEST_ID_CHARS_MAX
    assert correlation.request_id.isascii()
    assert correlation.request_id.isprintable()
