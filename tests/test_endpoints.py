"""Where engines publish, rank by rank."""

from __future__ import annotations

import pytest

from app.endpoints import Endpoint, parse_endpoint, rank_endpoints
from app.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "host", "port", "binds"),
    [
        ("tcp://10.0.0.7:5557", "10.0.0.7", 5557, False),
        ("tcp://pod-0.svc.cluster.local:1", "pod-0.svc.cluster.local", 1, False),
        ("tcp://[2001:db8::1]:65535", "[2001:db8::1]", 65_535, False),
        ("tcp://*:5557", "*", 5557, True),
        ("tcp://[::]:5557", "[::]", 5557, True),
        ("tcp://:::5557", "[::]", 5557, True),
        ("tcp://0.0.0.0:5557", "0.0.0.0", 5557, True),
    ],
)
def test_endpoints(text: str, host: str, port: int, binds: bool) -> None:
    endpoint = parse_endpoint(text, field="f")
    assert endpoint == Endpoint(host, port)
    assert endpoint.binds is binds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:5557",
        "udp://h:1",
        "tcp://h",
        "tcp://h:",
        "tcp://:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://h:1e3",
        "tcp://a b:1",
        "tcp://h/x:1",
        "tcp://2001:db8::1:1",
        "tcp://h:²",
        "tcp://a;b:1",
        "tcp://[]:1",
    ],
)
def test_impossible_endpoints(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_endpoint(text, field="zmq_endpoint")
    assert caught.value.field == "zmq_endpoint"


def test_ranks_are_at_port_plus_rank() -> None:
    assert rank_endpoints("tcp://h:10", "tcp://h:20", 2) == (
        (Endpoint("h", 10), Endpoint("h", 20)),
        (Endpoint("h", 11), Endpoint("h", 21)),
    )
    assert rank_endpoints("tcp://*:10", None, 1) == ((Endpoint("*", 10), None),)


@pytest.mark.parametrize(
    ("publisher", "replay", "dp_size", "field"),
    [
        ("tcp://h:10", "tcp://h:11", 2, "replay_endpoint"),
        ("tcp://h:11", "tcp://h:10", 2, "replay_endpoint"),
        ("tcp://h:65535", None, 2, "zmq_endpoint"),
        ("tcp://h:10", "tcp://h:65535", 2, "replay_endpoint"),
        ("tcp://h:10", "tcp://*:20", 1, "replay_endpoint"),
        ("tcp://h:10", None, 0, "dp_size"),
    ],
)
def test_ranks_that_cannot_be(publisher: str, replay: str | None, dp_size: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        rank_endpoints(publisher, replay, dp_size)
    assert caught.value.field == field
