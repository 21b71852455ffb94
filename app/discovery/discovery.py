"""Watches every place that knows pods, asks the engines that they name, and keeps the service's pods accordingly.

A task for each place, one for each engine that is asked, and one that settles deadlines. Engines are asked as
soon as they are seen, every `discovery_interval_s` until they answer (a model loads for minutes) and every REASK_S
after that, as an engine may come back with other ports in the same pod; ASKED_AT_ONCE of them at a time, each with
a deadline. What was learned stays when a later question fails.

Pods that a snapshot or the log brought belong to the place that had found them: they are kept until its first
picture shows that they are gone. Those of a place that is not configured are dropped at the deadline; so all replicas
of one log have to be configured with the same places.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx

from app.config import Settings
from app.discovery.dns_names import DnsName
from app.discovery.engine import TIMEOUT_S, learn
from app.discovery.kubernetes import Account, KubernetesPods
from app.discovery.pods_file import PodsFile
from app.discovery.registrar import DirectRegistrar, LoggedRegistrar, Registrar
from app.discovery.roster import Discovered, PlaceState, Roster, Rules
from app.discovery.sightings import Place
from app.errors import InvalidInput, InvalidSettings, Unresponsive
from app.pods import PodSpec
from app.service import IndexerService
from app.service.writers import Writer

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 64
REASK_S = 60.0
SETTLE_INTERVAL_S = 0.5
CANCEL_INTERVAL_S = 0.1
SETTLED_AT_ONCE = 512  # pods; others have their turn in between


def places(settings: Settings, *, file_specs: tuple[PodSpec, ...]) -> list[Place]:
    """Those that the settings name; `file_specs` are the pods file's at the start. Raises InvalidSettings."""
    interval_s = settings.discovery_interval_s
    found: list[Place] = []
    if settings.pods_file is not None:
        found.append(PodsFile(settings.pods_file, file_specs, interval_s=interval_s))
    try:
        found += [
            DnsName(text, server=settings.discovery_dns_server, interval_s=interval_s)
            for text in settings.discovery_dns
        ]
        if settings.discovery_kubernetes is not None:
            found.append(
                KubernetesPods(
                    settings.discovery_kubernetes,
                    engines=settings.discovery_kubernetes_engines,
                    api_url=settings.discovery_kubernetes_api_url,
                    account=Account(settings.discovery_kubernetes_account),
                    namespace=settings.discovery_kubernetes_namespace,
                    interval_s=interval_s,
                )
            )
    except InvalidInput as error:
        raise InvalidSettings(str(error)) from error
    for name, count in Counter(place.name for place in found).items():
        if count > 1:
            raise InvalidSettings(f"{name} is there {count} times")
    return found


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels until they are over: before Python 3.12 `wait_for`, which dnspython uses, can lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceFigures:
    """What can be seen of a place from outside."""

    place: str
    state: PlaceState
    cause: str
    seen_age_s: float | None  # since its last picture
    pods: Mapping[str, int]  # registered, waiting, vanished or refused; each is one of these
    waiting: Mapping[str, str]  # pod -> why it is not registered
    looks: Mapping[str, int]
    changes: Mapping[str, int]


