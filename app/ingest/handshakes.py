"""What the monitor of a connecting socket says of its handshakes, and what is wrong where they fail.

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
