"""The sequence tracker, fault by fault; test_sequence_model.py draws histories of all of them."""

from __future__ import annotations

import pytest

from app.ingest.actions import Deliver, Report
from app.ingest.sequence import SequenceLimits
from app.pods import SourceState
from tests.ingest.engine import LIMITS, Bench, SimulatedEngine


def connected(batches: int = 3, **arguments: object) -> Bench:
    bench = Bench(**arguments)  # type: ignore[arg-type]
    bench.connect()
    bench.answer()
    bench.publish(batches)
    assert bench.is_trusted()
    assert bench.delivered == bench.engine.batches
    return bench


def test_first_contact_replays_what_was_published_before() -> None:
    bench = Bench()
    bench.publish(5, lost=True)
    bench.connect()
    assert bench.state is SourceState.CATCHING_UP
    assert bench.requests == [0]
    bench.publish(2)
    assert bench.delivered == [], "live batches wait for those before them"
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()
    assert (bench.gaps, bench.replays) == (0, 1)


def test_an_engine_that_published_nothing_is_live_at_once() -> None:
    bench = Bench()
    bench.connect()
    bench.answer()
    assert bench.is_trusted()


def test_a_rolled_over_buffer_is_a_loss() -> None:
    bench = Bench(SimulatedEngine(buffer_batches=2))
    bench.publish(5, lost=True)
    bench.connect()
    bench.answer()
    assert bench.delivered == [b"0:3", b"0:4"]
    assert bench.lost
    assert bench.state is SourceState.LIVE, "the stream itself goes on"
    assert bench.gaps == 1


def test_a_loss_spares_what_came_live_below_the_buffer() -> None:
    bench = connected(3, engine=SimulatedEngine(buffer_batches=1))
    bench.publish(1, lost=True)
    bench.publish(2)
    bench.answer()
    assert bench.delivered == bench.engine.batches[:3] + bench.engine.batches[4:]
    assert bench.lost


def test_each_hole_is_told_in_its_place() -> None:
    """What comes between two of them may be a clear, which makes up for the first and not for the second."""
    bench = connected(3, engine=SimulatedEngine(buffer_batches=1))
    bench.publish(1, lost=True)
    bench.publish(1)
    bench.publish(1, lost=True)
    bench.publish(2)
    actions = [
        action
        for seq, payload in bench.engine.replay(2)
        for action in bench.tracker.on_replay(seq, payload, bench.now)
    ]
    told: list[int | str] = []
    for action in actions:
        if isinstance(action, Deliver):
            told.append(action.seq)
        elif isinstance(action, Report) and "are missing: " in action.cause:
            told.append(action.cause.partition(" are missing: ")[0])
    assert told == ["batches 3..3", 4, "batches 5..5", 6, 7]


def test_a_restart_that_the_buffer_cannot_rule_out_is_told() -> None:
    bench = connected(1, engine=SimulatedEngine(buffer_batches=2))
    bench.engine.restart()
    bench.publish(3, lost=True)
    bench.wait(LIMITS.probe_interval_s)
    bench.answer()  # batch 1 follows in number on batch 0, which was another one's
    assert bench.lost


def test_a_silent_replay_socket_of_an_engine_without_batches_heals() -> None:
    bench = Bench()
    bench.connect()
    while not bench.lost:
        bench.wait(LIMITS.replay_timeout_s)
    while bench.request is None:
        bench.wait(1.0)
    bench.answer()
    assert bench.is_trusted()


def test_a_gap_is_replayed_and_the_overlap_dropped() -> None:
    bench = connected()
    bench.publish(2, lost=True)
    bench.publish(2)
    assert bench.state is SourceState.CATCHING_UP
    assert bench.request == 2, "from the last batch, so that a restart shows"
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()
    assert (bench.gaps, bench.replays) == (1, 2)


def test_a_replay_that_meets_the_live_stream_is_not_waited_for() -> None:
    bench = connected()
    bench.publish(1, lost=True)
    bench.publish(1)
    bench.serve(bench.engine.replay(2), end=False)
    assert bench.is_trusted()
    assert bench.request is None


