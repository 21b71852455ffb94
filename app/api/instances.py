"""Instances of other indexers' words, as pods: the names that the compatibility routes give and read back.

Mooncake's conductor and Dynamo's indexer know an instance by (tenant, routing group, id), and every rank of it
registers with an endpoint of its own. Here a pod is known by one name and its ranks lie at consecutive ports. So
each registered rank becomes a pod, and everything that a pod's name cannot say by itself is written behind it:

    engine-a@tenant=acme@group=eu@rank=3        model llama-3 of that tenant:  llama-3@tenant=acme@group=eu

What is `default`, or rank 0, is left out, so an instance without any of it has its own id as its name, and a pod
that was registered elsewhere (configuration, /v1/pods) is an instance of the default tenant with all its ranks.
Nothing is kept beside the names: whatever brings the pods back after a restart brings the instances back.

A tenant is part of the model's name, hence of the context that every prefix hash begins with: no query can reach
what another tenant's pods hold, not even by prefix hashes. Ids and models that contain one of the marks are
refused, or a tenant could be spelt into another's name. Pure; a name is parsed once and remembered (bounded).
"""

from __future__ import annotations

import dataclasses
import functools
import re

from app.errors import InvalidInput

DEFAULT = "default"
NAMES_REMEMBERED_MAX = 16_384

_MARKS = ("@tenant=", "@group=", "@rank=")
_PARTITIONED = re.compile(r"(?P<name>.+?)(?:@tenant=(?P<tenant>.+?))?(?:@group=(?P<group>.+?))?", re.DOTALL)
_RANKED = re.compile(r"(?P<rest>.+)@rank=(?P<rank>[1-9][0-9]{0,4})", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """What separates the instances of one model from each other for good."""

    tenant: str = DEFAULT
    group: str = DEFAULT

    def key(self, name: str) -> str:
        """`name` within this partition. Raises InvalidInput for a name or a partition that has a mark in it."""
        for part in (name, self.tenant, self.group):
            for mark in _MARKS:
                if mark in part:
                    raise InvalidInput(f"{part!r} has {mark!r} in it, which separates names here")
        tenant = "" if self.tenant == DEFAULT else f"@tenant={self.tenant}"
        group = "" if self.group == DEFAULT else f"@group={self.group}"
        return name + tenant + group


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One rank of an instance, or all ranks from `dp_rank` on of a pod that was registered as a whole."""

    id: str
    partition: Partition
    dp_rank: int = 0

    @property
    def pod(self) -> str:
        """The name of its pod. Raises InvalidInput as `Partition.key` does."""
        name = self.partition.key(self.id)
        return f"{name}@rank={self.dp_rank}" if self.dp_rank else name

    @property
    def public_id(self) -> int | str:
        """A number where it is one of 64 bits: Dynamo's are, and its clients expect it back as one."""
        if (
            self.id.isascii()
            and self.id.isdigit()
            and str(int(self.id[:20])) == self.id
            and int(self.id) < 2**64
        ):
            return int(self.id)
        return self.id


@functools.lru_cache(maxsize=NAMES_REMEMBERED_MAX)
def instance_of(pod: str) -> Instance:
    """The instance that a pod's name stands for; every name stands for one."""
    ranked = _RANKED.fullmatch(pod)
    name, partition = model_of(ranked["rest"] if ranked else pod)
    return Instance(name, partition, int(ranked["rank"]) if ranked else 0)


@functools.lru_cache(maxsize=NAMES_REMEMBERED_MAX)
def model_of(key: str) -> tuple[str, Partition]:
    """What `Partition.key` was given."""
    found = _PARTITIONED.fullmatch(key)
    assert found is not None, "the pattern takes every name of at least one character"
    return found["name"], Partition(found["tenant"] or DEFAULT, found["group"] or DEFAULT)
