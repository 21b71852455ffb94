"""What counts as exact, and what makes a replay pass."""

from __future__ import annotations

import pytest

from app.replay.verdict import Report, Scope, Unjudged, Verdict, nearest


def verdict(scope: Scope, predicted: int, cached: int) -> Verdict:
    return Verdict(0, "pod", 0, scope, predicted, cached)


def report(*verdicts: Verdict) -> Report:
    return Report("capture", "model", 16, verdicts=list(verdicts))


@pytest.mark.parametrize(
    ("predicted", "cached", "outcome"),
    [(32, 32, "exact"), (0, 0, "exact"), (32, 16, "over"), (16, 32, "under")],
)
def test_outcome(predicted: int, cached: int, outcome: str) -> None:
    assert verdict(Scope.OUTSIDE, predicted, cached).outcome == outcome


@pytest.mark.parametrize(
    ("predictions", "truth", "chosen"), [({0, 64}, 64, 64), ({0, 64}, 48, 64), ({16, 48}, 32, 16)]
)
def test_nearest_possible_answer_counts(predictions: set[int], truth: int, chosen: int) -> None:
    assert nearest(predictions, truth) == chosen


def test_only_what_is_outside_reset_windows_decides() -> None:
    wrong_inside = verdict(Scope.INSIDE, 64, 0)
    wrong_together = verdict(Scope.CONCURRENT, 0, 64)
    right = verdict(Scope.OUTSIDE, 64, 64)
    assert report(right, wrong_inside, wrong_together).passed
    assert not report(right, verdict(Scope.OUTSIDE, 64, 48)).passed
    assert not report(right, verdict(Scope.OUTSIDE, 48, 64)).passed


def test_nothing_judged_is_no_pass() -> None:
    assert not report().passed
    assert not report(verdict(Scope.INSIDE, 0, 0)).passed


def test_json_sums_by_scope_and_names_each_mismatch() -> None:
    found = report(verdict(Scope.OUTSIDE, 64, 64), verdict(Scope.INSIDE, 64, 0))
    found.unjudged[Unjudged.SALT_HIDDEN] = 3
    document = found.as_json()
    assert (document["requests"], document["exact"], document["over"], document["under"]) == (2, 1, 1, 0)
    assert document["outside_windows"] == {"requests": 1, "exact": 1, "over": 0, "under": 0}
    assert document["inside_windows"] == {"requests": 1, "exact": 0, "over": 1, "under": 0}
    assert document["unjudged"]["salt_hidden"] == 3
    assert [wrong["outcome"] for wrong in document["mismatches"]] == ["over"]
