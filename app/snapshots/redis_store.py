"""Snapshots in the Redis that replicas share: the bytes of a file (frames.py) in pieces of about PIECE_BYTES.

    {TAG}:<generation>:<number>   a piece; it begins and ends between two frames
    {TAG}:newest, {TAG}:previous  what there is: Placed as JSON
    {TAG}:lock                    the replica that writes one now

All keys have one hash tag, so they lie on one node of a cluster and one script may switch them. A generation is written
under names of its own that expire after PIECE_LIFE_S, so nothing is left over if its writer dies. The last step is one
script. It works only while the writer still holds the lock: it makes the pieces permanent, makes the newest snapshot the
previous one, and lets the one before that expire a little later, for a reader that is still at it. So what a reader finds
is whole.

Only commands of Redis 6.2 are used. A writer or a reader holds one piece in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import msgspec

from app.errors import UNDECODABLE, SnapshotRefused, StoreFailed
from app.redis_faults import REDIS_FAULTS
from app.service.saved_state import SavedState
from app.snapshots.frames import FrameDecoder, FrameEncoder

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
PIECES_MAX = 100_000  # in one snapshot: 100 GB
PIECE_LIFE_S = 3_600  # of one that is not part of a whole snapshot
READING_S = 600  # that the pieces of a snapshot stay after it is neither the newest nor the previous
LOCK_S = 30  # without a piece, after which another replica may write


# KEYS lock, newest, previous, then the new pieces; ARGV token, the new one, reading time, the tag.
_SWITCH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 4, #KEYS do
  if redis.call('PERSIST', KEYS[i]) == 0 then return 0 end
end
local gone, newest = redis.call('GET', KEYS[3]), redis.call('GET', KEYS[2])
if gone then
  local placed = cjson.decode(gone)
  for i = 0, placed.pieces - 1 do
    redis.call('EXPIRE', ARGV[4] .. ':' .. placed.generation .. ':' .. i, ARGV[3])
  end
end
if newest then redis.call('SET', KEYS[3], newest) end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[1])
return 1
"""

