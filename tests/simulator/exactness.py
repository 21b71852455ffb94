"""Drives a fleet through an indexer and holds every prediction against what the pod then really reused.

As a script it runs longer than a test should: `python -m tests.simulator.exactness --requests 10000 --pods 8`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from typing import Any

from app.replay.indexer import POLL_INTERVAL_S, IndexerUnderTest, own_indexer
from app.simulator.engine import Prompt
from app.simulator.engine_settings import EngineSettings
from app.simulator.fleet import Fleet, FleetSettings, RunningPod
from app.simulator.kv_cache import KVCacheSettings
from app.simulator.offload import OffloadSettings
from app.simulator.pod import PodSettings
from app.simulator.rank import Rank

DEADLINE_S = 20.0
MODEL = "simulated"
FAULTS = ("drop", "reset", "duplicate", "restart", "truncate", "crash")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run. With `faults`, about one request in forty comes with something gone wrong."""

    requests: int = 400
    pods: int = 4
    dp_size: int = 1
    block_size: int = 16
    pages: int = 120
    faults: bool = True
    offload_chunk_tokens: int | None = None
    offload_chunks: int = 60
    draft_tokens: int = 0
    by_http: bool = False
    form: Any = None
    seed: int = 0

    def fleet(self, url: str) -> FleetSettings:
        offload = None
        if self.offload_chunk_tokens is not None:
            offload = OffloadSettings(
                model=MODEL,
                world_size=2,
                chunk_tokens=self.offload_chunk_tokens,
                capacity_chunks=self.offload_chunks,
            )
        pod = PodSettings(
            name=f"pod-{self.seed}",
            model=MODEL,
            adapters=("adapter",),
            engine=EngineSettings(
                cache=KVCacheSettings(capacity_pages=self.pages, block_size=self.block_size),
                offload=offload,
                draft_tokens=self.draft_tokens,
            ),
            dp_size=self.dp_size,
            speed=float("inf"),
            events_url=url if self.by_http else None,
        )
        if self.form is not None:
            pod = dataclasses.replace(pod, form=self.form)
        return FleetSettings(pods=self.pods, pod=pod, indexer_urls=(url,))


@dataclasses.dataclass
class Conversation:
    tokens: list[int]
    salt: str | None
    lora: str | None


