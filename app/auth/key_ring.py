"""The keys that are known now, and how keys change while the process runs.

Keys come from a setting, which holds for good, and from a file, which is read again every RELOAD_S seconds and taken
over when its content is another: that is a rotation without a restart, whichever way the file is replaced (written
anew, renamed, a mounted secret whose link moves). A file that cannot be used changes nothing: the keys from before
stay, which a log line and a counter say until it is repaired. With a file configured a key is needed whatever is in
it, so no slip opens the door.

A key that stays keeps its bucket (how many requests it may make now). `on_revoked` is called when a key is gone, for
what was opened with it and has no end of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from app.auth.api_keys import KEY_CHARS_ADVISED, KEY_CHARS_MAX, ApiKey, Scope, digest_of, read_keys_file
from app.config import Settings, variable
from app.errors import InvalidInput, InvalidSettings

logger = logging.getLogger(__name__)

RELOAD_S = 1.0
WITHOUT_KEY, UNKNOWN_KEY, SMALL_SCOPE, RATE = REFUSALS = (
    "refused_without_key",
    "refused_unknown_key",
    "refused_scope",
    "refused_rate",
)


class Bucket:
    """How many requests somebody may make now: `burst` at most, `rate_per_s` more each second; 0 is no bound."""

    __slots__ = ("_at_s", "_burst", "_rate_per_s", "_requests", "is_endless")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self.is_endless = rate_per_s == 0.0
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._requests = burst
        self._at_s = 0.0

    def is_empty(self, now_s: float) -> bool:
        """Whether `take` would have to wait."""
        return not self.is_endless and self._held(now_s) < 1.0

    def take(self, now_s: float) -> float:
        """Takes one and returns 0.0, or the seconds after which there is one."""
        assert not self.is_endless, "without a rate nothing is counted"
        held = self._held(now_s)
        self._at_s = now_s
        if held < 1.0:
            self._requests = held
            return (1.0 - held) / self._rate_per_s
        self._requests = held - 1.0
        return 0.0

    def _held(self, now_s: float) -> float:
        return min(self._burst, self._requests + (now_s - self._at_s) * self._rate_per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Whoever has one key."""

    key: ApiKey
    may_write: bool
    bucket: Bucket


def key_ring(settings: Settings, *, on_revoked: Callable[[], None]) -> KeyRing:
    """Raises InvalidSettings."""
    new_bucket = functools.partial(Bucket, settings.rate_requests_per_s, settings.rate_burst_requests)
    return KeyRing(settings.api_keys, settings.api_keys_file, new_bucket=new_bucket, on_revoked=on_revoked)


class KeyRing:
    """Raises InvalidSettings for a file that cannot be used at the start. `new_bucket` makes that of a new key."""

    def __init__(
        self,
        keys: Iterable[ApiKey],
        path: Path | None,
        *,
        new_bucket: Callable[[], Bucket],
        on_revoked: Callable[[], None],
    ) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self.new_bucket = new_bucket
        self._on_revoked = on_revoked
        self._callers: dict[bytes, Caller] = {}
        self._of_file: tuple[ApiKey, ...] = ()
        self._complaint = ""
        self._counts = dict.fromkeys((*REFUSALS, "reloads", "reload_failures"), 0)
        self._task: asyncio.Task[None] | None = None
        if path is not None:
            try:
                self._of_file = read_keys_file(path)
            except InvalidInput as error:
                raise InvalidSettings(f"{variable('api_keys_file')}: {error}") from error
        self._callers = self._made(self._of_file)
        self._advise()

    @property
    def is_needed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._callers) or self._path is not None

    def find(self, key: bytes) -> Caller | None:
        """Who has this key, if anybody."""
        if len(key) > KEY_CHARS_MAX:
            return None
        digest = digest_of(key)
        caller = self._callers.get(digest)
        return caller if caller is not None and hmac.compare_digest(caller.key.digest, digest) else None

    def count(self, refusal: str) -> None:
        """One of REFUSALS."""
        self._counts[refusal] += 1

    def gauges(self) -> Mapping[str, int]:
        return {"keys": len(self._callers)}

    def counters(self) -> Mapping[str, int]:
        return self._counts

    # -- keys of the file

    def start(self) -> None:
        if self._path is not None:
            self._task = asyncio.create_task(self._watch(), name="api keys")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def refresh(self) -> None:
        """Takes over what is in the file now."""
        assert self._path is not None, "only a file can change"
        try:
            keys = await asyncio.to_thread(read_keys_file, self._path)
            made = self._made(keys)
        except InvalidInput as error:
            self._counts["reload_failures"] += 1
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("API keys cannot be read again, those from before stay: %s", error)
            return
        repaired, self._complaint = bool(self._complaint), ""
        if set(keys) == set(self._of_file):
            if repaired:
                logger.info("API keys can be read again; they are the same")
            return
        gone = self._callers.keys() - made.keys()
        fewer = [
            digest for digest, caller in made.items() if not caller.may_write and self._may_write(digest)
        ]
        added = len(made.keys() - self._callers.keys())
        self._of_file, self._callers = keys, made
        self._counts["reloads"] += 1
        logger.info("API keys were read again: %d in all, %d new, %d gone", len(made), added, len(gone))
        self._advise()
        if gone or fewer:
            self._on_revoked()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                await self.refresh()
            except Exception:  # the outermost loop of this task: it must outlive a fault of ours, and say so
                self._counts["reload_failures"] += 1
                logger.exception("a look at the file of API keys failed")

    def _made(self, of_file: tuple[ApiKey, ...]) -> dict[bytes, Caller]:
        """By digest. A key of both the setting and the file has the larger scope."""
        made: dict[bytes, Caller] = {}
        for key in (*self._fixed, *of_file):
            before, also = self._callers.get(key.digest), made.get(key.digest)
            bucket = self.new_bucket() if before is None else before.bucket
            may_write = key.scope is Scope.WRITE or (also is not None and also.may_write)
            made[key.digest] = Caller(key, may_write, bucket)
        return made

    def _may_write(self, digest: bytes) -> bool:
        return digest in self._callers and self._callers[digest].may_write

    def _advise(self) -> None:
        short = sum(caller.key.is_short for caller in self._callers.values())
        if short:
            logger.warning(
                "%d API keys have fewer than %d characters: they can be guessed", short, KEY_CHARS_ADVISED
            )
