"""DNS names against a real server: addresses and SRV records that come and go, and every way not to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import dns.rcode
import pytest

from app.discovery import dns_names
from app.discovery.dns_names import DnsName, parse_server
from app.discovery.sightings import Sighting
from app.errors import InvalidInput, Unresponsive
from tests.discovery.dns_server import DnsServer
from tests.discovery.waiting import until, watching


@pytest.fixture
def server() -> Iterator[DnsServer]:
    with DnsServer() as started:
        yield started


def place(server: DnsServer, text: str, *, interval_s: float = 0.05) -> DnsName:
    return DnsName(text, server=server.address, interval_s=interval_s)


def look(server: DnsServer, text: str) -> dict[str, Sighting]:
    return asyncio.run(place(server, text).look())[0]


def test_one_pod_an_address(server: DnsServer) -> None:
    server.put("vllm.test", "A", "10.0.0.2", "10.0.0.1")
    found = look(server, "vllm.test,port=9000,model=m")
    assert {name: seen.url for name, seen in found.items()} == {
        "10.0.0.1:9000": "http://10.0.0.1:9000",
        "10.0.0.2:9000": "http://10.0.0.2:9000",
    }
    assert {seen.said.model for seen in found.values()} == {"m"}


def test_an_engine_of_both_families_is_one_pod(server: DnsServer) -> None:
    server.put("both.test", "A", "10.0.0.1")
    server.put("both.test", "AAAA", "fd00::1")
    server.put("six.test", "AAAA", "fd00::1")
    assert list(look(server, "both.test")) == ["10.0.0.1:8000"]
    assert {name: seen.url for name, seen in look(server, "six.test").items()} == {
        "[fd00::1]:8000": "http://[fd00::1]:8000"
    }


def test_srv_targets_keep_their_names_and_bring_their_ports(server: DnsServer) -> None:
    server.put("_http._tcp.vllm.test", "SRV", "0 10 8001 vllm-0.vllm.test.", "0 10 8002 vllm-1.vllm.test.")
    server.put("vllm-0.vllm.test", "A", "10.0.0.1")
    server.put("vllm-1.vllm.test", "AAAA", "fd00::2")
    first = look(server, "_http._tcp.vllm.test")
    assert {name: seen.url for name, seen in first.items()} == {
        "vllm-0.vllm.test:8001": "http://10.0.0.1:8001",
        "vllm-1.vllm.test:8002": "http://[fd00::2]:8002",
    }
    server.put("vllm-0.vllm.test", "A", "10.0.0.9")
    again = look(server, "_http._tcp.vllm.test")["vllm-0.vllm.test:8001"]
    assert again.incarnation != first["vllm-0.vllm.test:8001"].incarnation


def test_an_srv_target_without_addresses_is_not_there_and_one_of_several_is_several(
    server: DnsServer,
) -> None:
    server.put("_http._tcp.vllm.test", "SRV", "0 1 80 gone.test.", "0 1 80 two.test.")
    server.put("two.test", "A", "10.0.0.1", "10.0.0.2")
    assert set(look(server, "_http._tcp.vllm.test")) == {"10.0.0.1:80", "10.0.0.2:80"}


def test_an_engine_of_which_all_is_said_is_not_asked(server: DnsServer) -> None:
    server.put("sglang.test", "A", "10.0.0.1")
    [(name, seen)] = look(server, "sglang.test,zmq_port=5557,replay_port=6557,dp_size=2,model=m").items()
    assert name == "10.0.0.1:5557"
    assert seen.url is None
    assert seen.spec is not None
    assert (seen.spec.zmq_endpoint, seen.spec.replay_endpoint) == (
        "tcp://10.0.0.1:5557",
        "tcp://10.0.0.1:6557",
    )
    assert (seen.spec.dp_size, seen.spec.model, seen.spec.metrics_url) == (2, "m", None)


def test_no_such_name_and_no_such_records_are_nobody(server: DnsServer) -> None:
    server.put("else.test", "TXT", '"x"')
    assert look(server, "never.test") == {}
    assert look(server, "else.test") == {}
    assert look(server, "_http._tcp.never.test") == {}


def test_an_answer_too_long_for_udp_is_asked_for_over_tcp(server: DnsServer) -> None:
    addresses = [f"10.0.{number // 250}.{number % 250 + 1}" for number in range(600)]
    server.put("many.test", "A", *addresses)
    server.faults.truncate = True
    assert len(look(server, "many.test")) == 600
    assert ("many.test", "A", "tcp") in server.questions


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_an_error_is_no_picture(server: DnsServer, rcode: dns.rcode.Rcode) -> None:
    server.put("vllm.test", "A", "10.0.0.1")
    server.faults.rcode = rcode
    with pytest.raises(Unresponsive, match=r"A records of vllm\.test cannot be had"):
        look(server, "vllm.test")


@pytest.mark.parametrize("fault", ["silent", "garbage"])
def test_no_answer_is_no_picture(server: DnsServer, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_names, "TIMEOUT_S", 0.3)
    server.put("vllm.test", "A", "10.0.0.1")
    setattr(server.faults, fault, True)
    with pytest.raises(Unresponsive, match="cannot be had"):
        look(server, "vllm.test")


def test_a_target_that_cannot_be_resolved_fails_the_whole_look(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a picture would make pods vanish."""
    monkeypatch.setattr(dns_names, "ANSWERS_MAX", 1)
    server.put("_http._tcp.vllm.test", "SRV", "0 1 80 two.test.")
    server.put("two.test", "A", "10.0.0.1", "10.0.0.2")
    with pytest.raises(Unresponsive, match=r"two\.test\.? has more than 1 A records"):
        look(server, "_http._tcp.vllm.test")


