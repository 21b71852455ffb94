"""Pods behind a DNS name: a headless service of Kubernetes, a service of compose, or SRV records.

    vllm.default.svc,port=8000       one pod an address (A; AAAA where there is no A), named address:port
    _http._tcp.vllm.default.svc      one pod a target of the SRV records, at their ports, named target:port

A dual-stack engine has an A and an AAAA record and is one engine, so AAAA records are only looked up where there are
no A records. An SRV target keeps its name when its address changes: that is another engine, which starts empty.

It is asked again when the shortest TTL is over, at most every second and at least every `interval_s`: some servers
(that of compose) give TTLs of minutes for what changes at once. A name that does not exist, or has no addresses, is
an empty picture: a headless service without ready pods is just that. No answer, or one that is an error, is a
failure and keeps the picture. Names are completed by the search list of /etc/resolv.conf.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from app.discovery.sightings import Report, Sighting, parse_said, sight
from app.errors import InvalidInput, Unresponsive

TIMEOUT_S = 5.0  # of one question, its repetitions included
PAUSE_S_MIN = 1.0
ANSWERS_MAX = 4_096  # records of one answer
QUESTIONS_AT_ONCE = 16

_DNS_PORT = 53


class DnsName:
    """`text` is the name and what is said of its engines; `server` is address:port, None asks the system's."""

    def __init__(self, text: str, *, server: str | None, interval_s: float) -> None:
        name, _, rest = text.partition(",")
        self._host = name.strip()
        self.name = f"dns:{self._host}"
        self._said = parse_said(rest, place=self.name)
        self._is_srv = self._host.startswith("_")
        self._server = server
        self._interval_s = interval_s
        self._slots = asyncio.Semaphore(QUESTIONS_AT_ONCE)
        try:
            dns.name.from_text(self._host)
        except dns.exception.DNSException as error:
            raise InvalidInput(f"{self._host!r} is not a DNS name: {error}") from error
        if any(letter in self._host for letter in ":/ "):  # a name to DNS, and one that nobody has
            raise InvalidInput(
                f"{self._host!r} is not a DNS name: a port is said behind it, as name,port=8000"
            )
        if not self._host:
            raise InvalidInput(f"{text!r} does not begin with a DNS name")
        if self._is_srv and self._said.port is not None:
            raise InvalidInput(f"{self.name}: SRV records have the port, so port= is not said")
        if server is not None:
            parse_server(server)

    async def watch(self, report: Report) -> None:
        while True:
            pause_s = self._interval_s
            try:
                picture, ttl_s = await self.look()
                report.seen(picture)
                pause_s = min(max(float(ttl_s), PAUSE_S_MIN), self._interval_s)
            except Unresponsive as error:
                report.failed(str(error))
            await asyncio.sleep(pause_s)

    async def look(self) -> tuple[dict[str, Sighting], int]:
        """The pods that are there now, and for how many seconds that holds. Raises Unresponsive."""
        resolver = self._resolver()
        found = await (self._targets(resolver) if self._is_srv else self._addresses(resolver))
        sightings, ttl_s = found
        return {sighting.name: sighting for sighting in sightings}, ttl_s

    async def _addresses(self, resolver: dns.asyncresolver.Resolver) -> tuple[list[Sighting], int]:
        addresses, ttl_s = await self._resolve_host(resolver, self._host, search=True)
        port = self._said.engine_port or self._said.zmq_port
        return [sight(_at(address, port), address, address, self._said) for address in addresses], ttl_s

    async def _targets(self, resolver: dns.asyncresolver.Resolver) -> tuple[list[Sighting], int]:
        answer = await self._ask(resolver, self._host, "SRV", search=True)
        if answer is None or answer.rrset is None:
            return [], round(self._interval_s)
        records = [record for record in answer.rrset if isinstance(record, SRV) and record.port]
        targets = sorted({(str(record.target), record.port) for record in records})
        hosts = sorted({target for target, _ in targets})
        asking = [asyncio.ensure_future(self._resolve_host(resolver, host, search=False)) for host in hosts]
        try:
            resolved = await asyncio.gather(*asking)
        finally:  # the first that fails ends the look, and the others with it
            for task in asking:
                task.cancel()
        addresses = {host: found for host, (found, _) in zip(hosts, resolved, strict=True)}
        ttls = [answer.rrset.ttl, *(ttl_s for found, ttl_s in resolved if found)]
        sightings = [
            self._sight_target(target, port, address, alone=len(addresses[target]) == 1)
            for target, port in targets
            for address in addresses[target]
        ]
        return sightings, min(ttls)

    def _sight_target(self, target: str, port: int, address: str, *, alone: bool) -> Sighting:
        name = _at(target.rstrip(".") if alone else address, port)
        return sight(name, address, address, self._said, port=port)

    async def _resolve_host(
        self, resolver: dns.asyncresolver.Resolver, host: str, *, search: bool
    ) -> tuple[list[str], int]:
        """(addresses in order, TTL in seconds)."""
        for kind in ("A", "AAAA"):
            answer = await self._ask(resolver, host, kind, search=search)
            if answer is not None and answer.rrset is not None:
                return _sorted_addresses(record.address for record in answer.rrset), answer.rrset.ttl
        return [], round(self._interval_s)

    async def _ask(
        self, resolver: dns.asyncresolver.Resolver, name: str, kind: str, *, search: bool
    ) -> dns.resolver.Answer | None:
        """None where the name does not exist or has no such records. Raises Unresponsive."""
        try:
            async with self._slots:
                answer = await resolver.resolve(name, kind, search=search, lifetime=TIMEOUT_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
        except dns.exception.Timeout:  # its own words have the time that it took: another cause at each look
            raise Unresponsive(
                f"{kind} records of {name} cannot be had: no answer in {TIMEOUT_S:g} s"
            ) from None
        except (dns.exception.DNSException, OSError) as error:
            said = str(error) or type(error).__name__
            raise Unresponsive(f"{kind} records of {name} cannot be had: {said}") from error
        if answer.rrset is not None and len(answer.rrset) > ANSWERS_MAX:
            raise Unresponsive(f"{name} has more than {ANSWERS_MAX} {kind} records")
        return answer

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Made for each look: /etc/resolv.conf may have changed. Raises Unresponsive."""
        if self._server is not None:
            resolver = dns.asyncresolver.Resolver(configure=False)
            resolver.nameservers, resolver.port = parse_server(self._server)
            return resolver
        try:
            return dns.asyncresolver.Resolver()
        except (dns.exception.DNSException, OSError) as error:
            raise Unresponsive(f"the system's resolver cannot be set up: {error}") from error


def parse_server(text: str) -> tuple[list[str], int]:
    """([address], port) of `address`, `address:port` or `[address]:port`. Raises InvalidInput."""
    host, separator, port = text.rpartition(":")
    if not separator or (":" in host and not host.startswith("[")):
        host, port = text, str(_DNS_PORT)
    try:
        address = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        if not 1 <= int(port) <= 65_535:
            raise ValueError(port)
    except ValueError:
        raise InvalidInput(f"{text!r} is not the address of a DNS server, as 10.0.0.10:53") from None
    return [address], int(port)


def _sorted_addresses(addresses: Iterable[str]) -> list[str]:
    return sorted({str(ipaddress.ip_address(address)) for address in addresses})


def _at(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