def test_a_truncated_replay_is_resumed_where_it_stopped() -> None:
    bench = Bench()
    bench.publish(7, lost=True)
    bench.connect()
    bench.answer(replies_max=3, end=False)
    bench.wait(LIMITS.replay_timeout_s / 2)
    assert bench.request == 0, "still within its time"
    bench.wait(LIMITS.replay_timeout_s)
    assert bench.request == 2
    bench.answer(replies_max=3, end=False)
    bench.wait(LIMITS.replay_timeout_s)
    assert bench.request == 4
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()
    assert bench.replays == 3


def test_replies_dropped_in_the_middle_of_a_replay_are_asked_again() -> None:
    bench = Bench()
    bench.publish(6, lost=True)
    bench.connect()
    replies = bench.engine.replay(0)
    bench.serve(replies[:2] + replies[4:])
    assert bench.delivered == bench.engine.batches[:2]
    assert bench.request == 1
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_a_gap_that_replay_cannot_fill_is_given_up_after_the_last_attempt() -> None:
    bench = connected()
    bench.publish(1, lost=True)
    bench.publish(1)
    for attempt in range(LIMITS.replay_attempts):
        assert not bench.lost, f"given up before attempt {attempt + 1}"
        bench.serve(bench.engine.replay(2)[:1])
        bench.wait(LIMITS.retry_delay_s)
    assert bench.lost
    assert bench.delivered == bench.engine.batches[:3] + bench.engine.batches[4:]
    assert bench.gaps == 1
    bench.publish(1)
    assert bench.delivered[-1] == bench.engine.batches[-1]


def test_a_silent_replay_socket_is_given_up_and_healed_when_it_answers() -> None:
    bench = connected()
    bench.publish(1, lost=True)
    bench.publish(1)
    for _ in range(20):
        bench.wait(LIMITS.replay_timeout_s)
        if bench.lost:
            break
    assert bench.lost
    assert bench.delivered[-1] == bench.engine.batches[-1], "the stream goes on"
    requests = len(bench.requests)
    bench.publish(1, lost=True)
    bench.publish(1)
    assert len(bench.requests) == requests, "a silent socket is not asked at every gap"
    bench.wait(LIMITS.probe_interval_s)
    bench.wait(LIMITS.replay_timeout_s)
    bench.wait(LIMITS.probe_interval_s)
    assert bench.request == 0
    bench.answer()
    assert [reset.restarted for reset in bench.resets] == [False]
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


@pytest.mark.parametrize("gone", [1, 3])
def test_healing_is_not_tried_when_the_first_batches_are_gone(gone: int) -> None:
    bench = connected(engine=SimulatedEngine(buffer_batches=6 - gone))
    bench.publish(1, lost=True)
    bench.publish(1)
    while not bench.lost:
        bench.wait(LIMITS.replay_timeout_s)
    known = list(bench.delivered)
    bench.publish(1)
    while bench.request is None:
        bench.wait(1.0)
    bench.answer()
    assert bench.resets == []
    assert bench.delivered[: len(known)] == known
    assert bench.lost


def test_every_frame_twice_is_no_restart() -> None:
    bench = Bench()
    bench.connect()
    for _ in range(3):
        frame = bench.engine.publish()
        bench.live(*frame)
        bench.live(*frame)
    bench.answer()
    for _ in range(3):
        frame = bench.engine.publish()
        bench.live(*frame)
        bench.live(*frame)
    assert bench.delivered == bench.engine.batches
    assert bench.resets == []
    assert bench.counters.duplicates >= 3


def test_doubled_frames_that_found_no_room_to_be_held_are_no_restart() -> None:
    bench = Bench()
    bench.connect()
    for _ in range(3 * LIMITS.held_batches_max):
        frame = bench.engine.publish()
        bench.live(*frame)
        bench.live(*frame)
    assert bench.budget.overflows > 0
    bench.settle()
    assert bench.delivered == bench.engine.batches
    assert bench.resets == []
    assert bench.is_trusted()


