"""Recorded request traces: when a prompt came, how long it was, and which blocks it is made of.

Two forms are read, plain or gzipped, told apart by their first line:

    Mooncake   a JSON object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; an id stands
               for 512 tokens and everything before them, and the last block of a prompt can be partial
    pdelta     a header `{"format", "block"}`, then `[t_ms, session, tokens_in, tokens_out, keep, [new ids]]`: the
               blocks of a prompt are the first `keep` of the session's last prompt and the new ones; what is
               left of `tokens_in` behind the last block belongs to no block

A trace names blocks and has no tokens, so tokens are made up: a block's number, written in digits below 128,
again and again. Equal blocks get equal tokens, different blocks differ in every run of DIGITS tokens, so that
engine blocks can be shorter than those of the trace, and a token is one byte in msgpack. A line that cannot
be is refused with its number; a trace is held whole (some 200 bytes and 8 a block for a request).
"""

from __future__ import annotations

import array
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from app.errors import UNDECODABLE, InvalidInput

MOONCAKE_BLOCK_TOKENS = 512
DIGITS = 4  # tokens in which two blocks always differ
BLOCK_IDS_MAX = 128**DIGITS // 2  # the other half names what has no number in the trace
REQUESTS_MAX = 10_000_000


class TraceRequest(msgspec.Struct, frozen=True):
    """`block_ids` are numbers of blocks of `Trace.block_tokens`, the last one possibly partial."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order of their time."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    def token_ids(self, number: int) -> array.array[int]:
        """The prompt of request `number`; a tail that the trace has no block for is the request's own."""
        request = self.requests[number]
        tokens: array.array[int] = array.array("I")
        for block in request.block_ids:
            tokens += _digits(block) * (self.block_tokens // DIGITS)
        missing = request.prompt_tokens - len(tokens)
        if missing > 0:
            return tokens + self.own_tokens(number, missing)
        return tokens[: request.prompt_tokens]

    def own_tokens(self, number: int, count: int) -> array.array[int]:
        """Tokens that no other request has: the request's tail or its output."""
        return (_digits(BLOCK_IDS_MAX + number) * -(-count // DIGITS))[:count]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _PdeltaHeader(msgspec.Struct):
    format: str
    block: int


def load_trace(path: Path, *, requests_max: int = REQUESTS_MAX) -> Trace:
    """The first `requests_max` requests. Raises InvalidInput, with the line, for what is no such trace."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            return _read(path.name, enumerate(lines, 1), requests_max)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", field="trace") from error


def _read(name: str, lines: Iterator[tuple[int, bytes]], requests_max: int) -> Trace:
    first = next(lines, None)
    if first is None:
        raise InvalidInput(f"{name} is empty", field="trace")
    if b'"hash_ids"' in first[1]:
        block_tokens = MOONCAKE_BLOCK_TOKENS
        requests = _mooncake(name, _chained(first, lines))
    else:
        header = _decode(name, *first, _PdeltaHeader)
        block_tokens = header.block
        if block_tokens < 1 or block_tokens % DIGITS:
            raise InvalidInput(f"{name}: blocks of {block_tokens} tokens are not supported", field="trace")
        requests = _pdelta(name, lines, block_tokens)
    read: list[TraceRequest] = []
    for request in requests:
        if len(read) >= requests_max:
            break
        read.append(request)
    if not read:
        raise InvalidInput(f"{name} has no request", field="trace")
    return Trace(name, block_tokens, tuple(sorted(read, key=lambda request: request.at_s)))


def _mooncake(name: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[TraceRequest]:
    for number, line in lines:
        if not line.strip():
            continue
        said = _decode(name, number, line, _MooncakeLine)
        blocks = -(-said.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(said.hash_ids) != blocks:
            raise InvalidInput(
                f"{name} line {number}: {said.input_length} tokens are {blocks} blocks, not {len(said.hash_ids)}",
                field="trace",
            )
        yield _request(
            name, number, said.timestamp, said.input_length, said.output_length, tuple(said.hash_ids)
        )


def _pdelta(name: str, lines: Iterable[tuple[int, bytes]], block_tokens: int) -> Iterator[TraceRequest]:
    sessions: dict[str, tuple[int, ...]] = {}
    for number, line in lines:
        if not line.strip():
            continue
        at_ms, session, tokens_in, tokens_out, keep, new = _decode(
            name, number, line, tuple[float, str, int, int, int, list[int]]
        )
        before = sessions.get(session, ())
        if not 0 <= keep <= len(before):
            raise InvalidInput(
                f"{name} line {number}: session {session!r} has {len(before)} blocks, not {keep} to keep",
                field="trace",
            )
        blocks = (*before[:keep], *new)
        if len(blocks) > -(-tokens_in // block_tokens):
            raise InvalidInput(
                f"{name} line {number}: {tokens_in} tokens are not {len(blocks)} blocks", field="trace"
            )
        sessions[session] = blocks
        yield _request(name, number, at_ms, tokens_in, tokens_out, blocks)


def _request(
    name: str, number: int, at_ms: float, tokens_in: int, tokens_out: int, blocks: tuple[int, ...]
) -> TraceRequest:
    if tokens_in < 1 or tokens_out < 0 or at_ms < 0:
        raise InvalidInput(f"{name} line {number}: a length or a time that cannot be", field="trace")
    if any(not 0 <= block < BLOCK_IDS_MAX for block in blocks):
        raise InvalidInput(f"{name} line {number}: block ids are 0 to {BLOCK_IDS_MAX - 1}", field="trace")
    # A request without output is one that sampled a single token: an engine always does.
    return TraceRequest(at_ms / 1_000, tokens_in, max(1, tokens_out), blocks)


def _digits(number: int) -> array.array[int]:
    digits = []
    for _ in range(DIGITS):
        number, digit = divmod(number, 128)
        digits.append(digit)
    return array.array("I", digits)


def _decode(name: str, number: int, line: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except UNDECODABLE as error:
        raise InvalidInput(f"{name} line {number}: {error}", field="trace") from error


def _chained(first: tuple[int, bytes], rest: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield first
    yield from rest
