"""What the registry leaves behind of a source that is gone: nothing."""

from __future__ import annotations

from app.config import Settings
from app.index.prefix_index import PrefixIndex
from app.live import LiveFeed
from app.pods import PodSpec
from app.registry import Registry
from app.service import index_limits


def test_a_source_that_is_gone_is_in_no_book() -> None:
    settings = Settings()
    live = LiveFeed(subscribers_max=1, queue_events_max=1)
    registry = Registry(settings, PrefixIndex(index_limits(settings)), live, lambda: 1.0)
    registry.register(PodSpec("a", "m", dp_size=3))
    ids = [registry.source("a", dp_rank).index_id for dp_rank in range(3)]
    assert all(registry.answers.hear(index_id, 1.0) for index_id in ids)
    registry.register(PodSpec("a", "m", dp_size=2))
    assert [registry.answers.hear(index_id, 2.0) for index_id in ids] == [True, True, False]
    registry.drop("a")
    assert not any(registry.answers.hear(index_id, 3.0) for index_id in ids)
    assert [registry.by_index_id(index_id) for index_id in ids] == [None] * 3
