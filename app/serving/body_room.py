"""Room for the bodies of all requests together, while they come and until they are answered.

`body_bytes_max` bounds one body, and with thousands of connections that bounds nothing: whoever sends the beginnings of
many large ones would have all of them kept. So every byte that is kept takes room here, on the way that waits for a
body where the server reads it (app/serving/short_connections.py) as on the way of the routes (app/api/body_bound.py).

A body that is alone is always let in, so a bound below `body_bytes_max` refuses nobody for good. Not counted is what
the server has read and nobody has asked for yet: 64 KiB a connection at the most.
"""

from __future__ import annotations

from collections.abc import Mapping


class BodyRoom:
    """Takes no lock: all requests are of one thread."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._bytes = 0
        self._refused = 0

    def take(self, more: int, *, held: int) -> bool:
        """Room for `more` bytes of a body that has `held` bytes of it; False: there is none, and nothing was taken."""
        if self._bytes + more > self.bytes_max and self._bytes > held:
            return False
        self._bytes += more
        return True

    def hold(self, held: int) -> None:
        """What was let in and is kept on, by another than before."""
        self._bytes += held

    def give_back(self, held: int) -> None:
        self._bytes -= held
        assert self._bytes >= 0, "more was given back than was taken"

    def refuse(self) -> str:
        """Why, for the one who is told."""
        self._refused += 1
        return (
            f"the bodies of all requests together are longer than bodies_bytes_max = {self.bytes_max} bytes"
        )

    def gauges(self) -> Mapping[str, int]:
        return {"bytes": self._bytes}

    def counters(self) -> Mapping[str, int]:
        return {"refused": self._refused}
