"""From two lossy streams of one source, live and replay, to one: every batch once, in order.

A state machine without sockets or clock: frames, replies and `now` (seconds, monotonic) go in, actions come
out. Where it cannot keep its promise it reports the loss, and the stream goes on.

    what happens                  what is done
    batches before we connected   the first contact replays from 0
    a gap in the live numbers     live batches are held, the gap is replayed, what came twice is dropped
    a replay cut short            (engines before vLLM 0.33 drop replies and the end marker) asked again from
                                  where it stopped, as long as each round brings something
    a restarted engine            its numbers fall back to 0 without a word. Seen by a live number that falls
                                  back, or by a batch that differs from the one seen under its number: so
                                  every replay, and the check after a reconnect, starts at the last batch
    every frame delivered twice   same number, same digest: dropped, never taken for a restart
    a lost tail                   after a quiet while, the replay socket is asked whether there is more
    a silent replay socket        the gap is given up; once the socket answers and still knows batch 0, all
                                  is learned again from there
    a buffer that rolled over     what it no longer has is lost

Without a replay endpoint it cannot see a restart whose first batch to arrive has just the next number.
Memory is bounded: `held_batches_max`, the byte budget that all trackers share, a ring of digests. An input
costs O(1), plus what it delivers.
"""

from __future__ import annotations

import dataclasses
import enum

