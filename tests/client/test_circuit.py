"""The circuit alone, where several calls are out at once."""

from __future__ import annotations

from app.client import Circuit, CircuitState


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(clock: Clock) -> Circuit:
    circuit = Circuit(failures_max=1, open_s=1.0, clock=clock)
    assert circuit.admit()
    circuit.fail()
    assert circuit.state is CircuitState.OPEN
    return circuit


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now_s = 1.0
    assert [circuit.admit() for _ in range(3)] == [True, False, False]
    circuit.succeed()
    assert [circuit.admit() for _ in range(3)] == [True, True, True]


def test_a_trial_that_never_reports_is_given_up() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now_s = 1.0
    assert circuit.admit()
    clock.now_s = 1.5
    assert not circuit.admit()
    clock.now_s = 2.0
    assert circuit.admit()


def test_failures_of_calls_from_before_do_not_keep_it_open() -> None:
    clock = Clock()
    circuit = Circuit(failures_max=2, open_s=1.0, clock=clock)
    assert all(circuit.admit() for _ in range(4))
    circuit.fail()
    circuit.fail()
    clock.now_s = 0.9
    circuit.fail()
    circuit.fail()
    clock.now_s = 1.0
    assert circuit.state is CircuitState.HALF_OPEN
    assert circuit.opened == 1
