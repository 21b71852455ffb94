"""Hints by themselves: what they count, whose turn it is to be looked for, and what a snapshot has of them."""

from __future__ import annotations

from typing import Any

import msgspec

from app.events import BlockRemoved, BlockStored
from app.service import IndexerService
from app.service.hints import WAITING_VISITS_MAX, HintBook
from tests.service.test_effects import post, service, source, stored, uint64s


def hinted(name: int, *, parent: int | None = None, **metadata: Any) -> BlockStored:
    said = msgspec.json.encode(metadata or {"name": name})
    return msgspec.structs.replace(stored(name), parent_block_hash=parent, metadata=said)


def book(of: IndexerService) -> HintBook:
    return of.hints


def test_gauges_are_of_what_is_kept() -> None:
    told = service(hints_max=2)
    post(told, hinted(1), hinted(2), hinted(3), hinted(9, parent=8))
    assert book(told).gauges() == {"kept": 2, "waiting": 1, "bytes": len(b'{"name":3}') + len(b'{"name":9}')}
    assert book(told).counters()["evicted"] == 2
    post(told, hinted(3, n=1))
    assert book(told).gauges()["bytes"] == len(b'{"n":1}') + len(b'{"name":9}')


def test_hints_that_wait_have_their_turn_however_many_there_are() -> None:
    told = service()
    others = [hinted(1_000 + number, parent=10_000 + number) for number in range(WAITING_VISITS_MAX + 1)]
    post(told, *others, hinted(2, parent=1))
    assert book(told).gauges()["waiting"] == len(others) + 1
    post(told, stored(1))  # the parent of the last one, which is behind all that are looked for in one go
    for _ in range(2):
        post(told, stored(3))
    assert book(told).gauges()["waiting"] == len(others)


def test_a_hint_that_goes_while_a_snapshot_is_written_does_not_come_back_with_it() -> None:
    told, fresh = service(), service()
    post(told, hinted(1), hinted(2))
    post(fresh, stored(1), stored(2))
    told.hints.start_export()
    frames = [told.hints.export(2)[0]]
    post(
        told, BlockRemoved(block_hashes=uint64s(1)), stored(1)
    )  # another life of the block, without metadata
    done = False
    while not done:
        frame, done = told.hints.export(2)
        frames.append(frame)
    told.hints.end_export()
    for frame in frames:
        assert fresh.hints.restore(
            frame, {source(told).index_id: source(fresh).index_id}, contexts(told, fresh)
        )
    assert fresh.hints.gauges()["kept"] == 1
    assert fresh.hints.gauges()["bytes"] == len(b'{"name":2}')


def test_hints_longer_than_the_bound_of_now_are_left_out_and_counted() -> None:
    told, fresh = service(), service(hint_bytes_max=20)
    post(told, hinted(1, text="x" * 20), hinted(2))
    post(fresh, stored(1), stored(2))
    told.hints.start_export()
    frame, done = told.hints.export(10)
    assert done
    assert fresh.hints.restore(frame, {source(told).index_id: source(fresh).index_id}, contexts(told, fresh))
    assert fresh.hints.gauges() == {"kept": 1, "waiting": 0, "bytes": len(b'{"name":2}')}
    assert fresh.hints.counters()["refused"] == 1


def contexts(there: IndexerService, here: IndexerService) -> dict[int, int]:
    def ids(of: IndexerService) -> list[int]:
        return [context.id for context in of.describe(configured=frozenset(), at_s=0.0).contexts]

    return dict(zip(ids(there), ids(here), strict=True))
