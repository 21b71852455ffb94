"""Time by hand, and the same cache as the engine that steps token by token."""

from __future__ import annotations

import array
import math

import pytest

from app.errors import LimitExceeded
from app.experiment.virtual_pod import VirtualPod, VirtualRequest
from app.simulator.engine_settings import EngineSettings, TimeModel
from app.simulator.kv_cache import KVCacheSettings

TIME = TimeModel(step_s=1.0, prefill_s_per_token=0.5, decode_s_per_sequence=0.25)


def pod(
    *, pages: int = 64, block_size: int = 4, step_tokens_max: int = 8, running_max: int = 8
) -> VirtualPod:
    cache = KVCacheSettings(capacity_pages=pages, block_size=block_size)
    return VirtualPod(
        "pod-0",
        EngineSettings(cache=cache, time=TIME, step_tokens_max=step_tokens_max, running_max=running_max),
    )


def request(name: str, prompt: int, output: int, *, arrived_s: float = 0.0, first: int = 0) -> VirtualRequest:
    return VirtualRequest(
        name,
        arrived_s,
        array.array("I", range(first, first + prompt)),
        array.array("I", [1_000_000 + first] * output),
    )


def send(target: VirtualPod, made: VirtualRequest) -> VirtualRequest:
    target.advance(made.arrived_s)
    target.submit(made)
    return made


def test_first_token_comes_after_the_chunks_of_the_prompt() -> None:
    served = pod()
    made = send(served, request("a", 10, 3))
    served.advance(math.inf)
    # 8 tokens in a step of 1 + 4 s, 2 in one of 1 + 1 s; then two decoding steps of 1.25 s.
    assert made.first_token_s == pytest.approx(7.0)
    assert served.now_s == pytest.approx(9.5)
    assert (served.running, served.cache.usage()) == (0, 0.0)


def test_an_arrival_cuts_a_run_of_decoding_at_the_next_step() -> None:
    served = pod(block_size=64)
    send(served, request("a", 4, 60))
    late = send(served, request("b", 4, 1, arrived_s=5.0, first=500))
    served.advance(math.inf)
    # a: prompt until 3.0, decoding steps end at 4.25, 5.5; b is computed from 5.5, beside a's decoding.
    assert late.first_token_s == pytest.approx(5.5 + 1.0 + 4 * 0.5 + 0.25)


def test_prompts_share_what_is_cached_and_the_last_token_is_computed() -> None:
    served = pod()
    assert send(served, request("a", 8, 1)).cached_tokens == 0
    served.advance(math.inf)
    again = send(served, request("b", 8, 1, arrived_s=100.0))
    longer = send(served, request("c", 12, 1, arrived_s=100.0))
    assert (again.cached_tokens, longer.cached_tokens) == (4, 8)


def test_the_end_of_a_run_does_not_depend_on_how_often_time_is_asked_for() -> None:
    coarse, fine = pod(pages=12), pod(pages=12)
    made: dict[VirtualPod, list[VirtualRequest]] = {coarse: [], fine: []}
    for served, requests in made.items():
        for number in range(6):
            arrived_s = 3.7 * number
            if served is fine:
                for slice_number in range(10):
                    served.advance(max(served.now_s, arrived_s - 0.37 * (10 - slice_number)))
            requests.append(send(served, request(str(number), 9, 7, arrived_s=arrived_s, first=number % 3)))
        served.advance(math.inf)
    assert [r.cached_tokens for r in made[coarse]] == [r.cached_tokens for r in made[fine]]
    first_tokens = [r.first_token_s for r in made[coarse]]
    assert all(first_token is not None for first_token in first_tokens)
    assert first_tokens == pytest.approx([r.first_token_s for r in made[fine]])
    assert coarse.drain_events() == fine.drain_events()


def test_without_a_seat_a_request_waits_and_is_looked_up_later() -> None:
    served = pod(running_max=1)
    send(served, request("a", 8, 2))
    waiting = send(served, request("b", 8, 1))
    assert (waiting.waited, waiting.cached_tokens, served.running, served.waiting) == (True, None, 1, 1)
    served.advance(math.inf)
    assert waiting.cached_tokens == 4
    assert waiting.first_token_s is not None


def test_the_youngest_is_preempted_when_pages_run_out_and_all_are_answered() -> None:
    served = pod(pages=6)
    made = [send(served, request(str(number), 8, 12, first=100 * number)) for number in range(2)]
    served.advance(math.inf)
    assert served.preemptions > 0
    assert [r.generated for r in made] == [12, 12]
    assert (served.running, served.waiting, served.cache.usage()) == (0, 0, 0.0)


def test_what_can_never_fit_is_refused() -> None:
    served = pod(pages=4)
    with pytest.raises(LimitExceeded) as refused:
        served.submit(request("a", 16, 2))
    assert refused.value.bound == "capacity_pages"
    served.submit(request("b", 16, 1))
