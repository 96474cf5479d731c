from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from powertrain.checkpoint.manifest import Manifest
from powertrain.checkpoint.retention import best, missing_score, score, to_delete


def manifests_with(scores: list[Any]) -> list[Manifest]:
    return [
        Manifest(
            name=f"c{row}", row=row, attempt=0, metrics={} if value is None else {"eval": {"acc": value}},
            world_size=1, lease=1, parent="", created=0.0, files=[],
        )
        for row, value in enumerate(scores)
    ]  # fmt: skip


scores = st.lists(st.none() | st.integers(-3, 3) | st.floats(), max_size=12)
keeps = st.integers(1, 5)
orders = st.sampled_from(["max", "min"])


@given(scores, keeps, st.none() | st.just("eval/acc"), orders, st.sets(st.integers(0, 12)))
def test_the_newest_and_the_pinned_are_never_deleted(
    values: list[Any], keep: int, attribute: str | None, order: str, pins: set[int]
) -> None:
    manifests = manifests_with(values)
    pinned = {f"c{row}" for row in pins}
    gone = to_delete(
        manifests, num_to_keep=keep, score_attribute=attribute, score_order=order, pinned=frozenset(pinned)
    )
    assert not pinned & set(gone)
    assert not {m.name for m in manifests[-1:]} & set(gone)
    assert gone == [m.name for m in manifests if m.name in set(gone)]
    left = [m for m in manifests if m.name not in gone]
    assert min(keep, len(manifests)) <= len(left) <= keep + 1 + len(pinned)


@given(scores, keeps, orders)
def test_nothing_deleted_is_better_than_what_is_kept_for_its_score(
    values: list[Any], keep: int, order: str
) -> None:
    manifests = manifests_with(values)
    gone = set(to_delete(manifests, num_to_keep=keep, score_attribute="eval/acc", score_order=order))
    sign = 1 if order == "max" else -1

    def worth(manifest: Manifest) -> float:
        value = score(manifest.metrics, "eval/acc")
        return -math.inf if math.isnan(value) else sign * value

    kept = sorted((worth(m) for m in manifests if m.name not in gone), reverse=True)[:keep]
    assert all(worth(m) <= min(kept) for m in manifests if m.name in gone)


@given(scores, keeps)
def test_without_a_score_the_newest_are_kept(values: list[Any], keep: int) -> None:
    manifests = manifests_with(values)
    assert to_delete(manifests, num_to_keep=keep) == [m.name for m in manifests[:-keep]]


@given(scores)
def test_without_a_number_all_are_kept(values: list[Any]) -> None:
    assert to_delete(manifests_with(values), num_to_keep=None, score_attribute="eval/acc") == []


@given(scores, orders)
def test_best_is_the_extreme_and_the_newer_of_equals(values: list[Any], order: str) -> None:
    manifests = manifests_with(values)
    numbers = [float(v) for v in values if v is not None and not math.isnan(v)]
    winner = best(manifests, "eval/acc", order)
    if not numbers:
        assert winner is None
        return
    extreme = max(numbers) if order == "max" else min(numbers)
    assert winner is manifests[max(i for i, v in enumerate(values) if v is not None and v == extreme)]


def test_a_missing_or_nan_score_is_the_worst_in_both_orders() -> None:
    manifests = manifests_with([math.nan, 0.5, None, 0.1, 0.2])
    for order, kept in (("max", {"c1", "c4"}), ("min", {"c3", "c4"})):
        gone = to_delete(manifests, num_to_keep=1, score_attribute="eval/acc", score_order=order)
        assert set(gone) == {"c0", "c1", "c2", "c3", "c4"} - kept


def test_a_key_with_a_slash_counts_before_nesting() -> None:
    assert score({"a/b": 1, "a": {"b": 2}}, "a/b") == 1.0
    assert score({"a": {"b": {"c": True}}}, "a/b/c") == 1.0
    assert math.isnan(score({"a": "text"}, "a"))
    assert math.isnan(score({"a": 3}, "a/b"))


def test_a_score_that_no_checkpoint_has_is_warned_about_with_the_names_there_are() -> None:
    manifests = manifests_with([None, 0.5])
    assert missing_score(manifests, "eval/acc") == ""
    warning = missing_score(manifests, "accuracy")
    assert "checkpoint_score_attribute='accuracy'" in warning
    assert "Their metrics are eval/acc." in warning
