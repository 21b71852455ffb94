"""Owns every ZMQ socket: live streams in, replays asked for, batches handed to the feed.

It reads in turns of the event loop (turns.py): without waiting, until nothing is left or the slice is over. Then it
rests, so that what comes meanwhile costs one wake-up, and then listens to one descriptor for all sockets
(sockets.py). The asyncio sockets of pyzmq cost 2.6 times the CPU for the same messages, and a thread of its own took
the interpreter from those who answer queries (docs/performance-notes.md).

What it relies on:
  monitors    a source is connected from the handshake to the end of its last connection. The monitor tells
              both in no fixed order with the live frames, so a tracker holds frames that come while down.
  heartbeats  a peer that vanished without closing is noticed within `heartbeat_timeout_s`.

A source whose sockets cannot be opened is DOWN with the reason, and tried again every `reopen_interval_s`; so is one
whose peer ZMQ gave up, or that does not come through a handshake (handshakes.py). A
fault of our own costs its source a fresh start, or all of them one, is logged and counted, and never the receiver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from app.endpoints import Endpoint
from app.errors import UnreadableBatch
from app.ingest import handshakes
from app.ingest.actions import Action, Report, RequestReplay, Reset, StopReplay
from app.ingest.feed import Feed, Stream
from app.ingest.handshakes import Attempts, Handshakes
from app.ingest.replays import Replays
from app.ingest.sequence import SequenceCounters, SequenceLimits, SequenceTracker
from app.ingest.sockets import SocketLimits, Sockets
from app.ingest.subscription import FollowedPod, FollowedStream, ReceiverCounters, Subscription
from app.ingest.turns import Turns
from app.ingest.vllm import END_SEQ, parse_live, parse_replay_reply
from app.ingest.window import HoldBudget
from app.pods import SourceState

logger = logging.getLogger(__name__)


_WAIT_MIN_S = 0.001  # loops count in milliseconds, and less may be nothing to them
_BROKEN_S = 1.0  # before a receiver that failed as a whole starts over: a fault that comes back must not spin


class Receiver:
    """All calls on the event loop's thread."""

    def __init__(self, feed: Feed, turns: Turns, sequence: SequenceLimits, limits: SocketLimits) -> None:
        self._feed = feed
        self._turns = turns
        self._sequence = sequence
        self._limits = limits
        self.counters = ReceiverCounters()
        self.sequence_counters = SequenceCounters()
        self._budget = HoldBudget(limits.held_bytes_max)
        self._wanted: dict[str, FollowedPod] = {}
        self._wanted_changed = False
        self._subscriptions: dict[FollowedPod, list[Subscription]] = {}  # of a pod, those that were opened

        self._sockets = Sockets(limits)
        self._replays = Replays(self._sockets, limits.replays_max, self.counters)
        self._closing: deque[Subscription] = deque()
        self._opening: deque[tuple[FollowedPod, FollowedStream]] = deque()
        self._ticking: deque[tuple[FollowedPod, Subscription]] = deque()
        self._next_tick_s = 0.0
        self._unread: dict[zmq.Socket[bytes], Subscription] = {}  # may have something to read

        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._alarm: asyncio.TimerHandle | None = None
        self._listening = -1  # the descriptor that the loop watches
        self._rested_at_message = 0
        self._is_broken = False

    @property
    def held_bytes(self) -> int:
        return self._budget.used_bytes

    @property
    def held_overflows(self) -> int:
        return self._budget.overflows

    @property
    def replays_running(self) -> int:
        return self._replays.running

    @property
    def replays_waiting(self) -> int:
        return self._replays.waiting

    def follow(self, pod: FollowedPod) -> None:
        self._wanted[pod.name] = pod
        self._wanted_changed = True
        self.wake()

    def unfollow(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._wanted_changed = True
        self.wake()

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()
        self.wake()

    def stop(self) -> None:
        """Returns when all its sockets are gone, which takes milliseconds."""
        self._stop_waiting()
        self._loop = None
        self._sockets.close()

    def wake(self) -> None:
        """There may be something to do."""
        if self._loop is not None:
            self._turns.ask(self._turn)

    # -- turns

    def _turn(self, stop_at_s: float) -> bool:
        if self._loop is None:
            return False
        self._stop_waiting()
        try:
            if self._is_broken:
                self._start_over()
                self._is_broken = False
            return self._go_on(stop_at_s)
        except Exception:
            self.counters.faults += 1
            logger.exception("the ZMQ receiver failed; every stream is followed anew")
            self._is_broken = True
            self._wait(_BROKEN_S)
            return False

    def _go_on(self, stop_at_s: float) -> bool:
        """True when there is more to do at once."""
        self._follow_wanted()
        now = time.monotonic()
        is_tick = now >= self._next_tick_s and not self._ticking
        # A tick takes what is not told for silence: before it, every socket that has something is known.
        self._unread |= self._sockets.poll(all_of_them=is_tick)
        if is_tick:
            self._next_tick_s = now + self._limits.tick_interval_s
            self._ticking.extend(
                (pod, subscription)
                for pod, subscriptions in self._subscriptions.items()
                for subscription in subscriptions
            )
        self._tend(now, stop_at_s)
        is_full = self._read_some(stop_at_s)
        self._feed.flush()
        if self._closing or self._opening or self._ticking or (self._unread and not is_full):
            return True
        if is_full:
            self._wait(self._limits.tick_interval_s)  # or until the feed has room
        else:
            self._rest()
        return False

    def _tend(self, now: float, stop_at_s: float) -> None:
        """Closes, opens and ticks. While something waits to be read, for half of the slice: with many sources, or a loop
        that is busy with others, the next tick is due when the last of this one is done."""
        if self._unread:
            stop_at_s = (time.perf_counter() + stop_at_s) / 2
        while self._closing or self._opening or self._ticking:
            if self._closing:
                subscription = self._closing.popleft()
                subscription.tracker.close()
                self._close(subscription, now)
            elif self._opening:
                pod, followed = self._opening.popleft()
                if pod in self._subscriptions:
                    subscription = self._subscription(pod, *followed, now)
                    self._subscriptions[pod].append(subscription)
                    self._open(subscription, now)
            else:
                pod, subscription = self._ticking.popleft()
                if pod in self._subscriptions:
                    self._guarded(subscription, None, stop_at_s)
            if time.perf_counter() >= stop_at_s:
                return

    def _read_some(self, stop_at_s: float) -> bool:
        """True when something is left because the feed is full."""
        while self._unread:
            if self._feed.is_full():
                self._read_monitors(stop_at_s)
                return bool(self._unread)
            item = next(iter(self._unread))
            subscription = self._unread.pop(item)
            if self._guarded(subscription, item, stop_at_s):
                self._unread[item] = subscription  # behind all others
            if time.perf_counter() >= stop_at_s:
                break
        return False

    def _read_monitors(self, stop_at_s: float) -> None:
        """Those are read when the feed is full, too: ZMQ's thread waits for ever at a monitor that has no room, for all
        sources, and whoever closes such a socket waits for that thread."""
        for item, subscription in list(self._unread.items()):
            if item.closed or item is subscription.monitor:
                del self._unread[item]
                if not item.closed:
                    self._guarded(subscription, item, stop_at_s)

    def _guarded(self, subscription: Subscription, item: zmq.Socket[bytes] | None, stop_at_s: float) -> bool:
        """A step for one source; True when its socket may have more. The edge of its work: its fault costs that source a
        fresh start, and no other."""
        now = time.monotonic()
        try:
            if item is None:
                self._tick(subscription, now)
            elif item is subscription.monitor:
                self._read_monitor(subscription, now)
            else:
                return self._read(subscription, item, now, stop_at_s)
        except Exception:
            self.counters.faults += 1
            stream = subscription.stream
            logger.exception("%s failed in the receiver; followed anew", stream, extra=stream.log_fields())
            self._close(subscription, now)
            subscription.tracker.close()
            self._feed.put(stream, Report(SourceState.DOWN, cause="the receiver failed; see the log"))
            self._feed.put(stream, Reset(restarted=False, cause="the receiver failed"))
            stream.cause = ""
            subscription.tracker = self._tracker(subscription.replay, now)
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        return False

    # -- waiting

    def _rest(self) -> None:
        if self.counters.messages != self._rested_at_message:
            self._rested_at_message = self.counters.messages
            self._wait(self._limits.gather_s)
        elif self._loop is not None:
            self._listening = self._sockets.fileno()
            self._loop.add_reader(self._listening, self.wake)
            if self._subscriptions:
                self._wait(max(_WAIT_MIN_S, self._next_tick_s - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        if self._loop is not None:
            self._alarm = self._loop.call_later(seconds, self.wake)

    def _stop_waiting(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._listening >= 0 and self._loop is not None:
            self._loop.remove_reader(self._listening)
            self._listening = -1

    # -- following

    def _follow_wanted(self) -> None:
        if not self._wanted_changed:
            return
        self._wanted_changed = False
        wanted = dict.fromkeys(self._wanted.values())
        for pod in [pod for pod in self._subscriptions if pod not in wanted]:
            self._closing.extend(self._subscriptions.pop(pod))
        for pod in wanted:
            if pod not in self._subscriptions:
                self._subscriptions[pod] = []
                self._opening.extend((pod, followed) for followed in pod.streams)

    def _subscription(
        self, pod: FollowedPod, stream: Stream, publisher: Endpoint, replay: Endpoint | None, now: float
    ) -> Subscription:
        tracker = self._tracker(replay, now, stream.resume_at)
        stream.resume_at = None  # a tracker that is made anew comes behind a reset
        attempts = Attempts(str(publisher), self._limits.handshake_patience_s)
        handshakes_ = Handshakes(str(publisher), self._limits.handshake_patience_s)
        return Subscription(stream, publisher, replay, pod.topic, tracker, attempts, handshakes_)

    def _tracker(
        self, replay: Endpoint | None, now: float, resume_at: tuple[int, int] | None = None
    ) -> SequenceTracker:
        return SequenceTracker(
            self._sequence,
            self._budget,
            self.sequence_counters,
            replay_endpoint=replay is not None,
            now=now,
            resume_at=resume_at,
        )

    def _tick(self, subscription: Subscription, now: float) -> None:
        if subscription.dealer in self._unread or subscription.monitor in self._unread:
            return  # what waits to be read is not overdue
        if subscription.reopen_at_s is not None and now >= subscription.reopen_at_s:
            self._close(subscription, now)
            self._open(subscription, now)
        if subscription.handshakes.is_overdue(now):
            self._on_failed_handshake(subscription)
            self._close(subscription, now)  # ZMQ takes it for an open connection
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        elif trouble := subscription.attempts.trouble(now):
            self._report_down(subscription, trouble)
        self._perform(subscription, subscription.tracker.tick(now), now)

    def _start_over(self) -> None:
        """What is told of the sources comes before they are let go: if this fails too, the next try knows of them."""
        cause = "the receiver started over"
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.stream.cause = cause
                self._feed.put(subscription.stream, Report(SourceState.DOWN, cause=cause))
                self._feed.put(subscription.stream, Reset(restarted=False, cause=cause))
                subscription.tracker.close()
        for subscription in self._closing:
            subscription.tracker.close()
        for waiting in (self._subscriptions, self._closing, self._opening, self._ticking, self._unread):
            waiting.clear()
        self._sockets.close()
        self._sockets = Sockets(self._limits)
        self._replays = Replays(self._sockets, self._limits.replays_max, self.counters)
        self._wanted_changed = True

    # -- reading

    def _read(
        self, subscription: Subscription, item: zmq.Socket[bytes], now: float, stop_at_s: float
    ) -> bool:
        """Until nothing is left, the feed is full or the slice is over, a message at the least; True when there may be
        more."""
        while not item.closed:  # by what was read before
            try:
                frames = item.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.counters.messages += 1
            try:
                if item is subscription.live:
                    message = parse_live(frames)
                    if message.seq == END_SEQ:
                        raise UnreadableBatch("the number that ends a replay came on the live stream")
                    self.counters.message_bytes += len(message.payload)
                    actions = subscription.tracker.on_live(message.seq, message.payload, now)
                    self._perform(subscription, actions, now)
                else:
                    self._read_reply(subscription, frames, now)
            except UnreadableBatch as error:
                self._count_malformed(subscription.stream, error)
            if time.perf_counter() >= stop_at_s or self._feed.is_full():
                return True
        return False

    def _count_malformed(self, stream: Stream, error: UnreadableBatch) -> None:
        count = self.counters.messages_malformed = self.counters.messages_malformed + 1
        # The 1st, 2nd, 4th, 8th ...: a peer that sends nothing else floods no log.
        if count & (count - 1) == 0:
            logger.warning(
                "%s: malformed message (%d in all): %s", stream, count, error, extra=stream.log_fields()
            )

    def _read_reply(self, subscription: Subscription, frames: list[bytes], now: float) -> None:
        message = parse_replay_reply(frames)
        self.counters.message_bytes += len(message.payload)
        if message.seq == END_SEQ:
            self._replays.stop(subscription, now)
            self._perform(subscription, subscription.tracker.on_replay_end(now), now)
        else:
            self._perform(
                subscription, subscription.tracker.on_replay(message.seq, message.payload, now), now
            )

    def _read_monitor(self, subscription: Subscription, now: float) -> None:
        while subscription.monitor is not None:
            try:
                frames = subscription.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_monitor(subscription, parse_monitor_message(frames), now)

    def _on_monitor(self, subscription: Subscription, event: Any, now: float) -> None:
        kind = event["event"]
        tracker = subscription.tracker
        self._watch_for_an_end(subscription, kind, now)
        if not subscription.publisher.binds and subscription.handshakes.on_event(kind, now):
            self._on_failed_handshake(subscription)
        if kind in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            subscription.connections.add(event["value"])
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if subscription.established:
                logger.warning(
                    "%s: %s has another connection while one is open; two engines there would look like restarts",
                    subscription.stream,
                    subscription.publisher,
                    extra=subscription.stream.log_fields(),
                )
            subscription.established = True
            self._perform(subscription, tracker.on_connected(now), now)
        elif kind == zmq.EVENT_DISCONNECTED:
            subscription.connections.discard(event["value"])
            # On the bind side others may still be connected.
            if subscription.established and not subscription.connections:
                subscription.established = False
                cause = f"the connection to {subscription.publisher} ended"
                self._perform(subscription, tracker.on_disconnected(now, cause), now)
        trouble = "" if subscription.publisher.binds else subscription.attempts.on_event(kind, now)
        if trouble and not subscription.established:
            subscription.handshakes.forget()  # there is nobody to shake hands with now
            self._report_down(subscription, trouble)

    def _watch_for_an_end(self, subscription: Subscription, kind: int, now: float) -> None:
        """ZMQ gives a peer up for good that breaks the protocol or sends too long a message: it says that the
        connection ended, and not that it tries again. Then the socket is made anew."""
        if subscription.publisher.binds:
            return
        if kind == zmq.EVENT_DISCONNECTED or kind & handshakes.FAILED:
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        else:
            subscription.reopen_at_s = None

    def _on_failed_handshake(self, subscription: Subscription) -> None:
        self.counters.handshake_failures += 1
        if trouble := subscription.handshakes.trouble:
            self._report_down(subscription, trouble)  # and logged by the service, once

    # -- acting

    def _perform(self, subscription: Subscription, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._replays.ask(subscription, action.start_seq, now)
            elif isinstance(action, StopReplay):
                self._replays.stop(subscription, now)
            else:
                if isinstance(action, Report):
                    subscription.stream.cause = action.cause
                self._feed.put(subscription.stream, action)

    def _report_down(self, subscription: Subscription, cause: str) -> None:
        if subscription.stream.cause != cause:
            subscription.stream.cause = cause
            self._feed.put(subscription.stream, Report(SourceState.DOWN, cause=cause))

    # -- opening and closing

    def _open(self, subscription: Subscription, now: float) -> None:
        subscription.reopen_at_s = None
        publisher = subscription.publisher
        try:
            self._sockets.open_live(subscription)
        except zmq.ZMQError as error:
            self.counters.open_failures += 1
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
            verb = "bind" if publisher.binds else "connect to"
            self._report_down(subscription, f"cannot {verb} {publisher}: {os.strerror(error.errno or 0)}")
            return
        if publisher.binds:
            self._report_down(subscription, f"bound to {publisher}; no engine is connected")
        else:
            trouble = subscription.handshakes.trouble  # stays told until a handshake succeeds
            self._report_down(subscription, trouble or f"connecting to {publisher}")

    def _close(self, subscription: Subscription, now: float) -> None:
        self._replays.stop(subscription, now)
        self._sockets.close_live(subscription)
        subscription.connections.clear()
        subscription.established = False
        subscription.attempts.close()
        subscription.handshakes.close()
