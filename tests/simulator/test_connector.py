"""Hints beside blocks: saved layer by layer, sent with events, found again, and silent without a backend."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from app.ingest.vllm import WireForm, decode_batch
from app.simulator.connector import BlockMetadata, Connector, ConnectorSettings, EventHints
from app.simulator.engine import Prompt
from app.simulator.engine_settings import EngineSettings
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.offload import OffloadSettings
from app.simulator.rank import Rank


def hints() -> EventHints:
    return EventHints(lambda block: block < 10)


def test_hint_says_whose_prompt_it_is_and_anchors_its_beginning() -> None:
    connector = Connector(ConnectorSettings(anchor_tokens=4))
    hint = connector.build_prefix_hint(
        range(6), agent_id="planner", cla_group=2, workflow_step=3, offset_hint=[0.5, 1.0]
    )
    assert hint.as_fields() == {
        "anchor_hash": hint.anchor_hash,
        "agent_id": "planner",
        "token_length": 6,
        "cla_group": 2,
        "workflow_step": 3,
        "offset_hint": (0.5, 1.0),
        "pre_rope": True,
    }
    assert connector.build_prefix_hint([0, 1, 2, 3, 9]).anchor_hash == hint.anchor_hash
    assert connector.build_prefix_hint([9, 1, 2, 3]).anchor_hash != hint.anchor_hash


def test_offset_hints_and_cla_metadata_can_be_switched_off() -> None:
    connector = Connector(ConnectorSettings(offset_hints=False, cla_metadata=False))
    hint = connector.build_prefix_hint(range(6), agent_id="a", cla_group=2, offset_hint=[0.5])
    assert (hint.cla_group, hint.offset_hint, hint.agent_id) == (None, None, "a")


def test_block_is_reported_when_its_last_layer_is_saved() -> None:
    backend = hints()
    connector = Connector(ConnectorSettings(layers=3), backend)
    hint = connector.build_prefix_hint(range(6))
    for layer in (0, 2, 2):
        connector.on_save_kv_layer(layer, 7, hint)
    assert (backend.take([7]), connector.stats().pending_saves) == (None, 1)
    connector.on_save_kv_layer(1, 7, hint)
    assert (backend.take([7]), connector.stats().pending_saves) == (hint, 0)
    assert backend.take([7]) is None


def test_pending_saves_are_bounded() -> None:
    connector = Connector(ConnectorSettings(layers=2, pending_saves_max=3), hints())
    for block in range(10):
        connector.on_save_kv_layer(0, block, connector.build_prefix_hint(range(6)))
    assert connector.stats().pending_saves == 3


def test_stats_count_how_often_the_agent_changes() -> None:
    connector = Connector(backend=hints())
    for agent in ("a", "a", "b", "a"):
        connector.on_save_kv_layer(0, 1, connector.build_prefix_hint(range(6), agent_id=agent))
    assert (connector.stats().active, connector.stats().switches) == (True, 2)


def test_load_hook_gives_what_is_known_once_before_the_first_layer() -> None:
    backend = hints()
    connector = Connector(backend=backend)
    hint = connector.build_prefix_hint(range(6))
    assert connector.on_load_kv_layer(0, hint) is None
    backend.learn(hint.anchor_hash, [{"block": 1}])
    assert connector.on_load_kv_layer(0, hint) == [{"block": 1}]
    assert connector.on_load_kv_layer(1, hint) is None


def test_prefetch_goes_by_priority_and_reports_what_was_there() -> None:
    asked: list[int] = []

    def prefetch(block: int) -> bool:
        asked.append(block)
        return block != 2

    connector = Connector(backend=EventHints(prefetch))
    assert connector.prefetch_blocks([(0.1, 1), (0.9, 2), (0.5, 3)]) == [3, 1]
    assert asked == [2, 3, 1]


def test_without_a_backend_nothing_happens() -> None:
    connector = Connector()
    hint = connector.build_prefix_hint(range(6), agent_id="a")
    connector.on_save_kv_layer(0, 1, hint)
    assert connector.on_load_kv_layer(0, hint) is None
    assert connector.prefetch_blocks([(1.0, 1)]) == []
    assert not connector.stats().active
    assert connector.stats().pending_saves == 0


# -- in a pod


class Collected:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def publish(self, seq: int, payload: bytes, *, copies: int = 1) -> None:
        assert seq == len(self.payloads)
        self.payloads += [payload] * copies

    def restart(self) -> None:
        self.payloads.clear()

    def stop(self) -> None:
        pass


def published(form: WireForm, hint: BlockMetadata | None) -> list[Any]:
    """The stored events of one prompt of two blocks."""
    sink = Collected()

    async def run() -> None:
        engine = EngineSettings(cache=KVCacheSettings(block_size=4))
        rank = Rank(0, engine, sink, form=form, speed=float("inf"))
        rank.start()
        async for _ in rank.generate(Prompt(range(9), max_tokens=1), hint=hint):
            pass
        await rank.stop()

    asyncio.run(run())
    (payload,) = sink.payloads
    assert decode_batch(payload).rejected == ()
    assert len(decode_batch(payload).events) == 1
    events: list[Any] = msgspec.msgpack.decode(payload)[1]
    return events


def test_metadata_travels_with_the_event_of_its_blocks() -> None:
    hint = Connector().build_prefix_hint(range(9), agent_id="planner", workflow_step=1)
    (event,) = published(WireForm.MAPS_0_33, hint)
    assert event["metadata"] == {**hint.as_fields()}
    assert len(event["block_hashes"]) == 2


def test_event_without_hint_or_without_room_for_one_is_the_engines_own() -> None:
    hint = Connector().build_prefix_hint(range(9), agent_id="planner")
    assert "metadata" not in published(WireForm.MAPS_0_33, None)[0]
    assert published(WireForm.ARRAYS_0_17, hint)[0][0] == "BlockStored"


def test_hint_of_a_router_keeps_the_chunk_it_names_from_eviction() -> None:
    async def run() -> int:
        engine = EngineSettings(
            cache=KVCacheSettings(block_size=4), offload=OffloadSettings(chunk_tokens=4, capacity_chunks=2)
        )
        rank = Rank(0, engine, None, form=WireForm.MAPS_0_33, speed=float("inf"))
        rank.start()

        async def ask(first: int, hint: BlockMetadata | None = None) -> None:
            async for _ in rank.generate(Prompt(range(first, first + 4), max_tokens=1), hint=hint):
                pass

        await ask(0)
        await ask(100)
        assert rank.engine.offload is not None
        (name,) = [n for n, h in rank.engine.offload._hashes.items() if h.hex() in oldest(rank)]
        hint = rank.connector.build_prefix_hint(range(200, 204))
        rank.hints.learn(hint.anchor_hash, [{"block": name, "priority": 1}])
        await ask(200, hint)
        kept = rank.engine.offload.lookup(range(4))
        await rank.stop()
        return kept

    assert asyncio.run(run()) == 4


def oldest(rank: Rank) -> str:
    """The key of the chunk that would be evicted next."""
    assert rank.engine.offload is not None
    (worker,) = rank.engine.offload.workers
    return next(iter(worker._store._chunks))