class Driver:
    """Asks, sends and compares, one request after the other."""

    def __init__(self, plan: Plan, fleet: Fleet, indexer: IndexerUnderTest) -> None:
        self.plan = plan
        self.fleet = fleet
        self.indexer = indexer
        self.draw = random.Random(plan.seed)
        self.untold: set[tuple[str, int]] = set()  # ranks that have not said what became of their cache
        self.restarts: Counter[tuple[str, int]] = Counter()
        self.seen: dict[tuple[str, int], int] = {}
        self.outcomes: Counter[str] = Counter()
        self.faults_made: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.conversations = [self.conversation() for _ in range(3 * plan.pods)]

    def conversation(self) -> Conversation:
        system = [1_000 + self.draw.randrange(3)] * 70
        salt, lora = self.draw.choice([(None, None)] * 6 + [("tenant", None), (None, "adapter")])
        return Conversation(system + self.words(60), salt, lora)

    def words(self, most: int) -> list[int]:
        return [self.draw.randrange(30_000) for _ in range(self.draw.randint(1, most))]

    async def run(self) -> None:
        for _ in range(self.plan.requests):
            running = self.draw.choice(self.fleet.pods)
            rank = self.draw.choice(running.pod.ranks)
            if self.plan.faults and self.draw.random() < 0.025:
                await self.break_something(running, rank)
                rank = running.pod.ranks[rank.dp_rank]
            await self.request(running, rank)

    async def request(self, running: RunningPod, rank: Rank) -> None:
        place = self.draw.randrange(len(self.conversations))
        talk = self.conversations[place]
        await self.settle()
        key = (running.name, rank.dp_rank)
        by_rank = self.indexer.reusable_tokens(
            model=MODEL, lora=talk.lora, cache_salt=talk.salt, pod=running.name, token_ids=talk.tokens
        )
        dropping = rank.faults.drop_next > 0
        before = rank.next_seq
        prompt = Prompt(talk.tokens, max_tokens=self.draw.choice([1, 4, 40]), salt=talk.salt, lora=talk.lora)
        cached = 0
        outputs: list[int] = []
        async for output in running.pod.generate(prompt, dp_rank=rank.dp_rank):
            cached = output.cached_tokens
            outputs += output.token_ids
        self.judge(key, by_rank.get(rank.dp_rank, 0), cached)
        if rank.next_seq > before:
            self.untold.discard(key)
            if dropping and rank.faults.drop_next == 0 and rank.next_seq - before <= 1:
                self.untold.add(key)  # the only frame was lost: nobody knows before the next one
        if len(talk.tokens) + len(outputs) > self.plan.block_size * self.plan.pages // 3:
            self.conversations[place] = self.conversation()
        else:
            talk.tokens = [*talk.tokens, *outputs, *self.words(40)]

    def judge(self, key: tuple[str, int], predicted: int, cached: int) -> None:
        where = "untold" if key in self.untold else "told"
        outcome = "exact" if predicted == cached else "over" if predicted > cached else "under"
        self.outcomes[f"{where} {outcome}"] += 1
        if outcome != "exact" and where == "told":
            self.wrong.append(f"{key}: predicted {predicted}, cached {cached}")

    async def break_something(self, running: RunningPod, rank: Rank) -> None:
        keys = [(running.name, other.dp_rank) for other in running.pod.ranks]
        fault = FAULTS[sum(self.faults_made.values()) % len(FAULTS)]
        self.faults_made[fault] += 1
        match fault:
            case "reset":
                assert running.pod.reset_prefix_cache()
                self.untold.update(keys)
            case "drop":
                rank.faults.drop_next += 1
            case "duplicate":
                rank.faults.duplicate_next += 2
            case "truncate":
                for publisher in running.pod.publishers:
                    publisher.limit_replays(2)
                rank.faults.drop_next += 1
            case "restart":
                await self.settle()
                running.pod.restart_in_place()
                self.forget(keys)
            case "crash":
                await self.settle()
                await running.pod.crash()
                await running.pod.start()
                self.forget(keys)

    def forget(self, keys: list[tuple[str, int]]) -> None:
        """New engines: nothing of the old counts, and nobody has been told."""
        self.untold.update(keys)
        for key in keys:
            self.seen.pop(key, None)

    async def settle(self) -> None:
        """Return when the indexer has applied every frame that it can know of."""
        deadline = time.monotonic() + DEADLINE_S
        for running in self.fleet.pods:
            wanted = {
                rank.dp_rank: rank.next_seq - 1
                for rank in running.pod.ranks
                if (running.name, rank.dp_rank) not in self.untold
                and rank.next_seq
                and self.seen.get((running.name, rank.dp_rank)) != rank.next_seq
            }
            while wanted:
                at = self.indexer.positions(running.name)
                for dp_rank, seq in list(wanted.items()):
                    if at[dp_rank].last_seq == seq and at[dp_rank].state == "live":
                        del wanted[dp_rank]
                        self.seen[running.name, dp_rank] = seq + 1
                if wanted:
                    assert time.monotonic() < deadline, f"{running.name}: {wanted} wanted, {at}"
                    await asyncio.sleep(POLL_INTERVAL_S)


async def run(plan: Plan, url: str) -> Driver:
    async with Fleet(plan.fleet(url)) as fleet:
        with IndexerUnderTest(url) as indexer:
            driver = Driver(plan, fleet, indexer)
            try:
                await driver.run()
                for running in fleet.pods:
                    for rank in running.pod.ranks:
                        driver.outcomes["tokens from offload"] += rank.engine.stats().offload_hit_tokens
            finally:
                for running in fleet.pods:
                    indexer.drop(running.name)
    return driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    plan = Plan(requests=options.requests, pods=options.pods, dp_size=options.dp_size, seed=options.seed)
    with contextlib.ExitStack() as stack:
        driver = asyncio.run(run(plan, stack.enter_context(own_indexer())))
    for name, count in sorted(driver.outcomes.items()):
        print(f"{name:20} {count}")
    print(f"faults: {dict(driver.faults_made)}")
    for line in driver.wrong[:20]:
        print(line)


if __name__ == "__main__":
    main()