# KEYS lock, piece; ARGV token, lock time, content, life. The lock lives as long as pieces come.
_PUT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
return 1
"""

_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Placed(msgspec.Struct, frozen=True):
    """What Redis says of a whole snapshot, for whoever trims the log by its positions."""

    generation: str
    pieces: int
    size: int
    at_s: float
    digest: str
    positions: dict[int, str]
    log: str = ""


class Commands(Protocol):
    """The part of a Redis client (alone or of a cluster, without `decode_responses`) that is needed."""

    def get(self, name: str) -> Any: ...
    def set(self, name: str, value: Any, *, nx: bool, ex: int) -> Any: ...
    def unlink(self, *names: str) -> Any: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any: ...


class RedisStore:
    """`tag` is the beginning of every key, its braces included; `timeout_s` bounds every command."""

    def __init__(self, redis: Commands, *, tag: str, timeout_s: float = 10.0) -> None:
        assert "{" in tag, "the keys must lie on one node"
        self.redis = redis
        self.tag = tag
        self.timeout_s = timeout_s
        self.name = f"Redis, {tag}"

    async def begin(self) -> RedisSink | None:
        token = secrets.token_hex(8)
        async with self.told():
            mine = await self.redis.set(self.key("lock"), token, nx=True, ex=LOCK_S)
        return RedisSink(self, token) if mine else None

    async def names(self) -> list[str]:
        found = [await self.placed("newest"), await self.placed("previous")]
        return [
            name for name, placed in zip(("newest", "previous"), found, strict=True) if placed is not None
        ]

    async def open(self, name: str) -> RedisSource:
        try:
            placed = await self.placed(name)
        except StoreFailed as error:
            raise SnapshotRefused(str(error)) from error
        if placed is None:
            raise SnapshotRefused(f"{self.key(name)} is not there any more")
        return await RedisSource.checked(self, placed)

    async def placed(self, name: str) -> Placed | None:
        """Of the `newest` or the `previous`. Raises StoreFailed, also for something that no indexer wrote."""
        async with self.told():
            found = await self.redis.get(self.key(name))
        if found is None:
            return None
        try:
            return msgspec.json.decode(found, type=Placed)
        except UNDECODABLE as error:
            raise StoreFailed(f"{self.key(name)} is not of an indexer: {error}") from error

    def key(self, *parts: str | int) -> str:
        return ":".join((self.tag, *map(str, parts)))

    @contextlib.asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """One command: bounded in time, its fault in our words. No text of a fault names the URL."""
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except REDIS_FAULTS as error:
            raise StoreFailed(f"{self.name}: {str(error) or type(error).__name__}") from error


class RedisSink:
    def __init__(self, store: RedisStore, token: str) -> None:
        self._store = store
        self._token = token
        self._encoder = FrameEncoder()
        self._waiting = [self._encoder.start]
        self._waiting_bytes = len(self._encoder.start)
        self._pieces = self._size = 0
        self._is_over = False

    async def add(self, frame: bytes) -> None:
        await self._put(await asyncio.to_thread(self._encoder.index, frame))

    async def finish(self, state: SavedState) -> int:
        await self._put(self._encoder.state(state))
        if self._waiting:
            await self._send()
        store = self._store
        size = self._size
        placed = Placed(self._token, self._pieces, size, state.at_s, state.digest, state.positions, state.log)
        keys = [store.key(name) for name in ("lock", "newest", "previous")]
        keys += [store.key(self._token, number) for number in range(self._pieces)]
        arguments = (self._token, msgspec.json.encode(placed), READING_S, store.tag)
        async with store.told():
            done = await store.redis.eval(_SWITCH, len(keys), *keys, *arguments)
        self._is_over = bool(done)
        if not done:
            raise StoreFailed(f"{store.name}: another replica took over the writing")
        return size

    async def discard(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        store = self._store
        keys = [store.key(self._token, number) for number in range(self._pieces)]
        try:
            async with store.told():
                for first in range(0, len(keys), 1_000):
                    await store.redis.unlink(*keys[first : first + 1_000])
                await store.redis.eval(_UNLOCK, 1, store.key("lock"), self._token)
        except StoreFailed as error:
            logger.warning("an unfinished snapshot is left to its %d s: %s", PIECE_LIFE_S, error)

    async def _put(self, stored: bytes) -> None:
        self._waiting.append(stored)
        self._waiting_bytes += len(stored)
        if self._waiting_bytes >= PIECE_BYTES:
            await self._send()

    async def _send(self) -> None:
        store = self._store
        if self._pieces == PIECES_MAX:
            raise StoreFailed(f"{store.name}: a snapshot has at most {PIECES_MAX} pieces")
        piece = b"".join(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        keys = (store.key("lock"), store.key(self._token, self._pieces))
        self._pieces += 1  # before it is sent: whether it arrived is not known when this fails
        async with store.told():
            mine = await store.redis.eval(_PUT, 2, *keys, self._token, LOCK_S, piece, PIECE_LIFE_S)
        if not mine:
            raise StoreFailed(f"{store.name}: another replica took over the writing")
        self._size += len(piece)


class RedisSource:
    def __init__(self, store: RedisStore, placed: Placed, state: SavedState) -> None:
        self._store = store
        self._placed = placed
        self.name = f"{store.name}, {placed.generation}"
        self.state = state
        self.size = placed.size

    @classmethod
    async def checked(cls, store: RedisStore, placed: Placed) -> RedisSource:
        decoder = FrameDecoder(contents=False)
        with _refusals_of(store, placed):
            async for piece in _pieces(store, placed):
                await asyncio.to_thread(decoder.check, io.BytesIO(piece))
            return cls(store, placed, decoder.finish())

    async def frames(self) -> AsyncIterator[bytes]:
        decoder = FrameDecoder(contents=True)
        with _refusals_of(self._store, self._placed):
            async for piece in _pieces(self._store, self._placed):
                for frame in await asyncio.to_thread(lambda: list(decoder.frames(io.BytesIO(piece)))):  # noqa: B023
                    yield frame
            decoder.finish()


async def _pieces(store: RedisStore, placed: Placed) -> AsyncIterator[bytes]:
    for number in range(placed.pieces):
        async with store.told():
            piece = await store.redis.get(store.key(placed.generation, number))
        if piece is None:
            raise SnapshotRefused(f"is damaged: piece {number} is missing")
        yield piece


@contextlib.contextmanager
def _refusals_of(store: RedisStore, placed: Placed) -> Iterator[None]:
    try:
        yield
    except StoreFailed as error:
        raise SnapshotRefused(str(error)) from error
    except SnapshotRefused as error:
        raise SnapshotRefused(f"{store.name}, {placed.generation} {error}") from error
