"""What stands in the log: groups of entries, as msgpack arrays.

A group is what one replica appended at once to one partition: its format's version, the replica, a number that
ascends by one from group to group of that replica in that partition, the entries in order, and the number of the
group that must have come before it. An answer to an append can be lost, so a group can come twice; by its number
the second is known. Redis can lose what it has taken, so a group can come before one that has to be sent again.

Everything that changes the picture is an entry, and nothing else is. An entry says what was accepted, not what came
of it: duplicates, gaps and restarts are decided when it is applied, which every replica does at the same place of the
log and so with the same result. What a reader finds of a later version it does not guess at: it stops there
and says so (`UnknownEntry`).

Fields are only ever added at the end, with a default; tags are never given twice.
"""

from __future__ import annotations

import msgspec

from app import hashing
from app.errors import UNDECODABLE, IndexerError
from app.events import BlockRemoved, EventBatch, Tier
from app.pods import PodSpec, SourceState

VERSION = 1


class UnknownEntry(IndexerError):
    """A group of the log cannot be understood: a later version of the indexer wrote it, or something else did."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One change. `pod` decides on its partition."""


class Posted(Entry, frozen=True, kw_only=True, array_like=True, tag=1):
    """A batch that came by HTTP: the fields of its Envelope, and its events."""

    pod: str
    model: str | None
    dp_rank: int
    seq: int | None
    lora: str | None
    digest: int | None
    incomplete: bool
    batch: EventBatch
    owner: str | None = None


class Followed(Entry, frozen=True, kw_only=True, array_like=True, tag=2):
    """A batch of a followed stream, from the replica that holds the lease of the pod."""

    pod: str
    dp_rank: int
    seq: int | None
    digest: int | None
    epoch: int
    batch: EventBatch


class SourceReset(Entry, frozen=True, kw_only=True, array_like=True, tag=3):
    """A followed source holds nothing: its engine restarted, or its deadline is past."""

    pod: str
    dp_rank: int
    restarted: bool
    epoch: int


class SourceReported(Entry, frozen=True, kw_only=True, array_like=True, tag=4):
    """What is known of a followed stream: the arguments of IndexerService.set_source_state."""

    pod: str
    dp_rank: int
    state: SourceState
    gaps: int
    replays: int
    cause: str
    epoch: int


class SourceSilent(Entry, frozen=True, kw_only=True, array_like=True, tag=5):
    """A source that posts has said nothing for too long since the group `heard`. Void when it spoke in between."""

    pod: str
    dp_rank: int
    heard: str


class PodRegistered(Entry, frozen=True, kw_only=True, array_like=True, tag=6):
    spec: PodSpec

    @property
    def pod(self) -> str:
        return self.spec.name


class PodDropped(Entry, frozen=True, kw_only=True, array_like=True, tag=7):
    pod: str


class BlocksForgotten(Entry, frozen=True, kw_only=True, array_like=True, tag=8):
    """The arguments of IndexerService.remove_blocks."""

    pod: str
    model: str | None
    lora: str | None
    dp_rank: int | None
    tier: Tier | None


class RemovedEverywhere(Entry, frozen=True, kw_only=True, array_like=True, tag=9):
    """The arguments of IndexerService.remove_everywhere; in every partition, each for the pods of its own."""

    model: str
    lora: str | None
    events: tuple[BlockRemoved, ...]


class LeaseTaken(Entry, frozen=True, kw_only=True, array_like=True, tag=10):
    """From here on what an older epoch says of the pod's streams does not count."""

    pod: str
    epoch: int


class OwnerCleared(Entry, frozen=True, kw_only=True, array_like=True, tag=11):
    """The argument of Owners.clear. In one partition: a batch of another one that comes at the same time may be
    applied before it by one replica and behind it by another, and its blocks have that owner only there."""

    owner: str


AnyEntry = (
    Posted
    | Followed
    | SourceReset
    | SourceReported
    | SourceSilent
    | PodRegistered
    | PodDropped
    | BlocksForgotten
    | RemovedEverywhere
    | LeaseTaken
    | OwnerCleared
)


class Group(msgspec.Struct, frozen=True, array_like=True):
    replica: str
    number: int
    entries: tuple[AnyEntry, ...]
    follows: int = 0  # not before this number; 0: all that was before had been applied by its replica


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """Read before the rest: what is in a later version may not be a Group at all."""

    version: int
    group: msgspec.Raw


_heads = msgspec.msgpack.Decoder(_Head)
_groups = msgspec.msgpack.Decoder(Group)
_encoder = msgspec.msgpack.Encoder()


def partition_of(pod: str, partitions: int) -> int:
    """All that is said of a pod stands in one partition, in order."""
    return hashing.digest(pod.encode(errors="surrogatepass")) % partitions


def encode_entry(entry: AnyEntry) -> bytes:
    return _encoder.encode(entry)


def encode_group(replica: str, number: int, entries: list[bytes], *, follows: int) -> bytes:
    """`entries` are encoded already."""
    raw = tuple(msgspec.Raw(entry) for entry in entries)
    group = _encoder.encode((replica, number, raw, follows))
    return _encoder.encode((VERSION, msgspec.Raw(group)))


def decode_group(data: bytes) -> Group:
    """Raises UnknownEntry."""
    try:
        head = _heads.decode(data)
        if head.version != VERSION:
            raise UnknownEntry(f"the log has groups of version {head.version}; this indexer reads {VERSION}")
        return _groups.decode(head.group)
    except UNDECODABLE as error:
        raise UnknownEntry(f"the log has a group that cannot be read: {error}") from error
