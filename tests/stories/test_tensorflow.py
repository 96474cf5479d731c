"""Keras on two workers: the weights of one process, also after the death of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras_digits
import numpy as np
import pytest
from tests.stories.tabular import digits

import powertrain
from powertrain import FailureConfig
from powertrain.run import events as ev

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None or find_spec("tf_keras") is None,
    reason="tensorflow and tf-keras are not installed: make test-frameworks, or pip install tensorflow tf-keras",
)
#: How far a weight may be from that of one process: sums of gradients are made in another order.
TOLERANCE = 1e-3


def in_process(*arguments: Any) -> None:
    """TensorFlow in a process of its own: it starts threads that stay."""
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, keras_digits.__file__, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, timeout=200)


def weights_in(file: Path) -> list[Any]:
    with np.load(file) as saved:
        return list(saved.values())


@pytest.mark.timeout(400)
def test_two_workers_find_the_weights_of_one_process_also_after_a_rank_was_killed(
    fits: Any, tmp_path: Path, record_property: Any
) -> None:
    from powertrain.tensorflow import TensorflowTrainer

    features, labels = digits()
    features = features / 16
    result = fits.trainer(
        keras_digits.train_digits,
        kind=TensorflowTrainer,
        name="killed",
        train_loop_config={"killed_in": 2, "steps": len(features) // keras_digits.BATCH},
        datasets={
            "train": powertrain.data.from_numpy({"features": features, "label": labels.astype("int64")})
        },
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"TF_CPP_MIN_LOG_LEVEL": "3"}},
    ).fit()

    assert result.state == "finished"
    assert [fact.attempt for fact in fits.facts("killed") if isinstance(fact, ev.TrainingStarted)] == [0, 1]
    expected = {"begun": 2, "workers": 2, "keras": "tf_keras", "has_torch": False}
    assert result.return_value == expected, "continues after the commit"
    assert set(result.metrics) == {"loss", "accuracy"}
    np.savez(tmp_path / "given.npz", features=features, labels=labels)
    in_process("alone", tmp_path / "given.npz", tmp_path / "alone.npz")
    with result.checkpoint.as_directory() as directory:
        in_process("load", Path(directory, "model.keras"), tmp_path / "run.npz")
    alone, of_run = weights_in(tmp_path / "alone.npz"), weights_in(tmp_path / "run.npz")
    difference = max(abs(one - other).max() for one, other in zip(alone, of_run, strict=True))
    record_property("difference", float(difference))
    assert difference < TOLERANCE
