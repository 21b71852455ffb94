"""Every exception that this package raises for a fault of the world; faults of our own are assertions.

IndexerError
├── InvalidInput          a request or an event says something that cannot be; `field` names where
│   ├── UnreadableBatch   bytes that are not a batch of events at all
│   └── UnreadableBody    bytes that are not the JSON or msgpack that they claim to be
├── UnknownPod            no pod of that name is registered
├── LimitExceeded         a bound was met; `bound` names the setting
├── Overloaded            a queue is full; the same call may go through later
├── Unresponsive          another process did not answer, or not in time
├── InvalidSettings       a setting has an unknown name or an impossible value
└── NativeCoreMissing     the compiled core is absent; there is no slow path in its place
"""

from __future__ import annotations


class IndexerError(Exception):
    """Base of all: `str(error)` is a sentence for the person who sent the input."""


class InvalidInput(IndexerError):
    """Input that cannot be accepted; `field` is its place as a dotted path, "" when it is the whole."""

    def __init__(self, detail: str, *, field: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field


class UnreadableBatch(InvalidInput):
    """Bytes that are not a batch of KV events in any known wire form."""


class UnreadableBody(InvalidInput):
    """Bytes that are not the JSON or msgpack that they claim to be, or are nested beyond reason."""


class UnknownPod(IndexerError):
    """No pod of that name is registered."""

    def __init__(self, pod: str) -> None:
        super().__init__(f"no pod named {pod!r} is registered")
        self.pod = pod


class LimitExceeded(IndexerError):
    """A bound was met; `bound` names the setting that sets it."""

    def __init__(self, detail: str, *, bound: str) -> None:
        super().__init__(detail)
        self.bound = bound


class Overloaded(IndexerError):
    """A queue is full: nothing was changed, and the same call may go through later."""


class Unresponsive(IndexerError):
    """Another process did not answer, or not in time."""


class InvalidSettings(IndexerError):
    """A setting has an unknown name or an impossible value."""


class NativeCoreMissing(IndexerError):
    """The compiled core cannot be imported."""