def test_pods_come_and_go_and_a_failure_keeps_the_last_picture(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_names, "PAUSE_S_MIN", 0.01)
    server.put("vllm.test", "A", "10.0.0.1")

    async def run() -> None:
        async with watching(place(server, "vllm.test")) as told:
            await until(lambda: told.names == {"10.0.0.1:8000"}, "the first")
            server.put("vllm.test", "A", "10.0.0.1", "10.0.0.2")
            await until(lambda: told.names == {"10.0.0.1:8000", "10.0.0.2:8000"}, "the second")
            server.faults.rcode = dns.rcode.SERVFAIL
            await until(lambda: told.failures, "a failure")
            assert told.names == {"10.0.0.1:8000", "10.0.0.2:8000"}
            server.faults.rcode = None
            server.remove("vllm.test")
            await until(lambda: told.names == set(), "nobody")

    asyncio.run(run())


def test_the_ttl_says_when_to_ask_again_within_bounds(server: DnsServer) -> None:
    async def ttl(text: str) -> int:
        return (await place(server, text, interval_s=7).look())[1]

    server.put("a.test", "A", "10.0.0.1", ttl=3)
    server.put("_x._tcp.test", "SRV", "0 1 80 a.test.", ttl=600)
    assert asyncio.run(ttl("a.test")) == 3
    assert asyncio.run(ttl("_x._tcp.test")) == 3  # the shorter one of record and address
    assert asyncio.run(ttl("never.test")) == 7


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "does not begin with a DNS name"),
        ("a..b", "is not a DNS name"),
        ("x" * 64, "is not a DNS name"),
        ("vllm,prot=8000", "'prot' is none of"),
        ("vllm,port=0", "not a whole number in 1..65535"),
        ("vllm,port=8000,port=8001", "there twice"),
        ("vllm,port=", "has no value"),
        ("vllm,dp_size=2", "without zmq_port"),
        ("vllm,zmq_port=5557", "model must be said"),
        ("vllm,zmq_port=5557,replay_port=5558,dp_size=2,model=m", "overlap"),
        ("_http._tcp.vllm,port=80", "SRV records have the port"),
    ],
)
def test_what_cannot_be_said(text: str, fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        DnsName(text, server=None, interval_s=1)


def test_addresses_of_servers() -> None:
    assert parse_server("10.0.0.10") == (["10.0.0.10"], 53)
    assert parse_server("10.0.0.10:5353") == (["10.0.0.10"], 5353)
    assert parse_server("fd00::a") == (["fd00::a"], 53)
    assert parse_server("[fd00::a]:5353") == (["fd00::a"], 5353)
    for wrong in ("dns.test", "10.0.0.10:0", "10.0.0.10:x", "10.0.0.10:70000", ""):
        with pytest.raises(InvalidInput):
            parse_server(wrong)