from app import hashing
from app.ingest.actions import Action, Deliver, Report, RequestReplay, Reset, StopReplay
from app.ingest.window import DigestRing, HeldBatches, HoldBudget
from app.pods import SourceState


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Patience and bounds of one tracker."""

    replay_timeout_s: float = 2.0  # a replay is cut short when no reply came for so long
    replay_attempts: int = 3  # rounds without anything new before a gap is given up
    retry_delay_s: float = 0.2  # before a round that follows one without anything new
    restart_interval_s: float = 1.0  # least time between the replays of two restarts
    settle_s: float = 1.0  # after catching up, the first look for a lost tail
    probe_interval_s: float = 10.0  # without a live batch, the next look for a lost tail
    disconnect_deadline_s: float = 30.0
    held_batches_max: int = 4_096
    digests: int = 4_096


@dataclasses.dataclass(slots=True)
class SequenceCounters:
    """Since the start, over every tracker that shares them."""

    duplicates: int = 0  # batches that came again and were dropped
    probes: int = 0  # questions whether a tail was lost
    replay_timeouts: int = 0


_WHOLE = "the stream is whole from here on"


class _Phase(enum.Enum):
    DOWN = enum.auto()
    CATCHING_UP = enum.auto()  # live batches are held until the replay meets them
    UNPROVEN = enum.auto()  # connected, no replay endpoint: the next live batch shows whether any is missing
    LIVE = enum.auto()


class _Purpose(enum.Enum):
    CATCH_UP = enum.auto()
    PROBE = enum.auto()  # is there a batch after the last one, and is it still the same engine?
    HEAL = enum.auto()  # does the replay socket answer by now, and does it know batch 0?


@dataclasses.dataclass(slots=True)
class _Replay:
    purpose: _Purpose
    start_seq: int
    deadline_s: float | None = None  # none before the request is sent
    replies: int = 0
    anchored: bool = False  # a reply at or after the place that was asked for has come
    progressed: bool = False


class SequenceTracker:
    """One incarnation after the other of one source. Every input returns the actions it causes, in order."""

    def __init__(
        self,
        limits: SequenceLimits,
        budget: HoldBudget,
        counters: SequenceCounters,
        *,
        replay_endpoint: bool,
        now: float,
        resume_at: tuple[int, int] | None = None,
    ) -> None:
        """`resume_at` is the (number, digest) of the last batch that was applied before this process: the
        replay begins there, and another batch under that number is another incarnation."""
        self._limits = limits
        self._counters = counters
        self._replay_endpoint = replay_endpoint
        self._actions: list[Action] = []
        self._phase = _Phase.DOWN
        self._down_since_s: float | None = now  # none once the deadline has been acted upon
        self._last: int | None = None  # newest number delivered, or given up
        self._last_digest: int | None = None
        self._newest_live: int | None = None  # newest number seen on the live stream of this incarnation
        self._newest_live_digest: int | None = None
        self._digests = DigestRing(limits.digests)
        self._held = HeldBatches(limits.held_batches_max, budget)
        self._replay: _Replay | None = None
        self._retry_at_s: float | None = None
        self._probe_at_s = now
        self._restarted_at_s = float("-inf")
        self._futile_rounds = 0  # rounds of this catch-up that brought nothing new
        self._absent_rounds = 0  # rounds whose reply did not even have the last batch
        self._live_seen = False  # during this catch-up
        self._gap_counted = False  # the gap that this catch-up began with has been reported
        self._unverified = False  # reconnected, and not yet known to be the same incarnation
        self._silent = False  # the replay socket left a whole catch-up unanswered
        if resume_at is not None:
            self._last, self._last_digest = resume_at
            self._newest_live, self._newest_live_digest = resume_at
            self._digests.put(*resume_at)

    @property
    def held_batches(self) -> int:
        return len(self._held)

    # -- inputs

    def on_connected(self, now: float) -> list[Action]:
        self._down_since_s = None
        if self._replay_endpoint:
            # What was held may be another incarnation's. The replay that is asked for now has all that is this one's.
            self._held.clear()
            if self._is_behind():
                self._newest_live, self._newest_live_digest = self._last, self._last_digest
            self._unverified = self._last is not None
            self._catch_up(now, cause="connected")
        else:
            self._phase = _Phase.UNPROVEN
            self._report(
                SourceState.CATCHING_UP,
                cause="connected without a replay endpoint: the next batch shows whether any is missing",
            )
            for batch in self._held.take_all():
                self._accept(batch, now)
        return self._take()

    def on_disconnected(self, now: float, cause: str) -> list[Action]:
        self._abandon_replay()
        self._phase = _Phase.DOWN
        self._down_since_s = now
        self._report(SourceState.DOWN, cause=cause)
        return self._take()

    def on_live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        batch = Deliver(seq, payload, hashing.digest(payload))
        seen = self._seen(seq)
        newest_live = self._newest_live
        if seen == batch.digest:
            self._counters.duplicates += 1
        elif seen is not None or (newest_live is not None and seq <= newest_live):
            self._restart(now, f"live batch {seq} came after {newest_live}", first=batch)
        else:
            self._newest_live, self._newest_live_digest = seq, batch.digest
            if self._last is not None and seq <= self._last:
                # The live stream lags behind the replay that already brought this one.
                self._counters.duplicates += 1
            else:
                self._digests.put(seq, batch.digest)
                self._accept(batch, now)
        return self._take()

    def on_replay_sent(self, now: float) -> None:
        """The request left: from here on its replies are due."""
        if self._replay is not None:
            self._replay.deadline_s = now + self._limits.replay_timeout_s

    def on_replay(self, seq: int, payload: bytes, now: float) -> list[Action]:
        replay = self._replay
        if replay is None:
            return []
        replay.deadline_s = now + self._limits.replay_timeout_s
        replay.replies += 1
        if replay.purpose is _Purpose.HEAL:
            self._heal(replay, seq, now)
            if self._replay is None:
                return self._take()
        batch = Deliver(seq, payload, hashing.digest(payload))
        seen = self._seen(seq)
        if seen is not None and seen != batch.digest:
            self._restart(now, f"replayed batch {seq} is not the one seen before")
            return self._take()
        if not replay.anchored and seq >= replay.start_seq:
            replay.anchored = True
            if self._last is None or seq >= self._last:  # else live batches have overtaken it
                self._first_reply(seq)
        if self._last is None or seq > self._last:
            self._new_reply(replay, batch, now)
        return self._take()

    def on_replay_end(self, now: float) -> list[Action]:
        replay, self._replay = self._replay, None
        if replay is None:
            return []
        if replay.purpose is _Purpose.HEAL:
            self._silent = False
            self._probe_at_s = now
            if self._last is None:  # nothing delivered, nothing in the buffer: nothing was lost
                self._reset(restarted=False, cause="the replay endpoint answers again: nothing was published")
                self._go_live(now)
        elif not replay.anchored and self._last is not None:
            self._last_is_absent(now)
        elif self._phase is _Phase.LIVE:
            self._absent_rounds = 0
            self._probe_at_s = now + self._limits.probe_interval_s
        else:  # its first reply has shown whose batches these are
            self._end_round(replay, now, ended=True)
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Whatever is due by now; a few times a second is enough."""
        if self._phase is _Phase.DOWN:
            self._check_disconnect_deadline(now)
        elif self._retry_at_s is not None and now >= self._retry_at_s:
            self._request(_Purpose.CATCH_UP if self._phase is _Phase.CATCHING_UP else _Purpose.PROBE)
        elif self._replay is not None:
            deadline_s = self._replay.deadline_s
            if deadline_s is not None and now >= deadline_s:
                self._replay_timed_out(self._replay, now)
        elif self._phase is _Phase.LIVE and self._replay_endpoint and now >= self._probe_at_s:
            self._request(_Purpose.HEAL if self._silent else _Purpose.PROBE)
        return self._take()

    def close(self) -> None:
        """The source is not followed any more: what it held back is returned to the shared budget."""
        self._held.clear()

    # -- the live stream

    def _accept(self, batch: Deliver, now: float) -> None:
        """A live batch that is new to us."""
        if self._phase in (_Phase.DOWN, _Phase.CATCHING_UP):
            self._live_seen = self._phase is _Phase.CATCHING_UP
            self._held.put(batch)
            return
        seq = batch.seq
        if seq != self._expected():
            if self._replay_endpoint and not self._silent:
                self._held.put(batch)
                self._catch_up(now, cause=f"batches {self._expected()}..{seq - 1} are missing", gaps=1)
                self._live_seen = True
                return
            why = "the replay endpoint is silent" if self._replay_endpoint else "there is no replay endpoint"
            self._lose_up_to(seq, why)
            self._report(SourceState.LIVE, cause=_WHOLE)
        elif self._phase is _Phase.UNPROVEN:
            self._report(SourceState.LIVE, cause=_WHOLE)
        self._phase = _Phase.LIVE
        if not self._silent:
            self._probe_at_s = now + self._limits.probe_interval_s
        self._deliver(batch)

    def _restart(self, now: float, cause: str, first: Deliver | None = None) -> None:
        """Another incarnation speaks, `first` being its first live batch that came here."""
        self._reset(restarted=True, cause=cause)
        self._abandon_replay()
        wait_until_s = self._restarted_at_s + self._limits.restart_interval_s
        self._restarted_at_s = now
        if not self._replay_endpoint and self._phase is not _Phase.DOWN:
            self._phase = _Phase.UNPROVEN
        elif self._phase is not _Phase.DOWN:
            self._catch_up(now, cause="the engine restarted", not_before_s=wait_until_s)
        if first is not None:
            self._newest_live, self._newest_live_digest = first.seq, first.digest
            self._digests.put(first.seq, first.digest)
            self._accept(first, now)

    # -- the replay

    def _catch_up(
        self, now: float, *, cause: str, gaps: int = 0, not_before_s: float = float("-inf")
    ) -> None:
        self._abandon_replay()
        self._phase = _Phase.CATCHING_UP
        self._futile_rounds = self._absent_rounds = 0
        self._live_seen = False
        self._gap_counted = gaps > 0
        if gaps or now < not_before_s:
            self._report(SourceState.CATCHING_UP, gaps=gaps, cause=cause)
        if now < not_before_s:
            self._retry_at_s = not_before_s
        else:
            self._request(_Purpose.CATCH_UP, cause=cause)

    def _request(self, purpose: _Purpose, cause: str = "") -> None:
        self._retry_at_s = None
        start_seq = 0 if self._last is None or purpose is _Purpose.HEAL else self._last
        self._replay = _Replay(purpose, start_seq)
        if purpose is _Purpose.CATCH_UP:
            self._report(
                SourceState.CATCHING_UP, replays=1, cause=f"{cause or 'resumed'}: replay from {start_seq}"
            )
        else:
            self._counters.probes += 1
        self._actions.append(RequestReplay(start_seq))

    def _first_reply(self, seq: int) -> None:
        """The request began at the last batch delivered: a later reply means that the buffer rolled over."""
        last = self._last
        if last is not None and seq != last and self._unverified:
            self._reset(
                restarted=True, cause=f"reconnected, and batch {last} is no longer there to compare with"
            )
        elif last is not None and seq > last:
            # Even where in number nothing is missing: these may be the numbers of another incarnation.
            cause = f"batch {last} is no longer there to compare with"
            self._report(SourceState.DEGRADED, cause=cause)
        self._unverified = False
        if seq > self._expected():
            self._lose_up_to(seq, "the replay no longer has them")

    def _new_reply(self, replay: _Replay, batch: Deliver, now: float) -> None:
        seq = batch.seq
        meets = False  # only a batch that came both ways shows that replay and live stream are of one engine
        self._digests.put(seq, batch.digest)
        if seq == self._expected():
            replay.progressed = True
            meets = self._held.pop(seq) is not None
            self._deliver(batch)
        elif self._held.get(seq) is None:
            self._held.put(batch)  # replies in between were dropped; the next round brings them
        if self._phase is _Phase.LIVE:
            self._phase = _Phase.CATCHING_UP
            self._futile_rounds = 0
            self._live_seen = False
            replay.purpose = _Purpose.CATCH_UP
            self._report(SourceState.CATCHING_UP, gaps=1, replays=1, cause=f"batch {seq} never came live")
        elif meets:
            self._release()
            if self._live_seen and not self._is_behind():
                self._go_live(now)

    def _last_is_absent(self, now: float) -> None:
        """The engine answered, and does not know the last batch: said twice, it is another incarnation."""
        self._absent_rounds += 1
        if self._absent_rounds < 2:
            self._retry_at_s = now + self._limits.retry_delay_s
        else:
            self._restart(now, f"the engine does not know batch {self._last}")

    def _replay_timed_out(self, replay: _Replay, now: float) -> None:
        self._counters.replay_timeouts += 1
        self._abandon_replay()
        if replay.purpose is _Purpose.CATCH_UP:
            self._end_round(replay, now, ended=False)
        else:
            self._probe_at_s = now + self._limits.probe_interval_s

    def _end_round(self, replay: _Replay, now: float, *, ended: bool) -> None:
        """A round is over, by its end marker or by silence: done, again, or given up."""
        if not self._unverified:  # else the numbers that fit may be those of another incarnation
            self._release()
        if ended and not self._is_behind():
            self._go_live(now)
            return
        if replay.progressed:
            self._futile_rounds = 0
            self._request(_Purpose.CATCH_UP)
            return
        self._futile_rounds += 1
        if self._futile_rounds < self._limits.replay_attempts:
            self._retry_at_s = now + self._limits.retry_delay_s
            return
        self._silent = not ended and replay.replies == 0
        self._give_up(now)

    def _give_up(self, now: float) -> None:
        why = "the replay endpoint is silent" if self._silent else "the replay does not have them"
        if self._unverified:
            self._unverified = False
            cause = f"nobody can tell whether this is still the engine of batch {self._last}: {why}"
            self._report(SourceState.DEGRADED, cause=cause)
            self._release()
        elif self._silent and not self._is_behind():
            self._report(
                SourceState.DEGRADED, cause=f"nothing is known of batches from {self._expected()} on: {why}"
            )
        while self._is_behind():
            if self._held:
                self._lose_up_to(self._held.lowest(), why)
                self._release()
            else:
                assert self._newest_live is not None, "behind without a held batch is behind a dropped one"
                self._lose_up_to(self._newest_live + 1, why)
            if self._is_behind() and not self._silent:
                self._futile_rounds = 0
                self._request(_Purpose.CATCH_UP)
                return
        self._go_live(now)

    def _heal(self, replay: _Replay, seq: int, now: float) -> None:
        """The silent socket answers. Learning all again is worth it only if nothing is missing then."""
        self._silent = False
        if seq != 0:
            self._abandon_replay()
            self._probe_at_s = now + self._limits.probe_interval_s
            return
        self._reset(restarted=False, cause="the replay endpoint answers again: all is learned anew")
        self._phase = _Phase.CATCHING_UP
        self._futile_rounds = self._absent_rounds = 0
        self._live_seen = False
        replay.purpose = _Purpose.CATCH_UP
        self._report(SourceState.CATCHING_UP, replays=1, cause="replay from 0")

    # -- parts

    def _expected(self) -> int:
        return 0 if self._last is None else self._last + 1

    def _seen(self, seq: int) -> int | None:
        """Digest of the batch that came under this number, as far as it is remembered: the ring forgets, and a number
        of which nothing is known counts as new."""
        if seq == self._last:
            return self._last_digest
        if seq == self._newest_live:
            return self._newest_live_digest
        held = self._held.get(seq)
        return self._digests.get(seq) if held is None else held.digest

    def _is_behind(self) -> bool:
        newest_live = self._newest_live
        return bool(self._held) or (newest_live is not None and newest_live >= self._expected())

    def _deliver(self, batch: Deliver) -> None:
        self._last, self._last_digest = batch.seq, batch.digest
        self._actions.append(batch)

    def _release(self) -> int:
        """Deliver what is held as far as it is contiguous; returns how many."""
        released = 0
        while (batch := self._held.pop(self._expected())) is not None:
            self._deliver(batch)
            released += 1
        return released

    def _lose_up_to(self, seq: int, why: str) -> None:
        """Give up what is missing below `seq`; what is held from below it is delivered."""
        while self._held and (lowest := self._held.lowest()) < seq:
            self._skip_to(lowest, why)
            self._release()
        self._skip_to(seq, why)

    def _skip_to(self, seq: int, why: str) -> None:
        """Over one hole, if there is one. Each is told in its place: a clear between two makes up for the first only."""
        if seq <= self._expected():
            return
        cause = f"batches {self._expected()}..{seq - 1} are missing: {why}"
        self._report(SourceState.DEGRADED, gaps=0 if self._gap_counted else 1, cause=cause)
        self._gap_counted = False
        self._last = seq - 1 if seq > 0 else None
        self._last_digest = self._digests.get(seq - 1) if seq > 0 else None

    def _go_live(self, now: float) -> None:
        self._abandon_replay()
        self._phase = _Phase.LIVE
        self._gap_counted = False
        interval_s = self._limits.probe_interval_s if self._silent else self._limits.settle_s
        self._probe_at_s = now + interval_s
        self._report(SourceState.LIVE, cause=_WHOLE)

    def _reset(self, *, restarted: bool, cause: str) -> None:
        if self._phase is _Phase.LIVE:  # first, or for a moment an emptied picture passes for a whole one
            self._report(SourceState.CATCHING_UP, cause=cause)
        self._actions.append(Reset(restarted, cause))
        self._last = self._last_digest = self._newest_live = self._newest_live_digest = None
        self._digests.clear()
        self._held.clear()
        self._unverified = self._silent = False
        self._retry_at_s = None

    def _check_disconnect_deadline(self, now: float) -> None:
        deadline_s = self._limits.disconnect_deadline_s
        if self._down_since_s is not None and now - self._down_since_s >= deadline_s:
            self._down_since_s = None
            self._reset(restarted=False, cause=f"disconnected for {deadline_s:g} s")

    def _abandon_replay(self) -> None:
        self._retry_at_s = None
        if self._replay is not None:
            self._replay = None
            self._actions.append(StopReplay())

    def _report(self, state: SourceState, cause: str, *, gaps: int = 0, replays: int = 0) -> None:
        self._actions.append(Report(state, cause, gaps, replays))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
