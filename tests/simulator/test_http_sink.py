"""Batches by HTTP: in order, tried again until somebody answers, given up when refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from app.ingest.vllm import Stored, WireForm, encode_batch
from app.replay.indexer import IndexerUnderTest, own_indexer
from app.simulator.http_sink import QUEUE_BATCHES_MAX, HttpSink


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_indexer() as started:
        yield started


def payload(block: int) -> bytes:
    stored = Stored(block_hashes=[block], token_ids=[block] * 4, block_size=4)
    return encode_batch(WireForm.MAPS_0_33, ts=0.0, events=[stored])


def test_batches_arrive_in_order_and_what_is_refused_is_counted(url: str) -> None:
    async def run() -> HttpSink:
        sink = HttpSink(url, "by-http", "m", 0)
        sink.publish(0, payload(1))
        sink.publish(1, b"no batch at all")
        sink.publish(1, payload(2))
        sink.publish(2, payload(3), copies=0)
        sink.publish(2, payload(3), copies=2)
        await sink.drained()
        sink.stop()
        await sink.closed()
        return sink

    sink = asyncio.run(run())
    assert (sink.refused, sink.lost) == (1, 1)
    with IndexerUnderTest(url) as indexer:
        assert indexer.positions("by-http")[0].last_seq == 2
        for block in (1, 2, 3):
            found = indexer.reusable_tokens(
                model="m", lora=None, cache_salt=None, pod="by-http", token_ids=[block] * 5
            )
            assert found == {0: 4}
        indexer.drop("by-http")


def test_full_queue_loses_and_counts() -> None:
    async def run() -> int:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
            sink = HttpSink(f"http://127.0.0.1:{silent.getsockname()[1]}", "pod", "m", 0)
            for seq in range(QUEUE_BATCHES_MAX + 5):
                sink.publish(seq, b"")
            lost = sink.lost
            sink.stop()
            await sink.closed()
        return lost

    assert asyncio.run(run()) == 5
