"""What the receiver follows, what it knows of each stream of it, and what it counts."""

from __future__ import annotations

import dataclasses

import zmq

from app.endpoints import Endpoint
from app.ingest.feed import Stream
from app.ingest.handshakes import Attempts, Handshakes
from app.ingest.sequence import SequenceTracker

FollowedStream = tuple[Stream, Endpoint, Endpoint | None]
"""With its publisher and its replay."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FollowedPod:
    """Its streams have the same topic. Equal only to itself."""

    name: str
    topic: bytes
    streams: tuple[FollowedStream, ...]


@dataclasses.dataclass(slots=True)
class ReceiverCounters:
    messages: int = 0
    message_bytes: int = 0
    messages_malformed: int = 0
    open_failures: int = 0
    handshake_failures: int = 0
    faults: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Subscription:
    """One stream and its sockets; the receiver's own."""

    stream: Stream
    publisher: Endpoint
    replay: Endpoint | None
    topic: bytes
    tracker: SequenceTracker
    attempts: Attempts
    handshakes: Handshakes
    live: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    dealer: zmq.Socket[bytes] | None = None
    connections: set[int] = dataclasses.field(default_factory=set)
    established: bool = False
    replay_from: int | None = None  # a request that waits for its turn
    reopen_at_s: float | None = None
