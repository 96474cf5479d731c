"""Runs that read datasets: every row exactly once per epoch, through deaths, resumes and other numbers of workers.

On the cluster play those in which a run goes on with another number of workers, by hand and by resize, and one of the
usual loops. The order itself is a pure function, and errors are found by the driver or the loader: told on one machine.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import feeding
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import story
from tests.stories.engines import ON_BOTH, on, on_cases
from tests.stories.going import changes_of_size
from typer.testing import CliRunner

import powertrain.data
from powertrain import DataConfig, FailureConfig
from powertrain.cli.main import app
from powertrain.data import Dataset
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer

ROWS = 120


def parquet(directory: Path, rows: int = ROWS, first: int = 0) -> Path:
    """Three files of several row groups, one of them empty."""
    place = directory / "files"
    place.mkdir(exist_ok=True)
    ids = list(range(first, first + rows))
    for number, part in enumerate((ids[: rows // 2], [], ids[rows // 2 :])):
        table = pa.table({"id": pa.array(part, pa.int64())})
        pq.write_table(table, place / f"part-{number}.parquet", row_group_size=7)
    return place


def dataset(directory: Path, **options: Any) -> Dataset:
    return powertrain.data.read_parquet(str(parquet(directory, **options))).random_shuffle()


def lineage(fits: Any) -> dict[int, Counter[int]]:
    """How often each row was trained on in each epoch, in what counts of the run: up to the row from which the next
    attempt went on."""
    started = [fact for fact in fits.facts("fed") if isinstance(fact, ev.AttemptStarted)]
    firsts = {fact.attempt: fact.first_row for fact in started}
    found: dict[int, Counter[int]] = {}
    for path in fits.directory.glob("fed-*.jsonl"):
        attempt = int(path.stem.split("-")[1])
        undone = firsts.get(attempt + 1, 10**9)
        for line in map(json.loads, path.read_text().splitlines()):
            if line["row"] < undone:
                found.setdefault(line["epoch"], Counter()).update(line["ids"])
    return found


def each_once(rows: int = ROWS) -> Counter[int]:
    return Counter(range(rows))


def fit(fits: Any, loop: Any, config: dict[str, Any], *, workers: Any, **options: Any) -> dict[str, Any]:
    datasets = options.pop("datasets", None) or {"train": dataset(fits.directory)}
    given = options.pop("dataset_config", None)
    trainer = fits.trainer(
        loop,
        kind=TorchTrainer,
        workers=workers,
        train_loop_config=config,
        datasets=datasets,
        dataset_config=given,
        name="fed",
        **options,
    )
    return story.outcome_of(trainer.fit)


@on("local", "ray", smoke=["local"])
def test_three_workers_one_killed_then_two_then_four_see_each_row_once_per_epoch(fits: Any) -> None:
    """The run is killed in the middle of both epochs, and goes on each time with another number of workers."""
    config = {"epochs": 2, "batch": 10, "every": 2, "kills": [[0, 6], [1, 9]]}
    for workers, raised in ((3, "TrainingFailedError"), (2, "TrainingFailedError"), (4, "")):
        outcome = fit(fits, feeding.counts_epochs_by_the_shard, config, workers=workers)
        assert outcome["raised"] == raised, outcome
    started = [f for f in fits.facts("fed") if isinstance(f, ev.AttemptStarted)]
    assert [fact.world_size for fact in started] == [3, 2, 4]
    assert lineage(fits) == {0: each_once(), 1: each_once()}


IDIOMS = {
    feeding.counts_epochs_by_the_shard: [[0, 5], [1, 4]],
    feeding.one_loader_for_all_epochs: [[0, 5], [1, 4]],
    feeding.keeps_the_position_by_hand: [[0, 5], [1, 4]],
    feeding.saves_at_epoch_ends: [[0, 8], [1, 3]],
    feeding.registers_its_state: [[0, 5], [1, 4]],
}


@on_cases(
    ("engine", "loop"),
    [*(("local", loop) for loop in IDIOMS), ("ray", feeding.keeps_the_position_by_hand)],
)
def test_each_way_to_write_the_loop_sees_each_row_once_per_epoch(fits: Any, loop: Any) -> None:
    config = {"epochs": 2, "batch": 9, "every": 2, "kills": IDIOMS[loop]}
    outcome = fit(
        fits,
        loop,
        config,
        workers=2,
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=powertrain.CheckpointConfig(checkpoint_frequency=2),
    )
    assert outcome["raised"] == "", outcome
    started = [f for f in fits.facts("fed") if isinstance(f, ev.AttemptStarted)]
    assert len(started) == 3, "both deaths happened"
    assert lineage(fits) == {0: each_once(), 1: each_once()}


def test_an_epoch_number_that_is_repeated_gets_the_next_epoch_of_the_data(fits: Any) -> None:
    config = {"epochs": 3, "batch": 20, "every": 0, "kills": [[0, 5]]}
    outcome = fit(
        fits,
        feeding.repeats_the_saved_epoch,
        config,
        workers=2,
        failure_config=FailureConfig(max_failures=1),
    )
    assert outcome["raised"] == "", outcome
    # Epoch 0 was saved at its end and its number is trained again: with the data's epoch 1, then 2 and 3.
    assert lineage(fits) == {epoch: each_once() for epoch in range(4)}


def test_an_epoch_that_is_broken_off_is_followed_by_the_next(fits: Any) -> None:
    config = {"epochs": 3, "batch": 10, "steps": 2, "every": 0, "kills": [[0, 3]]}
    outcome = fit(
        fits, feeding.breaks_off_each_epoch, config, workers=2, failure_config=FailureConfig(max_failures=1)
    )
    assert outcome["raised"] == "", outcome
    found = lineage(fits)
    assert set(found) == {0, 1, 2}
    assert all(len(rows) == 40 and set(rows.values()) == {1} for rows in found.values())


@ON_BOTH
def test_a_run_that_is_resized_in_mid_epoch_sees_each_row_once(fits: Any) -> None:
    sizes = [(12, 2), (20, 4)]
    config = {"epochs": 2, "batch": 4, "every": 0, "kills": [[2, 7]], "pace": 0.03, "until_size": sizes}

    def ask() -> None:
        for step, workers in ((5, 2), (20, 4)):
            story.await_told(f"step-{step}")
            storage = str(fits.directory / "storage")
            CliRunner().invoke(app, ["resize", "fed", str(workers), "--storage", storage])

    asking = threading.Thread(target=ask)
    asking.start()
    outcome = fit(
        fits,
        feeding.registers_its_state,
        config,
        workers=(2, 4),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=powertrain.CheckpointConfig(checkpoint_frequency=3),
    )
    asking.join()
    assert outcome["raised"] == "", outcome
    assert lineage(fits) == {0: each_once(), 1: each_once()}
    assert changes_of_size(fits, "fed") == [4, 2, 4]
    assert len([fact for fact in fits.facts("fed") if isinstance(fact, ev.Failed)]) == 1, (
        "one kill, one failure"
    )


@pytest.mark.smoke
def test_a_torch_loader_sees_each_row_once_per_epoch_over_deaths_and_other_world_sizes(fits: Any) -> None:
    config = {"epochs": 2, "batch": 5, "every": 2, "rows": ROWS, "kills": [[0, 5], [1, 8]]}
    for workers, raised in ((3, "TrainingFailedError"), (2, "TrainingFailedError"), (4, "")):
        trainer = fits.trainer(
            feeding.reads_a_torch_loader,
            kind=TorchTrainer,
            workers=workers,
            train_loop_config=config,
            name="fed",
        )
        outcome = story.outcome_of(trainer.fit)
        assert outcome["raised"] == raised, outcome
    assert lineage(fits) == {0: each_once(), 1: each_once()}


def test_a_dataset_that_is_not_split_is_whole_on_every_rank(fits: Any) -> None:
    config = {"epochs": 1, "batch": 30, "every": 2, "kills": []}
    outcome = fit(
        fits,
        feeding.evaluates_between,
        config,
        workers=2,
        datasets={
            "train": dataset(fits.directory),
            "eval": lambda: powertrain.data.from_items([{"id": n} for n in range(10)]),
        },
        dataset_config=DataConfig(datasets_to_split=["train"]),
    )
    assert outcome["raised"] == "", outcome
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    evaluated = [rows for rows in frame["evaluated"].tolist() if isinstance(rows, (list, str))]
    assert len(evaluated) == 4
    assert all(str(list(rows) if not isinstance(rows, str) else rows) for rows in evaluated)
    assert lineage(fits) == {0: each_once()}


def test_a_loop_that_does_not_load_its_checkpoint_starts_at_epoch_0_with_a_warning(fits: Any) -> None:
    config = {"epochs": 1, "batch": 20, "every": 0, "kills": [[0, 3]]}
    outcome = fit(
        fits,
        feeding.never_asks_for_its_checkpoint,
        config,
        workers=2,
        failure_config=FailureConfig(max_failures=1),
    )
    assert outcome["raised"] == "", outcome
    notes = " ".join(str(fact) for fact in fits.facts("fed"))
    assert "get_checkpoint" in notes
    assert lineage(fits)[0][0] >= 1


def test_data_that_has_changed_since_the_checkpoint_is_refused_before_training(fits: Any) -> None:
    config = {"epochs": 2, "batch": 10, "every": 2, "kills": [[0, 6]]}
    first = fit(fits, feeding.counts_epochs_by_the_shard, config, workers=2)
    assert first["raised"] == "TrainingFailedError"
    changed = {"train": dataset(fits.directory, rows=110)}
    refused = fit(fits, feeding.counts_epochs_by_the_shard, config, workers=2, datasets=changed)
    assert refused["raised"] == "DataChangedError"
    assert "had 120 rows then and has 110 now" in refused["message"]
    started = [f for f in fits.facts("fed") if isinstance(f, ev.AttemptStarted)]
    assert len(started) == 1, "no process was started for it"
    again = fit(
        fits,
        feeding.counts_epochs_by_the_shard,
        config | {"kills": []},
        workers=2,
        datasets=changed,
        dataset_config=DataConfig(on_change="restart_epoch"),
    )
    assert again["raised"] == "", again
    assert lineage(fits)[1] == each_once(110)


def test_a_map_that_raises_names_the_row_and_the_line(fits: Any) -> None:
    mapped = powertrain.data.read_parquet(str(parquet(fits.directory))).map(feeding.raises_in_a_map)
    outcome = fit(fits, feeding.reads_until_it_fails, {}, workers=2, datasets={"train": mapped})
    assert outcome["raised"] == "TrainingFailedError"
    text = outcome["message"] + str(outcome["failures"])
    assert "raises_in_a_map" in text
    assert "no such label" in text
    assert "feeding.py" in text
    assert "part-0.parquet" in text


def test_missing_files_are_reported_before_any_process_starts(fits: Any, tmp_path: Path) -> None:
    nothing = powertrain.data.read_parquet(str(tmp_path / "nowhere"))
    outcome = fit(fits, feeding.reads_until_it_fails, {}, workers=2, datasets={"train": nothing})
    assert outcome["raised"] == "DataError"
    assert "nowhere" in outcome["message"]


def test_the_result_says_where_each_dataset_stands(fits: Any) -> None:
    config = {"epochs": 2, "batch": 10, "every": 2, "kills": [[0, 7]]}
    outcome = fit(fits, feeding.counts_epochs_by_the_shard, config, workers=2)
    assert outcome["raised"] == "TrainingFailedError"
    [(name, position)] = Result.from_path(outcome["path"]).data_positions.items()
    assert (name, position.epoch, position.position, position.rows) == ("train", 0, 60, ROWS)