def test_a_restart_in_place_resets_and_replays_from_zero() -> None:
    bench = connected(5)
    bench.engine.restart()
    bench.publish(1, lost=True)
    bench.publish(1)
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.request == 0
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_a_restart_hidden_behind_higher_numbers_is_seen_in_the_replay() -> None:
    bench = connected(3)
    bench.engine.restart()
    bench.publish(6, lost=True)
    bench.publish(1)
    assert bench.request == 2
    bench.answer()
    assert [reset.restarted for reset in bench.resets] == [True]
    bench.settle()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_a_restart_while_disconnected_is_seen_although_the_numbers_fit() -> None:
    bench = connected(3)
    bench.disconnect()
    assert bench.state is SourceState.DOWN
    bench.engine.restart()
    bench.publish(3, lost=True)
    bench.connect()
    bench.publish(1)  # number 3, just what would have come next
    assert bench.delivered == [b"0:0", b"0:1", b"0:2"], "held until the check"
    bench.settle()
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_a_restarted_engine_that_has_published_nothing_is_seen_on_reconnect() -> None:
    bench = connected(3)
    bench.disconnect()
    bench.engine.restart()
    bench.connect()
    bench.settle()
    assert bench.delivered == []
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.is_trusted()


def test_a_blip_of_the_connection_loses_and_resets_nothing() -> None:
    bench = connected(3)
    bench.disconnect()
    bench.publish(2, lost=True)
    bench.connect()
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.resets == []
    assert bench.is_trusted()


def test_a_picture_that_cannot_be_verified_after_a_reconnect_is_dropped() -> None:
    bench = connected(3, engine=SimulatedEngine(buffer_batches=2))
    bench.disconnect()
    bench.publish(10, lost=True)
    bench.connect()
    bench.answer()
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.delivered == bench.engine.batches[-2:]
    assert bench.lost


def test_a_disconnect_past_the_deadline_resets_once() -> None:
    bench = connected(3)
    bench.disconnect()
    bench.wait(LIMITS.disconnect_deadline_s - 0.125)
    assert bench.resets == []
    bench.wait(0.125)
    assert len(bench.resets) == 1
    bench.wait(LIMITS.disconnect_deadline_s)
    assert [reset.restarted for reset in bench.resets] == [False]
    assert bench.delivered == []
    bench.publish(2, lost=True)
    bench.connect()
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_a_lost_tail_is_found_without_another_live_batch() -> None:
    bench = connected(3)
    bench.publish(2, lost=True)
    bench.wait(LIMITS.probe_interval_s)
    assert bench.request == 2
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()
    assert bench.gaps == 1


def test_a_probe_that_finds_nothing_changes_nothing() -> None:
    bench = connected(3)
    reports = len(bench.reports)
    bench.wait(LIMITS.probe_interval_s)
    bench.answer()
    bench.publish(1)
    assert bench.delivered == bench.engine.batches
    assert len(bench.reports) == reports


def test_without_a_replay_endpoint_the_first_number_decides() -> None:
    whole = Bench(replay_endpoint=False)
    whole.connect()
    assert whole.state is SourceState.CATCHING_UP
    whole.publish(2)
    assert whole.is_trusted()
    late = Bench(replay_endpoint=False)
    late.publish(3, lost=True)
    late.connect()
    late.publish(2)
    assert late.lost
    assert late.delivered == late.engine.batches[3:]
    assert late.requests == []


def test_without_a_replay_endpoint_a_gap_is_lost_and_a_restart_heals() -> None:
    bench = Bench(replay_endpoint=False)
    bench.connect()
    bench.publish(3)
    bench.publish(1, lost=True)
    bench.publish(2)
    assert bench.lost
    assert bench.gaps == 1
    bench.engine.restart()
    bench.publish(2)
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_without_a_replay_endpoint_the_next_number_proves_a_reconnect() -> None:
    bench = Bench(replay_endpoint=False)
    bench.connect()
    bench.publish(3)
    bench.disconnect()
    bench.connect()
    assert not bench.is_trusted()
    bench.publish(1)
    assert bench.is_trusted()
    assert bench.delivered == bench.engine.batches


