"""One thread that owns every ZMQ socket: live streams in, replays asked for, batches handed to the feed.

A thread with blocking sockets, because the asyncio ones cost 2.6 times the CPU for the same messages. It
sleeps in one poll over everything: a SUB and its monitor per source, a DEALER per running replay, and a
socket pair that wakes it.

What it relies on:
  monitors    a source is connected from the handshake to the end of its last connection. The monitor tells
              both in no fixed order with the live frames, so a tracker holds frames that come while down.
  heartbeats  a peer that vanished without closing is noticed within `heartbeat_timeout_s`.
  one DEALER  for each replay request: replies to a request that was given up die with its socket, unread.

A source whose sockets cannot be opened is DOWN with the reason, and tried again every `reopen_interval_s`; so is one
whose peer ZMQ gave up, or that does not come through a handshake (handshakes.py). A
fault of our own costs every followed source a fresh start, is logged and counted, and never the thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections import deque
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
from app.ingest.sequence import SequenceCounters, SequenceLimits, SequenceTracker
from app.ingest.vllm import END_SEQ, build_replay_request, parse_live, parse_replay_reply
from app.ingest.window import HoldBudget
from app.pods import SourceState

logger = logging.getLogger(__name__)

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | handshakes.FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
)


@dataclasses.dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds and intervals of sockets and of the thread's rounds."""

    live_queue_messages_max: int = 1_000  # ZMQ's receive queue of one live stream; the engine's own is larger
    replay_queue_messages_max: int = 1_000  # of one replay
    message_bytes_max: int = 64 * 1024 * 1024
    held_bytes_max: int = 256 * 1024 * 1024  # live batches that wait for replays, all sources together
    replays_max: int = 32  # replays that run at once; the others wait for their turn
    heartbeat_interval_s: float = 5.0
    heartbeat_timeout_s: float = 15.0
    reconnect_interval_s: float = 0.1
    reconnect_interval_s_max: float = 5.0
    reopen_interval_s: float = 5.0
    handshake_patience_s: float = 3.0  # from the connection to the end of its handshake
    tick_interval_s: float = 0.1
    reads_per_round_max: int = 128  # messages from one socket before the next has its turn
    read_bytes_per_round_max: int = 1024 * 1024  # likewise; the message that passes it is read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FollowedPod:
    """Streams with their endpoints (publisher, replay), all with the same topic. Equal only to itself."""

    name: str
    topic: bytes
    streams: tuple[tuple[Stream, Endpoint, Endpoint | None], ...]


