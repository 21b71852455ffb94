"""Settings that cannot be together, or not on this machine: each stops the start with a sentence that names the fault."""

from __future__ import annotations

from pathlib import Path
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
        ({"redis_cluster": True}, "KVINDEXER_REDIS_CLUSTER: there is no KVINDEXER_REDIS_URL beside it"),
        ({"redis_namespace": "east"}, "KVINDEXER_REDIS_NAMESPACE: there is no KVINDEXER_REDIS_URL beside it"),
        ({"redis_partitions": 4}, "KVINDEXER_REDIS_PARTITIONS: there is no KVINDEXER_REDIS_URL beside it"),
        (
            {"discovery_dns_server": "10.0.0.1:53"},
            "KVINDEXER_DISCOVERY_DNS_SERVER: there is no KVINDEXER_DISCOVERY_DNS beside it",
        ),
        (
            {"discovery_kubernetes_namespace": "a", "discovery_dns": "b"},
            "KVINDEXER_DISCOVERY_KUBERNETES_NAMESPACE: there is no KVINDEXER_DISCOVERY_KUBERNETES beside it",
        ),
    ],
)
def test_settings_without_what_they_belong_to(settings: dict[str, Any], said: str) -> None:
    assert refusal(**settings) == said


def test_a_default_that_is_said_is_no_contradiction() -> None:
    create_app(load_settings(redis_namespace="kvindexer", redis_partitions=8, redis_cluster=False))


def test_a_folder_in_which_nothing_can_be_written() -> None:
    said = "KVINDEXER_SNAPSHOT_PATH='/proc/snapshot': nothing can be written in its folder: "
    assert refusal(snapshot_path="/proc/snapshot").startswith(said)
    said = "KVINDEXER_SNAPSHOT_PATH='/nowhere/snapshot': must be a file in a folder that is there"
    assert refusal(snapshot_path="/nowhere/snapshot") == said


def test_pods_that_cannot_be_are_refused_by_the_name_of_their_setting(tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text("a=,model=m\nfoo\n")
    said = "'foo' does not begin with name=tcp://host:port"
    assert refusal(pods=("foo",)) == f"KVINDEXER_PODS: {said}"
    assert refusal(pods_file=str(path)) == f"KVINDEXER_PODS_FILE: {path}, line 2: {said}"


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
