"""How what is discovered reaches the service: at once, or through the log that replicas share.

A lone process calls the service. With Redis every change goes through the log, takes its time and may be refused
later: a task hands over the newest wish for each pod, one after the other. Every replica discovers for itself and
wishes the same, so most wishes change nothing; where two differ for a moment, the order of the log decides.
There are at most as many wishes as discovered pods, and none is given up: while the log is away they wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from app.errors import IndexerError, LogAway, Overloaded, UnknownPod
from app.pods import PodSpec
from app.service import IndexerService
from app.service.writers import Writer

logger = logging.getLogger(__name__)

Refused = Callable[[str, str], None]  # told the pod and the cause


class Registrar(Protocol):
    def register(self, spec: PodSpec) -> None:
        """Raises what is wrong with it as far as that is known at once."""

    def drop(self, name: str) -> None:
        """A pod that is gone already is fine."""

    def is_pending(self, name: str, /) -> bool:
        """A wish for this pod is on its way."""

    async def run(self, refused: Refused) -> None:
        """For as long as it is not cancelled; `refused` is told of registrations that came to nothing."""


class DirectRegistrar:
    def __init__(self, service: IndexerService) -> None:
        self._service = service

    def register(self, spec: PodSpec) -> None:
        self._service.register(spec)

    def drop(self, name: str) -> None:
        with contextlib.suppress(UnknownPod):
            self._service.drop_pod(name)

    def is_pending(self, _name: str, /) -> bool:
        return False

    async def run(self, refused: Refused) -> None:
        """Nothing is left to do."""


class LoggedRegistrar:
    """`pause_s` is the time between two attempts while the log is away."""

    def __init__(self, service: IndexerService, writer: Writer, *, pause_s: float) -> None:
        self._service = service
        self._writer = writer
        self._pause_s = pause_s
        self._wishes: dict[str, PodSpec | None] = {}
        self._woken = asyncio.Event()

    def register(self, spec: PodSpec) -> None:
        self._service.check_spec(spec)
        known = self._service.pods.get(spec.name)
        if known is None or known.spec != spec or spec.name in self._wishes:
            self._wish(spec.name, spec)

    def drop(self, name: str) -> None:
        self._wish(name, None)

    def is_pending(self, name: str, /) -> bool:
        return name in self._wishes

    def _wish(self, name: str, spec: PodSpec | None) -> None:
        self._wishes.pop(name, None)
        self._wishes[name] = spec
        self._woken.set()

    async def run(self, refused: Refused) -> None:
        while True:
            self._woken.clear()
            while self._wishes:
                name, spec = next(iter(self._wishes.items()))
                try:
                    await self._hand_over(name, spec)
                except (LogAway, Overloaded) as error:
                    logger.warning("pod %s waits for the log: %s", name, error)
                    await asyncio.sleep(self._pause_s)
                    continue
                except IndexerError as error:
                    refused(name, str(error))
                if self._wishes.get(name) is spec:
                    del self._wishes[name]
            await self._woken.wait()

    async def _hand_over(self, name: str, spec: PodSpec | None) -> None:
        if spec is not None:
            await self._writer.register(spec)
            return
        with contextlib.suppress(UnknownPod):
            await self._writer.drop_pod(name)
