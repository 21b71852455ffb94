"""What the monitor of a connecting socket says of its attempts and its handshakes, and what is wrong where they fail.

libzmq 4.3 gives no errno for an attempt that fails: the value of CONNECT_RETRIED is the interval, that of CLOSED the
descriptor. Which events come, and when, tells what it is:

    no address, or no route     CONNECT_RETRIED, and no CONNECT_DELAYED before it
    refused                     CONNECT_DELAYED, and CONNECT_RETRIED at once
    no answer                   CONNECT_DELAYED, and nothing for two minutes: longer than `patience_s`

TCP connects to anything: a web server, a proxy with nothing behind it, a port of the engine that is another one. ZMQ says
then that a connection began, perhaps that its handshake failed, and tries again for ever; or it takes what comes for an
ancient protocol, and says nothing more. So a connection has `patience_s` to come through its handshake, and what ends
before, or takes longer, failed. Where nothing else has happened for so long, there is a `trouble` to be told: for a
moment an engine that ends or begins behind a proxy looks the same.
"""

from __future__ import annotations

import zmq

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WRONG_PORT = "is that the port of a ZMQ publisher?"


class Attempts:
    """To connect, of one socket: what is wrong with the newest, "" while nothing is known to be."""

    def __init__(self, endpoint: str, patience_s: float) -> None:
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._resolved = True  # the last one got past the name
        self._began_at_s: float | None = None  # the one that is under way

    def on_event(self, kind: int, now: float) -> str:
        """A monitor's event."""
        if kind == zmq.EVENT_CONNECT_DELAYED:
            self._resolved, self._began_at_s = True, now
        elif kind == zmq.EVENT_CONNECTED:
            self._began_at_s = None
        elif kind == zmq.EVENT_CONNECT_RETRIED:
            trouble = self.trouble(now)
            if not trouble and self._began_at_s is not None:
                trouble = f"{self._endpoint} refuses connections: nothing listens on that port, or a firewall says no"
            elif not self._resolved:
                trouble = (
                    f"no address for the host of {self._endpoint}, no route to it, or no descriptor left"
                )
            self._resolved, self._began_at_s = False, None
            return trouble
        return ""

    def trouble(self, now: float) -> str:
        """Of one that takes too long."""
        if self._began_at_s is None or now - self._began_at_s < self._patience_s:
            return ""
        return f"no answer from {self._endpoint}: a wrong address, or something on the way drops what is sent"

    def close(self) -> None:
        """The socket is closed."""
        self._resolved, self._began_at_s = True, None


class Handshakes:
    """Of one socket that connects, or of one after the other to the same endpoint."""

    def __init__(self, endpoint: str, patience_s: float) -> None:
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._due_at_s: float | None = None  # of the handshake that is under way
        self._detail = ""
        self._failing_since_s: float | None = None
        self.trouble = ""  # the sentence; "" while nothing is known to be wrong

    def on_event(self, kind: int, now: float) -> bool:
        """A monitor's event; True when a handshake failed with it."""
        if kind == zmq.EVENT_CONNECTED:
            self._due_at_s, self._detail = now + self._patience_s, ""
            self._failing_since_s = now if self._failing_since_s is None else self._failing_since_s
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.forget()
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._detail = "it asks for credentials, and there are none"
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._detail = f"what comes is not ZMQ, or not of a publisher: {_WRONG_PORT}"
        elif kind == zmq.EVENT_DISCONNECTED and self._due_at_s is not None:
            self._fail(f"the other side ends the connection: {_WRONG_PORT}", now)
            return True
        return False

    def is_overdue(self, now: float) -> bool:
        """True once for a handshake that has taken too long: it failed."""
        if self._due_at_s is None or now < self._due_at_s:
            return False
        self._fail(f"nothing that ZMQ understands came in {self._patience_s:g} s: {_WRONG_PORT}", now)
        return True

    def forget(self) -> None:
        """Nothing is under way, and nothing is wrong."""
        self._due_at_s, self._detail, self._failing_since_s, self.trouble = None, "", None, ""

    def close(self) -> None:
        """The socket is closed."""
        self._due_at_s = None

    def _fail(self, detail: str, now: float) -> None:
        if self._failing_since_s is not None and now - self._failing_since_s >= self._patience_s:
            self.trouble = f"connected to {self._endpoint}, but the handshake fails: {self._detail or detail}"
        self.close()
