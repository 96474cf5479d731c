"""Scripts that pick their rows at random without a seed, or look at a batch first: started again they go on exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import feeding
import pytest
from tests.stories.test_data import each_once, fit, lineage, parquet

import powertrain.data
from powertrain.data import Dataset
from powertrain.errors import DataChangedError

CONFIG = {"epochs": 2, "batch": 8, "every": 2, "kills": [[0, 5]]}


def datasets_of_the_script(directory: Any, seed: int | None = None) -> tuple[Dataset, Dataset]:
    """What a script makes anew at each start."""
    whole = powertrain.data.read_parquet(str(parquet(directory)))
    return whole.train_test_split(0.25, shuffle=True, seed=seed)


def ids(dataset: Dataset) -> set[int]:
    return {row["id"] for row in dataset.iter_rows()}


@pytest.mark.smoke
def test_a_killed_run_over_an_unseeded_split_goes_on_with_the_same_rows(fits: Any) -> None:
    """Killed in mid-epoch, started again by the same script: each training row once, no row of the test."""
    train, test = datasets_of_the_script(fits.directory)
    first = fit(
        fits, feeding.counts_epochs_by_the_shard, CONFIG, workers=2, datasets={"train": train, "test": test}
    )
    assert first["raised"] == "TrainingFailedError", first
    held_out = ids(test)
    again_train, again_test = datasets_of_the_script(fits.directory)
    assert ids(again_test) == held_out
    second = fit(
        fits,
        feeding.counts_epochs_by_the_shard,
        CONFIG,
        workers=3,
        datasets={"train": again_train, "test": again_test},
    )
    assert second["raised"] == "", second
    seen = lineage(fits)
    trained_on = set(range(120)) - held_out
    assert len(trained_on) == 90
    assert seen == {0: Counter(trained_on), 1: Counter(trained_on)}


def test_another_split_is_refused_with_its_cause_and_without_the_advice_to_mix_rows(fits: Any) -> None:
    train, _ = datasets_of_the_script(fits.directory, seed=1)
    first = fit(fits, feeding.counts_epochs_by_the_shard, CONFIG, workers=2, datasets={"train": train})
    assert first["raised"] == "TrainingFailedError", first
    other, _ = datasets_of_the_script(fits.directory, seed=2)
    refused = fit(fits, feeding.counts_epochs_by_the_shard, CONFIG, workers=2, datasets={"train": other})
    assert refused["raised"] == DataChangedError.__name__
    assert "drawn at random (by train_test_split()" in refused["message"]
    assert "would train on rows that were held out" in refused["message"]


@pytest.mark.parametrize("workers", [2])
def test_a_look_at_a_batch_costs_neither_an_epoch_nor_the_rest_of_one(fits: Any, workers: int) -> None:
    for raised in ("TrainingFailedError", ""):
        outcome = fit(fits, feeding.looks_at_a_batch_first, CONFIG, workers=workers)
        assert outcome["raised"] == raised, outcome
    assert lineage(fits) == {0: each_once(), 1: each_once()}
