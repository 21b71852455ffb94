"""Traffic through one router, until cancelled: open loop, with a bound on what is under way.

TrafficSource   made-up sessions (app/demo/traffic.py), endless
TraceSource     the requests of a recorded trace at their times; ends with the last answer
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from app.demo.router import Router
from app.demo.traffic import Session, sessions
from app.experiment.trace import Trace

SESSIONS_MAX = 1_000  # under way at once; past it a new one is left out
REQUESTS_MAX = 1_000  # of a trace, likewise


class Source(Protocol):
    """`begun` and `left_out` count sessions, or requests of a trace."""

    begun: int
    left_out: int

    async def run(self) -> None: ...


class TrafficSource:
    def __init__(self, router: Router, *, rate: float, seed: int) -> None:
        self.begun = 0
        self.left_out = 0
        self._router = router
        self._sessions = sessions(rate, seed)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with asyncio.TaskGroup() as group:
            open_sessions: set[asyncio.Task[None]] = set()
            for wait_s, session in self._sessions:
                due_s += wait_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if len(open_sessions) >= SESSIONS_MAX:
                    self.left_out += 1
                    continue
                self.begun += 1
                task = group.create_task(self._talk(session))
                open_sessions.add(task)
                task.add_done_callback(open_sessions.discard)

    async def _talk(self, session: Session) -> None:
        while not session.is_over:
            served = await self._router.send(session.prompt, session.answer_tokens())
            if served is None:
                return
            session.take(served.answer)
            await asyncio.sleep(session.pause_s())


class TraceSource:
    """`speed` is seconds of the trace in one second. Blocks become the made-up tokens of app/experiment/trace.py."""

    def __init__(self, router: Router, trace: Trace, *, speed: float) -> None:
        self.begun = 0
        self.left_out = 0
        self._router = router
        self._trace = trace
        self._speed = speed

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        first_s = self._trace.requests[0].at_s
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            under_way: set[asyncio.Task[None]] = set()
            for number, request in enumerate(self._trace.requests):
                due_s = began_s + (request.at_s - first_s) / self._speed
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if len(under_way) >= REQUESTS_MAX:
                    self.left_out += 1
                    continue
                self.begun += 1
                task = group.create_task(self._send(number))
                under_way.add(task)
                task.add_done_callback(under_way.discard)

    async def _send(self, number: int) -> None:
        prompt = self._trace.token_ids(number).tolist()
        await self._router.send(prompt, self._trace.requests[number].output_tokens)
