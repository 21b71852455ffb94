"""A URL of Redis that cannot be used is told without a word of it: there is a password in it."""

from __future__ import annotations

import pytest

from app.errors import InvalidSettings
from app.replication.redis_log import RedisLog

SECRETS = ("s3cret", "4711", "hidden")


@pytest.mark.parametrize("cluster", [False, True], ids=["alone", "cluster"])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret/hidden@host:6379/0",
        "redis://user:s3cret#hidden@host:6379/0",
        "rediss://user:s3cret?hidden@host:6379/0",
        "redis://:4711/hidden@host:6379/0",  # the port 4711 of this machine, for whoever does not look further
        "redis://user:4711#hidden@host:6379",
        "redis://user:4711?hidden@host:6379",
        "redis://:hidden@host:s3cret",
        "redis://:hidden@host:4711000",
        "redis://:hidden@[host:6379",
        "redis://:hidden@host:6379/0?socket_timeout=s3cret",
        "http://:hidden@host:6379/0",
        "s3cret",
    ],
)
def test_a_url_that_cannot_be_used_is_not_repeated(url: str, cluster: bool) -> None:
    with pytest.raises(InvalidSettings, match="cannot be used") as caught:
        RedisLog(url, cluster=cluster, namespace="test", timeout_s=1.0)
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "a traceback shows what the client says"
    )
    assert not any(secret in str(caught.value) for secret in SECRETS), str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "redis://:s3cret%2Fhid%40den@host:6379/0",
        "rediss://user:p@ss@host",
        "redis://host/0?password=p@ss/w@rd",
        "unix:///run/redis@one.sock?password=p@ss",
    ],
)
def test_a_url_that_can_be_used_is(url: str) -> None:
    RedisLog(url, cluster=False, namespace="test", timeout_s=1.0)
