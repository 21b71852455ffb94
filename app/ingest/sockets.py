"""The receiver's ZMQ sockets: a SUB and its monitor per source, a DEALER per running replay, one descriptor for all.

ZMQ has a descriptor for each socket that tells no more than a change: once it was looked at, messages that are there
already show no more. So whoever is told of a socket reads until nothing is left (`zmq.Again`), or remembers it.

A DEALER is for one request: replies to a request that was given up die with its socket, unread. Whatever cannot be
opened raises ZMQError and leaves nothing open. All of it can be thrown away at once (`close`), which does not depend on
what is known of any single socket.

Streams take at most three quarters of the process's descriptors: with none left, no request could be accepted, probes
included. What comes past that fails as if the system had none left (EMFILE).
"""

from __future__ import annotations

import dataclasses
import errno
import resource
import select

import zmq

from app.endpoints import Endpoint
from app.ingest import handshakes
from app.ingest.subscription import Subscription
from app.ingest.vllm import build_replay_request

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | handshakes.FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
)
_TOLD_MAX = 64  # in one call
_DESCRIPTORS_A_STREAM = 5


@dataclasses.dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds and intervals of sockets, and of reading them."""

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
    gather_s: float = 0.001  # rest behind reading: what comes meanwhile is read in one go


class Sockets:
    """`fileno` is readable when `poll` may find something."""

    def __init__(self, limits: SocketLimits) -> None:
        self._limits = limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._epoll = select.epoll()
        self._open: dict[int, tuple[zmq.Socket[bytes], Subscription]] = {}  # by their descriptors
        self._new: list[int] = []  # that were not told yet
        self._streams = 0
        self._streams_max = _streams_max()

    def close(self) -> None:
        self._epoll.close()
        self._context.destroy(linger=0)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def poll(self, *, all_of_them: bool = False) -> list[tuple[zmq.Socket[bytes], Subscription]]:
        """Of those that may have something to read all or some, every one of them in its turn; [] when there are none."""
        told, self._new = self._new, []
        told_max = max(_TOLD_MAX, len(self._open)) if all_of_them else _TOLD_MAX
        told += [descriptor for descriptor, _ in self._epoll.poll(0, told_max)]
        return [self._open[descriptor] for descriptor in told if descriptor in self._open]

    def open_live(self, subscription: Subscription) -> None:
        if self._streams >= self._streams_max:
            raise zmq.ZMQError(errno.EMFILE)
        live = self._make(zmq.SUB, subscription.publisher)
        try:
            live.set(zmq.RCVHWM, self._limits.live_queue_messages_max)
            live.set(zmq.HEARTBEAT_IVL, int(self._limits.heartbeat_interval_s * 1_000))
            live.set(zmq.HEARTBEAT_TIMEOUT, int(self._limits.heartbeat_timeout_s * 1_000))
            live.set(zmq.SUBSCRIBE, subscription.topic)
            monitor = live.get_monitor_socket(_MONITORED)
        except zmq.ZMQError:
            live.close(0)
            raise
        subscription.live, subscription.monitor = live, monitor
        self._streams += 1
        try:
            self._register(live, subscription)
            self._register(monitor, subscription)
            if subscription.publisher.binds:
                live.bind(str(subscription.publisher))
            else:
                live.connect(str(subscription.publisher))
        except zmq.ZMQError:
            self.close_live(subscription)
            raise

    def close_live(self, subscription: Subscription) -> None:
        if subscription.monitor is not None and subscription.live is not None:
            subscription.live.disable_monitor()
            self._unregister(subscription.monitor)
            self._unregister(subscription.live)
            self._streams -= 1
        subscription.live = subscription.monitor = None

    def open_replay(self, subscription: Subscription, endpoint: Endpoint, start_seq: int) -> None:
        """With the request on its way."""
        dealer = subscription.dealer = self._make(zmq.DEALER, endpoint)
        try:
            self._register(dealer, subscription)
            dealer.set(zmq.RCVHWM, self._limits.replay_queue_messages_max)
            dealer.connect(str(endpoint))
            dealer.send_multipart(build_replay_request(start_seq), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.close_replay(subscription)
            raise

    def close_replay(self, subscription: Subscription) -> None:
        if subscription.dealer is not None:
            self._unregister(subscription.dealer)
            subscription.dealer = None

    def _make(self, kind: int, endpoint: Endpoint) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.MAXMSGSIZE, self._limits.message_bytes_max)
        made.set(zmq.RECONNECT_IVL, int(self._limits.reconnect_interval_s * 1_000))
        made.set(zmq.RECONNECT_IVL_MAX, int(self._limits.reconnect_interval_s_max * 1_000))
        if endpoint.is_ipv6:
            made.set(zmq.IPV6, 1)
        return made

    def _register(self, made: zmq.Socket[bytes], subscription: Subscription) -> None:
        descriptor = made.FD
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
        except OSError as error:  # the kernel watches no more for this user
            raise zmq.ZMQError(error.errno) from error
        self._open[descriptor] = (made, subscription)
        # Connecting or sending may have looked at the descriptor.
        self._new.append(descriptor)

    def _unregister(self, made: zmq.Socket[bytes]) -> None:
        descriptor = made.FD
        if self._open.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        made.close(0)


def _streams_max() -> float:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return float("inf")
    return descriptors * 3 // 4 // _DESCRIPTORS_A_STREAM