def test_frames_that_outrun_the_news_of_their_connection_are_held() -> None:
    bench = Bench()
    bench.publish(2)
    assert bench.delivered == []
    bench.connect()
    bench.answer()
    assert bench.delivered == bench.engine.batches
    late = Bench(replay_endpoint=False)
    late.publish(2)
    late.connect()
    assert late.delivered == late.engine.batches
    assert late.is_trusted()


def test_live_batches_that_lag_behind_the_replay_are_no_restart() -> None:
    bench = Bench(limits=SequenceLimits(held_batches_max=2, digests=4))
    frames = [bench.engine.publish() for _ in range(20)]
    bench.connect()
    bench.answer()
    for frame in frames[5:]:
        bench.live(*frame)
    assert bench.resets == []
    assert bench.counters.duplicates == len(frames[5:])
    bench.publish(1)
    assert bench.delivered == bench.engine.batches


def test_a_live_batch_that_overtakes_the_reply_to_a_look_for_a_lost_tail_is_no_restart() -> None:
    bench = connected(3)
    bench.wait(LIMITS.probe_interval_s)
    for _ in range(3):
        under_way = bench.engine.replay(bench.requests[-1])
        bench.publish(1)
        if bench.request is not None:
            bench.serve(under_way)
        bench.wait(LIMITS.retry_delay_s)
    assert bench.resets == []
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_held_batches_whose_numbers_fit_wait_for_the_proof_that_the_engine_is_the_same() -> None:
    bench = connected(3)
    bench.disconnect()
    bench.engine.restart()
    bench.publish(3, lost=True)
    bench.connect()
    bench.publish(1)  # number 3, just what would have come next
    bench.wait(LIMITS.replay_timeout_s)  # the first request had no answer at all
    assert bench.delivered == [b"0:0", b"0:1", b"0:2"]
    bench.settle()
    assert [reset.restarted for reset in bench.resets] == [True]
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_what_was_held_of_an_engine_is_not_its_successors() -> None:
    bench = Bench()
    bench.publish(2, lost=True)
    bench.connect()
    bench.publish(1)  # number 2 waits for a replay that does not come
    bench.disconnect()
    bench.engine.restart()
    bench.publish(2, lost=True)
    bench.connect()
    bench.answer()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_doubled_frames_that_the_replay_is_far_ahead_of_are_no_restart() -> None:
    bench = Bench(limits=SequenceLimits(held_batches_max=16, digests=4))
    frames = [bench.engine.publish() for _ in range(12)]
    bench.connect()
    bench.serve(bench.engine.replay(0)[:1] + bench.engine.replay(3), end=False)  # two replies were dropped
    for frame in frames:
        bench.live(*frame)
        bench.live(*frame)
    bench.settle()
    assert bench.resets == []
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_an_engine_that_nobody_can_tell_from_another_is_not_trusted() -> None:
    bench = connected(3)
    bench.disconnect()
    bench.connect()
    bench.publish(2)
    while bench.state is not SourceState.LIVE:
        bench.wait(LIMITS.replay_timeout_s)
    assert bench.lost
    assert bench.delivered == bench.engine.batches, "the stream goes on"
    assert (bench.gaps, bench.resets) == (0, [])
    assert "nobody can tell" in next(r.cause for r in bench.reports if r.state is SourceState.DEGRADED)


def test_replays_of_a_flapping_stream_are_spaced_out() -> None:
    bench = connected(3)
    for _ in range(10):
        bench.engine.restart()
        bench.publish(1)
        if bench.request is not None:
            bench.answer()
    assert len(bench.requests) <= 3
    bench.wait(LIMITS.restart_interval_s)
    bench.settle()
    assert bench.delivered == bench.engine.batches
    assert bench.is_trusted()


def test_held_bytes_are_given_back() -> None:
    bench = connected(3, held_bytes_max=10)
    bench.publish(1, lost=True)
    bench.publish(6)
    assert 0 < bench.budget.used_bytes <= 10
    assert bench.budget.overflows > 0
    bench.settle()
    assert bench.delivered == bench.engine.batches
    assert bench.budget.used_bytes == 0
    bench.publish(1, lost=True)
    bench.publish(1)
    assert bench.budget.used_bytes > 0
    bench.tracker.close()
    assert bench.budget.used_bytes == 0
