"""The log in Redis: one stream a partition, and one key that says what log it is.

    {NAMESPACE:P}:log   stream of partition P; each message has one field `g`, a group (app/replication/entries.py)
    {NAMESPACE}:log     what every replica must agree on, and the log's own number, made with the first append

The braces keep what belongs together on one node of a Redis Cluster and let partitions lie on different ones; for that
reason no command names two streams. Only commands of Redis 6.2 are used. The client retries nothing by itself: what
came of a command that failed is decided by whoever called.

Whatever goes wrong on the way to Redis or in it is LogAway, with a sentence that never holds the URL, which may
have a password in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from app.errors import UNDECODABLE, InvalidSettings, LogAway

BEGINNING = "0-0"  # the position before the first message
BLOCK_S = 1.0  # how long a read waits for something new
GROUPS_PER_READ = 64
_FIELD = b"g"


class Terms(msgspec.Struct, frozen=True):
    """What replicas must agree on, or they would make different pictures of one log. `log` is its own number."""

    log: str
    version: int
    partitions: int
    fuzzy: bool
    count_copies: bool


class RedisLog:
    """`timeout_s` bounds every command, beyond what a read waits. Raises LogAway from every call."""

    def __init__(self, url: str, *, cluster: bool, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self._writer = _client(url, cluster=cluster, timeout_s=timeout_s)
        self._reader = _client(url, cluster=cluster, timeout_s=timeout_s + BLOCK_S)

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._writer.aclose()
            await self._reader.aclose()

    async def agree(self, terms: Terms) -> Terms:
        """The terms that are in force: these, where the log had none."""
        key = f"{{{self._namespace}}}:log"
        async with _away_is_told():
            await self._writer.set(key, msgspec.json.encode(terms), nx=True)
            found = await self._writer.get(key)
        try:
            return msgspec.json.decode(found or b"", type=Terms)
        except UNDECODABLE as error:
            raise LogAway(f"the key {key} is not of this indexer: {error}") from error

    async def append(self, partition: int, group: bytes) -> str:
        """The position of the group."""
        async with _away_is_told():
            position = await self._writer.xadd(self._stream(partition), {_FIELD: group})
        return _text(position)

    async def read(self, partition: int, after: str, *, wait: bool) -> list[tuple[str, bytes]]:
        """(position, group) of what comes next; nothing when there is nothing, and with `wait` for BLOCK_S."""
        stream = self._stream(partition)
        block = int(BLOCK_S * 1000) if wait else None
        async with _away_is_told():
            found = await self._reader.xread({stream: after}, count=GROUPS_PER_READ, block=block)
        return [
            (_text(position), fields[_FIELD])
            for _, messages in found or ()
            for position, fields in messages
            if fields is not None and _FIELD in fields
        ]

    async def has(self, partition: int, position: str) -> bool:
        """The message at this position is there."""
        async with _away_is_told():
            found = await self._writer.xrange(self._stream(partition), position, position, count=1)
        return bool(found)

    async def first(self, partition: int) -> str | None:
        """The position of the oldest message that is there."""
        async with _away_is_told():
            found = await self._writer.xrange(self._stream(partition), "-", "+", count=1)
        return _text(found[0][0]) if found else None

    async def last(self, partition: int) -> str:
        """The position of the newest message that ever was there."""
        async with _away_is_told():
            try:
                about = await self._writer.xinfo_stream(self._stream(partition))
            except ResponseError as error:
                if "no such key" in str(error):
                    return BEGINNING
                raise
        return _text(about["last-generated-id"])

    async def trim(self, partition: int, before: str) -> int:
        """Takes away what is older than this position, about; returns how many messages went."""
        async with _away_is_told():
            return int(await self._writer.xtrim(self._stream(partition), minid=before, approximate=True))

    def _stream(self, partition: int) -> str:
        return f"{{{self._namespace}:{partition}}}:log"


def order(position: str) -> tuple[int, int]:
    """Positions compare by these."""
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


def _text(position: bytes | str) -> str:
    return position.decode() if isinstance(position, bytes) else position


def _client(url: str, *, cluster: bool, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "protocol": 2,
        "client_name": "kvindexer",
    }
    try:
        if cluster:
            return RedisCluster.from_url(url, **options)
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
    except ValueError as error:
        raise InvalidSettings(f"KVINDEXER_REDIS_URL cannot be used: {_plain(error, url)}") from None


def _plain(error: Exception, url: str) -> str:
    """What a fault says, without the URL."""
    return str(error).replace(url, "the URL")


@contextlib.asynccontextmanager
async def _away_is_told() -> AsyncIterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        said = str(error) or type(error).__name__
        raise LogAway(f"Redis: {said}") from error
