"""Objects that an earlier version has kept in run directories, with the modules that it had."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import powertrain
from powertrain.checkpoint.staging import CheckpointDirectory
from powertrain.data.dataset import Dataset
from powertrain.values import kept_pickles
from powertrain.worker.session import Session

#: By name, the pickles of the objects: configs, datasets of every source and operation, the arguments of a sweep.
KEPT: dict[str, bytes] = pickle.loads((Path(__file__).parent / "earlier_layout" / "kept.pickle").read_bytes())


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("dataset")])
def test_datasets_of_an_earlier_version_can_be_opened_and_described(name: str) -> None:
    dataset = kept_pickles.loads(KEPT[name])
    assert isinstance(dataset, Dataset)
    assert "Dataset(" in repr(dataset)


def test_rows_in_memory_of_an_earlier_version_are_the_same() -> None:
    assert kept_pickles.loads(KEPT["dataset items"]).take_all() == [{"x": 1}, {"x": 2}]
    assert kept_pickles.loads(KEPT["dataset limited"]).take_all() == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_configs_and_the_arguments_of_a_sweep_can_be_opened() -> None:
    scaling, run, *others = kept_pickles.loads(KEPT["configs"])
    assert (scaling.num_workers, run.failure_config.max_failures, len(others)) == (2, 2, 6)
    tune = kept_pickles.loads(KEPT["tune"])
    assert tune["config"].metric == "loss"
    assert set(tune["space"]) == {"x", "y", "z"}


def test_a_checkpoint_directory_in_a_return_value_of_an_earlier_version_is_still_its_path() -> None:
    # As protocol 0 writes it: the class in the module it had, called with its one argument.
    directory = kept_pickles.loads(b"cpowertrain.checkpoint.saver\nCheckpointDirectory\n(V/runs/open-1\ntR.")
    assert isinstance(directory, CheckpointDirectory)
    assert directory == "/runs/open-1"


def test_functions_that_a_kept_training_function_calls_are_found_where_they_are_now() -> None:
    assert kept_pickles.loads(b"cpowertrain.worker.session\nget_checkpoint\n.") is powertrain.get_checkpoint
    assert kept_pickles.loads(b"cpowertrain.worker.session\nTrainContext\n.") is powertrain.TrainContext
    assert kept_pickles.loads(b"cpowertrain.worker.session\nSession\n.") is Session


def test_a_class_that_no_module_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Gone"):
        kept_pickles.loads(b"cpowertrain.data.operations\nGone\n.")
