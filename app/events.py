"""What engines say, and what is said of it, as plain values: the vocabulary between the codec and the service.

Numbers cross this boundary as little-endian buffers, never as Python integers one by one: a 256-block event
carries 4,096 token ids, and building an object for each costs more than indexing them.

    block_hashes   uint64, one a block: the engine's own names (negative ones as two's complement,
                   byte digests by their last 8 bytes read big-endian, which is what vLLM's integer form is)
    token_ids      uint32, block_size a block
    extra_keys     one canonical encoding a block (see app/extra_keys.py), b"" where a block has none

No behaviour here, and no check: whoever builds these values (the codec) has checked them. They go into the log
of a replicated indexer as arrays (app/replication/entries.py), so a field is only ever added at the end, with a
default, and a tag is never given twice.
"""

from __future__ import annotations

import enum

import msgspec


class Tier(enum.IntEnum):
    """Where a block lies, fastest first; the engine's `medium`, normalised."""

    GPU = 0
    CPU = 1
    DISK = 2
    EXTERNAL = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=1):
    """Consecutive blocks that a rank now holds on `tier`, the first of them a child of `parent_block_hash`.

    An empty `token_ids` is a placeholder: blocks that the source has named before, now also on this tier.
    """

    block_hashes: bytes
    parent_block_hash: int | None
    token_ids: bytes
    block_size: int
    lora: str | None = None
    tier: Tier = Tier.GPU
    group: int = 0
    extra_keys: tuple[bytes, ...] | None = None
    metadata: bytes | None = (
        None  # of the last block, an object in either notation as it came: app/service/hints.py
    )

    @property
    def block_count(self) -> int:
        return len(self.block_hashes) // 8


class BlocksHashed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=5):
    """A BlockStored that another replica hashed: `prefix_hashes` (uint64, one a block) stand in for its tokens.

    They are chained to `chain_from`; None says that the event is a root's. `contents` are a SimHash and a content
    hash (both uint64) of each leading block without extra keys, b"" where no fuzzy matches are made. `lora` is the
    context's: None is the bare model, whatever the pod's adapter.
    """

    block_hashes: bytes
    prefix_hashes: bytes
    block_size: int
    chain_from: int | None = None
    contents: bytes = b""
    lora: str | None = None
    tier: Tier = Tier.GPU
    group: int = 0
    metadata: bytes | None = None  # as in BlockStored


class PrefixesStored(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=2):
    """Blocks whose prefix hashes are known, as a dump of another indexer says them; no engine does.

    `block_hashes[i]` is the engine's name for `prefix_hashes[i]` (uint64), and `copies[i]` (uint64, at least 1)
    says how many there are now, however many there were: 1 each when None. `lora` is the context's: None is
    the bare model, whatever the pod's adapter.
    """

    block_hashes: bytes
    prefix_hashes: bytes
    block_size: int
    copies: bytes | None = None
    lora: str | None = None
    tier: Tier = Tier.GPU
    group: int = 0
    hints: bytes | None = None  # a list in either notation as it came: app/service/hints.py
    owners: bytes | None = None  # likewise: app/service/owners.py


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=3):
    """One copy of each of these blocks left `tier`."""

    block_hashes: bytes
    tier: Tier = Tier.GPU
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=4):
    """The engine reset its prefix cache: the GPU tier of this rank is empty; offload tiers are not concerned."""


Event = BlockStored | BlocksHashed | PrefixesStored | BlockRemoved | AllBlocksCleared


class RejectedEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An event of a batch that was skipped.

    `reason` is one of a small fixed set (a metric label); `detail` is the sentence for a person.
    """

    index: int
    reason: str
    detail: str


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one message carries, in order. `positions[i]` is the place of `events[i]` in the message.

    `ignored` counts events that are well-formed but say nothing about reusable prefixes
    (blocks of sliding-window or state-space groups).
    """

    events: tuple[Event, ...]
    positions: tuple[int, ...]
    rejected: tuple[RejectedEvent, ...] = ()
    ignored: int = 0
    ts: float | None = None
    dp_rank: int | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a posted batch beside its events.

    `lora` is the adapter of events that name none, `owner` whom the blocks are stored for. The log has its fields in
    `Posted`, in an order of their own (app/replication/entries.py): a new one is added there too.
    """

    pod: str
    model: str | None = None  # None: that of the pod, which is known
    dp_rank: int = 0
    seq: int | None = None  # among the batches of its rank, from 0
    lora: str | None = None
    digest: int | None = None  # any hash of what was sent that is the same in every process
    incomplete: bool = False  # its sender says that the picture is not whole
    owner: str | None = None
