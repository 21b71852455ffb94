"""Every exception that this package raises for a fault of the world; faults of our own are assertions.

IndexerError
├── InvalidInput          a request or an event says something that cannot be; `field` names where
│   ├── UnreadableBatch   bytes that are not a batch of events at all
│   ├── BatchRejected     a batch of events without one that can be used; `rejected` says why, event by event
│   └── UnreadableBody    bytes that are not the JSON or msgpack that they claim to be
├── UnknownPod            no pod of that name is registered
├── UnknownOwner          nothing was stored for an owner of that name
├── LimitExceeded         a bound was met; `bound` names the setting
│   └── BodyTooLarge      a request body is longer than we read
├── Overloaded            a queue is full; the same call may go through later
│   └── NoRoom            the bodies of other requests have taken all there is
├── LogAway               the log that replicas share cannot be reached, or not in time
├── TokenizerUnavailable  a tokenizer cannot be had now: the hub or its process does not answer
├── SwitchedOff           a setting leaves out what is asked for; `setting` names it
├── NoCandidate           no pod is there to choose from
├── Unresponsive          another process did not answer, or not in time
├── Refused               an indexer refused a request of ours; `status` is its answer
├── SnapshotRefused       a file is no snapshot, or not as it was written
├── StoreFailed           snapshots cannot be written or looked for now
├── InvalidSettings       a setting has an unknown name or an impossible value
├── CannotListen          the address to listen on cannot be had
└── NativeCoreMissing     the compiled core is absent; there is no slow path in its place
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from app.events import RejectedEvent

# What msgspec raises for bytes that are not what was asked for: text that is not UTF-8 and nesting are no DecodeError.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class IndexerError(Exception):
    """Base of all: `str(error)` is a sentence for the person who sent the input."""


class InvalidInput(IndexerError):
    """Input that cannot be accepted; `field` is its place as a dotted path, "" when it is the whole.

    `faults` are (field, detail) of every fault where there are several to name.
    """

    def __init__(self, detail: str, *, field: str = "", faults: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.faults = tuple(faults) or ((field, detail),)


class UnreadableBatch(InvalidInput):
    """Bytes that are not a batch of KV events in any known wire form."""


class BatchRejected(InvalidInput):
    """A batch of events of which none can be used: nothing was changed."""

    def __init__(self, rejected: tuple[RejectedEvent, ...]) -> None:
        places = "; ".join(f"event {event.index}: {event.detail}" for event in rejected[:3])
        more = f"; and {len(rejected) - 3} more" if len(rejected) > 3 else ""
        super().__init__(f"no event of the batch can be used: {places}{more}", field="events")
        self.rejected = rejected


class UnreadableBody(InvalidInput):
    """Bytes that are not the JSON or msgpack that they claim to be, or are nested beyond reason."""


class UnknownPod(IndexerError):
    """No pod of that name is registered."""

    def __init__(self, pod: str) -> None:
        super().__init__(f"no pod named {pod!r} is registered")
        self.pod = pod


class UnknownOwner(IndexerError):
    """Nothing was stored for an owner of that name, nor for a role of it."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"no owner named {owner!r} is known")
        self.owner = owner


class LimitExceeded(IndexerError):
    """A bound was met; `bound` names the setting that sets it."""

    def __init__(self, detail: str, *, bound: str) -> None:
        super().__init__(detail)
        self.bound = bound


class BodyTooLarge(LimitExceeded):
    """A request body is longer than we read; what came of it is forgotten."""


class Overloaded(IndexerError):
    """A queue is full: nothing was changed, and the same call may go through later."""


class NoRoom(Overloaded):
    """The bodies of other requests have taken all there is, `bound`; the rest of this one is not read."""

    def __init__(self, detail: str, *, bound: str) -> None:
        super().__init__(detail)
        self.bound = bound


class LogAway(IndexerError):
    """The log that replicas share does not answer; the same call may go through later."""


class TokenizerUnavailable(IndexerError):
    """A tokenizer cannot be had now; the same call may go through later."""


class SwitchedOff(IndexerError):
    """What is asked for is left out by a setting."""

    def __init__(self, detail: str, *, setting: str) -> None:
        super().__init__(f"{detail}: KVINDEXER_{setting.upper()} is false")
        self.setting = setting


class NoCandidate(IndexerError):
    """No pod of the model is registered, or none of those that the request names can serve it."""


class Unresponsive(IndexerError):
    """Another process did not answer, or not in time."""


class Refused(IndexerError):
    """An indexer answered that the request cannot be; the same request will not go through later."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the indexer refused the request with {status}: {detail}")
        self.status = status
        self.detail = detail


class SnapshotRefused(IndexerError):
    """A file is not a snapshot, is of another version, or is damaged: nothing of it was used."""


class StoreFailed(IndexerError):
    """The place where snapshots lie does not answer, is full, or is not ours; the ones that are there stay."""


class InvalidSettings(IndexerError):
    """A setting has an unknown name or an impossible value."""


class CannotListen(IndexerError):
    """The address to listen on is taken, not ours, or none."""


class NativeCoreMissing(IndexerError):
    """The compiled core cannot be imported."""

    def __init__(self) -> None:
        super().__init__(
            "the native core is not built: run `pip install .` (or `make serve`) in the project's folder; it needs a "
            "C++20 compiler. Where that was done, call `kvindexer`: `python -m app` there finds the sources alone"
        )
