"""A simulated pod: its ranks, their sockets, and what an operator can do to it.

A crash closes the sockets with frames still in them and fails every open request; a start after it is a
new process on the same endpoints: an empty cache, sequence numbers from 0, an empty replay buffer. A
restart in place does the same without the sockets ever closing. Neither tells the indexer anything, as
engines do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence

from app.errors import InvalidInput, InvalidSettings, Unresponsive
from app.ingest.vllm import WireForm
from app.simulator.connector import BlockMetadata
from app.simulator.engine import Output, Prompt
from app.simulator.engine_settings import EngineSettings
from app.simulator.http_sink import HttpSink
from app.simulator.publisher import Publisher, PublisherSettings, open_publishers, port_of
from app.simulator.rank import EventSink, Rank

FORMS_WITH_REPLAY_TOPIC = frozenset(
    {
        WireForm.MAPS_0_26,
        WireForm.MAPS_0_29,
        WireForm.MAPS_0_30,
        WireForm.MAPS_0_33,
        WireForm.SGLANG_MAPS,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class PodSettings:
    """`events_url` publishes by HTTP to that indexer instead of ZMQ. Port 0 takes a free one.

    Rank r listens at `zmq_port + r` and `replay_port + r`. `max_tokens_total` bounds prompt and output of a request.
    `advertised_host` is what an indexer is told instead of `host`, where that is 0.0.0.0.
    """

    name: str = "pod-0"
    model: str = "simulated"
    adapters: tuple[str, ...] = ()
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    form: WireForm = WireForm.MAPS_0_33
    dp_size: int = 1
    speed: float = 1.0
    host: str = "127.0.0.1"
    advertised_host: str | None = None
    zmq_port: int = 0
    replay_port: int = 0
    topic: str = ""
    buffer_steps: int = 10_000
    events_url: str | None = None
    events_api_key: str | None = None
    max_tokens_total: int = 131_072


class Pod:
    """Start it on an event loop; not thread-safe."""

    def __init__(self, settings: PodSettings | None = None) -> None:
        self.settings = settings or PodSettings()
        if self.settings.dp_size < 1 or self.settings.speed <= 0:
            raise InvalidSettings("dp_size is at least 1 and speed is above 0")
        self.ranks: list[Rank] = []
        self.publishers: list[Publisher] = []
        self._http_sinks: list[HttpSink] = []
        self._next_rank = 0
        self.is_up = False

    # -- life

    async def start(self) -> None:
        """Open the sockets, on the endpoints of the last time if there was one, and begin to step."""
        its = self.settings
        sinks = self._open_http_sinks() if its.events_url is not None else self._open_publishers()
        self.ranks = [
            Rank(dp_rank, its.engine, sink, form=its.form, speed=its.speed)
            for dp_rank, sink in enumerate(sinks)
        ]
        for rank in self.ranks:
            rank.start()
        self.is_up = True

    async def stop(self) -> None:
        """The same as a crash: engines do not say good-bye."""
        self.is_up = False
        for rank in self.ranks:
            await rank.stop()
        for publisher in self.publishers:
            publisher.stop()
        for sink in self._http_sinks:
            sink.stop()
            await sink.closed()
        self._http_sinks = []

    crash = stop

    def restart_in_place(self) -> None:
        for rank in self.ranks:
            rank.restart_in_place()

    # -- requests

    def generate(
        self, prompt: Prompt, *, dp_rank: int | None = None, hint: BlockMetadata | None = None
    ) -> AsyncGenerator[Output, None]:
        """On the rank that was asked for, else on each in turn."""
        if not self.is_up:
            raise Unresponsive(f"pod {self.settings.name!r} is down")
        if dp_rank is not None and not 0 <= dp_rank < len(self.ranks):
            raise InvalidInput(f"there is no rank {dp_rank}", field="dp_rank")
        if len(prompt.token_ids) + prompt.max_tokens > self.settings.max_tokens_total:
            raise InvalidInput(
                f"prompt and max_tokens are more than {self.settings.max_tokens_total} tokens",
                field="max_tokens",
            )
        if dp_rank is None:
            dp_rank = self._next_rank
            self._next_rank = (self._next_rank + 1) % len(self.ranks)
        return self.ranks[dp_rank].generate(prompt, hint=hint)

    def reset_prefix_cache(self) -> bool:
        """True when every rank was idle; the others are reset all the same, as engines do it."""
        done = [rank.engine.reset_prefix_cache() for rank in self.ranks]
        return all(done)

    # -- what an indexer needs to know

    @property
    def zmq_endpoint(self) -> str | None:
        """Of rank 0; rank r is at port + r."""
        return self.publishers[0].endpoint if self.publishers else None

    @property
    def replay_endpoint(self) -> str | None:
        return self.publishers[0].replay_endpoint if self.publishers else None

    # -- sockets

    def _open_http_sinks(self) -> Sequence[EventSink]:
        its = self.settings
        assert its.events_url is not None, "only called with an indexer to post to"
        self._http_sinks = [
            HttpSink(its.events_url, its.name, its.model, dp_rank, api_key=its.events_api_key)
            for dp_rank in range(its.dp_size)
        ]
        return self._http_sinks

    def _open_publishers(self) -> Sequence[EventSink]:
        if self.publishers:
            ports = (port_of(self.publishers[0].endpoint), port_of(self.publishers[0].replay_endpoint or ""))
            self.publishers = self._publishers(*ports)
        else:
            self.publishers = self._publishers(self.settings.zmq_port, self.settings.replay_port)
        return self.publishers

    def _publishers(self, port: int, replay_port: int) -> list[Publisher]:
        return open_publishers(
            PublisherSettings(
                topic=self.settings.topic,
                buffer_steps=self.settings.buffer_steps,
                replay_topic_frame=self.settings.form in FORMS_WITH_REPLAY_TOPIC,
            ),
            host=self.settings.host,
            port=port,
            replay_port=replay_port,
            dp_size=self.settings.dp_size,
        )
