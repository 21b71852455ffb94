"""The pods that one place has reported, and what became of each in the service.

    seen for the first time       registered: at once where all is said, else when its engine was asked
    another incarnation           what it held is forgotten at once, and it starts anew
    changed, same incarnation     registered again: the registry knows what can be kept
    in the picture no more        kept, and dropped `deadline_s` later unless it is back; deleted for certain: at once
    a place that fails            nothing changes; it is said

The spec of a discovered pod names its place and its incarnation. So every replica of a service can discover for
itself: the first one that reports a change makes it, and the same report of the others has no effect. And a process
that finds pods of its place in a snapshot or in the log knows which of them to look for.

A name belongs to one place: the first that reported it keeps it until its pod vanishes. Configured names belong to the
configuration. A place overrules the API: a pod that is deleted or changed there is registered again as it was
discovered, but only after `deadline_s`, because another replica may have newer news. Each change is one log
line with its cause.

At most `pods_max` pods; what a picture has beyond is left out, counted in `refused` and said in `cause`.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from app.discovery.engine import Learned
from app.discovery.registrar import Registrar
from app.discovery.sightings import Sighting
from app.errors import IndexerError
from app.pods import PodSpec
from app.service import IndexerService

logger = logging.getLogger(__name__)

CHANGES = ("added", "changed", "vanished", "returned", "dropped")


class PlaceState(enum.StrEnum):
    STARTING = "starting"  # not looked at yet
    WORKING = "working"
    FAILING = "failing"  # its last picture is kept


@dataclasses.dataclass(slots=True, eq=False)
class Discovered:
    """One pod of a place. `sighting` is None for one that a snapshot remembers and the place has not shown yet."""

    name: str
    sighting: Sighting | None
    spec: PodSpec | None  # what is to be registered; None until its engine has told
    cause: str = ""  # why it is not registered as it should be
    is_asked: bool = False  # its engine was asked at least once
    is_registered: bool = False
    differs_since_s: float | None = None  # the service has another pod of the name, or none
    vanished_at_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What all rosters of a process have in common; `owners` is theirs to write."""

    deadline_s: float
    pods_max: int
    reserved: frozenset[str]  # names of the configuration
    owners: dict[str, Roster]
    registrar: Registrar
    ask: Callable[[Roster, Discovered], None]  # begin to ask its engine, until it is forgotten
    forget: Callable[[Discovered], None]
    registered: Callable[[PodSpec], None]