@dataclasses.dataclass(slots=True)
class ReceiverCounters:
    """Written by the receiver thread only."""

    messages: int = 0
    message_bytes: int = 0
    messages_malformed: int = 0
    open_failures: int = 0
    handshake_failures: int = 0
    faults: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Subscription:
    stream: Stream
    publisher: Endpoint
    replay: Endpoint | None
    topic: bytes
    tracker: SequenceTracker
    handshakes: Handshakes
    live: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    dealer: zmq.Socket[bytes] | None = None
    connections: set[int] = dataclasses.field(default_factory=set)
    established: bool = False
    resolved: bool = True  # the last attempt to connect got past the name
    replay_from: int | None = None  # a request that waits for its turn
    reopen_at_s: float | None = None


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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_poller = zmq.Poller()
        self._subscriptions: dict[FollowedPod, tuple[_Subscription, ...]] = {}
        self._by_socket: dict[zmq.Socket[bytes], _Subscription] = {}
        self._waiting: deque[_Subscription] = deque()
        self._running_replays = 0
        self._next_tick_s = 0.0
        self._rounds = 0
        self._budget = HoldBudget(limits.held_bytes_max)
        self.counters = ReceiverCounters()
        self.sequence_counters = SequenceCounters()

    @property
    def held_bytes(self) -> int:
        return self._budget.used_bytes

    @property
    def held_overflows(self) -> int:
        return self._budget.overflows

    @property
    def replays_running(self) -> int:
        return self._running_replays

    @property
    def replays_waiting(self) -> int:
        return len(self._waiting)

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
            self._context.term()
        self._wake_out.close()
        self._wake_in.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # -- the thread

    def _run(self) -> None:
        # pyzmq tells raw descriptors from sockets by type.
        self._poller.register(self._wake_in.fileno(), zmq.POLLIN)
        self._wake_poller.register(self._wake_in.fileno(), zmq.POLLIN)
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
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
                        self._wake_poller.poll(1_000)  # a fault that comes back must not spin
        finally:
            self._context.destroy(linger=0)

    def _round(self) -> None:
        self._follow_wanted()
        if self._feed.is_full():
            self._feed.flush()
            self._wake_poller.poll(1_000)
            self._clear_wakes()
            return
        ready = [item for item, _ in self._poller.poll(self._poll_timeout_ms())]
        self._clear_wakes()
        now = time.monotonic()
        self._rounds += 1
        # In turns: who comes last when the queue fills up must come early in a later round.
        first = self._rounds % max(len(ready), 1)
        unread: set[_Subscription] = set()
        for item in ready[first:] + ready[:first]:
            subscription = self._by_socket.get(item)
            if subscription is None:
                continue
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

    def _guarded(
        self,
        subscription: _Subscription,
        step: Callable[[_Subscription, Any, float], None],
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
    ) -> _Subscription:
        tracker = self._tracker(replay, now, stream.resume_at)
        stream.resume_at = None  # a tracker that is made anew comes behind a reset
        handshakes_ = Handshakes(str(publisher), self._limits.handshake_patience_s)
        return _Subscription(stream, publisher, replay, pod.topic, tracker, handshakes_)

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

    def _tick(self, subscription: _Subscription, _: Any, now: float) -> None:
        if subscription.reopen_at_s is not None and now >= subscription.reopen_at_s:
            self._close(subscription, now)
            self._open(subscription, now)
        if subscription.handshakes.is_overdue(now):
            self._on_failed_handshake(subscription)
            self._close(subscription, now)  # ZMQ takes it for an open connection
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        self._perform(subscription, subscription.tracker.tick(now), now)

    def _start_over(self) -> None:
        """What is told of a source comes before it is let go: if this fails too, the next try knows of it still."""
        for pod, subscriptions in list(self._subscriptions.items()):
            cause = "the receiver started over"
            for subscription in subscriptions:
                self._feed.put(subscription.stream, Report(SourceState.DOWN, cause=cause))
                self._feed.put(subscription.stream, Reset(restarted=False, cause=cause))
            self._close_pod(pod)
        self._wanted_changed = True

    # -- reading

    def _read(self, subscription: _Subscription, item: zmq.Socket[bytes], now: float) -> None:
        if item is subscription.monitor:
            self._read_monitor(subscription, now)
            return
        most_bytes = self.counters.message_bytes + self._limits.read_bytes_per_round_max
        for _ in range(self._limits.reads_per_round_max):
            if item.closed:
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
        if (
            count & (count - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th ...: a peer that sends nothing else floods no log
            logger.warning(
                "%s: malformed message (%d in all): %s", stream, count, error, extra=stream.log_fields()
            )

    def _read_reply(self, subscription: _Subscription, frames: list[bytes], now: float) -> None:
        message = parse_replay_reply(frames)
        self.counters.message_bytes += len(message.payload)
        if message.seq == END_SEQ:
            self._stop_replay(subscription, now)
            self._perform(subscription, subscription.tracker.on_replay_end(now), now)
        else:
            self._perform(
                subscription, subscription.tracker.on_replay(message.seq, message.payload, now), now
            )

    def _read_monitor(self, subscription: _Subscription, now: float) -> None:
        while subscription.monitor is not None:
            try:
                frames = subscription.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_monitor(subscription, parse_monitor_message(frames), now)

    def _on_monitor(self, subscription: _Subscription, event: Any, now: float) -> None:
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

    def _watch_for_an_end(self, subscription: _Subscription, kind: int, now: float) -> None:
        """ZMQ gives a peer up for good that breaks the protocol or sends too long a message: it says that the
        connection ended, and not that it tries again. Then the socket is made anew."""
        if subscription.publisher.binds:
            return
        if kind == zmq.EVENT_DISCONNECTED or kind & handshakes.FAILED:
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
        else:
            subscription.reopen_at_s = None

    def _on_failed_handshake(self, subscription: _Subscription) -> None:
        self.counters.handshake_failures += 1
        if trouble := subscription.handshakes.trouble:
            self._report_down(subscription, trouble)  # and logged by the service, once

    # -- acting

    def _perform(self, subscription: _Subscription, actions: list[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._stop_replay(subscription, now)
                subscription.replay_from = action.start_seq
                self._waiting.append(subscription)
                self._start_replays(now)
            elif isinstance(action, StopReplay):
                self._stop_replay(subscription, now)
            else:
                self._feed.put(subscription.stream, action)

    def _start_replays(self, now: float) -> None:
        while self._waiting and self._running_replays < self._limits.replays_max:
            subscription = self._waiting.popleft()
            assert subscription.replay is not None, "only a source with a replay endpoint asks for a replay"
            assert subscription.replay_from is not None, "a source that waits has said from where"
            start_seq, subscription.replay_from = subscription.replay_from, None
            try:
                dealer = self._socket(zmq.DEALER, subscription.replay)
                self._running_replays += 1
                subscription.dealer = dealer
                self._register(dealer, subscription)
                dealer.set(zmq.RCVHWM, self._limits.replay_queue_messages_max)
                dealer.connect(str(subscription.replay))
                dealer.send_multipart(build_replay_request(start_seq), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # Its tracker finds no reply within the timeout and does what a silent endpoint deserves.
                self.counters.open_failures += 1
                logger.warning(
                    "%s: cannot ask %s for a replay: %s",
                    subscription.stream,
                    subscription.replay,
                    error,
                    extra=subscription.stream.log_fields(),
                )
            subscription.tracker.on_replay_sent(now)

    def _stop_replay(self, subscription: _Subscription, now: float) -> None:
        if subscription.replay_from is not None:
            subscription.replay_from = None
            self._waiting.remove(subscription)
        if subscription.dealer is not None:
            self._unregister(subscription.dealer)
            subscription.dealer = None
            self._running_replays -= 1
            self._start_replays(now)

    def _report_down(self, subscription: _Subscription, cause: str) -> None:
        if subscription.stream.cause != cause:
            self._feed.put(subscription.stream, Report(SourceState.DOWN, cause=cause))

    # -- sockets

    def _open(self, subscription: _Subscription, now: float) -> None:
        subscription.reopen_at_s = None
        live: zmq.Socket[bytes] | None = None
        try:
            live = self._socket(zmq.SUB, subscription.publisher)
            live.set(zmq.RCVHWM, self._limits.live_queue_messages_max)
            live.set(zmq.HEARTBEAT_IVL, int(self._limits.heartbeat_interval_s * 1_000))
            live.set(zmq.HEARTBEAT_TIMEOUT, int(self._limits.heartbeat_timeout_s * 1_000))
            live.set(zmq.SUBSCRIBE, subscription.topic)
            monitor = live.get_monitor_socket(_MONITORED)
            subscription.live, subscription.monitor = live, monitor
            self._register(live, subscription)
            self._register(monitor, subscription)
            if subscription.publisher.binds:
                live.bind(str(subscription.publisher))
                self._report_down(subscription, f"bound to {subscription.publisher}; no engine is connected")
            else:
                live.connect(str(subscription.publisher))
                trouble = subscription.handshakes.trouble  # stays told until a handshake succeeds
                self._report_down(subscription, trouble or f"connecting to {subscription.publisher}")
        except zmq.ZMQError as error:
            self.counters.open_failures += 1
            self._close(subscription, now)
            if live is not None and not live.closed:
                live.close(0)
            subscription.reopen_at_s = now + self._limits.reopen_interval_s
            verb = "bind" if subscription.publisher.binds else "connect to"
            self._report_down(
                subscription, f"cannot {verb} {subscription.publisher}: {os.strerror(error.errno or 0)}"
            )

    def _socket(self, kind: int, endpoint: Endpoint) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.MAXMSGSIZE, self._limits.message_bytes_max)
        made.set(zmq.RECONNECT_IVL, int(self._limits.reconnect_interval_s * 1_000))
        made.set(zmq.RECONNECT_IVL_MAX, int(self._limits.reconnect_interval_s_max * 1_000))
        if endpoint.is_ipv6:
            made.set(zmq.IPV6, 1)
        return made

    def _register(self, made: zmq.Socket[bytes], subscription: _Subscription) -> None:
        self._poller.register(made, zmq.POLLIN)
        self._by_socket[made] = subscription

    def _unregister(self, made: zmq.Socket[bytes]) -> None:
        self._poller.unregister(made)
        del self._by_socket[made]
        made.close(0)

    def _close(self, subscription: _Subscription, now: float) -> None:
        self._stop_replay(subscription, now)
        if subscription.monitor is not None and subscription.live is not None:
            subscription.live.disable_monitor()
            self._unregister(subscription.monitor)
            self._unregister(subscription.live)
        subscription.live = subscription.monitor = None
        subscription.connections.clear()
        subscription.established = False
        subscription.handshakes.close()

    def _close_pod(self, pod: FollowedPod) -> None:
        now = time.monotonic()
        for subscription in self._subscriptions.pop(pod):
            subscription.tracker.close()
            self._close(subscription, now)
