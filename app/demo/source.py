"""Sessions of traffic through one router, until cancelled: open loop, with a bound on what is under way."""

from __future__ import annotations

import asyncio

from app.demo.router import Router
from app.demo.traffic import Session, sessions

SESSIONS_MAX = 1_000  # under way at once; past it a new one is left out


class TrafficSource:
    """`begun` and `left_out` count sessions."""

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
