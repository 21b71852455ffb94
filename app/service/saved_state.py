"""What a snapshot says beside the frames of the index: pods, sources, contexts, slots, owners; and how they come back.

A restored source is trusted as far as can be shown, and no further.

    a followed stream       begins where it was: the tracker gets the number and the digest of its last batch,
                            so the replay shows whether it is still the same engine (see app/ingest/sequence.py);
                            without such a position it holds nothing
    posts with numbers      the next number shows whether any was missed
    posts without numbers   nobody can tell what came in between: degraded
    waiting orphans         are not in a snapshot: degraded

With a log, all that came since is in the log, and read behind the snapshot: nothing but orphans is in doubt, and what
was known of a stream is known again.

A pod of the configuration comes back only while it is configured, and with its present endpoints and model;
one that announced itself, or that a PUT made, comes back as it was. What a source was counted (gaps, batches)
begins anew, as for every counter of a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable

import msgspec

from app import hashing
from app.errors import IndexerError, LimitExceeded
from app.events import Tier
from app.index.interface import Index
from app.index.prefix_index import TICK_MS, SlotInfo
from app.pods import Pod, PodSpec, Source, SourceState
from app.service.owners import Owners
from app.service.registry import Registry

logger = logging.getLogger(__name__)


class SavedContext(msgspec.Struct, frozen=True):
    id: int
    model: str
    lora: str | None
    block_size: int
    prefixes: int = 0  # entries, about


class SavedSource(msgspec.Struct, frozen=True):
    """`id` is the source's number in the index that was saved."""

    id: int
    dp_rank: int
    last_seq: int | None
    last_digest: int | None
    first_digest: int | None
    block_size: int | None
    chunk_sizes: dict[int, int]
    offloads: bool
    loss_cause: str | None  # why it was incomplete; None when it was not
    heard_s_ago: float | None
    stream: str = SourceState.LIVE.value
    stream_cause: str = ""
    newest_ts: float | None = None
    cleared_loss: str = ""


class SavedPod(msgspec.Struct, frozen=True):
    spec: PodSpec
    configured: bool
    sources: list[SavedSource]


class SavedState(msgspec.Struct, frozen=True):
    """All of one instant; `slots` are (context, slot, source, tier, group, blocks, digest)."""

    at_s: float  # Unix time
    tick: int
    digest: str
    pods: list[SavedPod]
    contexts: list[SavedContext]
    slots: list[tuple[int, int, int, int, int, int, int]]
    names: int = 0  # of prefixes by engine hashes, about
    owners: list[tuple[int, str]] = []  # (number in the claims, name)
    shingle: int | None = None  # of the SimHashes of the contents among the frames; None: there are none
    positions: dict[int, str] = {}  # partition of the log -> where it had been read to; {} without a log
    log: str = ""  # the number of that log
    log_memory: bytes = b""  # what its reader must remember, as app/replication/applier.py has it


@dataclasses.dataclass(frozen=True, slots=True)
class Adoption:
    """What the frames need to find their place: slot of the snapshot -> (context, source) of this index, and the
    numbers of owners there and here."""

    places: list[tuple[SlotInfo, int, int]]
    owners: list[tuple[int, int]]
    entries: dict[int, int]  # by context, about
    other_names: int  # beyond one each, about
    saved_at: int  # ticks of the snapshot
    elapsed: int  # ticks since
    now: int
    specs: tuple[PodSpec, ...]  # registered because of the snapshot
    left_out: int  # pods


def index_digest(registry: Registry, index: Index) -> str:
    """64 bits as hexadecimal: of who holds which prefix on which tier, in whatever order it came.

    Equal for equal pictures in any process, engine hashes and copies aside. The sum modulo 2^64 of
    XXH64(msgpack([pod, rank, model, lora, block size, tier, group, digest of the slot])).
    """
    contexts = {context.id: context for context in index.contexts()}
    total = 0
    for slot in index.slots():
        source = registry.by_index_id(slot.source)
        if not slot.blocks or source is None:
            continue
        context = contexts[slot.context]
        total += hashing.digest(
            msgspec.msgpack.encode(
                (
                    source.pod,
                    source.dp_rank,
                    context.model,
                    context.lora,
                    context.block_size,
                    slot.tier,
                    slot.group,
                    slot.digest,
                )
            )
        )
    return f"{total % 2**64:016x}"


def describe(
    registry: Registry,
    index: Index,
    owners: Owners,
    *,
    configured: frozenset[str],
    at_s: float,
    now: int,
    clock: Callable[[], float],
) -> SavedState:
    """`configured` are the names of the pods of the configuration."""
    pods = [
        SavedPod(
            pod.spec,
            pod.spec.name in configured,
            [_describe_source(source, index, clock()) for source in pod.sources.values()],
        )
        for pod in registry.pods.values()
    ]
    contexts = [SavedContext(c.id, c.model, c.lora, c.block_size, c.prefixes) for c in index.contexts()]
    slots = [(s.context, s.slot, s.source, s.tier, s.group, s.blocks, s.digest) for s in index.slots()]
    names = index.stats().engine_keys
    digest = index_digest(registry, index)
    return SavedState(at_s, now, digest, pods, contexts, slots, names, owners.numbered())