class Roster:
    """A Report. `place` is its name; all calls are made on the event loop."""

    def __init__(
        self, place: str, service: IndexerService, rules: Rules, *, clock: Callable[[], float]
    ) -> None:
        self.place = place
        self.state = PlaceState.STARTING
        self.cause = ""
        self.seen_at_s: float | None = None
        self.refused = 0
        self.pods: dict[str, Discovered] = {}
        self.changes: Counter[str] = Counter(dict.fromkeys(CHANGES, 0))
        self.looks: Counter[str] = Counter({"seen": 0, "failed": 0})
        self._service = service
        self._rules = rules
        self._clock = clock

    # -- Report

    def seen(self, picture: Mapping[str, Sighting], *, deleted: Collection[str] = ()) -> None:
        self.looks["seen"] += 1
        self.seen_at_s = self._clock()
        for name in deleted:
            if name in self.pods and name not in picture:
                self._drop(self.pods[name], "it was deleted")
        self.refused = 0
        for name, sighting in picture.items():
            self._see(name, sighting)
        for known in list(self.pods.values()):
            if known.name not in picture and known.vanished_at_s is None:
                known.vanished_at_s = self._clock()
                cause = f"not there any more; dropped in {self._rules.deadline_s:g} s unless it is back"
                self._tell("vanished", known.name, cause, logging.WARNING)
        self._set_state(
            PlaceState.WORKING,
            f"pods_max = {self._rules.pods_max}: {self.refused} pods are left out" if self.refused else "",
        )

    def failed(self, cause: str) -> None:
        self.looks["failed"] += 1
        self._set_state(PlaceState.FAILING, cause)

    # -- the engines' answers

    def learned(self, known: Discovered, learned: Learned) -> None:
        known.is_asked = True
        spec = self._marked(learned.spec, known.sighting)
        if known.spec == spec:
            return
        is_new = known.spec is None
        known.spec = spec
        if self._register(known):
            said = "; ".join((f"its engine told {_shown(spec)}", *learned.notes))
            level = logging.WARNING if learned.notes else logging.INFO
            self._tell("added" if is_new else "changed", known.name, said, level)

    def unanswered(self, known: Discovered, cause: str) -> None:
        """A pod that was learned before stays as it was: its streams say how it is."""
        known.is_asked = True
        if known.spec is None:
            self._set_cause(known, cause)

    # -- time

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Drops whose deadline is over, and makes the registered pods what they are discovered to be."""
        for known in [self.pods[name] for name in (names or list(self.pods)) if name in self.pods]:
            gone_s = known.vanished_at_s
            if known.sighting is None and known.name not in self._service.pods:
                self._forget(known)  # nobody saw it, and it is gone
            elif gone_s is not None and self._clock() - gone_s >= self._rules.deadline_s:
                self._drop(known, f"not there for {self._rules.deadline_s:g} s")
            elif known.spec is not None and known.name not in self._rules.reserved:
                self._settle_one(known)

    def remember(self, spec: PodSpec) -> None:
        """A pod of this place that a snapshot brought back, or another replica found; the place decides."""
        known = Discovered(spec.name, None, spec, is_asked=True, is_registered=True)
        self.pods[spec.name] = known
        self._rules.owners[spec.name] = self
        if self.seen_at_s is not None:
            known.vanished_at_s = self._clock()

    def not_taken(self, name: str, cause: str) -> None:
        """The log did not take the pod; it is tried again at the deadline."""
        known = self.pods.get(name)
        if known is not None and self._rules.owners.get(name) is self:
            self._set_cause(known, cause)

    # -- inside

    def _see(self, name: str, sighting: Sighting) -> None:
        known = self.pods.get(name)
        if known is not None and (known.sighting is sighting or known.sighting == sighting):
            self._welcome_back(known)
            return
        if known is None:
            if len(self.pods) >= self._rules.pods_max:
                self.refused += 1
                return
            self._add(name, sighting)
        elif known.sighting is not None and known.sighting.incarnation != sighting.incarnation:
            cause = (
                f"another engine of this name: {_incarnation(sighting)} (was {_incarnation(known.sighting)})"
            )
            self._drop(known, cause)
            self._add(name, sighting)
        else:
            self._amend(known, sighting)

    def _add(self, name: str, sighting: Sighting) -> None:
        spec = None if sighting.spec is None else self._marked(sighting.spec, sighting)
        known = self.pods[name] = Discovered(name, sighting, spec)
        if known.spec is None:
            self._rules.ask(self, known)
            return
        known.is_asked = True
        if self._register(known):
            self._tell("added", name, f"told {_shown(known.spec)}")

    def _amend(self, known: Discovered, sighting: Sighting) -> None:
        known.sighting = sighting
        self._welcome_back(known)
        if sighting.spec is None:
            self._rules.forget(known)
            self._rules.ask(self, known)
            return
        spec = self._marked(sighting.spec, sighting)
        if known.spec != spec:
            known.spec = spec
            if self._register(known):
                self._tell("changed", known.name, f"told {_shown(spec)}")

    def _welcome_back(self, known: Discovered) -> None:
        if known.vanished_at_s is not None:
            known.vanished_at_s = None
            self._tell("returned", known.name, "there again, and unchanged")

    def _register(self, known: Discovered) -> bool:
        owner = self._rules.owners.get(known.name)
        spec = known.spec
        assert spec is not None, "nothing to register before it is known"
        if known.name in self._rules.reserved:
            self._set_cause(known, "a pod of this name is configured")
        elif owner is not None and owner is not self and not owner.yields(known.name):
            self._set_cause(known, f"{owner.place} has a pod of this name")
        else:
            try:
                self._rules.registrar.register(spec)
            except IndexerError as error:
                self._set_cause(known, str(error))
                return False
            if owner is not None and owner is not self:
                owner.pods.pop(known.name)
            self._rules.owners[known.name] = self
            known.cause, known.differs_since_s = "", self._clock()
            self._rules.registered(spec)
            self._is_as_discovered(known)
            return True
        return False

    def _settle_one(self, known: Discovered) -> None:
        if self._rules.owners.get(known.name) is not self:
            self._register(known)
        elif not self._is_as_discovered(known):
            if known.differs_since_s is None:
                known.differs_since_s = self._clock()
            elif self._clock() - known.differs_since_s >= self._rules.deadline_s:
                self._register(known)

    def yields(self, name: str) -> bool:
        """Whether another place may have the name: the pod is not there any more as far as is known here."""
        known = self.pods.get(name)
        return known is None or known.vanished_at_s is not None

    def _is_as_discovered(self, known: Discovered) -> bool:
        pod = self._service.pods.get(known.name)
        known.is_registered = pod is not None and (pod.spec is known.spec or pod.spec == known.spec)
        if pod is not None and known.is_registered:
            known.spec, known.cause, known.differs_since_s = pod.spec, "", None
        return known.is_registered

    def _marked(self, spec: PodSpec, sighting: Sighting | None) -> PodSpec:
        incarnation = "" if sighting is None else sighting.incarnation
        return dataclasses.replace(spec, discovered_by=self.place, incarnation=incarnation)

    def _forget(self, known: Discovered) -> bool:
        """Whether the name was its own."""
        del self.pods[known.name]
        self._rules.forget(known)
        is_owner = self._rules.owners.get(known.name) is self
        if is_owner:
            del self._rules.owners[known.name]
        return is_owner

    def _drop(self, known: Discovered, cause: str) -> None:
        if self._forget(known):
            pod = self._service.pods.get(known.name)
            ours = {"", "" if known.spec is None else known.spec.incarnation}
            if pod is not None and pod.spec.incarnation in ours:  # else a replica has its successor already
                self._rules.registrar.drop(known.name)
            self._tell("dropped", known.name, cause)

    def _set_cause(self, known: Discovered, cause: str) -> None:
        if known.cause != cause:
            known.cause = cause
            logger.warning(
                "%s: pod %s is not followed: %s; tried again",
                self.place,
                known.name,
                cause,
                extra={"place": self.place, "pod": known.name, "cause": cause},
            )

    def _set_state(self, state: PlaceState, cause: str) -> None:
        if (self.state, self.cause) == (state, cause):
            return
        self.state, self.cause = state, cause
        logger.log(
            logging.WARNING if cause else logging.INFO,
            "%s is %s: %s; %d pods are known",
            self.place,
            state,
            cause or "looked at",
            len(self.pods),
            extra={"place": self.place, "state": state.value, "cause": cause},
        )

    def _tell(self, change: str, pod: str, cause: str, level: int = logging.INFO) -> None:
        self.changes[change] += 1
        logger.log(
            level,
            "%s: pod %s %s: %s",
            self.place,
            pod,
            change,
            cause,
            extra={"place": self.place, "pod": pod, "change": change, "cause": cause},
        )


def _shown(spec: PodSpec) -> str:
    where = spec.zmq_endpoint or "posts of its own"
    ranks = f", {spec.dp_size} ranks" if spec.dp_size > 1 else ""
    return f"{spec.model} at {where}, blocks of {spec.block_size or 'a size to be seen'}{ranks}"


def _incarnation(sighting: Sighting) -> str:
    return sighting.incarnation or "the same"
