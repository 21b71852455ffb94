"""What the monitor's events of attempts to connect are taken for."""

from __future__ import annotations

import pytest
import zmq

from app.ingest.handshakes import Attempts

BEGIN, AGAIN, OPEN = zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CONNECTED
PATIENCE_S = 3.0
REFUSED, SILENT, NOWHERE = "refuses connections", "no answer from tcp://a:1", "no address for the host of"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([(BEGIN, 0.0), (AGAIN, 0.1)], REFUSED),
        ([(BEGIN, 0.0), (AGAIN, 127.0)], SILENT),  # by the kernel
        ([(BEGIN, 0.0), (AGAIN, 0.1), (BEGIN, 1.0), (AGAIN, 1.1)], REFUSED),
        ([(BEGIN, 0.0), (AGAIN, 0.1), (AGAIN, 1.0)], NOWHERE),
        ([(AGAIN, 0.0), (AGAIN, 1.0)], NOWHERE),
        ([(AGAIN, 0.0), (AGAIN, 1.0), (BEGIN, 2.0), (AGAIN, 2.1)], REFUSED),
        ([(BEGIN, 0.0), (OPEN, 0.1), (zmq.EVENT_DISCONNECTED, 9.0), (AGAIN, 9.0)], ""),
        ([(AGAIN, 0.0), (AGAIN, 1.0), (BEGIN, 2.0), (OPEN, 2.1), (AGAIN, 3.0)], ""),
    ],
)
def test_what_an_attempt_came_to(events: list[tuple[int, float]], said: str) -> None:
    attempts = Attempts("tcp://a:1", PATIENCE_S)
    trouble = [attempts.on_event(kind, now) for kind, now in events][-1]
    assert said in trouble
    assert bool(trouble) is bool(said)
    assert attempts.trouble(1_000.0) == "", "nothing is under way"


def test_only_an_attempt_that_is_under_way_can_take_too_long() -> None:
    attempts = Attempts("tcp://a:1", PATIENCE_S)
    assert attempts.trouble(100.0) == ""
    attempts.on_event(BEGIN, 100.0)
    assert attempts.trouble(100.0 + PATIENCE_S - 0.1) == ""
    assert SILENT in attempts.trouble(100.0 + PATIENCE_S)
    attempts.on_event(OPEN, 104.0)
    assert attempts.trouble(200.0) == "", "it is connected"


def test_a_closed_socket_leaves_nothing_of_its_attempts() -> None:
    attempts = Attempts("tcp://a:1", PATIENCE_S)
    attempts.on_event(BEGIN, 0.0)
    attempts.close()
    assert attempts.trouble(100.0) == ""
    attempts.on_event(AGAIN, 100.0)
    attempts.close()
    assert attempts.on_event(AGAIN, 101.0) == "", "the first word of another socket"
