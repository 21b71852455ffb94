"""Replays that run and those that wait for their turn: at most `replays_max` at once, in the order they were asked for.

A request that cannot be sent counts as sent: its tracker finds no reply within the timeout and does what a silent
endpoint deserves.
"""

from __future__ import annotations

import logging
from collections import deque

import zmq

from app.ingest.sockets import Sockets
from app.ingest.subscription import ReceiverCounters, Subscription

logger = logging.getLogger(__name__)


class Replays:
    """A source has one request at a time, which waits or runs."""

    def __init__(self, sockets: Sockets, running_max: int, counters: ReceiverCounters) -> None:
        self._sockets = sockets
        self._running_max = running_max
        self._counters = counters
        self._waiting: deque[Subscription] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, subscription: Subscription, start_seq: int, now: float) -> None:
        """In the place of what the source asked for before."""
        self.stop(subscription, now)
        subscription.replay_from = start_seq
        self._waiting.append(subscription)
        self._start(now)

    def stop(self, subscription: Subscription, now: float) -> None:
        if subscription.replay_from is not None:
            subscription.replay_from = None
            self._waiting.remove(subscription)
        if subscription.dealer is not None:
            self._sockets.close_replay(subscription)
            self.running -= 1
            self._start(now)

    def _start(self, now: float) -> None:
        while self._waiting and self.running < self._running_max:
            subscription = self._waiting.popleft()
            assert subscription.replay is not None, "only a source with a replay endpoint asks for a replay"
            assert subscription.replay_from is not None, "a source that waits has said from where"
            start_seq, subscription.replay_from = subscription.replay_from, None
            try:
                self._sockets.open_replay(subscription, subscription.replay, start_seq)
                self.running += 1
            except zmq.ZMQError as error:
                self._counters.open_failures += 1
                logger.warning(
                    "%s: cannot ask %s for a replay: %s",
                    subscription.stream,
                    subscription.replay,
                    error,
                    extra=subscription.stream.log_fields(),
                )
            subscription.tracker.on_replay_sent(now)
