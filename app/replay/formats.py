"""Reads both forms of a capture (docs/captures.md) into steps.

Lines are decoded by their `kind` into typed structs: a missing field, a wrong type or an unknown kind is
refused with file and line number; unknown fields are left alone, since recorders add what they find
useful.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from app.errors import UNDECODABLE, InvalidInput
from app.replay.capture import Answer, Capture, Frame, Request, Reset, Send, Step, build_capture

WORKLOAD_FILE = "workload.jsonl"
REQUESTS_FILE = "requests.jsonl"
RECORDED_POD = "pod"  # a recording is of one pod and does not name it


def load_capture(path: Path) -> Capture:
    """A workload file, a folder with `workload.jsonl`, or a folder with `pub*.jsonl` and `requests.jsonl`."""
    try:
        if path.is_file():
            return _load_workload(path, path.stem)
        if (path / WORKLOAD_FILE).is_file():
            return _load_workload(path / WORKLOAD_FILE, path.name)
        if (path / REQUESTS_FILE).is_file():
            return _load_recording(path)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", field=str(path)) from error
    raise InvalidInput(
        f"{path} is neither a workload file nor a folder with {WORKLOAD_FILE} or {REQUESTS_FILE}",
        field=str(path),
    )


# -- the workload form


class _Meta(msgspec.Struct, tag_field="kind", tag="meta"):
    model: str | None = None


class _Event(msgspec.Struct, tag_field="kind", tag="event"):
    pod: str
    frames: list[str]
    dp_rank: int = 0


class _Send(msgspec.Struct, tag_field="kind", tag="send"):
    pod: str
    i: int


class _Answer(msgspec.Struct, tag_field="kind", tag="request"):
    pod: str
    i: int
    prompt_token_ids: list[int]
    cached_tokens: int | None = None
    cache_salt: str | None = None
    lora: str | None = None
    model: str | None = None
    dp_rank: int | None = None
    output_token_ids: list[int] | None = None


class _Reset(msgspec.Struct, tag_field="kind", tag="reset"):
    pod: str
    ok: bool = True


_WorkloadLine = _Meta | _Event | _Send | _Answer | _Reset


def _load_workload(path: Path, name: str) -> Capture:
    lines: list[tuple[str, Any]] = list(_lines(path, _WorkloadLine))
    answers = {line.i: line for _, line in lines if isinstance(line, _Answer)}
    sent = [line.i for _, line in lines if isinstance(line, _Send) and line.i in answers]
    numbers = {i: position for position, i in enumerate(sent)}
    if len(numbers) != len(sent):
        raise InvalidInput(f"{path}: two `send` lines carry the same number", field=str(path))
    steps: list[Step] = []
    model: str | None = None
    for place, line in lines:
        match line:
            case _Meta():
                model = line.model
            case _Event():
                steps.append(_frame(place, line.frames, line.pod, line.dp_rank))
            case _Send() if line.i in numbers:
                steps.append(Send(numbers[line.i]))
            case _Answer():
                if line.i not in numbers:
                    raise InvalidInput(f"{place}: request {line.i} has no `send` line", field=place)
                steps.append(Answer(numbers[line.i]))
            case _Reset() if line.ok:
                steps.append(Reset(line.pod))
    requests = [
        Request(
            pod=line.pod,
            token_ids=line.prompt_token_ids,
            output_token_ids=line.output_token_ids or (),
            cache_salt=line.cache_salt,
            lora=line.lora,
            cached_tokens=line.cached_tokens,
            dp_rank=line.dp_rank,
        )
        for line in (answers[i] for i in sent)
    ]
    return build_capture(name, steps, requests, [answers[i].model or model for i in sent])


# -- the recording form


class _PublishedFrames(msgspec.Struct):
    t: float
    frames: list[str]


class _Usage(msgspec.Struct):
    cached_tokens: int | None = None


class _Section(msgspec.Struct, tag_field="kind", tag="section"):
    t: float


class _Tokenize(msgspec.Struct, tag_field="kind", tag="tokenize"):
    t: float


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    cache_salt: str | None = None


class _Start(msgspec.Struct, tag_field="kind", tag="request_start"):
    t: float
    prompt_token_ids: list[int]
    model: str | None = None
    extra: _Body = _Body()


class _Response(msgspec.Struct, tag_field="kind", tag="response"):
    t: float
    prompt_tokens_details: _Usage | None = None
    output_token_ids: list[int] | None = None


class _TextUsage(msgspec.Struct):
    prompt_tokens_details: _Usage | None = None


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _WholeResponse(msgspec.Struct):
    choices: list[_Choice]
    usage: _TextUsage
    prompt_token_ids: list[int] | None = None


class _TextRequest(msgspec.Struct, tag_field="kind", tag="text_request"):
    t: float
    body: _Body
    response: _WholeResponse


class _ChatRequest(msgspec.Struct, tag_field="kind", tag="chat_request"):
    t: float
    body: _Body
    response: _WholeResponse


class _ResetResult(msgspec.Struct):
    success: bool


class _ResetCall(msgspec.Struct, tag_field="kind", tag="reset_prefix_cache"):
    t: float
    status: int
    response: str

    @property
    def done(self) -> bool:
        """An engine refuses while blocks are in use, and then says nothing later."""
        return self.status == 200 and msgspec.json.decode(self.response, type=_ResetResult).success


_RecordingLine = _Section | _Tokenize | _Start | _Response | _TextRequest | _ChatRequest | _ResetCall


@dataclasses.dataclass(slots=True)
class _Timeline:
    """Requests of a recording in the making. Responses carry no number: they answer the oldest open request,
    and requests that were open together all stay open until the last of them is answered."""

    steps: list[tuple[float, Step]]
    requests: list[Request]
    models: list[str | None]
    open: list[int]
    answered: list[_Response]

    def start(self, t: float, request: Request, model: str | None) -> int:
        self.requests.append(request)
        self.models.append(model)
        number = len(self.requests) - 1
        self.steps.append((t, Send(number)))
        return number

    def answer(self, place: str, line: _Response) -> None:
        self.answered.append(line)
        if len(self.answered) > len(self.open):
            raise InvalidInput(f"{place}: a response without a request", field=place)
        if len(self.answered) < len(self.open):
            return
        for number, response in zip(self.open, self.answered, strict=True):
            usage = response.prompt_tokens_details
            self.requests[number] = dataclasses.replace(
                self.requests[number],
                cached_tokens=usage.cached_tokens if usage is not None else None,
                output_token_ids=response.output_token_ids or (),
            )
            self.steps.append((line.t, Answer(number)))
        self.open.clear()
        self.answered.clear()


def _load_recording(folder: Path) -> Capture:
    timeline = _Timeline([], [], [], [], [])
    before = 0.0
    for place, line in _lines(folder / REQUESTS_FILE, _RecordingLine):
        match line:
            case _Start():
                request = Request(RECORDED_POD, line.prompt_token_ids, cache_salt=line.extra.cache_salt)
                timeline.open.append(timeline.start(line.t, request, line.model))
            case _Response():
                timeline.answer(place, line)
            case _TextRequest() | _ChatRequest():
                # The line was written when the answer was there; the request left after the line before it.
                number = timeline.start(before, _whole_request(place, line), line.body.model)
                timeline.steps.append((line.t, Answer(number)))
            case _ResetCall() if line.done:
                timeline.steps.append((line.t, Reset(RECORDED_POD)))
        before = line.t
    frames = [
        (line.t, _frame(place, line.frames, RECORDED_POD, dp_rank))
        for dp_rank, path in _published_files(folder)
        for place, line in _lines(path, _PublishedFrames)
    ]
    # Stable: at one and the same instant the request side goes first, so it is judged without the frame.
    merged = sorted([*timeline.steps, *frames], key=lambda timed: timed[0])
    return build_capture(folder.name, [step for _, step in merged], timeline.requests, timeline.models)


def _whole_request(place: str, line: _TextRequest | _ChatRequest) -> Request:
    """Text or chat: the engine reports the tokens it made of it when asked to (`return_token_ids`)."""
    answer, choice = line.response, line.response.choices[0] if line.response.choices else _Choice()
    token_ids = answer.prompt_token_ids or choice.prompt_token_ids
    if token_ids is None:
        raise InvalidInput(f"{place}: the response has no prompt_token_ids", field=place)
    details = answer.usage.prompt_tokens_details
    return Request(
        RECORDED_POD,
        token_ids,
        output_token_ids=choice.token_ids or (),
        cache_salt=line.body.cache_salt,
        cached_tokens=details.cached_tokens if details is not None else None,
    )


def _published_files(folder: Path) -> list[tuple[int, Path]]:
    found = [
        (int(named.group(1) or 0), path)
        for path in sorted(folder.iterdir())
        if (named := re.fullmatch(r"pub(?:_rank(\d+))?\.jsonl", path.name))
    ]
    if not found:
        raise InvalidInput(f"{folder} has no pub*.jsonl", field=str(folder))
    return found


# -- lines and frames


def _lines(path: Path, kind: Any) -> Iterator[tuple[str, Any]]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                yield place, decoder.decode(line)
            except UNDECODABLE as error:
                raise InvalidInput(f"{place}: {error}", field=place) from error


def _frame(place: str, frames: list[str], pod: str, dp_rank: int) -> Frame:
    try:
        topic, seq, payload = (base64.b64decode(frame, validate=True) for frame in frames)
        if len(seq) != 8:
            raise InvalidInput(f"{place}: a sequence number has 8 bytes, not {len(seq)}", field=place)
        return Frame(pod, dp_rank, topic.decode(), int.from_bytes(seq, "big"), payload)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{place}: not three frames in base64: {error}", field=place) from error
