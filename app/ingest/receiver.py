"""One thread that owns every ZMQ socket: live streams in, replays asked for, batches handed to the feed.

A thread with blocking sockets, because the asyncio ones cost 2.6 times the CPU for the same messages. It
sleeps in one poll over everything (sockets.py) and a socket pair that wakes it; replays take turns (replays.py).

What it relies on:
  monitors    a source is connected from the handshake to the end of its last connection. The monitor tells
              both in no fixed order with the live frames, so a tracker holds frames that come while down.
  heartbeats  a peer that vanished without closing is noticed within `heartbeat_timeout_s`.

A source whose sockets cannot be opened is DOWN with the reason, and tried again every `reopen_interval_s`; so is one
whose peer ZMQ gave up, or that does not come through a handshake (handshakes.py). A
fault of our own costs every followed source a fresh start, is logged and counted, and never the thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from app.endpoints import Endpoint
from app.errors import UnreadableBatch
from app.ingest import handshakes
from app.ingest.actions import Action, Report, RequestReplay, Reset, StopReplay
from app.ingest.feed import Feed, Stream
from app.ingest.handshakes import Handshakes
from app.ingest.replays import Replays
from app.ingest.sequence import SequenceCounters, SequenceLimits, SequenceTracker
from app.ingest.sockets import SocketLimits, Sockets
from app.ingest.subscription import FollowedPod, ReceiverCounters, Subscription
from app.ingest.vllm import END_SEQ, parse_live, parse_replay_reply
from app.ingest.window import HoldBudget
from app.pods import SourceState

logger = logging.getLogger(__name__)


class Receiver:
    """`follow`, `unfollow`, `start`, `wake`, `stop` belong to the loop's thread, the rest to its own."""

    def __init__(self, feed: Feed, sequence: SequenceLimits, limits: SocketLimits) -> None:
        self._feed = feed
        self._sequence = sequence
        self._limits = limits
        self._wanted: dict[str, FollowedPod] = {}
        self._wanted_changed = False
        self._wanted_lock = threading.Lock()
        self._stopping = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="zmq-ingest", daemon=True)

        # From here on, the receiver thread's own.
        self.counters = ReceiverCounters()
        self.sequence_counters = SequenceCounters()
        self._sockets = Sockets(limits, self._wake_in.fileno())
        self._replays = Replays(self._sockets, limits.replays_max, self.counters)
        self._subscriptions: dict[FollowedPod, tuple[Subscription, ...]] = {}
        self._next_tick_s = 0.0
        self._rounds = 0
        self._budget = HoldBudget(limits.held_bytes_max)

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

    # -- the loop's side

    def follow(self, pod: FollowedPod) -> None:
        with self._wanted_lock:
            self._wanted[pod.name] = pod
            self._wanted_changed = True
        self.wake()

    def unfollow(self, name: str) -> None:
        with self._wanted_lock:
            self._wanted.pop(name, None)
            self._wanted_changed = True
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # as many wakes as fit are on their way already
            self._wake_out.send(b"\0")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread and all its sockets are gone; a round takes milliseconds."""
        self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._sockets.close()
        self._wake_out.close()
        self._wake_in.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- the thread

    def _run(self) -> None:
        is_broken = False
        try:
            while not (self._stopping or self._feed.is_deserted):
                try:
                    if is_broken:
                        self._start_over()
                        is_broken = False
                    self._round()
                except Exception:
                    self.counters.faults += 1
                    logger.exception("the ZMQ receiver failed; every stream is followed anew")
                    is_broken = True
                    if not self._stopping:
                        self._sockets.wait_for_wake(1_000)  # a fault that comes back must not spin
        finally:
            self._sockets.close()

    def _round(self) -> None:
        self._follow_wanted()
        if self._feed.is_full():
            self._feed.flush()
            self._sockets.wait_for_wake(1_000)
            self._clear_wakes()
            return
        ready = self._sockets.wait(self._poll_timeout_ms())
        self._clear_wakes()
        now = time.monotonic()
        self._rounds += 1
        messages_before = self.counters.messages
        # In turns: who comes last when the queue fills up must come early in a later round.
        first = self._rounds % max(len(ready), 1)
        unread: set[Subscription] = set()
        for item, subscription in ready[first:] + ready[:first]:
            if self._feed.is_full():
                unread.add(subscription)
            else:
                self._guarded(subscription, self._read, item, now)
        if now >= self._next_tick_s:
            self._next_tick_s = now + self._limits.tick_interval_s
            for subscriptions in self._subscriptions.values():
                for subscription in subscriptions:
                    if subscription not in unread:  # a reply that waits in a queue is not overdue
                        self._guarded(subscription, self._tick, None, now)
        self._feed.flush()
        # A round that read as much as this has left some to be read, or was worth its wake-up.
        if ready and self.counters.messages - messages_before < self._limits.reads_per_round_max:
            time.sleep(self._limits.gather_s)

    def _guarded(
        self,
        subscription: Subscription,
        step: Callable[[Subscription, Any, float], None],
        item: zmq.Socket[bytes] | None,
        now: float,
    ) -> None:
        """The edge of one source's work: its fault costs that source a fresh start, and no other."""
        try:
            step(subscription, item, now)
        except Exception:
            self.counters.faults += 1
            stream = subscription.stream
            logger.exception("%s failed in the receiver; followed anew", stream, extra=stream.log_fields())
            self._close(subscription, now)
            subscription.tracker.close()
            self._feed.put(stream, Report(SourceState.DOWN, cause="the receiver failed; see the log"))
            self._feed.put(stream, Reset(restarted=False, cause="the receiver failed"))
            subscription.tracker = self._tracker(subscription.replay, now)
            subscription.reopen_at_s = now + self._limits.reopen_interval_s

    def _poll_timeout_ms(self) -> int | None:
        if not self._subscriptions:
            return None
        return max(0, int((self._next_tick_s - time.monotonic()) * 1_000) + 1)

    def _clear_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4_096):
                pass

    def _follow_wanted(self) -> None:
        if not self._wanted_changed:
            return
        with self._wanted_lock:
            self._wanted_changed = False
            wanted = dict.fromkeys(self._wanted.values())
        for pod in [pod for pod in self._subscriptions if pod not in wanted]:
            self._close_pod(pod)
        now = time.monotonic()
        for pod in wanted:
            if pod not in self._subscriptions:
                subscriptions = tuple(self._subscription(pod, *stream, now) for stream in pod.streams)
                self._subscriptions[pod] = subscriptions
                for subscription in subscriptions:
                    self._open(subscription, now)

    def _subscription(
        self, pod: FollowedPod, stream: Stream, publisher: Endpoint, replay: Endpoint | None, now: float
    ) -> Subscription:
        tracker = self._tracker(replay, now, stream.resume_at)
        stream.resume_at = None  # a tracker that is made anew comes behind a reset
        handshakes_ = Handshakes(str(publisher), self._limits.handshake_patience_s)
        return Subscription(stream, publisher, replay, pod.topic, tracker, handshakes_)

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

    def _tick(self, subscription: Subscription, _: Any, now: float) -> None:
        if subscription.reopen_at_s is not None and now >= subscription.reopen_at_s:
            self._close(subscription, now)
            self._open(subscription, now)
        if subscription.handshakes.is_overdue(now):
            self._on_failed_handshake(subscription)
            self._close(subscription, now)  # ZMQ takes it for an open connection
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        self._perform(subscription, subscription.tracker.tick(now), now)

    def _start_over(self) -> None:
        """What is told of the sources comes before they are let go: if this fails too, the next try knows of them."""
        cause = "the receiver started over"
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                self._feed.put(subscription.stream, Report(SourceState.DOWN, cause=cause))
                self._feed.put(subscription.stream, Reset(restarted=False, cause=cause))
                subscription.tracker.close()
        self._subscriptions.clear()
        self._sockets.close()
        self._sockets = Sockets(self._limits, self._wake_in.fileno())
        self._replays = Replays(self._sockets, self._limits.replays_max, self.counters)
        self._wanted_changed = True

    # -- reading

    def _read(self, subscription: Subscription, item: zmq.Socket[bytes], now: float) -> None:
        if item is subscription.monitor:
            self._read_monitor(subscription, now)
            return
        most_bytes = self.counters.message_bytes + self._limits.read_bytes_per_round_max
        for _ in range(self._limits.reads_per_round_max):
            if item.closed:  # by what was read before it
                return
            try:
                frames = item.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
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
            if self.counters.message_bytes >= most_bytes:
                return

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
        elif kind == zmq.EVENT_CONNECT_DELAYED:
            subscription.resolved = True
        elif kind == zmq.EVENT_CONNECT_RETRIED:
            # An attempt whose host name has no address ends without having begun to connect.
            if not subscription.resolved and not subscription.established:
                self._report_down(
                    subscription,
                    f"no address for the host of {subscription.publisher}, or no descriptor left",
                )
            subscription.resolved = False

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
                self._feed.put(subscription.stream, action)

    def _report_down(self, subscription: Subscription, cause: str) -> None:
        if subscription.stream.cause != cause:
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
        subscription.handshakes.close()

    def _close_pod(self, pod: FollowedPod) -> None:
        now = time.monotonic()
        for subscription in self._subscriptions.pop(pod):
            subscription.tracker.close()
            self._close(subscription, now)
