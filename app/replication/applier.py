"""Applies what is read from the log, and keeps where in it this replica is.

Every replica applies the same entries in the same order, partition by partition, and nothing else changes its picture:
so what is decided here must follow from the log alone. No clock, no setting that may differ, no local figure decides.
Left out, and counted, are

    groups that came before   an append whose answer was lost is sent again; (replica, number) tells
    groups that came early    Redis lost the one before, which nobody has applied; their replica sends both again
    fenced entries            of a followed stream, from a replica whose lease of the pod has passed to another

A group is applied at one go, so a position is always between two groups. What `LogState` holds is all that a
replica needs to go on from a snapshot: it belongs into the snapshot, taken in the same instant.

Bounds: the numbers of the last `REPLICAS_MAX` replicas of each partition are kept; of pods, what is registered.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from app.errors import IndexerError
from app.events import Envelope
from app.pods import Pod, PodSpec, SourceState
from app.replication.entries import (
    AnyEntry,
    BlocksForgotten,
    Followed,
    Group,
    LeaseTaken,
    OwnerCleared,
    PodDropped,
    PodRegistered,
    Posted,
    RemovedEverywhere,
    SourceReported,
    SourceReset,
    SourceSilent,
    decode_group,
    partition_of,
)
from app.replication.redis_log import BEGINNING
from app.service import IndexerService
from app.service.saved_state import SavedState

logger = logging.getLogger(__name__)

REPLICAS_MAX = 1_024
NOT_HELD = "no replica follows it yet"


class LogState(msgspec.Struct):
    """Where a replica is in the log, and what it must remember of what came before. Part of a snapshot."""

    log: str  # the log's own number
    positions: list[str]  # by partition: of the last group applied
    numbers: list[
        dict[str, int]
    ]  # by partition: replica -> number of its last group; the latest replica last
    epochs: dict[str, int] = {}  # pod that is registered -> the newest lease of its streams
    heard: dict[str, list[str]] = {}  # pod -> by rank, "" for none: position of the last batch posted
    floors: dict[int, int] = {}  # by partition: the least that a lease of any other pod must have


def beginning(log: str, partitions: int) -> LogState:
    return LogState(log, [BEGINNING] * partitions, [{} for _ in range(partitions)])


class Settle(Protocol):
    """Outbox.settle."""

    def __call__(self, partition: int, number: int, outcomes: Sequence[object]) -> None: ...


class Fenced(IndexerError):
    """The lease of the pod has passed to another replica."""


class Applier:
    """All calls on the service's thread."""

    def __init__(self, service: IndexerService, replica: str, partitions: int, *, settle: Settle) -> None:
        self._service = service
        self._replica = replica
        self._partitions = partitions
        self._settle = settle
        self.state = beginning("", partitions)
        self.counts = {
            "applied_groups": 0,
            "applied_entries": 0,
            "repeated_groups": 0,
            "early_groups": 0,
            "fenced_entries": 0,
            "refused_entries": 0,
            "faults": 0,
        }

    def place(self, saved: SavedState, state: LogState | None = None) -> SavedState:
        """A snapshot of now, with where the log has been applied to."""
        state = state or self.state
        positions = dict(enumerate(state.positions))
        return msgspec.structs.replace(
            saved, log=state.log, positions=positions, log_memory=msgspec.msgpack.encode(state)
        )

    def recall(self, saved: SavedState) -> None:
        """The picture is that of a snapshot now."""
        self.state = msgspec.msgpack.decode(saved.log_memory, type=LogState)

    def apply(self, partition: int, position: str, data: bytes) -> None:
        """Raises UnknownEntry, with nothing changed."""
        group = decode_group(data)
        if group.follows > self.state.numbers[partition].get(group.replica, 0):
            self.counts["early_groups"] += 1
            logger.error(
                "partition %d: Redis lost what %s had appended; it comes again", partition, group.replica
            )
        elif self._is_new(partition, group):
            outcomes = [self._outcome(partition, position, entry) for entry in group.entries]
            self.counts["applied_groups"] += 1
            if group.replica == self._replica:
                self._settle(partition, group.number, outcomes)
        else:
            self.counts["repeated_groups"] += 1
        self.state.positions[partition] = position

    def _is_new(self, partition: int, group: Group) -> bool:
        numbers = self.state.numbers[partition]
        last = numbers.pop(group.replica, 0)
        numbers[group.replica] = max(last, group.number)
        if len(numbers) > REPLICAS_MAX:
            del numbers[next(iter(numbers))]
        return group.number > last

    def _outcome(self, partition: int, position: str, entry: AnyEntry) -> object:
        try:
            outcome = self._apply(partition, position, entry)
        except Fenced as error:
            self.counts["fenced_entries"] += 1
            return error
        except IndexerError as error:
            self.counts["refused_entries"] += 1
            return error
        except Exception as error:
            # The edge of one entry's work: its fault must not stop the log, here as little as anywhere else.
            self.counts["faults"] += 1
            logger.exception("an entry of partition %d at %s was not applied", partition, position)
            return error
        self.counts["applied_entries"] += 1
        return outcome

    def _apply(self, partition: int, position: str, entry: AnyEntry) -> object:
        if isinstance(entry, Posted):
            return self._post(position, entry)
        if isinstance(entry, Followed | SourceReset | SourceReported):
            return self._follow(partition, entry)
        return self._control(partition, entry)

    def _post(self, position: str, entry: Posted) -> object:
        envelope = Envelope(
            pod=entry.pod,
            model=entry.model,
            dp_rank=entry.dp_rank,
            seq=entry.seq,
            lora=entry.lora,
            digest=entry.digest,
            incomplete=entry.incomplete,
            owner=entry.owner if self._service.owners.has_room_for(entry.owner) else None,
        )
        result = self._service.post(envelope, entry.batch)
        if not result.duplicate:
            heard = self.state.heard.setdefault(entry.pod, [])
            heard.extend([""] * (entry.dp_rank + 1 - len(heard)))
            heard[entry.dp_rank] = position
        return result

    def _follow(self, partition: int, entry: Followed | SourceReset | SourceReported) -> object:
        newest = self._newest(partition, entry.pod)
        if entry.epoch < newest:
            raise Fenced(f"the lease {entry.epoch} of pod {entry.pod!r} is over: {newest} was taken")
        service = self._service
        if isinstance(entry, Followed):
            return service.apply(entry.pod, entry.dp_rank, entry.batch, seq=entry.seq, digest=entry.digest)
        if isinstance(entry, SourceReset):
            service.reset_source(entry.pod, entry.dp_rank, restarted=entry.restarted)
        else:
            service.set_source_state(
                entry.pod,
                entry.dp_rank,
                entry.state,
                gaps=entry.gaps,
                replays=entry.replays,
                cause=entry.cause,
            )
        return None

    def _control(
        self,
        partition: int,
        entry: SourceSilent
        | PodRegistered
        | PodDropped
        | BlocksForgotten
        | RemovedEverywhere
        | LeaseTaken
        | OwnerCleared,
    ) -> object:
        service = self._service
        if isinstance(entry, PodRegistered):
            return self._register(partition, entry.spec)
        if isinstance(entry, PodDropped):
            service.drop_pod(entry.pod)
            self._forget(partition, entry.pod)
            return None
        if isinstance(entry, BlocksForgotten):
            return service.remove_blocks(
                entry.pod, model=entry.model, lora=entry.lora, dp_rank=entry.dp_rank, tier=entry.tier
            )
        if isinstance(entry, RemovedEverywhere):
            concerns = functools.partial(self._is_here, partition)
            return sum(
                service.remove_everywhere(entry.model, entry.lora, event, concerns=concerns)
                for event in entry.events
            )
        if isinstance(entry, OwnerCleared):
            return service.owners.clear(entry.owner)
        if isinstance(entry, LeaseTaken):
            newest = self._newest(partition, entry.pod)
            if entry.epoch < newest:
                raise Fenced(f"the lease {entry.epoch} of pod {entry.pod!r} is over: {newest} was taken")
            if entry.pod in service.pods:
                self.state.epochs[entry.pod] = entry.epoch
            else:
                self.state.floors[partition] = entry.epoch
            return None
        if self.heard(entry.pod, entry.dp_rank) == entry.heard:
            service.silence(entry.pod, entry.dp_rank)
        return None

    def _register(self, partition: int, spec: PodSpec) -> Pod:
        """A pod that starts empty is followed by nobody yet, and what is on its way of its stream before is of a
        picture that is gone."""
        before = self._service.pods.get(spec.name)
        pod = self._service.register(spec)
        if pod is not before:
            if before is not None:
                self._forget(partition, spec.name)
            if spec.zmq_endpoint is not None:
                for dp_rank in range(spec.dp_size):
                    self._service.set_source_state(spec.name, dp_rank, SourceState.DOWN, cause=NOT_HELD)
        return pod

    def _forget(self, partition: int, pod: str) -> None:
        """Its holder needs a newer lease. One number a partition says so for all pods that are gone, so names that come
        and go leave nothing behind: leases are numbered together there, and who asks for another one gets the highest."""
        self.state.heard.pop(pod, None)
        over = self.state.epochs.pop(pod, None)
        if over is not None:
            self.state.floors[partition] = max(over + 1, self.state.floors.get(partition, 0))

    def _newest(self, partition: int, pod: str) -> int:
        return self.state.epochs.get(pod, self.state.floors.get(partition, 0))

    def set_away(self, partition: int, cause: str) -> None:
        """The partition is not read now, and why; "" when it is again."""
        self._service.set_away(cause, concerns=functools.partial(self._is_here, partition))

    def heard(self, pod: str, dp_rank: int) -> str:
        """The position of the last batch that was posted for this rank; "" where there is none."""
        heard = self.state.heard.get(pod, [])
        return heard[dp_rank] if dp_rank < len(heard) else ""

    def _is_here(self, partition: int, pod: str) -> bool:
        return partition_of(pod, self._partitions) == partition
