"""What a sequence tracker tells its surroundings to do, in order."""

from __future__ import annotations

import msgspec

from app.pods import SourceState


class Deliver(msgspec.Struct, frozen=True):
    """The next batch of the stream, with its payload's digest: each number at most once between two resets, ascending."""

    seq: int
    payload: bytes
    digest: int


class Reset(msgspec.Struct, frozen=True):
    """Everything this source was known to hold is gone, or can no longer be vouched for."""

    restarted: bool
    cause: str


class Report(msgspec.Struct, frozen=True):
    """DEGRADED: batches were lost for good at this place. Other states are about the stream from here on."""

    state: SourceState
    cause: str
    gaps: int = 0
    replays: int = 0


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask for every batch from `start_seq` on, over a new socket, so that no older reply counts."""

    start_seq: int


class StopReplay(msgspec.Struct, frozen=True):
    """No reply to the last request is wanted any more."""


Action = Deliver | Reset | Report | RequestReplay | StopReplay
