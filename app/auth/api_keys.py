"""API keys as they are written and as they are kept: text in, digests out. Pure.

A key is known by its digest under a secret that this process made up at its start, and by nothing else: no key is
kept, shown or logged, and a dump of the memory has none that could be used. The secret is also why looking one up in
a dictionary gives nothing away: how long that takes depends on digests that nobody outside can compute or choose.

Refused, without ever repeating what was written, because what is in the wrong place may be a key: entries that are
not `key:read` or `key:write`, keys that no header can carry, a key that is there twice, files without a key.
Cost of a look-up: one keyed BLAKE2s of a short text, 0.4 us.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

from app.errors import InvalidInput

KEYS_MAX = 10_000
KEY_CHARS_MAX = 512
KEY_CHARS_ADVISED = 16  # shorter ones can be guessed
FILE_BYTES_MAX = KEYS_MAX * (KEY_CHARS_MAX + 8)

# Copied for each key: its own block is hashed once.
_KEYED = hashlib.blake2s(digest_size=16, key=secrets.token_bytes(32))


class Scope(enum.StrEnum):
    READ = "read"
    WRITE = "write"  # includes read


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    digest: bytes = dataclasses.field(repr=False)
    scope: Scope
    is_short: bool = False  # easily guessed


def digest_of(key: bytes) -> bytes:
    """What a key is known by in this process."""
    state = _KEYED.copy()
    state.update(key)
    return state.digest()


def parse_keys(entries: Iterable[tuple[str, str]]) -> tuple[ApiKey, ...]:
    """Keys of (place, `key:scope`). Raises InvalidInput, which names the place and never the entry."""
    keys: dict[bytes, ApiKey] = {}
    for place, entry in entries:
        key = _parse_key(place, entry)
        if key.digest in keys:
            raise InvalidInput(f"{place} has a key that is there already")
        keys[key.digest] = key
        if len(keys) > KEYS_MAX:
            raise InvalidInput(f"there are more than {KEYS_MAX} keys")
    return tuple(keys.values())


def parse_setting(text: str) -> tuple[ApiKey, ...]:
    """`key:scope,key:scope`."""
    entries = [entry.strip() for entry in text.split(",")]
    keys = parse_keys((f"entry {number}", entry) for number, entry in enumerate(entries, 1) if entry)
    if text and not keys:
        raise InvalidInput("entry 1 is empty, and so is every other")
    return keys


def read_keys_file(path: Path) -> tuple[ApiKey, ...]:
    """One `key:scope` a line; blank lines and lines that start with '#' are skipped. At least one."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidInput(f"{path}: longer than {FILE_BYTES_MAX} bytes")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: not UTF-8") from None
    numbered = [(f"line {number}", line.strip()) for number, line in enumerate(lines, 1)]
    try:
        keys = parse_keys((place, line) for place, line in numbered if line and not line.startswith("#"))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    if not keys:
        raise InvalidInput(f"{path}: there is no key in it")
    return keys


def _parse_key(place: str, entry: str) -> ApiKey:
    key, _, said = entry.rpartition(":")
    try:
        scope = Scope(said.strip().lower())
    except ValueError:
        raise InvalidInput(f"{place} is not key:read or key:write") from None
    key = key.strip()
    if not key or len(key) > KEY_CHARS_MAX:
        raise InvalidInput(f"{place} has no key of 1 to {KEY_CHARS_MAX} characters")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InvalidInput(f"{place} has a key that is not printable ASCII without spaces")
    return ApiKey(digest_of(key.encode()), scope, len(key) < KEY_CHARS_ADVISED)
