"""Pods as the operator writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import InvalidInput
from app.ingest.registry import PODS_FILE_BYTES_MAX, parse_pod, parse_pods, read_pods_file
from app.pods import PodSpec


def test_every_key() -> None:
    assert parse_pod(
        "a=tcp://h:5557, model=org/m,replay=tcp://h:5560,block_size=16,dp_size=2,lora=l,topic=kv@a@m"
    ) == PodSpec(
        "a",
        "org/m",
        lora="l",
        block_size=16,
        zmq_endpoint="tcp://h:5557",
        replay_endpoint="tcp://h:5560",
        topic="kv@a@m",
        dp_size=2,
    )


def test_the_shortest() -> None:
    assert parse_pod("a=tcp://h:1,model=m") == PodSpec("a", "m", zmq_endpoint="tcp://h:1")
    assert parse_pod("a=,model=m") == PodSpec("a", "m")


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("", "name", "does not begin"),
        ("tcp://h:1", "name", "does not begin"),
        ("=tcp://h:1,model=m", "name", "does not begin"),
        ("a=tcp://h:1", "a.model", "no model"),
        ("a=tcp://h:1,model=", "a.model", "no value"),
        ("a=tcp://h:1,model", "a.model", "no value"),
        ("a=tcp://h:1,model=m,model=n", "a.model", "twice"),
        ("a=tcp://h:1,model=m,modle=n", "a.modle", "'modle' is none of"),
        ("a=tcp://h:1,model=m,", "a.", "'' is none of"),
        ("a=tcp://h:1,model=m,block_size=0", "a.block_size", "whole number"),
        ("a=tcp://h:1,model=m,block_size=-1", "a.block_size", "whole number"),
        ("a=tcp://h:1,model=m,dp_size=²", "a.dp_size", "whole number"),
        ("a=tcp://h:1,model=m,dp_size=99999999999999", "a.dp_size", "whole number"),
        ("a=tcp://h,model=m", "a.zmq_endpoint", "no port"),
        ("a=tcp://h:1,model=m,replay=tcp://*:2", "a.replay_endpoint", "names no host"),
        ("a=tcp://h:1,model=m,replay=tcp://h:2,dp_size=2", "a.replay_endpoint", "overlap"),
        ("a=,model=m,replay=tcp://h:2", "a.replay", "without a stream"),
    ],
)
def test_faults_are_named(text: str, field: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_pod(text)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_a_file_has_a_line_a_pod(tmp_path: Path) -> None:
    path = tmp_path / "pods"
    path.write_text("# two pods\n\na=tcp://h:1,model=m\n  b=tcp://h:2,model=m\n", encoding="utf-8")
    assert [spec.name for spec in read_pods_file(path)] == ["a", "b"]


def test_faults_of_a_file_name_the_line() -> None:
    with pytest.raises(InvalidInput, match="pods, line 2: pod 'b' has no model"):
        parse_pods("a=tcp://h:1,model=m\nb=tcp://h:1", origin="pods")
    with pytest.raises(InvalidInput, match="pods, line 3: pod 'a' is there twice"):
        parse_pods("a=tcp://h:1,model=m\n\na=tcp://h:2,model=m", origin="pods")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_pods_file(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        read_pods_file(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (PODS_FILE_BYTES_MAX + 1))
    with pytest.raises(InvalidInput, match="is larger than"):
        read_pods_file(tmp_path / "large")
