"""Settings that cannot be together, or not on this machine: each stops the start with a sentence that names the fault."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import load_settings
from app.errors import InvalidSettings
from app.main import create_app

SECRET = "hunter2"


def refusal(**settings: Any) -> str:
    with pytest.raises(InvalidSettings) as refused:
        create_app(load_settings(**settings))
    return str(refused.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"redis_cluster": True}, "redis_cluster: there is no redis_url beside it"),
        ({"redis_namespace": "east"}, "redis_namespace: there is no redis_url beside it"),
        ({"redis_partitions": 4}, "redis_partitions: there is no redis_url beside it"),
        (
            {"discovery_dns_server": "10.0.0.1:53"},
            "discovery_dns_server: there is no discovery_dns beside it",
        ),
        (
            {"discovery_kubernetes_namespace": "a", "discovery_dns": "b"},
            "discovery_kubernetes_namespace: there is no discovery_kubernetes beside it",
        ),
    ],
)
def test_settings_without_what_they_belong_to(settings: dict[str, Any], said: str) -> None:
    assert refusal(**settings) == said


def test_a_default_that_is_said_is_no_contradiction() -> None:
    create_app(load_settings(redis_namespace="kvindexer", redis_partitions=8, redis_cluster=False))


def test_a_folder_in_which_nothing_can_be_written() -> None:
    assert "nothing can be written in its folder" in refusal(snapshot_path="/proc/snapshot")
    assert "must be a file in a folder that is there" in refusal(snapshot_path="/nowhere/snapshot")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"redis://:{SECRET}@host:port/0", "its port is no number"),
        (f"redis://:{SECRET}/x@host:6379/0", "in a password, / is written %2F"),
        (f"redis://:{SECRET}@host:70000/0", "its port is no number from 0 to 65535"),
        (f"http://:{SECRET}@host:6379/0", "must specify one of the following schemes"),
        ("redis", "must specify one of the following schemes (redis://"),
    ],
)
def test_a_redis_url_that_cannot_be(url: str, said: str) -> None:
    refused = refusal(redis_url=url)
    assert refused.startswith("KVINDEXER_REDIS_URL cannot be used: ")
    assert said in refused
    assert SECRET not in refused
