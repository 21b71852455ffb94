"""Where engines publish: `tcp://host:port` of rank 0, with rank r at port + r.

Who binds follows the engine's own rule, mirrored. An engine binds its publisher when its endpoint names
every interface (`*` or `::`) and connects otherwise; so an indexer that is told `*` or `::` is the side
that engines connect to, and binds. Replay sockets are always bound by the engine, so a replay endpoint
always names a host.

Checked here, before any socket exists, because libzmq takes port 70000 for 4464 and a host name for
whatever it may resolve to later.
"""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import urlsplit

from app.errors import InvalidInput
from app.observability.redaction import redacted

PORT_MAX = 65_535
_HOST = re.compile(r"\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")
_EVERY_INTERFACE = frozenset({"*", "0.0.0.0", "[::]"})


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP endpoint; an IPv6 `host` keeps its brackets."""

    host: str
    port: int

    @property
    def binds(self) -> bool:
        return self.host in _EVERY_INTERFACE

    @property
    def is_ipv6(self) -> bool:
        return self.host.startswith("[")

    def at_rank(self, dp_rank: int) -> Endpoint:
        return Endpoint(self.host, self.port + dp_rank)

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse_endpoint(text: str, *, field: str) -> Endpoint:
    """Raises InvalidInput that names `field` and what is wrong with it."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme != "tcp":
        raise InvalidInput(f"{text!r} is not an endpoint: tcp://host:port is expected", field=field)
    host, separator, port_text = rest.rpartition(":")
    if not separator or not (port_text.isascii() and port_text.isdigit()):
        raise InvalidInput(f"{text!r} has no port: tcp://host:port is expected", field=field)
    host = "[::]" if host == "::" else host
    if not _HOST.fullmatch(host):
        raise InvalidInput(f"{text!r} has an impossible host {host!r}", field=field)
    port = int(port_text)
    if not 1 <= port <= PORT_MAX:
        raise InvalidInput(f"{text!r}: port {port} is not in 1..{PORT_MAX}", field=field)
    return Endpoint(host, port)


def rank_endpoints(
    zmq_endpoint: str, replay_endpoint: str | None, dp_size: int
) -> tuple[tuple[Endpoint, Endpoint | None], ...]:
    """(publisher, replay) of every rank of a pod. Raises InvalidInput."""
    if dp_size < 1:
        raise InvalidInput(f"dp_size must be at least 1, not {dp_size}", field="dp_size")
    publisher = parse_endpoint(zmq_endpoint, field="zmq_endpoint")
    _check_last_port(publisher, dp_size, field="zmq_endpoint")
    if replay_endpoint is None:
        return tuple((publisher.at_rank(rank), None) for rank in range(dp_size))
    replay = parse_endpoint(replay_endpoint, field="replay_endpoint")
    _check_last_port(replay, dp_size, field="replay_endpoint")
    if replay.binds:
        raise InvalidInput(
            f"{replay_endpoint!r} names no host: the engine binds its replay socket, so say where that is",
            field="replay_endpoint",
        )
    if publisher.host == replay.host and abs(publisher.port - replay.port) < dp_size:
        raise InvalidInput(
            f"the ports of {dp_size} ranks from {publisher} and from {replay} overlap: "
            f"keep them at least {dp_size} apart",
            field="replay_endpoint",
        )
    return tuple((publisher.at_rank(rank), replay.at_rank(rank)) for rank in range(dp_size))


def check_metrics_url(text: str) -> None:
    """Raises InvalidInput unless this is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits or not text.isprintable() or " " in text:
        raise InvalidInput(
            f"{redacted(text)!r} is not a URL: http://host:port/metrics is expected", field="metrics_url"
        )


def _check_last_port(endpoint: Endpoint, dp_size: int, *, field: str) -> None:
    if endpoint.port + dp_size - 1 > PORT_MAX:
        raise InvalidInput(
            f"{endpoint}: rank {dp_size - 1} would be at port {endpoint.port + dp_size - 1}, past {PORT_MAX}",
            field=field,
        )
