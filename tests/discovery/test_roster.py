"""What becomes of the pods that places tell, with a real service and a clock that stands still unless it is moved."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from app.config import load_settings
from app.discovery.engine import Learned
from app.discovery.registrar import DirectRegistrar
from app.discovery.roster import Discovered, PlaceState, Roster, Rules
from app.discovery.sightings import Said, Sighting, sight
from app.index.prefix_index import PrefixIndex
from app.pods import PodSpec
from app.service import IndexerService, index_limits
from tests.service.test_service import batch, stored

DEADLINE_S = 30.0


class World:
    """A service, and rosters over it; engines that are to be asked wait in `asked`."""

    def __init__(self, *, pods_max: int = 10, reserved: tuple[str, ...] = ()) -> None:
        self.now_s = 1_000.0
        settings = load_settings(pods_max=pods_max)
        self.service = IndexerService(settings, PrefixIndex(index_limits(settings)), clock=lambda: self.now_s)
        self.asked: dict[str, tuple[Roster, Discovered]] = {}
        self.registered: list[str] = []
        self.rules = Rules(
            registrar=DirectRegistrar(self.service),
            deadline_s=DEADLINE_S,
            pods_max=pods_max,
            reserved=frozenset(reserved),
            owners={},
            ask=lambda roster, known: self.asked.__setitem__(known.name, (roster, known)),
            forget=self._forget,
            registered=lambda spec: self.registered.append(spec.name),
        )

    def _forget(self, known: Discovered) -> None:
        self.asked.pop(known.name, None)

    def roster(self, place: str = "place") -> Roster:
        return Roster(place, self.service, self.rules, clock=lambda: self.now_s)

    def hold(self, pod: str) -> None:
        self.service.apply(pod, 0, batch(stored(0)), seq=0)

    def endpoint(self, pod: str) -> str | None:
        return self.service.pod(pod).spec.zmq_endpoint

    def holds(self, pod: str) -> bool:
        return any(self.service.blocks_by_tier(pod, 0).values())


def spec(name: str, *, host: str = "10.0.0.1", model: str = "m", block_size: int | None = None) -> PodSpec:
    return PodSpec(name, model=model, zmq_endpoint=f"tcp://{host}:5557", block_size=block_size)


def said(name: str, incarnation: str = "1", **more: Any) -> dict[str, Sighting]:
    """A pod of which all is said."""
    return {name: Sighting(name, incarnation, spec=spec(name, **more))}


def seen(name: str, incarnation: str = "1", *, address: str = "10.0.0.1") -> dict[str, Sighting]:
    """A pod whose engine is to be asked."""
    return {name: sight(name, incarnation, address, Said())}


@pytest.fixture
def world() -> World:
    return World()


def test_a_pod_is_registered_with_its_place(world: World) -> None:
    roster = world.roster("dns:vllm")
    assert str(roster.state) == PlaceState.STARTING
    roster.seen(said("a"))
    assert world.endpoint("a") == "tcp://10.0.0.1:5557"
    assert world.service.pod("a").spec.discovered_by == "dns:vllm"
    assert str(roster.state) == PlaceState.WORKING
    assert world.registered == ["a"]
    roster.seen(said("a"))
    assert world.registered == ["a"], "an unchanged pod is left alone"


def test_a_pod_to_be_asked_is_registered_when_it_has_told(world: World) -> None:
    roster = world.roster()
    roster.seen(seen("a"))
    assert "a" not in world.service.pods
    _, known = world.asked["a"]
    roster.unanswered(known, "it loads its model")
    assert (known.cause, known.is_asked) == ("it loads its model", True)
    roster.learned(known, Learned(spec("a")))
    assert world.endpoint("a") == "tcp://10.0.0.1:5557"
    assert known.cause == ""
    roster.unanswered(known, "it is busy")
    assert world.endpoint("a") == "tcp://10.0.0.1:5557", "what was learned stays"
    roster.learned(known, Learned(spec("a", host="10.0.0.2")))
    assert world.endpoint("a") == "tcp://10.0.0.2:5557"


@pytest.mark.parametrize("after_s", [0, 1, DEADLINE_S - 0.001, DEADLINE_S, DEADLINE_S + 1])
def test_a_vanished_pod_is_dropped_at_its_deadline(world: World, after_s: float) -> None:
    roster = world.roster()
    roster.seen(said("a"))
    world.hold("a")
    roster.seen({})
    world.now_s += after_s
    roster.settle()
    assert ("a" in world.service.pods) == (after_s < DEADLINE_S)
    if after_s < DEADLINE_S:
        assert world.holds("a")


def test_a_pod_that_is_back_in_time_keeps_what_it_holds_and_gets_its_whole_deadline_again(
    world: World,
) -> None:
    roster = world.roster()
    roster.seen(said("a"))
    world.hold("a")
    for _ in range(3):
        roster.seen({})
        world.now_s += DEADLINE_S - 1
        roster.settle()
        roster.seen(said("a"))
        roster.settle()
    assert world.holds("a")
    assert roster.changes == {"added": 1, "changed": 0, "vanished": 3, "returned": 3, "dropped": 0}


def test_a_pod_that_was_deleted_is_dropped_at_once(world: World) -> None:
    roster = world.roster()
    roster.seen(said("a") | said("b"))
    roster.seen(said("b"), deleted={"a", "never seen"})
    assert set(world.service.pods) == {"b"}


def test_another_incarnation_at_the_same_address_starts_empty(world: World) -> None:
    roster = world.roster()
    roster.seen(said("a", "uid-1"))
    world.hold("a")
    roster.seen(said("a", "uid-2"))
    assert not world.holds("a")
    assert world.endpoint("a") == "tcp://10.0.0.1:5557"


def test_another_incarnation_of_a_vanished_pod_starts_empty(world: World) -> None:
    roster = world.roster()
    roster.seen(seen("a", "uid-1"))
    roster.learned(world.asked["a"][1], Learned(spec("a")))
    world.hold("a")
    roster.seen({})
    roster.seen(seen("a", "uid-2"))
    assert "a" not in world.service.pods, "nothing is known of the new one before it is asked"
    roster.learned(world.asked["a"][1], Learned(spec("a")))
    assert not world.holds("a")


def test_another_address_starts_empty_and_another_block_size_that_is_so_already_does_not(
    world: World,
) -> None:
    roster = world.roster()
    roster.seen(said("a"))
    world.hold("a")
    roster.seen(said("a", block_size=4))
    assert world.holds("a")
    roster.seen(said("a", host="10.0.0.2", block_size=4))
    assert not world.holds("a")
    assert roster.changes["changed"] == 2


def test_a_failing_place_changes_nothing(world: World) -> None:
    roster = world.roster()
    roster.seen(said("a"))
    world.hold("a")
    roster.failed("no answer")
    assert (roster.state, roster.cause) == (PlaceState.FAILING, "no answer")
    world.now_s += 100 * DEADLINE_S
    roster.settle()
    assert world.holds("a")
    roster.seen(said("a"))
    assert (roster.state, roster.cause) == (PlaceState.WORKING, "")


def test_what_the_api_changes_comes_back_as_it_is_discovered(world: World) -> None:
    roster = world.roster()
    roster.seen(said("a") | said("b"))
    world.service.drop_pod("a")
    world.service.register(spec("b", host="10.0.0.9"))
    roster.settle()
    assert "a" not in world.service.pods, "another replica may know better already"
    assert world.endpoint("b") == "tcp://10.0.0.9:5557"
    world.now_s += DEADLINE_S
    roster.settle()
    assert world.endpoint("a") == "tcp://10.0.0.1:5557"
    assert world.endpoint("b") == "tcp://10.0.0.1:5557"
    assert world.service.pod("b").spec.discovered_by == "place"


def test_a_name_of_the_configuration_is_left_to_it() -> None:
    world = World(reserved=("a",))
    world.service.register(spec("a", host="10.0.0.9"))
    roster = world.roster()
    roster.seen(said("a"))
    roster.settle()
    assert world.endpoint("a") == "tcp://10.0.0.9:5557"
    assert roster.pods["a"].cause == "a pod of this name is configured"
    roster.seen({}, deleted={"a"})
    assert "a" in world.service.pods


def test_two_places_with_one_name(world: World) -> None:
    first, second = world.roster("first"), world.roster("second")
    first.seen(said("a"))
    second.seen(said("a", host="10.0.0.2"))
    second.settle()
    assert world.endpoint("a") == "tcp://10.0.0.1:5557"
    assert second.pods["a"].cause == "first has a pod of this name"
    first.seen({})
    second.settle()
    assert world.endpoint("a") == "tcp://10.0.0.2:5557"
    assert world.service.pod("a").spec.discovered_by == "second"
    world.now_s += DEADLINE_S
    first.settle()
    assert "a" in world.service.pods, "it is the second's now"


def test_more_pods_than_there_may_be() -> None:
    world = World(pods_max=2)
    roster = world.roster()
    many = said("a") | said("b") | said("c")
    roster.seen(many)
    assert set(world.service.pods) == {"a", "b"}
    assert roster.refused == 1
    assert roster.cause == "pods_max = 2: 1 pods are left out"
    roster.seen({name: many[name] for name in "bc"}, deleted={"a"})
    assert set(world.service.pods) == {"b", "c"}
    assert (roster.refused, roster.cause) == (0, "")


def test_no_room_in_the_service_is_tried_again() -> None:
    world = World(pods_max=1)
    world.service.register(spec("other"))
    roster = world.roster()
    roster.seen(said("a"))
    assert "pods_max = 1" in roster.pods["a"].cause
    world.service.drop_pod("other")
    roster.settle()
    assert roster.pods["a"].cause == ""
    assert "a" in world.service.pods


def test_a_remembered_pod_waits_for_the_first_picture(world: World) -> None:
    roster = world.roster()
    for name in ("stays", "moved", "gone"):
        found = dataclasses.replace(spec(name), discovered_by="place", incarnation="1")
        world.service.register(found)
        roster.remember(found)
        world.hold(name)
    roster.failed("no answer")
    world.now_s += 100 * DEADLINE_S
    roster.settle()
    assert world.holds("gone")
    roster.seen(said("stays") | seen("moved", address="10.0.0.2"))
    assert world.holds("stays")
    assert world.holds("moved"), "until its engine has told"
    roster.learned(world.asked["moved"][1], Learned(spec("moved", host="10.0.0.2")))
    assert not world.holds("moved")
    world.now_s += DEADLINE_S
    roster.settle()
    assert set(world.service.pods) == {"stays", "moved"}


def test_one_line_for_each_change_and_none_for_the_same_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="app.discovery.roster")
    roster = world.roster()
    for _ in range(3):
        roster.failed("no answer")
    for _ in range(3):
        roster.seen(seen("a"))
        roster.unanswered(world.asked["a"][1], "it loads its model")
    for _ in range(3):
        roster.learned(world.asked["a"][1], Learned(spec("a"), notes=("no replay",)))
        roster.settle()
    for _ in range(3):
        roster.seen({})
    world.now_s += DEADLINE_S
    roster.settle()
    roster.settle()
    assert [record.getMessage() for record in caplog.records] == [
        "place is failing: no answer; 0 pods are known",
        "place is working: looked at; 1 pods are known",
        "place: pod a is not followed: it loads its model; tried again",
        "place: pod a added: its engine told m at tcp://10.0.0.1:5557, blocks of a size to be seen; no replay",
        "place: pod a vanished: not there any more; dropped in 30 s unless it is back",
        "place: pod a dropped: not there for 30 s",
    ]
