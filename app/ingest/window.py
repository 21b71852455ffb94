"""What a sequence tracker remembers: digests of the batches it saw, and live batches that must wait for a
replay.

Digests (app/hashing.py) tell a frame that came twice from another batch with the same number, which is what a
restarted engine sends. A ring of plain arrays costs 16 bytes a remembered batch.
"""

from __future__ import annotations

from array import array

from app.ingest.actions import Deliver

_NO_SEQ = 2**64 - 1  # ends a replay, so no batch has it


class DigestRing:
    """Digest by sequence number for about the last `size` numbers; newer ones take the older ones' places."""

    def __init__(self, size: int) -> None:
        assert size > 0, "a ring has at least one place"
        self._size = size
        self.clear()

    def clear(self) -> None:
        self._seqs = array("Q", [_NO_SEQ]) * self._size
        self._digests = array("Q", [0]) * self._size

    def get(self, seq: int) -> int | None:
        place = seq % self._size
        return self._digests[place] if self._seqs[place] == seq else None

    def put(self, seq: int, digest: int) -> None:
        place = seq % self._size
        there = self._seqs[place]
        if there == _NO_SEQ or there <= seq:
            self._seqs[place] = seq
            self._digests[place] = digest


class HoldBudget:
    """Bytes that all sources together may hold back; `overflows` counts batches that found no room."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.overflows = 0

    def take(self, size_bytes: int) -> bool:
        if self.used_bytes + size_bytes > self.bytes_max:
            return False
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "more bytes were given back than taken"


class HeldBatches:
    """Batches of one source by sequence number, bounded in number here and in bytes by the shared budget.

    A batch that finds no room is dropped: to its tracker it is one more gap, and the replay brings it.
    """

    def __init__(self, batches_max: int, budget: HoldBudget) -> None:
        self._batches_max = batches_max
        self._budget = budget
        self._batches: dict[int, Deliver] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, seq: int) -> Deliver | None:
        return self._batches.get(seq)

    def put(self, batch: Deliver) -> None:
        assert batch.seq not in self._batches, "a batch is held once"
        if len(self._batches) < self._batches_max and self._budget.take(len(batch.payload)):
            self._batches[batch.seq] = batch
        else:
            self._budget.overflows += 1

    def pop(self, seq: int) -> Deliver | None:
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._budget.give_back(len(batch.payload))
        return batch

    def lowest(self) -> int:
        return min(self._batches)

    def take_all(self) -> list[Deliver]:
        held = [batch for _, batch in sorted(self._batches.items())]
        self.clear()
        return held

    def clear(self) -> None:
        for batch in self._batches.values():
            self._budget.give_back(len(batch.payload))
        self._batches.clear()