class Discovery:
    """Made before the event loop runs, used on it. `reserved` are the names of pods that are configured."""

    def __init__(
        self,
        settings: Settings,
        service: IndexerService,
        writer: Writer,
        watched: Sequence[Place],
        *,
        reserved: frozenset[str],
        registered: Callable[[PodSpec], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._service = service
        self._clock = clock
        self._watched = list(watched)
        self._registrar: Registrar = (
            DirectRegistrar(service)
            if writer.immediate is not None
            else LoggedRegistrar(service, writer, pause_s=settings.discovery_interval_s)
        )
        self._rules = Rules(
            registrar=self._registrar,
            deadline_s=settings.discovery_deadline_s,
            pods_max=settings.pods_max,
            reserved=reserved,
            owners={},
            ask=self._begin_asking,
            forget=self._end_asking,
            registered=registered,
        )
        self._settle_interval_s = min(SETTLE_INTERVAL_S, max(0.05, settings.discovery_deadline_s / 2))
        self._rosters = {place.name: self._roster(place.name) for place in watched}
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE)
        self._client: httpx.AsyncClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: dict[Discovered, asyncio.Task[None]] = {}
        self._questions: Counter[str] = Counter({"answered": 0, "unanswered": 0, "faults": 0})

    def start(self) -> None:
        """On the running event loop, after a snapshot was restored."""
        self._remember()
        for place in self._watched:
            self._run(functools.partial(place.watch, self._rosters[place.name]), place.name)
        self._run(self._settle, "settling")
        self._run(functools.partial(self._registrar.run, self._refused), "registering")

    async def stop(self) -> None:
        await end([*self._tasks, *self._asking.values()])
        self._tasks, self._asking = [], {}
        if self._client is not None:
            await self._client.aclose()

    # -- how it goes

    def figures(self) -> list[PlaceFigures]:
        return [self._figures(roster) for roster in self._rosters.values()]

    def stats(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(figures) for figures in self.figures()]

    def questions(self) -> Mapping[str, int]:
        return self._questions

    def unfinished(self) -> list[tuple[str, str]]:
        """(place, sentence) of each place that has not shown its first picture, or whose engines were not asked."""
        found = []
        for roster in self._rosters.values():
            unasked = sum(not known.is_asked for known in roster.pods.values())
            if roster.seen_at_s is None:
                cause = f": {roster.cause}" if roster.cause else ""
                found.append((f"discovery.{roster.place}", f"{roster.place} was not seen yet{cause}"))
            elif unasked:
                found.append(
                    (f"discovery.{roster.place}", f"{unasked} pods of {roster.place} were not asked yet")
                )
        return found

    def _figures(self, roster: Roster) -> PlaceFigures:
        present = [pod for pod in roster.pods.values() if pod.vanished_at_s is None]
        waiting = {pod.name: pod.cause for pod in present if not pod.is_registered or pod.cause}
        return PlaceFigures(
            place=roster.place,
            state=roster.state,
            cause=roster.cause,
            seen_age_s=None if roster.seen_at_s is None else max(0.0, self._clock() - roster.seen_at_s),
            pods={
                "registered": len(present) - len(waiting),
                "waiting": len(waiting),
                "vanished": len(roster.pods) - len(present),
                "refused": roster.refused,
            },
            waiting=waiting,
            looks=dict(roster.looks),
            changes=dict(roster.changes),
        )

    # -- inside

    def _roster(self, name: str) -> Roster:
        return Roster(name, self._service, self._rules, clock=self._clock)

    def _remember(self) -> None:
        """Pods that are registered as discovered, and that no roster knows."""
        for pod in self._service.pods.values():
            place = pod.spec.discovered_by
            if place is None or pod.spec.name in self._rules.owners or pod.spec.name in self._rules.reserved:
                continue
            roster = self._rosters.get(place)
            if roster is None:
                roster = self._rosters[place] = self._roster(place)
                roster.seen({})
                roster.failed("it is not configured")
            if pod.spec.name not in roster.pods and not self._registrar.is_pending(pod.spec.name):
                roster.remember(pod.spec)

    def _refused(self, name: str, cause: str) -> None:
        roster = self._rules.owners.get(name)
        if roster is not None:
            roster.not_taken(name, cause)

    async def _settle(self) -> None:
        while True:
            self._remember()
            for roster in list(self._rosters.values()):
                names = list(roster.pods)
                for first in range(0, len(names), SETTLED_AT_ONCE):
                    roster.settle(names[first : first + SETTLED_AT_ONCE])
                    await asyncio.sleep(0)
            await asyncio.sleep(self._settle_interval_s)

    def _begin_asking(self, roster: Roster, known: Discovered) -> None:
        self._asking[known] = asyncio.create_task(
            self._guard(lambda: self._ask(roster, known), known.name), name=f"ask {known.name}"
        )

    def _end_asking(self, known: Discovered) -> None:
        task = self._asking.pop(known, None)
        if task is not None:
            task.cancel()

    async def _ask(self, roster: Roster, known: Discovered) -> None:
        if self._client is None:  # made late: it costs 16 ms, and most have nobody to ask
            self._client = httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False)
        client = self._client
        assert known.sighting is not None, "only asked of what was seen"
        while self._asking.get(known) is asyncio.current_task():
            pause_s = self._settings.discovery_interval_s
            try:
                async with self._slots, asyncio.timeout(2 * TIMEOUT_S):
                    learned = await learn(
                        client, known.sighting, metrics_bytes_max=self._settings.loads_bytes_max
                    )
                self._questions["answered"] += 1
                if self._asking.get(known) is asyncio.current_task():
                    roster.learned(known, learned)
                pause_s = max(REASK_S, pause_s)
            except (Unresponsive, InvalidInput, TimeoutError) as error:
                self._questions["unanswered"] += 1
                roster.unanswered(known, str(error) or f"{known.sighting.url} does not answer in time")
            await asyncio.sleep(pause_s)

    def _run(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._tasks.append(asyncio.create_task(self._guard(work, name), name=f"discovery {name}"))

    async def _guard(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        while True:
            try:
                await work()
                return
            except Exception:  # the outermost loop of a task: it must outlive a fault of ours, and say so
                self._questions["faults"] += 1
                logger.exception("discovery of %s failed", name)
            await asyncio.sleep(self._settings.discovery_interval_s)
