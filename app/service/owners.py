"""Agents that blocks were stored for, by name; the index knows them by number.

Pods hold blocks. An owner holds nothing: its claim says that a pod's block was stored for it, and ends with the
block (app/index/prefix_index.py, "owners"). So a router can leave out what an agent has of its own and ask what
it could have of others.

A name stands for its roles too, wherever it is excluded or cleared: `agent1` for `agent1:system`, not for `agent10`.

Bounds: `owners_max` names. When there are as many, those whose blocks are all gone make room; where none are, a new
name is refused, and counted.
A snapshot has the names with their numbers of the moment, and claims by number; a dump has names at every block.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from app.config import Settings
from app.errors import UNDECODABLE, LimitExceeded, UnknownOwner
from app.fuzzy.answer import is_named
from app.index.interface import Index
from app.index.prefix_index import NameRun

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class OwnerInfo:
    owner: str
    blocks: (
        int  # each as often as it is held on different tiers of different ranks; those not swept yet count
    )


class _Said(msgspec.Struct):
    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=1_024, pattern=r"^[^\x00-\x1f\x7f]+\Z")]
    blocks: list[int]


def read_owners(raw: bytes) -> list[tuple[str, frozenset[int]]]:
    """(owner, engine hashes) of what a dump says in `owners`, in either notation; [] for what is no such list."""
    decode = msgspec.json.decode if raw[:1] == b"[" else msgspec.msgpack.decode
    try:
        said = decode(raw, type=list[_Said])
    except UNDECODABLE:
        return []
    return [(claim.owner, frozenset(claim.blocks)) for claim in said]


class Owners:
    """Part of the service."""

    def __init__(self, settings: Settings, index: Index) -> None:
        self.refused = 0
        self._settings = settings
        self._index = index
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def number(self, name: str | None) -> int:
        """What the index calls the owner, made when new; 0 for nobody, and where nobody could ask.

        Raises LimitExceeded (`owners_max`).
        """
        if name is None or not self._settings.fuzzy:
            return 0
        self.check(name)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._index.add_owner()
            self._names[number] = name
        return number

    def check(self, name: str | None) -> None:
        """Raises LimitExceeded (`owners_max`) where `number` would."""
        if not self.has_room_for(name):
            self.refused += 1
            detail = f"owners_max = {self._settings.owners_max} owners have blocks already"
            raise LimitExceeded(detail, bound="owners_max")

    def has_room_for(self, name: str | None) -> bool:
        """Owners whose blocks are all gone make room, when it is wanted."""
        if name is None or name in self._numbers or not self._settings.fuzzy:
            return True
        if len(self._numbers) >= self._settings.owners_max:
            self._forget_unclaimed()
        return len(self._numbers) < self._settings.owners_max

    def name(self, number: int) -> str | None:
        return self._names.get(number)

    def all(self) -> list[OwnerInfo]:
        """By name."""
        claims = self._index.owner_claims()
        return [OwnerInfo(name, claims[self._numbers[name]]) for name in sorted(self._numbers)]

    def named(self, name: str) -> list[OwnerInfo]:
        """The owner and its roles. Raises UnknownOwner when there are none."""
        found = [info for info in self.all() if is_named(info.owner, (name,))]
        if not found:
            raise UnknownOwner(name)
        return found

    def clear(self, name: str) -> list[OwnerInfo]:
        """The owner and its roles claim nothing from now on; returns what they had. Raises UnknownOwner."""
        cleared = self.named(name)
        for info in cleared:
            self._forget(info.owner)
        return cleared

    def clear_all(self) -> None:
        for name in list(self._numbers):
            self._forget(name)

    # -- across processes

    def of_blocks(self, run: NameRun, names: Sequence[int]) -> list[dict[str, str | list[int]]]:
        """What a dump says in `owners` of a run of names: each owner with its blocks."""
        if not self._numbers:
            return []
        claims = self._index.owners_at(
            run.source, run.context, tier=run.tier, group=run.group, prefix_hashes=run.prefix_hashes
        )
        blocks: dict[int, list[int]] = {}
        for place, number in claims:
            blocks.setdefault(number, []).append(names[place])
        return [{"owner": self._names[number], "blocks": of_owner} for number, of_owner in blocks.items()]

    def numbered(self) -> list[tuple[int, str]]:
        """(number, name) of all."""
        return [(number, name) for name, number in self._numbers.items()]

    def adopt(self, numbered: Sequence[tuple[int, str]]) -> list[tuple[int, int]]:
        """Makes the owners of a snapshot known here: (number there, number here). Those past `owners_max`, which may
        be smaller than it was, are left out and counted."""
        if not self._settings.fuzzy:
            return []
        adopted = []
        for there, name in numbered:
            if self.has_room_for(name):
                adopted.append((there, self.number(name)))
            else:
                self.refused += 1
        if len(adopted) < len(numbered):
            logger.warning(
                "%d of %d owners of a snapshot are left out: owners_max = %d",
                len(numbered) - len(adopted),
                len(numbered),
                self._settings.owners_max,
            )
        return adopted

    def gauges(self) -> Mapping[str, int]:
        return {"known": len(self._numbers)}

    def counters(self) -> Mapping[str, int]:
        return {"refused": self.refused}

    def _forget_unclaimed(self) -> None:
        for number in self._index.unclaimed_owners():
            self._forget(self._names[number])

    def _forget(self, name: str) -> None:
        number = self._numbers.pop(name)
        del self._names[number]
        self._index.clear_owner(number)
