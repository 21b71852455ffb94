"""A capture as a sequence of steps: what the engines said, what was asked, what they answered.

Two forms are read (docs/captures.md describes both line by line):

    workload   one file, one line a step, in the order in which the recorder saw them
    recording  a folder: `pub*.jsonl` holds the frames of each rank, `requests.jsonl` the rest; merged by time

Frames keep their recorded sequence numbers and payload bytes. What the recorder could not know is worked
out here once, from the frames: block size, adapters, whether the release publishes cache salts at all, and
which rank of a data-parallel pod answered a request. Requests whose time in the engine overlaps are
marked: from outside nobody can tell which of the frames in between the engine had acted on. A line that
cannot be read is refused by file and line number; a capture is never used in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from app.errors import InvalidInput
from app.events import BlockStored
from app.ingest.vllm import decode_batch


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One message of one rank: publish it now."""

    pod: str
    dp_rank: int
    topic: str
    seq: int
    payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Request number `request` leaves for its pod: ask the indexer now."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The engine has answered: its frames from here on cannot have served the request."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    """The pod's prefix cache was cleared; the pod will say so with its next frame."""

    pod: str


Step = Frame | Send | Answer | Reset


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What was asked of `pod`, and `cached_tokens`, the engine's own count (None: it did not report one)."""

    pod: str
    token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    lora: str | None = None
    cached_tokens: int | None = None
    dp_rank: int | None = None  # None: the capture does not say which rank answered
    concurrent: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """`ranks` are those that speak, by pod. `salts_published`: a match can tell salted prompts apart."""

    name: str
    model: str
    block_size: int
    ranks: dict[str, tuple[int, ...]]
    requests: tuple[Request, ...]
    steps: tuple[Step, ...]
    salts_published: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRun:
    """The part of a stored event that says which prompts it can come from."""

    token_ids: bytes  # uint32, little-endian
    block_size: int
    lora: str | None
    has_extra_keys: bool


def build_capture(
    name: str, steps: Sequence[Step], requests: Sequence[Request], models: Sequence[str | None]
) -> Capture:
    """`models[i]` is the model name that request i gave, the name of an adapter included."""
    stored = {position: _stored_runs(step) for position, step in enumerate(steps) if isinstance(step, Frame)}
    runs = [run for of_frame in stored.values() for run in of_frame]
    if not runs:
        raise InvalidInput(f"{name}: no frame stores a block, so there is nothing to check")
    adapters = {run.lora for run in runs if run.lora is not None}
    base_models = [model for model in models if model is not None and model not in adapters]
    ranks = _ranks_by_pod(steps)
    concurrent = _concurrent_requests(steps, requests)
    answered_by = _ranks_by_request(steps, stored, requests, ranks)
    completed = tuple(
        dataclasses.replace(
            request,
            lora=request.lora if request.lora is not None else (model if model in adapters else None),
            dp_rank=request.dp_rank if request.dp_rank is not None else answered_by.get(position),
            concurrent=position in concurrent,
        )
        for position, (request, model) in enumerate(zip(requests, models, strict=True))
    )
    return Capture(
        name=name,
        model=base_models[0] if base_models else name,
        block_size=max(run.block_size for run in runs),
        ranks=ranks,
        requests=completed,
        steps=tuple(steps),
        salts_published=any(run.has_extra_keys for run in runs),
    )


def _stored_runs(frame: Frame) -> tuple[StoredRun, ...]:
    return tuple(
        StoredRun(event.token_ids, event.block_size, event.lora, any(event.extra_keys or ()))
        for event in decode_batch(frame.payload).events
        if isinstance(event, BlockStored) and event.token_ids
    )


def _ranks_by_pod(steps: Iterable[Step]) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for step in steps:
        if isinstance(step, Frame):
            found.setdefault(step.pod, set()).add(step.dp_rank)
    return {pod: tuple(sorted(ranks)) for pod, ranks in found.items()}


def _concurrent_requests(steps: Iterable[Step], requests: Sequence[Request]) -> set[int]:
    """Requests that were in one pod together with another."""
    running: dict[str, set[int]] = {}
    found: set[int] = set()
    for step in steps:
        if isinstance(step, Send):
            together = running.setdefault(requests[step.request].pod, set())
            together.add(step.request)
            if len(together) > 1:
                found |= together
        elif isinstance(step, Answer):
            running[requests[step.request].pod].discard(step.request)
    return found


def _ranks_by_request(
    steps: Sequence[Step],
    stored: dict[int, tuple[StoredRun, ...]],
    requests: Sequence[Request],
    ranks: dict[str, tuple[int, ...]],
) -> dict[int, int]:
    """The rank that stored a part of the request's own text after it was sent and before the next one was.

    A request that made its rank store nothing stays unknown, unless its pod has one rank only.
    """
    found: dict[int, int] = {}
    last_sent: dict[str, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Send):
            pod = requests[step.request].pod
            last_sent[pod] = step.request
            if len(ranks.get(pod, ())) == 1:
                found[step.request] = ranks[pod][0]
        elif isinstance(step, Frame):
            sent = last_sent.get(step.pod)
            if sent is not None and sent not in found and _stores_of(requests[sent], stored[position]):
                found[sent] = step.dp_rank
    return found


def _stores_of(request: Request, runs: Iterable[StoredRun]) -> bool:
    text = b"".join(token.to_bytes(4, "little") for token in (*request.token_ids, *request.output_token_ids))
    return any(
        text[start : start + len(run.token_ids)] == run.token_ids
        for run in runs
        for start in range(0, len(text), run.block_size * 4)
    )
