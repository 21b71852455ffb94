"""Snapshots in a real Redis: what a reader finds is whole, whoever dies; one replica at a time; nothing is left over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis
import redis.asyncio

from app.config import Settings
from app.errors import SnapshotRefused, StoreFailed
from app.events import Envelope
from app.index.prefix_index import PrefixIndex
from app.service import IndexerService, index_limits
from app.snapshots import redis_store
from app.snapshots.keeper import SnapshotKeeper
from app.snapshots.redis_store import Placed, RedisSource, RedisStore
from tests.replication.redis_server import RedisServer, serving_redis
from tests.service.test_service import Clock, batch, stored
from tests.snapshots.test_file import FRAMES, STATE

TAG = "{kvindexer:test}:snapshot"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with serving_redis() as made:
        yield made


@pytest.fixture
def keys(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "PIECE_BYTES", 64)


@asynccontextmanager
async def store_at(port: int) -> AsyncIterator[RedisStore]:
    async with redis.asyncio.Redis(port=port) as client:
        yield RedisStore(client, tag=TAG)


def play(server: RedisServer, scene: Callable[[RedisStore], Awaitable[None]]) -> None:
    async def run() -> None:
        async with store_at(server.port) as store:
            await scene(store)

    asyncio.run(run())


async def write(store: RedisStore, frames: list[bytes] = FRAMES, at_s: float = 1.0) -> int:
    sink = await store.begin()
    assert sink is not None
    for frame in frames:
        await sink.add(frame)
    return await sink.finish(msgspec.structs.replace(STATE, at_s=at_s, positions={0: "5-1", 3: "0-0"}))


def names(keys: redis.Redis) -> set[str]:
    found = keys.keys()
    assert isinstance(found, list)
    return {key.decode() if isinstance(key, bytes) else key for key in found}


async def read(source: RedisSource) -> list[bytes]:
    return [frame async for frame in source.frames()]


def test_what_was_written_is_read(server: RedisServer, keys: redis.Redis, small_pieces: None) -> None:
    async def scene(store: RedisStore) -> None:
        assert await store.names() == []
        size = await write(store)
        assert await store.names() == ["newest"]
        source = await store.open("newest")
        assert source.size == size == sum(keys.strlen(name) for name in names(keys) if name[-1].isdigit())
        assert source.state == msgspec.structs.replace(STATE, at_s=1.0, positions={0: "5-1", 3: "0-0"})
        assert await read(source) == FRAMES
        placed = await store.placed("newest")
        assert placed is not None
        assert placed.pieces > 1
        assert placed.positions == {0: "5-1", 3: "0-0"}

    play(server, scene)


def test_the_one_before_is_kept_and_the_others_go(
    server: RedisServer, keys: redis.Redis, small_pieces: None
) -> None:
    async def scene(store: RedisStore) -> None:
        placed: list[Placed] = []
        for number in range(4):
            await write(store, [bytes([number]) * 200 + bytes(range(256))], at_s=float(number))
            newest = await store.placed("newest")
            assert newest is not None
            placed.append(newest)
        assert await store.names() == ["newest", "previous"]
        assert (await store.open("previous")).state.at_s == 2.0
        whole = [f"{TAG}:{one.generation}:{n}" for one in placed[2:] for n in range(one.pieces)]
        going = [f"{TAG}:{one.generation}:{n}" for one in placed[:2] for n in range(one.pieces)]
        assert names(keys) == {*whole, *going, f"{TAG}:newest", f"{TAG}:previous"}
        assert {keys.ttl(key) for key in whole} == {-1}
        assert all(0 < keys.ttl(key) <= redis_store.READING_S for key in going)

    play(server, scene)


def test_who_lost_the_lock_writes_no_further_piece(
    server: RedisServer, keys: redis.Redis, small_pieces: None
) -> None:
    async def scene(store: RedisStore) -> None:
        late = await store.begin()
        assert late is not None
        await late.add(FRAMES[0] * 20)
        keys.set(f"{TAG}:lock", "another")
        before = names(keys)
        with pytest.raises(StoreFailed, match="took over"):
            await late.add(bytes(range(256)))
        assert names(keys) == before
        await late.discard()
        assert names(keys) == {f"{TAG}:lock"}
        assert keys.get(f"{TAG}:lock") == b"another", "it is not its own to open"

    play(server, scene)


def test_one_replica_at_a_time(server: RedisServer, keys: redis.Redis) -> None:
    async def scene(store: RedisStore) -> None:
        first = await store.begin()
        assert first is not None
        assert await store.begin() is None
        await first.discard()
        second = await store.begin()
        assert second is not None
        await first.discard()  # the lock is not its own any more
        assert await store.begin() is None
        await second.discard()
        assert names(keys) == set()

    play(server, scene)


def test_a_writer_that_lost_its_lock_changes_nothing(
    server: RedisServer, keys: redis.Redis, small_pieces: None
) -> None:
    async def scene(store: RedisStore) -> None:
        await write(store, at_s=1.0)
        slow = await store.begin()
        assert slow is not None
        await slow.add(b"slow" * 100)
        keys.delete(f"{TAG}:lock")  # as if it had slept
        await write(store, at_s=2.0)
        with pytest.raises(StoreFailed, match="another replica"):
            await slow.finish(STATE)
        await slow.discard()
        assert (await store.open("newest")).state.at_s == 2.0
        assert (await store.open("previous")).state.at_s == 1.0

    play(server, scene)


def test_a_writer_that_dies_leaves_nothing_for_long(
    server: RedisServer, keys: redis.Redis, small_pieces: None
) -> None:
    async def scene(store: RedisStore) -> None:
        sink = await store.begin()
        assert sink is not None
        for _ in range(5):
            await sink.add(bytes(range(256)))
        assert len(names(keys)) > 3
        assert all(0 < keys.ttl(key) <= redis_store.PIECE_LIFE_S for key in names(keys))
        assert await store.names() == []

    play(server, scene)


def test_pieces_that_went_before_the_switch_are_missed(
    server: RedisServer, keys: redis.Redis, small_pieces: None
) -> None:
    async def scene(store: RedisStore) -> None:
        sink = await store.begin()
        assert sink is not None
        await sink.add(bytes(range(256)))
        keys.delete(next(key for key in names(keys) if key.endswith(":0")))
        with pytest.raises(StoreFailed):
            await sink.finish(STATE)
        assert await store.names() == []

    play(server, scene)


def test_any_damage_is_refused(server: RedisServer, keys: redis.Redis, small_pieces: None) -> None:
    """A changed byte of any piece, a piece too few, two in each other's place."""

    async def scene(store: RedisStore) -> None:
        await write(store)
        placed = await store.placed("newest")
        assert placed is not None
        pieces = [f"{TAG}:{placed.generation}:{number}" for number in range(placed.pieces)]
        for key in pieces:
            whole = keys.get(key)
            assert isinstance(whole, bytes)
            for at in range(len(whole)):
                keys.set(key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                with pytest.raises(SnapshotRefused):
                    await store.open("newest")
            keys.delete(key)
            with pytest.raises(SnapshotRefused, match="missing"):
                await store.open("newest")
            keys.set(key, whole)
        first, last = keys.get(pieces[0]), keys.get(pieces[-1])
        assert isinstance(first, bytes)
        assert isinstance(last, bytes)
        keys.set(pieces[0], last)
        keys.set(pieces[-1], first)
        with pytest.raises(SnapshotRefused):
            await store.open("newest")

    play(server, scene)


def test_redis_that_does_not_answer(keys: redis.Redis, small_pieces: None) -> None:
    async def scene(server: RedisServer) -> None:
        async with redis.asyncio.Redis(port=server.port) as client:
            store = RedisStore(client, tag=TAG, timeout_s=0.3)
            await write(store)
            sink = await store.begin()
            assert sink is not None
            with server.frozen():
                with pytest.raises(StoreFailed):
                    await sink.add(bytes(range(256)))
                await sink.discard()
                with pytest.raises(SnapshotRefused):
                    await store.open("newest")
            assert (await store.open("newest")).state.at_s == 1.0

    with serving_redis() as server:
        asyncio.run(scene(server))


def test_a_service_comes_back_on_another_replica(server: RedisServer, keys: redis.Redis) -> None:
    def replica(store: RedisStore) -> tuple[IndexerService, SnapshotKeeper]:
        settings = Settings()
        index = PrefixIndex(index_limits(settings))
        service = IndexerService(settings, index, clock=Clock())
        keeper = SnapshotKeeper(
            service,
            index,
            store,
            configured=frozenset(),
            interval_s=60,
            place=lambda state: msgspec.structs.replace(state, positions={1: "7-2"}),
        )
        return service, keeper

    async def scene(store: RedisStore) -> None:
        service, keeper = replica(store)
        for number in range(50):
            service.post(Envelope(pod="pod-a", model="m", seq=number, digest=7), batch(stored(number * 8, 8)))
        assert await keeper.save()
        digest = service.stats()["digest"]
        service.post(Envelope(pod="pod-a", model="m", seq=50, digest=7), batch(stored(400)))
        assert await keeper.save()
        other, other_keeper = replica(store)
        newest = await store.placed("newest")
        assert newest is not None
        keys.delete(f"{TAG}:{newest.generation}:0")
        await other_keeper.restore()  # the newest is damaged: the one before it
        assert other.stats()["digest"] == digest
        assert other_keeper.counters()["refused"] == 1
        assert newest.positions == {1: "7-2"}
        held = await store.begin()
        assert held is not None
        assert not await keeper.save(), "another one is at it"
        await held.discard()

    play(server, scene)
