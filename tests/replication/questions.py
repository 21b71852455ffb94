"""Matches asked without a pause, beside whatever a test does to the replicas: none may be wrong at any moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

import httpx

from tests.ingest.publisher import Publisher
from tests.replication.test_replicas import DEADLINE_S, depths

AHEAD = 3  # so many names further than what was published are asked for


class Questions:
    """On a thread of its own, of the replicas that `of` named last; what `publishers` published is the truth. Their
    blocks stay, so a replica that has answered with one must not answer without it later."""

    def __init__(self, publishers: Mapping[str, Publisher]) -> None:
        self._publishers = publishers
        self._turn = threading.Lock()  # held during a question
        self._asked: list[httpx.Client] = []
        self._told: dict[tuple[str, int], set[str]] = {}  # (replica, name) -> pods
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="questions", daemon=True)
        self.answers: dict[str, int] = {}  # by replica
        self.wrong: list[str] = []

    def of(self, clients: Sequence[httpx.Client]) -> None:
        """From now on these are asked, and when it returns nobody else is."""
        asked = [httpx.Client(base_url=client.base_url, timeout=DEADLINE_S) for client in clients]
        with self._turn:
            before, self._asked = self._asked, asked
        for client in before:
            client.close()

    def __enter__(self) -> Questions:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self.of([])

    def _run(self) -> None:
        random_ = random.Random(11)
        while not self._ended.is_set():
            with self._turn:
                for client in self._asked:
                    newest = max(len(publisher.batches) for publisher in self._publishers.values())
                    self._ask(client, random_.randint(1, newest + AHEAD))
            self._ended.wait(0.002)  # or the lock is never free for others

    def _ask(self, client: httpx.Client, name: int) -> None:
        replica = str(client.base_url)
        try:
            found = depths(client, name)
        except httpx.HTTPError as error:
            self.wrong.append(f"{replica} did not answer: {error!r}")
            return
        self.answers[replica] = self.answers.get(replica, 0) + 1
        # What was published is looked at after the answer: it can only have become more.
        truth = {pod for pod, publisher in self._publishers.items() if len(publisher.batches) >= name}
        if not found.keys() <= truth or set(found.values()) - {1}:
            self.wrong.append(f"{replica} answered {found} for {name}, which only {sorted(truth)} have")
        before = self._told.setdefault((replica, name), set())
        if not before <= found.keys():
            self.wrong.append(f"{replica} forgot {sorted(before - found.keys())} of {name}")
        before |= found.keys()
