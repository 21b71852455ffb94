"""A small authoritative DNS server on a free port, UDP and TCP, with a zone that can change and faults to switch on."""

from __future__ import annotations

import dataclasses
import socket
import socketserver
import struct
import threading
from types import TracebackType
from typing import Any, Self

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


@dataclasses.dataclass
class Faults:
    """`truncate` sends UDP answers empty, with the flag that asks for TCP."""

    rcode: dns.rcode.Rcode | None = None
    silent: bool = False
    garbage: bool = False
    truncate: bool = False


class DnsServer:
    """`zone` maps (name, type) to TTL and records; a name that has none of any type does not exist."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.faults = Faults()
        self.questions: list[tuple[str, str, str]] = []  # name, type, transport
        server = self

        class Udp(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data, sender = self.request
                answer = server.answer(data, "udp")
                if answer is not None:
                    sender.sendto(answer, self.client_address)

        class Tcp(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                (length,) = struct.unpack("!H", self.rfile.read(2))
                answer = server.answer(self.rfile.read(length), "tcp")
                if answer is not None:
                    self.wfile.write(struct.pack("!H", len(answer)) + answer)

        self._tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tcp)
        self._tcp.daemon_threads = True
        self.port = int(self._tcp.server_address[1])
        self._udp = socketserver.ThreadingUDPServer(("127.0.0.1", self.port), Udp)
        self._threads = [
            threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
            for one in (self._tcp, self._udp)
        ]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def put(self, name: str, kind: str, *records: str, ttl: int = 0) -> None:
        self.zone = {**self.zone, (name, kind): (ttl, list(records))}

    def remove(self, name: str) -> None:
        self.zone = {key: value for key, value in self.zone.items() if key[0] != name}

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._tcp, self._udp):
            one.shutdown()
            one.server_close()
        for thread in self._threads:
            thread.join(10)

    def answer(self, data: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(data)
        [question] = query.question
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.questions.append((name, kind, transport))
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA
        if self.faults.silent:
            return None
        if self.faults.garbage:
            return b"\x00" * 7
        if self.faults.rcode is not None:
            response.set_rcode(self.faults.rcode)
            return response.to_wire()
        if self.faults.truncate and transport == "udp":
            response.flags |= dns.flags.TC
            return response.to_wire()
        if (name, kind) in self.zone:
            response.answer.append(_records(name, kind, self.zone[name, kind]))
        elif not any(known == name for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()


def _records(name: str, kind: str, said: tuple[int, list[str]]) -> Any:
    ttl, records = said
    return dns.rrset.from_text(dns.name.from_text(name), ttl, "IN", kind, *records)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
