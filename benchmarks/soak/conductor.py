"""The order of events: warm up, rounds of load and trouble with a check behind each, a restart in the middle, an end.

In a round every pod works, and things happen to some of them; then all pause, the indexer gets time to catch up, and
every answer in every form is held against the caches of the engines. Strangers and slow clients never pause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import random
import time
import urllib.parse
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.soak.callers import Background, Caller, Forms, Keys, Prober, Router
from benchmarks.soak.findings import Findings
from benchmarks.soak.pods import MODEL, Documents, PostingPod, PublishingPod, SimulatedPod
from benchmarks.soak.server import Server, Usage
from benchmarks.soak.strangers import MalformedHttp, MalformedZmq, SlowClients, flood, wrong_keys

SETTLE_DEADLINE_S = 60.0
KEY_DEADLINE_S = 20.0
PUBLISHING_PODS = 6
ROUTERS = 3
MALFORMED_SENDERS = 3
QUESTIONS = 24  # of a check, each in one form; the first in all
STEPS_A_BURST = 8
LOAD_PAUSE_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    round_s: float = 8.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """What one process of the indexer used at the end of each round, the first of them behind its warm-up."""

    usages: list[Usage]
    lasted_s: float


class Conductor:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.findings = Findings()
        self.lives: list[Life] = []
        self.metrics: dict[str, float] = {}
        self.end_s: list[float] = []
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self._keys = Keys(folder / "keys")
        self._server = Server(folder, self._keys.path, self.findings)
        self._documents = Documents(plan.seed)
        self._clean_up = contextlib.ExitStack()
        self._publishing: list[PublishingPod] = []
        self._posting: list[PostingPod] = []

    def run(self) -> None:
        """Everything that was started has ended when this returns, however it returns."""
        with self._clean_up:
            self._clean_up.callback(self._server.kill)
            self._server.start()
            self._caller = Caller(self._server, self._keys.write, self.findings)
            self._clean_up.callback(self._caller.close)
            self._forms = Forms(self._caller)
            self._start_pods()
            self._start_others()
            began_s = time.monotonic()
            middle_s, end_s = began_s + self._plan.seconds * 0.4, began_s + self._plan.seconds
            self._live_until(middle_s)
            self._restart()
            self._live_until(end_s)
            self._background.end()
            self.metrics = self._read_metrics()
            self.end_s.append(self._server.end())

    # -- who takes part

    def _start_pods(self) -> None:
        for number in range(PUBLISHING_PODS):
            pod = PublishingPod(f"pod-{number}", self._documents, self._draw.randrange(2**32))
            self._clean_up.callback(pod.stop)
            self._publishing.append(pod)
            self._put_pod(pod.name, pod.registration())
        for number, as_json in enumerate((True, False)):
            caller = Caller(self._server, self._keys.write, self.findings)
            self._clean_up.callback(caller.close)
            seed = self._draw.randrange(2**32)
            name = f"posting-{number}"
            self._put_pod(name, {"model": MODEL})
            self._posting.append(PostingPod(name, self._documents, seed, caller.post, as_json=as_json))

    def _put_pod(self, name: str, spec: dict[str, object]) -> None:
        body = msgspec.json.encode(spec)
        status, answer = self._caller.call("PUT", f"/v1/pods/{name}", body, "application/json")
        assert status in (200, 201), f"{name} was not registered: {status} {answer!r}"

    def _start_others(self) -> None:
        self._background = Background(self.findings)
        for number in range(ROUTERS):
            router = Router(self._server, self._keys, self.findings, self._documents, 100 + number)
            self._clean_up.callback(router.close)
            self._background.add(f"router {number}", router.step, 0.002)
        prober = Prober(self._server, self.findings)
        self._clean_up.callback(prober.close)
        self._background.add("prober", prober.step, 0.02)
        for number in range(MALFORMED_SENDERS):
            sender = MalformedHttp(self._server, self._keys, self.findings, self._plan.seed * 10 + number)
            self._background.add(f"malformed HTTP {number}", sender.step, 0.01)
        strange = MalformedZmq(self.findings, self._plan.seed)
        self._clean_up.callback(strange.close)
        for name, spec in strange.registrations().items():
            self._put_pod(name, spec)
        slow = SlowClients(self._server, self._keys, self.findings, self._plan.seed)
        self._clean_up.callback(slow.close)
        # Registered last, so that it runs first: what a thread uses is closed when the thread has ended.
        self._clean_up.callback(self._background.end)
        self._background.add("malformed ZMQ", strange.step, 0.02)
        self._background.add("slow clients", slow.step, 1.0)
        self._background.start()

    # -- rounds

    def _live_until(self, end_s: float) -> None:
        usages: list[Usage] = []
        began_s = time.monotonic()
        while time.monotonic() < end_s:
            self._round(min(self._plan.round_s, max(1.0, end_s - time.monotonic())))
            if not self._server.is_alive():
                self.findings.violation(
                    "end", f"the indexer ended by itself: {list(self._server.last_lines)[-5:]}"
                )
                return
            usages.append(self._server.usage())
        self.lives.append(Life(usages, time.monotonic() - began_s))

    def _round(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        gone: list[PublishingPod] = []
        trouble = self._troubles(seconds, gone)
        while (now_s := time.monotonic()) < end_s:
            while trouble and now_s >= trouble[0][0]:
                trouble.pop(0)[1]()
            self._burst(gone)
            time.sleep(LOAD_PAUSE_S)
        for _, step in trouble:
            step()
        if self._draw.random() < 0.75:  # else a tail that was lost has to be found without another word
            for pod in self._publishing:
                pod.end_round()
        self._check("a round")
        self._lose_for_good(self._draw.choice(self._publishing))
        self._rotate_keys()
        wrong_keys(self._server, self._keys, self.findings)
        self.findings.count("rounds")

    def _burst(self, gone: list[PublishingPod]) -> None:
        pods: list[SimulatedPod] = [pod for pod in (*self._publishing, *self._posting) if pod not in gone]
        pod = self._draw.choice(pods)
        for _ in range(self._draw.choice((1, STEPS_A_BURST, 4 * STEPS_A_BURST))):
            pod.work()

    def _troubles(self, seconds: float, gone: list[PublishingPod]) -> list[tuple[float, Any]]:
        """What happens when in a round: a kill and what comes of it, a clear by each way, a flood."""
        now_s = time.monotonic()
        victim = self._draw.choice(self._publishing)

        def crash() -> None:
            victim.crash()
            gone.append(victim)
            self.findings.count("engines killed")

        def come_back() -> None:
            victim.come_back()
            gone.remove(victim)

        def clear() -> None:
            others = [pod for pod in self._publishing if pod is not victim]
            for pod in (self._draw.choice(others), self._draw.choice(self._posting)):
                pod.clear()
                self.findings.count("caches cleared")

        steps = [
            (0.1, crash),
            (0.1 + self._draw.choice((0.0, 0.2, 0.4)), come_back),
            (0.6, clear),
            (0.7, lambda: flood(self._server, self.findings)),
        ]
        return [(now_s + part * seconds, step) for part, step in sorted(steps, key=lambda step: step[0])]

    def _restart(self) -> None:
        """Pods that publish go on while the indexer is away; those that post wait for it."""
        self.end_s.append(self._server.end())
        for _ in range(50):
            self._draw.choice(self._publishing).work()
        self._server.start()
        self.findings.count("restarts of the indexer")
        self._check("the restart")

    # -- checks

    def _check(self, when: str) -> None:
        for pod in self._publishing:
            self._settle(pod, "live")
        questions = [self._documents.question(self._draw) for _ in range(QUESTIONS)]
        forms = list(self._forms.all.items())
        for number, tokens in enumerate(questions):
            held = {pod.name: pod.held_blocks(tokens) for pod in (*self._publishing, *self._posting)}
            wanted = {name: depth for name, depth in held.items() if depth}
            for name, form in forms if number == 0 else [forms[number % len(forms)]]:
                got = {pod: depth for pod, depth in form(tokens).items() if pod in held}
                self.findings.count("answers held against the truth")
                self.findings.count("pod rows held against the truth", len(held))
                if got != wanted:
                    self.findings.violation("wrong answer", f"after {when}, {name}: {got}, not {wanted}")

    def _settle(self, pod: PublishingPod, state: str) -> Any:
        """Waits until the indexer says that it has read all of the pod's stream."""
        began_s = time.monotonic()
        wanted = (pod.next_seq - 1 if pod.next_seq else None, state)
        while True:
            rank = self._caller.ask("GET", f"/v1/pods/{urllib.parse.quote(pod.name)}")["ranks"][0]
            got = (rank["last_seq"], rank["state"])
            if got == wanted:
                self.findings.sample("settle", time.monotonic() - began_s)
                return rank
            if time.monotonic() - began_s > SETTLE_DEADLINE_S:
                self.findings.violation(
                    "not settled", f"{pod.name} waited for {wanted}, the indexer has {rank}"
                )
                return rank
            time.sleep(0.02)

    def _lose_for_good(self, pod: PublishingPod) -> None:
        """What can never be known is said, and over with the next clear."""
        pod.lose_for_good()
        self._settle(pod, "degraded")
        pod.clear()
        self._settle(pod, "live")
        self.findings.count("losses said and healed")

    def _rotate_keys(self) -> None:
        fresh = self._keys
        gone = fresh.rotate()
        old, new = (Caller(self._server, key, self.findings) for key in (gone, fresh.passing))
        deadline_s = time.monotonic() + KEY_DEADLINE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if (old.call("GET", "/v1/pods")[0], new.call("GET", "/v1/pods")[0]) == (401, 200):
                    self.findings.count("keys rotated")
                    break
            time.sleep(0.1)
        else:
            self.findings.violation(
                "keys", f"a new key did not count within {KEY_DEADLINE_S:g} s, or an old one did"
            )
        old.close()
        new.close()

    def _read_metrics(self) -> dict[str, float]:
        _, page = self._caller.call("GET", "/metrics")
        values: dict[str, float] = {}
        for line in page.decode().splitlines():
            if not line.startswith("#") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                with contextlib.suppress(ValueError):
                    values[name] = float(value)
        return values
