"""Names of instances as pods: reversible, and never another tenant's."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.api.instances import DEFAULT, Instance, Partition, instance_of, model_of
from app.errors import InvalidInput

PARTS = st.text(st.sampled_from("aé@=/|7"), min_size=1, max_size=6) | st.sampled_from(
    ["tenant", "@rank", "rank=3", "x@group", DEFAULT]
)
MARKS = ("@tenant=", "@group=", "@rank=")


def partitions() -> st.SearchStrategy[Partition]:
    return st.builds(Partition, PARTS, PARTS)


@given(PARTS, partitions(), st.sampled_from([0, 1, 65_535]))
def test_a_pod_name_is_read_back(identity: str, partition: Partition, dp_rank: int) -> None:
    instance = Instance(identity, partition, dp_rank)
    assert instance_of(instance.pod) == instance
    assert model_of(partition.key(identity)) == (identity, partition)


@given(PARTS, partitions(), PARTS, partitions())
def test_no_two_partitions_share_a_model(one: str, mine: Partition, other: str, theirs: Partition) -> None:
    assume((one, mine) != (other, theirs))
    assert mine.key(one) != theirs.key(other)


@pytest.mark.parametrize("mark", MARKS)
def test_marks_are_refused(mark: str) -> None:
    for partition, name in [
        (Partition(), f"m{mark}x"),
        (Partition(tenant=f"a{mark}b"), "m"),
        (Partition(group=f"a{mark}b"), "m"),
    ]:
        with pytest.raises(InvalidInput, match=mark):
            partition.key(name)


@pytest.mark.parametrize(
    ("pod", "instance"),
    [
        ("engine-a", Instance("engine-a", Partition())),
        ("engine-a@rank=3", Instance("engine-a", Partition(), 3)),
        ("7@tenant=acme", Instance("7", Partition("acme"))),
        ("7@tenant=acme@group=eu@rank=12", Instance("7", Partition("acme", "eu"), 12)),
        ("http://10.0.0.7:8000", Instance("http://10.0.0.7:8000", Partition())),
        ("@tenant=", Instance("@tenant=", Partition())),
        ("x@rank=0", Instance("x@rank=0", Partition())),
    ],
)
def test_names(pod: str, instance: Instance) -> None:
    assert instance_of(pod) == instance


@pytest.mark.parametrize(
    ("identity", "public"),
    [("7", 7), ("07", "07"), ("a", "a"), (str(2**64 - 1), 2**64 - 1), (str(2**64), str(2**64))],
)
def test_numbers_stay_numbers(identity: str, public: int | str) -> None:
    assert Instance(identity, Partition()).public_id == public
