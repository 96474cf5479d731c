"""Loops of Transformers and Accelerate lose a rank in mid-epoch: each row comes once, and the loss is that of an
undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import on

pytest.importorskip("transformers")

#: Transformers takes long to import, and on a cluster each rank does so in each of its starts.
PATIENCE = 400.0
ROWS = 40

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def rows_by_epoch(root: Path, name: str, epochs: int = 2) -> list[Counter[int]]:
    """Rows that the final weights were trained on, by epoch: of the first attempt those up to the step that the second
    one has begun after."""
    attempts: list[dict[int, Counter[int]]] = []
    for attempt in range(2):
        steps: dict[int, Counter[int]] = {}
        for file in sorted(root.glob(f"rows-{name}-{attempt}-*")):
            for line in file.read_text().splitlines():
                step, rows = json.loads(line)
                steps.setdefault(step, Counter()).update(rows)
        attempts.append(steps)
    first, second = attempts
    begun = min(second, default=max(first) + 1)
    steps = {step: rows for step, rows in first.items() if step < begun} | second
    assert sorted(steps) == list(range(1, max(steps) + 1))
    per_epoch = len(steps) // epochs
    return [
        sum((steps[1 + epoch * per_epoch + number] for number in range(per_epoch)), Counter[int]())
        for epoch in range(epochs)
    ]


def play(stories: Any, scenario: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play a pair of runs to its end; return what came of the undisturbed one and of the other."""
    driver = stories.start(scenario)
    outcome = driver.outcome(within=PATIENCE)
    undisturbed, disturbed = outcome["undisturbed"], outcome["disturbed"]
    assert (undisturbed["raised"], disturbed["raised"]) == ("", ""), (outcome, driver.output)
    once = Counter(range(ROWS))
    assert rows_by_epoch(stories.root, name) == [once, once]
    assert rows_by_epoch(stories.root, f"{name}-disturbed") == [once, once]
    assert list(stories.root.glob(f"rows-{name}-disturbed-1-*")), "it was never disturbed"
    assert not list(stories.root.glob(f"rows-{name}-1-*"))
    assert disturbed["metrics"]["step"] == undisturbed["metrics"]["step"]
    return undisturbed["metrics"], disturbed["metrics"]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("fine_tune_rows", "map"), ("fine_tune_shards", "shard"), ("fine_tune_batches", "batches")],
)
@on("local", "inline")
def test_a_trainer_that_loses_a_rank_ends_with_the_loss_of_an_undisturbed_one(
    stories: Any, scenario: str, name: str
) -> None:
    undisturbed, disturbed = play(stories, scenario, name)
    for metric in ("loss", "best"):
        assert disturbed[metric] == pytest.approx(undisturbed[metric], abs=1e-5)
    for found in (undisturbed, disturbed):
        assert found["found"] == pytest.approx(found["best"], abs=1e-5), (
            "another model than the best was loaded"
        )
        if name != "map":  # where Accelerate repeats rows to fill the last batch
            assert found["exact"] == pytest.approx(found["found"], abs=1e-5)


@on("ray")
def test_a_trainer_that_loses_a_rank_on_ray_ends_with_the_loss_of_an_undisturbed_one(stories: Any) -> None:
    undisturbed, disturbed = play(stories, "fine_tune_shards", "shard")
    assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)


@on("local", "inline")
def test_a_trainer_that_knows_nothing_of_its_run_resumes(stories: Any) -> None:
    undisturbed, disturbed = play(stories, "train_unprepared", "unprepared")
    assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)


@on("local")
def test_a_function_that_returns_a_trainer_gets_hugging_face_datasets_row_by_row(stories: Any) -> None:
    undisturbed, disturbed = play(stories, "train_what_a_function_makes", "made")
    for metric in ("loss", "eval_loss"):
        assert disturbed[metric] == pytest.approx(undisturbed[metric], abs=1e-5)


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("accelerate_with_own_skipping", "own"), ("accelerate_a_prepared_loader", "prepared")],
)
@on("local", "inline")
def test_a_loop_of_accelerate_that_loses_a_rank_trains_on_each_row_once(
    stories: Any, scenario: str, name: str
) -> None:
    undisturbed, disturbed = play(stories, scenario, name)
    assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5)


@on("ray")
def test_a_loop_of_accelerate_that_loses_a_rank_on_ray_trains_on_each_row_once(stories: Any) -> None:
    play(stories, "accelerate_a_prepared_loader", "prepared")
