"""Loops of Transformers and Accelerate lose a rank in mid-epoch: each row comes once, and the loss is that of an
undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import on
from tests.stories.tracker_stores import assert_one_run

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


def play(stories: Any, scenario: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Play pairs of runs to their end; give the name of each, and what the undisturbed and the other one reported."""
    driver = stories.start(scenario)
    once = Counter(range(ROWS))
    for name, outcome in driver.outcome(within=PATIENCE).items():
        undisturbed, disturbed = outcome["undisturbed"], outcome["disturbed"]
        assert (undisturbed["raised"], disturbed["raised"]) == ("", ""), (outcome, driver.output)
        assert rows_by_epoch(stories.root, name) == [once, once], name
        assert rows_by_epoch(stories.root, f"{name}-disturbed") == [once, once], name
        assert list(stories.root.glob(f"rows-{name}-disturbed-1-*")), f"{name} was never disturbed"
        assert not list(stories.root.glob(f"rows-{name}-1-*"))
        assert disturbed["metrics"]["step"] == undisturbed["metrics"]["step"], name
        if name == "shard":  # the one with trackers
            run, store = stories.storage / "shard-disturbed", f"sqlite:///{stories.root}/mlflow.db"
            last = disturbed["metrics"]["step"]
            # A report for each save, and the one that the function makes at its end.
            assert_one_run(run, store, "step", [*range(3, last, 3), last, last])
        yield name, undisturbed["metrics"], disturbed["metrics"]


@on("local", "inline")
def test_a_trainer_that_loses_a_rank_ends_with_the_loss_of_an_undisturbed_one(stories: Any) -> None:
    """With accumulated gradients, the best model at the end, and each form of data."""
    played = []
    for name, undisturbed, disturbed in play(stories, "fine_tune"):
        played.append(name)
        for metric in ("loss", "best"):
            assert disturbed[metric] == pytest.approx(undisturbed[metric], abs=1e-5), name
        for found in (undisturbed, disturbed):
            assert found["found"] == pytest.approx(found["best"], abs=1e-5), "another model than the best"
            if name != "map":  # where Accelerate repeats rows to fill the last batch
                assert found["exact"] == pytest.approx(found["found"], abs=1e-5), name
    assert played == ["map", "shard", "batches"]


@on("local", "inline")
def test_a_transformers_trainer_resumes_functions_that_know_nothing_of_their_run(stories: Any) -> None:
    """One trains by itself; the other returns a Trainer of datasets, which are Hugging Face's."""
    for name, undisturbed, disturbed in play(stories, "train_by_transformers_trainer"):
        assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5), name
        if name == "made":
            assert disturbed["eval_loss"] == pytest.approx(undisturbed["eval_loss"], abs=1e-5)


@on("local", "inline", "ray")
def test_a_loop_of_accelerate_that_loses_a_rank_trains_on_each_row_once(stories: Any) -> None:
    """With its own skipping, and with a loader that is prepared here, of which it reads no batch ahead."""
    for name, undisturbed, disturbed in play(stories, "accelerate"):
        assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5), name


@on("ray")
def test_a_trainer_on_ray_that_loses_a_rank_ends_with_the_loss_of_an_undisturbed_one(stories: Any) -> None:
    """With accumulated gradients and the best model at the end."""
    for name, undisturbed, disturbed in play(stories, "fine_tune_on_a_cluster"):
        assert disturbed["loss"] == pytest.approx(undisturbed["loss"], abs=1e-5), name
        assert disturbed["found"] == pytest.approx(undisturbed["best"], abs=1e-5), name
