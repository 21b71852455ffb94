"""What the registry says of a source at its beginning, and what it leaves behind of one that is gone: nothing."""

from __future__ import annotations

import pytest

from app.config import Settings
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec, SourceState
from app.service import index_limits
from app.service.live import LiveFeed
from app.service.registry import Registry


def empty(live: LiveFeed | None = None) -> Registry:
    settings = Settings()
    live = live or LiveFeed(subscribers_max=1, queue_events_max=1)
    return Registry(settings, PrefixIndex(index_limits(settings)), live, lambda: 1.0)


def test_a_source_that_is_gone_is_in_no_book() -> None:
    registry = empty()
    registry.register(PodSpec("a", "m", dp_size=3))
    ids = [registry.source("a", dp_rank).index_id for dp_rank in range(3)]
    assert all(registry.answers.hear(index_id, 1.0) for index_id in ids)
    registry.register(PodSpec("a", "m", dp_size=2))
    assert [registry.answers.hear(index_id, 2.0) for index_id in ids] == [True, True, False]
    registry.drop("a")
    assert not any(registry.answers.hear(index_id, 3.0) for index_id in ids)
    assert [registry.by_index_id(index_id) for index_id in ids] == [None] * 3


def test_a_source_that_was_never_live_is_not_said_to_have_been(caplog: pytest.LogCaptureFixture) -> None:
    registry = empty()
    registry.register(PodSpec("a", "m", zmq_endpoint="tcp://127.0.0.1:5557"))
    source = registry.source("a", 0)
    registry.set_stream(source, SourceState.DOWN, "connecting")
    registry.set_stream(source, SourceState.LIVE, "the stream is whole")
    registry.set_stream(source, SourceState.DOWN, "the connection ended")
    changes = [(vars(line)["from"], vars(line)["to"]) for line in caplog.records]
    assert changes == [("new", "down"), ("live", "down")], "what is fine is no warning"
    assert "is down (was new): connecting" in caplog.text


def test_a_source_that_posted_was_live_before_its_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was ever told of its stream, which it has not."""
    registry = empty()
    registry.register(PodSpec("a", "m"))
    source = registry.source("a", 0)
    registry.hear(source)
    registry.set_stream(source, SourceState.DOWN, "silent")
    assert [vars(line)["from"] for line in caplog.records] == ["live"]


def test_the_live_feed_is_told_the_same_as_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveFeed(subscribers_max=1, queue_events_max=1)
    told: list[str] = []
    monkeypatch.setattr(live, "tell", lambda _kind, **fields: told.append(fields["state_before"]))
    registry = empty(live)
    registry.register(PodSpec("a", "m", zmq_endpoint="tcp://127.0.0.1:5557"))
    live.subscribe()
    source = registry.source("a", 0)
    registry.set_stream(source, SourceState.DOWN, "connecting")
    registry.set_stream(source, SourceState.LIVE, "the stream is whole")
    assert told == ["new", "down"]
