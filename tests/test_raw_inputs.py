"""Raw bytes into everything that is read from outside, beside the native decoders (test_raw_bytes.py) and what the
OpenAPI document allows (test_contract.py): heads and targets of requests, ZMQ frames, files, the log, snapshots.

Whatever comes is read, or refused with the error of its kind; never another exception, never a 5xx. Half of it is
something valid with a few bytes changed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.auth.api_keys import read_keys_file
from app.config import Settings
from app.errors import InvalidInput, SnapshotRefused, UnreadableBatch
from app.index.prefix_index import PrefixIndex
from app.ingest.registry import read_pods_file
from app.ingest.vllm import END_SEQ, Stored, WireForm, decode_batch, encode_batch
from app.ingest.wire_frames import parse_live, parse_replay_reply, parse_replay_request
from app.pods import PodSpec, SourceState
from app.replay.formats import load_capture
from app.replication.applier import Applier
from app.replication.entries import (
    AnyEntry,
    Followed,
    LeaseTaken,
    PodRegistered,
    Posted,
    SourceReported,
    SourceReset,
    UnknownEntry,
    encode_entry,
    encode_group,
)
from app.service import IndexerService, index_limits
from app.snapshots.frames import FrameDecoder, FrameEncoder
from tests.serving.test_serving import serving
from tests.snapshots.test_file import STATE
from tests.test_raw_bytes import EXAMPLES, damaged

CAPTURES = Path(__file__).parent / "data" / "captures"
PAYLOAD = encode_batch(
    WireForm.MAPS_0_33,
    ts=1.0,
    events=[Stored(block_hashes=[1, 2], token_ids=[1, 2, 3, 4], block_size=2, lora_name="l")],
)


# -- frames


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


FRAMES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"", b"topic", seq(0), seq(5), seq(END_SEQ), seq(2**63), PAYLOAD, b"\0" * 7, b"\xff" * 9]
        ),
        st.binary(max_size=20),
        damaged([PAYLOAD]),
    ),
    max_size=6,
)


@settings(max_examples=EXAMPLES * 3, deadline=None)
@example([])
@given(FRAMES)
def test_zmq_frames(frames: list[bytes]) -> None:
    """Of a live message, a reply, a request; with what is in them."""
    readers: list[Callable[[list[bytes]], Any]] = [parse_live, parse_replay_reply, parse_replay_request]
    for read in readers:
        with contextlib.suppress(UnreadableBatch):
            message = read(frames)
            if read is not parse_replay_request:
                decode_batch(message.payload)


# -- files


def check_file(content: bytes, read: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        with contextlib.suppress(InvalidInput):
            read(path)


PODS = (
    b"# ours\n\npod-a=tcp://10.0.0.7:5557,model=m,replay=tcp://10.0.0.7:6557,block_size=16,dp_size=2\n"
    b"pod-b=,model=m,metrics=http://10.0.0.8:8000/metrics,lora=l,topic=kv\n"
)
KEYS = b"# keys\nkey-of-a-router-0123456789:read\nkey-of-an-engine-0123456789:write\n"


@settings(max_examples=EXAMPLES * 3, deadline=None)
@given(st.one_of(damaged([PODS]), st.binary(max_size=100)))
def test_pods_file(content: bytes) -> None:
    check_file(content, read_pods_file)


@settings(max_examples=EXAMPLES * 3, deadline=None)
@given(st.one_of(damaged([KEYS]), st.binary(max_size=100)))
def test_keys_file(content: bytes) -> None:
    check_file(content, read_keys_file)


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in objects)


def beginning(path: Path, count: int = 12) -> bytes:
    with path.open("rb") as file:
        return b"".join(line for line, _ in zip(file, range(count), strict=False))


@pytest.mark.parametrize("name", ["v0.32.0-workload", "core/v0.23.0.jsonl"])
def test_replay_captures(name: str, tmp_path: Path) -> None:
    """One file of it at a time is harmed; the others are as they were."""
    original = CAPTURES / name
    copy = tmp_path / original.name
    if original.is_dir():
        shutil.copytree(original, copy)
        files = sorted(path for path in copy.iterdir() if path.suffix == ".jsonl")
    else:
        shutil.copy(original, copy)
        files = [copy]
    whole = {path: beginning(path) for path in files}

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(files))
        for path, content in whole.items():
            path.write_bytes(data.draw(damaged([content])) if path is victim else content)
        with contextlib.suppress(InvalidInput):
            load_capture(copy)

    check()


# -- the log


def entries() -> list[AnyEntry]:
    batch = decode_batch(PAYLOAD)
    return [
        PodRegistered(spec=PodSpec("pod-a", "m", zmq_endpoint="tcp://h:1", dp_size=2)),
        LeaseTaken(pod="pod-a", epoch=1),
        Followed(pod="pod-a", dp_rank=0, seq=0, digest=5, epoch=1, batch=batch),
        SourceReported(
            pod="pod-a", dp_rank=1, state=SourceState.DEGRADED, gaps=1, replays=2, cause="a gap", epoch=1
        ),
        SourceReset(pod="pod-a", dp_rank=0, restarted=True, epoch=1),
        Posted(pod="pod-b", model="m", dp_rank=0, seq=1, lora=None, digest=6, incomplete=False, batch=batch),
    ]


GROUPS = [
    encode_group("r", 1, [encode_entry(entry) for entry in entries()], follows=0),
    *(encode_group("r", 1, [encode_entry(entry)], follows=0) for entry in entries()),
]


def applier() -> tuple[Applier, IndexerService]:
    given = Settings(orphan_blocks_max=64)
    service = IndexerService(given, PrefixIndex(index_limits(given)), clock=lambda: 0.0)
    return Applier(service, "other", 1, settle=lambda *_: None), service


def test_groups_of_the_log_are_good_when_whole() -> None:
    made, service = applier()
    made.apply(0, "1-0", GROUPS[0])
    assert made.counts["applied_entries"] == len(entries())
    assert set(service.pods) == {"pod-a", "pod-b"}


@settings(max_examples=EXAMPLES * 5, deadline=None)
@example(GROUPS[0].replace(b"pod-a", b"pod-\xff"))
@given(st.one_of(damaged(GROUPS), damaged(GROUPS), st.binary(max_size=60)))
def test_groups_of_the_log(data: bytes) -> None:
    """Applied, refused entry by entry, or not understood as a whole; the service is of use afterwards."""
    made, service = applier()
    with contextlib.suppress(UnknownEntry):
        made.apply(0, "1-0", data)
    assert made.counts["faults"] == 0
    service.tick()
    for pod in list(service.pods):
        service.drop_pod(pod)


# -- snapshots with sums that are right


class Resealed(FrameEncoder):
    """Writes a state of any bytes."""

    def any_state(self, content: bytes) -> bytes:
        return self._frame(2, content)


@settings(max_examples=EXAMPLES * 5, deadline=None)
@example(msgspec.msgpack.encode(STATE).replace(b"pod-a", b"pod-\xff"))
@given(st.one_of(damaged([msgspec.msgpack.encode(STATE)]), st.binary(max_size=60)))
def test_states_of_snapshots(content: bytes) -> None:
    encoder = Resealed()
    decoder = FrameDecoder(contents=True)
    decoder.check(io.BytesIO(encoder.start + encoder.any_state(content)))
    with contextlib.suppress(SnapshotRefused):
        decoder.finish()


# -- requests


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("serve", KVINDEXER_PORT="0", KVINDEXER_HEAD_TIMEOUT_S="1", KVINDEXER_BODY_TIMEOUT_S="1") as (
        _,
        port,
    ):
        yield port


BODY = b'{"model":"m","token_ids":[1,2,3,4]}'
HEADS = [
    b"POST /v1/match?model=m&block_size=2&pods=a,b&top_k=3 HTTP/1.1\r\nhost: h\r\ncontent-type: application/octet-stream"
    b"\r\nx-request-id: a-1\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
    b"POST /v1/events?pod=p&model=m&seq=3&dp_rank=1&ts=1.5 HTTP/1.1\r\nhost: h\r\ncontent-type: application/msgpack\r\n"
    b"accept: application/msgpack, */*;q=0.1\r\nexpect: 100-continue\r\n",
    b"GET /v1/pods/a%2Fb?x=%ff HTTP/1.1\r\nhost: h\r\nauthorization: Bearer x\r\naccept-encoding: gzip\r\n",
    b"DELETE /v1/pods/p/blocks?tier=gpu&dp_rank=0&lora=%00 HTTP/1.1\r\nhost: h\r\n",
    b"POST /v1/match HTTP/1.1\r\nhost: h\r\ncontent-type: application/json; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n",
    b"GET /metrics HTTP/1.0\r\nconnection: keep-alive, upgrade\r\nupgrade: websocket\r\n",
]


@settings(max_examples=EXAMPLES * 3, deadline=None)
@given(head=damaged(HEADS), body=st.sampled_from([b"", BODY, bytes(16), PAYLOAD, b"5\r\nabcde\r\n0\r\n\r\n"]))
def test_heads_and_targets(port: int, head: bytes, body: bytes) -> None:
    """An answer that is none of our faults, or an end."""
    request = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", port), 30.0) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        # The end of what is sent: an unfinished request is over at once, and not after its time.
        with contextlib.suppress(
            http.client.RemoteDisconnected, ConnectionResetError, http.client.IncompleteRead
        ):
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status < 500, (request, answer.status, answer.read(2_000))