def _describe_source(source: Source, index: Index, now_s: float) -> SavedSource:
    cause = source.loss_cause or "batches were lost" if source.incomplete else None
    if cause is None and index.orphan_blocks(source.index_id):
        cause = "blocks that waited for their parent are not in the snapshot"
    return SavedSource(
        id=source.index_id,
        dp_rank=source.dp_rank,
        last_seq=source.last_seq,
        last_digest=source.last_digest,
        first_digest=source.first_digest,
        block_size=source.block_size,
        chunk_sizes={int(tier): size for tier, size in source.chunk_sizes.items()},
        offloads=source.offloads,
        loss_cause=cause,
        heard_s_ago=None if source.last_event_at_s is None else now_s - source.last_event_at_s,
        stream=source.stream.value,
        stream_cause=source.stream_cause,
        newest_ts=source.newest_ts,
        cleared_loss=source.cleared_loss,
    )


def adopt(
    registry: Registry,
    index: Index,
    owners: Owners,
    state: SavedState,
    *,
    configured: frozenset[str],
    at_s: float,
    now: int,
) -> Adoption:
    """Registers pods, sources, contexts and owners of a snapshot. A clock that went back counts as no time."""
    elapsed_s = max(0.0, at_s - state.at_s)
    specs: list[PodSpec] = []
    adopted: list[tuple[SavedSource, Source]] = []
    left_out = 0
    for saved in state.pods:
        is_new = saved.spec.name not in registry.pods
        pod = _pod(registry, saved, configured)
        if pod is None:
            left_out += 1
            continue
        if is_new:
            specs.append(saved.spec)
        for known in saved.sources:
            with contextlib.suppress(LimitExceeded):  # dp_ranks_max is smaller than it was
                adopted.append((known, registry.source(pod.spec.name, known.dp_rank)))
    adopted.sort(key=lambda pair: -(pair[0].heard_s_ago or 0.0))
    in_log = bool(state.log)
    for known, source in adopted:
        _restore_source(registry, source, known, elapsed_s, in_log=in_log)
    sources = {
        known.id: source.index_id for known, source in adopted if in_log or _may_hold(registry, source)
    }
    contexts = {c.id: index.context(c.model, c.lora, c.block_size, now) for c in state.contexts}
    living = {context.id for context in index.contexts()}  # contexts_max may be smaller than it was
    places = [
        (slot, contexts[slot.context], sources[slot.source])
        for slot in (SlotInfo(*row) for row in state.slots)
        if contexts[slot.context] in living and slot.source in sources
    ]
    elapsed = min(int(elapsed_s * 1000) // TICK_MS + 1, 2**31)
    coming = sum(slot.blocks for slot, _, _ in places) / max(1, sum(row[5] for row in state.slots))
    return Adoption(
        places=places,
        owners=owners.adopt(state.owners),
        entries={
            contexts[c.id]: int(c.prefixes * coming) for c in state.contexts if contexts[c.id] in living
        },
        other_names=int(max(0, state.names - sum(c.prefixes for c in state.contexts)) * coming),
        saved_at=state.tick,
        elapsed=elapsed,
        now=now,
        specs=tuple(specs),
        left_out=left_out,
    )


def _pod(registry: Registry, saved: SavedPod, configured: frozenset[str]) -> Pod | None:
    """The registered pod that the saved one is now; None with a word in the log when it is none."""
    name = saved.spec.name
    known = registry.pods.get(name)
    if known is not None:
        as_saved = dataclasses.replace(
            known.spec,
            dp_size=saved.spec.dp_size,
            metrics_url=saved.spec.metrics_url,
            discovered_by=saved.spec.discovered_by,
        )
        if as_saved == saved.spec:
            return known
        logger.warning(
            "pod %s starts empty: its configuration is another than when it was saved",
            name,
            extra={"pod": name},
        )
        return None
    if saved.configured and name not in configured:
        logger.info(
            "pod %s is not restored: it is not in the configuration any more", name, extra={"pod": name}
        )
        return None
    try:
        return registry.register(saved.spec)
    except IndexerError as error:
        logger.warning("pod %s is not restored: %s", name, error, extra={"pod": name})
        return None


def _may_hold(registry: Registry, source: Source) -> bool:
    """Where no log says what came since."""
    follows = registry.pods[source.pod].spec.zmq_endpoint is not None
    return not follows or (source.last_seq is not None and source.last_digest is not None)


def _restore_source(
    registry: Registry, source: Source, saved: SavedSource, elapsed_s: float, *, in_log: bool
) -> None:
    source.last_seq = saved.last_seq
    source.last_digest = saved.last_digest
    source.first_digest = saved.first_digest
    source.newest_ts = saved.newest_ts
    if in_log:
        registry.set_stream(source, SourceState(saved.stream), saved.stream_cause)
    elif not _may_hold(registry, source):
        source.last_seq = None
        return
    source.block_size = saved.block_size
    source.chunk_sizes.update({Tier(tier): size for tier, size in saved.chunk_sizes.items()})
    source.offloads = saved.offloads
    source.cleared_loss = saved.cleared_loss
    registry.restore(source, None if saved.heard_s_ago is None else saved.heard_s_ago + elapsed_s)
    if saved.loss_cause is not None:
        registry.lose(source, f"restored so: {saved.loss_cause}")
    elif not in_log and saved.last_seq is None and saved.heard_s_ago is not None:
        registry.lose(source, "restored, and its batches have no numbers that show what came in between")
