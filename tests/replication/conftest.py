"""What tests with a real Redis share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replication.redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server
