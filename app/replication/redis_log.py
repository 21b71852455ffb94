"""The log in Redis: one stream a partition, and one key that says what log it is.

    {NAMESPACE:P}:log:NUMBER    stream of partition P; each message has one field `g`, a group (entries.py)
    {NAMESPACE}:log             what every replica must agree on, and the NUMBER of the log that is in force
    {NAMESPACE}:trimmed:NUMBER  partition -> the position before which its stream may have been trimmed
    {NAMESPACE}:candidates      who would make a new log, while there is none or what it had is lost in part

The braces keep what belongs together on one node of a Redis Cluster and let partitions lie on different ones; for that
reason no command names two streams. Only commands of Redis 6.2 are used. The client retries nothing by itself: what
came of a command that failed is decided by whoever called.

Whatever goes wrong on the way to Redis or in it is LogAway, with a sentence that never holds the URL, which may
have a password in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from app.errors import UNDECODABLE, InvalidSettings, LogAway
from app.redis_faults import REDIS_FAULTS

logger = logging.getLogger(__name__)

BEGINNING = "0-0"  # the position before the first message
BLOCK_S = 1.0  # how long a read waits for something new
GROUPS_PER_READ = 64
CANDIDATES_S = 30
_FIELD = b"g"
_NO_PORT = "its port is no number from 0 to 65535; in a password, / is written %2F, ? %3F, # %23 and @ %40"

# KEYS the terms; ARGV those that are in force, "" for none, and those that shall be.
_SUCCEED = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class Terms(msgspec.Struct, frozen=True):
    """What replicas must agree on, or they would make different pictures of one log. `log` is its own number."""

    log: str
    version: int
    partitions: int
    fuzzy: bool
    count_copies: bool


class LogSilent(LogAway):
    """Redis did not answer in time: it hangs, or what is sent to it gets lost."""


class RedisLog:
    """`timeout_s` bounds every command, beyond what a read waits. Raises LogAway from every call."""

    def __init__(self, url: str, *, cluster: bool, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self.number = ""  # of the log that is read and written here; "": none is known yet
        self._writer = _client(url, cluster=cluster, timeout_s=timeout_s)
        self._reader = _client(url, cluster=cluster, timeout_s=timeout_s + BLOCK_S)
        self._evicts = ""  # what was told last of its evictions

    @property
    def commands(self) -> Any:
        """The client, for what shares this Redis with the log: leases and snapshots."""
        return self._writer

    async def close(self) -> None:
        for client in (self._writer, self._reader):
            with contextlib.suppress(*REDIS_FAULTS):
                await client.aclose()

    async def warn_of_evictions(self) -> None:
        """One line in the log where Redis may evict what is here, and none again while that stays so, nor where none of
        it can be asked or may be: nothing that is read or written here waits for a warning to be right."""
        try:
            async with _away_is_told():
                if isinstance(self._writer, RedisCluster):
                    # One by one: the answer of several is a dict of them, that of a single one is not.
                    cluster = await self._writer.initialize()
                    nodes = cluster.get_primaries()
                    answers = [await cluster.info("memory", target_nodes=node) for node in nodes]
                else:
                    answers = [await self._writer.info("memory")]
        except LogAway:
            return
        found = {policy for memory in answers if (policy := _evicting(memory))}
        before, self._evicts = self._evicts, ", ".join(sorted(found))
        if found and self._evicts != before:
            logger.warning(
                "Redis may evict the log and the snapshots when its maxmemory is reached: its maxmemory-policy is %s; "
                "set maxmemory-policy noeviction",
                self._evicts,
            )

    async def terms(self) -> Terms | None:
        """Those in force; None: there is no log."""
        key = self._shared("log")
        async with _away_is_told():
            found = await self._writer.get(key)
        if found is None:
            return None
        try:
            return msgspec.json.decode(found, type=Terms)
        except UNDECODABLE as error:
            raise LogAway(f"the key {key} is not of this indexer: {error}") from error

    async def succeed(self, before: Terms | None, terms: Terms) -> bool:
        """These are in force from now on, if those before still were."""
        was = b"" if before is None else msgspec.json.encode(before)
        key = self._shared("log")
        async with _away_is_told():
            return bool(await self._writer.eval(_SUCCEED, 1, key, was, msgspec.json.encode(terms)))

    async def remove(self, number: str, partitions: int) -> None:
        """The streams of a log that is not in force any more."""
        async with _away_is_told():
            for partition in range(partitions):
                await self._writer.unlink(f"{{{self._namespace}:{partition}}}:log:{number}")
            await self._writer.unlink(self._shared(f"trimmed:{number}"))

    # -- who makes a new one

    async def stand(self, name: str, rank: bytes) -> None:
        key = self._shared("candidates")
        async with _away_is_told():
            await self._writer.hset(key, name, rank)
            await self._writer.expire(key, CANDIDATES_S)

    async def candidates(self) -> dict[str, bytes]:
        async with _away_is_told():
            found = await self._writer.hgetall(self._shared("candidates"))
        return {_text(name): rank for name, rank in found.items()}

    async def forget_candidates(self) -> None:
        async with _away_is_told():
            await self._writer.unlink(self._shared("candidates"))

    async def append(self, partition: int, group: bytes) -> str:
        """The position of the group."""
        if not self.number:
            raise LogAway("the log is not known yet")
        async with _away_is_told():
            position = await self._writer.xadd(self._stream(partition), {_FIELD: group})
        return _text(position)

    async def read(self, partition: int, after: str, *, wait: bool) -> tuple[list[tuple[str, bytes]], bool]:
        """(position, group) of what comes next; nothing when there is nothing, and with `wait` for BLOCK_S. And whether
        `after` itself was still there, asked on the same connection behind: then nothing between is missing, however
        often Redis was another one before."""
        stream = self._stream(partition)
        block = int(BLOCK_S * 1000) if wait else None
        async with _away_is_told():
            both = self._reader.pipeline(transaction=False)
            both.xread({stream: after}, count=GROUPS_PER_READ, block=block)
            both.xrange(stream, after, after, count=1)
            found, itself = await both.execute()
        groups = [
            (_text(position), fields[_FIELD])
            for _, messages in found or ()
            for position, fields in messages
            if fields is not None and _FIELD in fields
        ]
        return groups, bool(itself)

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

    async def now_s(self) -> float:
        """Unix time as Redis has it, which positions are made of."""
        async with _away_is_told():
            seconds, microseconds = await self._writer.time()
        return int(seconds) + int(microseconds) / 1e6

    async def trimmed(self, partition: int) -> str:
        """What is older than this position may be gone; the beginning where nothing is."""
        async with _away_is_told():
            found = await self._writer.hget(self._shared(f"trimmed:{self.number}"), str(partition))
        return BEGINNING if found is None else _text(found)

    async def trim(self, partition: int, before: str) -> int:
        """Takes away what is older than this position; returns how many messages went. It is said first."""
        async with _away_is_told():
            await self._writer.hset(self._shared(f"trimmed:{self.number}"), str(partition), before)
            return int(await self._writer.xtrim(self._stream(partition), minid=before, approximate=False))

    def _stream(self, partition: int) -> str:
        return f"{{{self._namespace}:{partition}}}:log:{self.number}"

    def _shared(self, name: str) -> str:
        return f"{{{self._namespace}}}:{name}"


def order(position: str) -> tuple[int, int]:
    """Positions compare by these."""
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


def _evicting(memory: dict[str, Any]) -> str:
    """The policy by which keys without an end to their life may go; "" where none may."""
    policy = str(memory.get("maxmemory_policy", ""))
    return policy if policy.startswith("allkeys-") and memory.get("maxmemory") else ""


def _text(position: bytes | str) -> str:
    return position.decode() if isinstance(position, bytes) else position


class _Cluster(RedisCluster):
    """Where a node goes, redis-py closes for one command the connection that another one is being sent on. That is then
    told in words that are none of Redis: uvloop's of a closed transport (RuntimeError), or that a writer is None
    (AttributeError)."""

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        with _closed_is_told():
            return await super().initialize(*args, **kwargs)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        with _closed_is_told():
            return await super().execute_command(*args, **kwargs)


@contextlib.contextmanager
def _closed_is_told() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        raise ConnectionError(f"a connection was closed while it was in use: {error}") from error


def _client(url: str, *, cluster: bool, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "protocol": 2,
        "client_name": "kvindexer",
    }
    if not _has_sound_port(url):
        raise InvalidSettings(f"KVINDEXER_REDIS_URL cannot be used: {_NO_PORT}")
    try:
        if cluster:
            return _Cluster.from_url(url, **options)
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
    except (ValueError, RedisClusterException) as error:
        raise InvalidSettings(f"KVINDEXER_REDIS_URL cannot be used: {_plain(error, url)}") from None


def _has_sound_port(url: str) -> bool:
    """Not where a sign of the password ends what passes for the host: the port would be a part of the password, and told
    whenever it cannot be connected to."""
    try:
        parts = urlsplit(url)
        is_file = parts.scheme == "unix"
        _ = None if is_file else parts.port
    except ValueError:
        return False
    behind = parts.fragment + parts.query.partition("=")[0]
    return "@" not in (behind if is_file else parts.path + behind)


def _plain(error: Exception, url: str) -> str:
    """What a fault says, without the URL."""
    return str(error).replace(url, "the URL") if "://" in url else str(error)


@contextlib.asynccontextmanager
async def _away_is_told() -> AsyncIterator[None]:
    try:
        yield
    except REDIS_FAULTS as error:
        said = str(error) or type(error).__name__
        kind = LogSilent if isinstance(error, (RedisTimeout, TimeoutError)) else LogAway
        raise kind(f"Redis: {said}") from error
