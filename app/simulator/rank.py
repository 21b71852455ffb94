"""One data-parallel rank of a simulated pod: an engine, its event stream, and the task that steps both in
time.

After each step the rank waits for the step's simulated duration, publishes what the step did, and hands
out the tokens, in that order: without a lag, the events of a step have left before its answer arrives. Sequence
numbers are the rank's own and start again at 0 when the engine restarts. The fault switches act on the way
out: what is dropped stays in the replay buffer, what is duplicated leaves twice, and with a lag everything
leaves later, in order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec

from app.errors import Overloaded, Unresponsive
from app.ingest.vllm import Stored, WireEvent, WireForm, encode_batch
from app.simulator.connector import BlockMetadata, Connector, EventHints
from app.simulator.engine import Engine, Output, Prompt, Step
from app.simulator.engine_settings import EngineSettings

OUTBOX_BATCHES_MAX = 10_000
RETRY_DELAY_S = 0.01  # when the sink has no room


class EventSink(Protocol):
    """Where batches go: a ZMQ publisher or HTTP."""

    def publish(self, seq: int, payload: bytes, *, copies: int = 1) -> None: ...

    def restart(self) -> None: ...

    def stop(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Faults:
    """Counted down as they strike; `lag_s` is real time and stays until it is changed."""

    drop_next: int = 0
    duplicate_next: int = 0
    lag_s: float = 0.0


@dataclasses.dataclass(slots=True)
class _Request:
    outputs: asyncio.Queue[Output | None]
    hint: BlockMetadata | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """`engine` made it: what a dead engine had not sent is lost."""

    engine: Engine
    due_s: float
    seq: int
    payload: bytes
    copies: int


class Rank:
    """`speed` is simulated seconds per second; infinite does not wait at all. `sink` None publishes nothing."""

    def __init__(
        self,
        dp_rank: int,
        settings: EngineSettings,
        sink: EventSink | None,
        *,
        form: WireForm,
        speed: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.dp_rank = dp_rank
        self.faults = Faults()
        self.next_seq = 0
        self.sink = sink
        self._settings = settings
        self._form = form
        self._speed = speed
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._requests_made = 0
        self._work = asyncio.Event()
        self._outbox: asyncio.Queue[_Batch] = asyncio.Queue(OUTBOX_BATCHES_MAX)
        self._tasks: list[asyncio.Task[None]] = []
        self._boot()

    def _boot(self) -> None:
        self.engine = Engine(self._settings)
        self.hints = EventHints(self._prefetch)
        settings = self._settings.connector
        self.connector = Connector(settings, backend=None if settings is None else self.hints)

    # -- life

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._step_forever()), asyncio.create_task(self._send_forever())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the tasks and every open request; the sink belongs to the caller."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_requests()

    def restart_in_place(self) -> None:
        """A new engine process behind the same endpoints: empty, from 0, and without a word about it."""
        self._fail_requests()
        self.next_seq = 0
        self._boot()
        if self.sink is not None:
            self.sink.restart()

    def _fail_requests(self) -> None:
        for request in self._requests.values():
            request.outputs.put_nowait(None)
        self._requests.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a fault of ours: nobody may wait for it."""
        if not task.cancelled() and task.exception() is not None:
            logging.getLogger(__name__).error("rank %d stopped", self.dp_rank, exc_info=task.exception())
            self._fail_requests()

    # -- requests

    async def generate(
        self, prompt: Prompt, *, hint: BlockMetadata | None = None
    ) -> AsyncGenerator[Output, None]:
        """Outputs as the steps give them; leaving early aborts the request. Unresponsive when the engine dies."""
        if hint is not None:
            self._load_hints(hint)
        self._requests_made += 1
        name = f"{self.dp_rank}-{self._requests_made}"
        self.engine.submit(name, prompt)
        request = self._requests[name] = _Request(asyncio.Queue(), hint)
        self._work.set()
        try:
            while True:
                output = await request.outputs.get()
                if output is None:
                    raise Unresponsive("the engine died before it had answered")
                yield output
                if output.finished:
                    return
        finally:
            if self._requests.pop(name, None) is not None:
                self.engine.abort(name)

    async def drained(self) -> None:
        """Return when everything published so far has left."""
        await self._outbox.join()

    # -- tasks

    async def _step_forever(self) -> None:
        while True:
            engine = self.engine
            step = engine.step()
            if step is None:
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(step.duration_s / self._speed)
            if engine is not self.engine:
                continue  # restarted meanwhile: this step never happened
            await self._publish(step)
            for output in step.outputs:
                request = self._requests.get(output.request)
                if request is not None:
                    request.outputs.put_nowait(output)
                    if output.finished:
                        del self._requests[output.request]

    async def _publish(self, step: Step) -> None:
        if not step.events or self.sink is None:
            return
        copies = 1
        if self.faults.drop_next:
            self.faults.drop_next -= 1
            copies = 0
        elif self.faults.duplicate_next:
            self.faults.duplicate_next -= 1
            copies = 2
        events = [
            self._annotated(event, cause) for event, cause in zip(step.events, step.causes, strict=True)
        ]
        payload = encode_batch(self._form, ts=self._clock(), events=events, dp_rank=self.dp_rank)
        due = asyncio.get_running_loop().time() + self.faults.lag_s
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        await self._outbox.put(_Batch(self.engine, due, seq, payload, copies))
        if not self.faults.lag_s:
            await self._outbox.join()

    async def _send_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._outbox.get()
            try:
                await asyncio.sleep(max(0.0, batch.due_s - loop.time()))
                await self._send(batch)
            finally:
                self._outbox.task_done()

    async def _send(self, batch: _Batch) -> None:
        while self.sink is not None and batch.engine is self.engine:
            try:
                self.sink.publish(batch.seq, batch.payload, copies=batch.copies)
            except Overloaded:
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                return

    # -- hints

    def _annotated(self, event: WireEvent, cause: str | None) -> WireEvent | msgspec.Raw:
        """The event with its request's metadata, in the forms that are maps."""
        request = self._requests.get(cause) if cause is not None else None
        if not isinstance(event, Stored) or request is None or request.hint is None:
            return event
        blocks = [block for block in event.block_hashes if isinstance(block, int)]
        for block in blocks:
            for layer in range(self.connector.settings.layers):
                self.connector.on_save_kv_layer(layer, block, request.hint)
        metadata = self.hints.take(blocks)
        if metadata is None or not self._form.value.is_map:
            return event
        batch: list[Any] = msgspec.msgpack.decode(encode_batch(self._form, ts=0.0, events=[event]))
        return msgspec.Raw(msgspec.msgpack.encode({**batch[1][0], "metadata": metadata.as_fields()}))

    def _load_hints(self, hint: BlockMetadata) -> None:
        """Before a prompt is looked up: what is known of its prefix may bring blocks closer."""
        known = self.connector.on_load_kv_layer(0, hint) or ()
        named = [fields for fields in known if isinstance(fields.get("block"), int)]
        self.connector.prefetch_blocks((_priority(fields), fields["block"]) for fields in named)

    def _prefetch(self, block: int) -> bool:
        return self.engine.offload is not None and self.engine.offload.prefetch(block)


def _priority(hint: dict[str, Any]) -> float:
    """What it says, else the beginning of a prompt first: nothing behind a hole is of use."""
    for name, sign in (("priority", 1.0), ("tokens", -1.0)):
        value = hint.get(name)
        if isinstance(value, int | float):
            return sign * value
    return 0.0
