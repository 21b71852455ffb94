"""Hints beside blocks: what a pod knows of a block besides its tokens, told to the indexer and brought back.

After LMCache's V1 connector bridge. A request may say whose agent it is, at which step of its workflow,
which group of layers shares its cache (CLA), and where its prefix may be found again (offset hints). The
save hook is called for every layer of a block; when the last layer is saved, the metadata is reported
once. It travels as `metadata` of the block's event and returns as `hints` of a match. Only tensors before
rotary encoding are shared, so `pre_rope` is always true. Without a backend every hook does nothing; no
hook ever raises for want of one.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from app.simulator.block_names import packed


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`pending_saves_max` bounds blocks with layers still to come; the oldest are given up first."""

    layers: int = 1
    anchor_tokens: int = 256  # leading tokens that name a prefix
    offset_hints: bool = True
    cla_metadata: bool = True
    pending_saves_max: int = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMetadata:
    """Beside a block, and as the hint of a prefix before it has blocks."""

    anchor_hash: int
    agent_id: str | None
    token_length: int
    cla_group: int | None = None
    workflow_step: int | None = None
    offset_hint: tuple[float, ...] | None = None

    def as_fields(self) -> dict[str, Any]:
        """For an event; what is not known is left out."""
        fields = {**dataclasses.asdict(self), "pre_rope": True}
        return {name: value for name, value in fields.items() if value is not None}


class HintBackend(Protocol):
    """Where metadata goes and hints come from."""

    def report(self, block: int, metadata: BlockMetadata) -> None: ...

    def hints(self, anchor_hash: int) -> Sequence[dict[str, Any]] | None: ...

    def prefetch(self, block: int) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorStats:
    """`switches` counts how often the agent that saves has changed."""

    active: bool
    switches: int
    pending_saves: int


class Connector:
    """The hooks of one pod."""

    def __init__(self, settings: ConnectorSettings | None = None, backend: HintBackend | None = None) -> None:
        self.settings = settings or ConnectorSettings()
        self._backend = backend
        self._pending: collections.OrderedDict[int, set[int]] = collections.OrderedDict()
        self._agent: str | None = None
        self._switches = 0

    def build_prefix_hint(
        self,
        token_ids: Sequence[int],
        *,
        agent_id: str | None = None,
        cla_group: int | None = None,
        workflow_step: int | None = None,
        offset_hint: Sequence[float] | None = None,
    ) -> BlockMetadata:
        """Two prompts with the same leading `anchor_tokens` have the same anchor."""
        anchor = hashlib.blake2b(packed(token_ids[: self.settings.anchor_tokens]).tobytes(), digest_size=8)
        return BlockMetadata(
            anchor_hash=int.from_bytes(anchor.digest(), "big"),
            agent_id=agent_id,
            token_length=len(token_ids),
            cla_group=cla_group if self.settings.cla_metadata else None,
            workflow_step=workflow_step,
            offset_hint=tuple(offset_hint)
            if offset_hint is not None and self.settings.offset_hints
            else None,
        )

    def on_save_kv_layer(self, layer: int, block: int, metadata: BlockMetadata) -> None:
        """One layer of a block is saved; with the last of them the block is reported."""
        if self._backend is None:
            return
        if metadata.agent_id != self._agent:
            self._switches += self._agent is not None
            self._agent = metadata.agent_id
        saved = self._pending.setdefault(block, set())
        saved.add(layer)
        if len(saved) >= self.settings.layers:
            del self._pending[block]
            self._backend.report(block, metadata)
        elif len(self._pending) > self.settings.pending_saves_max:
            self._pending.popitem(last=False)

    def on_load_kv_layer(self, layer: int, hint: BlockMetadata) -> Sequence[dict[str, Any]] | None:
        """What is known of the prefix; asked before its first layer is loaded, None for the others."""
        if self._backend is None or layer != 0:
            return None
        return self._backend.hints(hint.anchor_hash)

    def prefetch_blocks(self, blocks: Iterable[tuple[float, int]]) -> list[int]:
        """(priority, block) pairs, highest priority first; returns those that were there to be fetched."""
        if self._backend is None:
            return []
        wanted = sorted(blocks, key=lambda pair: -pair[0])
        return [block for _, block in wanted if self._backend.prefetch(block)]

    def stats(self) -> ConnectorStats:
        return ConnectorStats(self._backend is not None, self._switches, len(self._pending))


class EventHints:
    """The backend of a pod: metadata rides on the event of its block, hints are those that a router passed on.

    Both are bounded; the oldest go first. `prefetch` brings a block closer, False when it is not there.
    """

    def __init__(
        self, prefetch: Callable[[int], bool], *, reported_max: int = 65_536, learned_max: int = 4_096
    ) -> None:
        self._prefetch = prefetch
        self._reported: collections.OrderedDict[int, BlockMetadata] = collections.OrderedDict()
        self._learned: collections.OrderedDict[int, list[dict[str, Any]]] = collections.OrderedDict()
        self._reported_max = reported_max
        self._learned_max = learned_max

    def report(self, block: int, metadata: BlockMetadata) -> None:
        self._reported[block] = metadata
        if len(self._reported) > self._reported_max:
            self._reported.popitem(last=False)

    def take(self, blocks: Iterable[int]) -> BlockMetadata | None:
        """The metadata for an event of these blocks: that of its last block."""
        taken: BlockMetadata | None = None
        for block in blocks:
            taken = self._reported.pop(block, taken)
        return taken

    def learn(self, anchor_hash: int, hints: Sequence[dict[str, Any]]) -> None:
        self._learned[anchor_hash] = list(hints)
        self._learned.move_to_end(anchor_hash)
        if len(self._learned) > self._learned_max:
            self._learned.popitem(last=False)

    def hints(self, anchor_hash: int) -> Sequence[dict[str, Any]] | None:
        return self._learned.get(anchor_hash)

    def prefetch(self, block: int) -> bool:
        return self._prefetch(block)
