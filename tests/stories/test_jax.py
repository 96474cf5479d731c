"""JAX on two workers: the weights of one process, also after the death of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax_digits
import numpy as np
import pytest
from tests.stories.tabular import digits, digits_frame

import powertrain
from powertrain import FailureConfig
from powertrain.run import events as ev

pytest.importorskip("jax", reason="jax is not installed: make test-frameworks, or pip install jax")

#: Of two workers, equally many each: a global array is divided evenly.
ROWS = 1796
#: How far a weight may be from that of one process: sums of gradients are made in another order.
TOLERANCE = 1e-4


def of_one_process(directory: Path) -> dict[str, Any]:
    """The weights after training without a run, in a process of its own: JAX starts threads that stay."""
    features, labels = digits()
    np.savez(directory / "given.npz", features=features[:ROWS], labels=labels[:ROWS])
    subprocess.run(
        [sys.executable, jax_digits.__file__, directory / "given.npz", directory / "alone.npz"],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
    )
    with np.load(directory / "alone.npz") as saved:
        return dict(saved)


def test_two_workers_find_the_weights_of_one_process_also_after_a_rank_was_killed(
    fits: Any, tmp_path: Path, record_property: Any
) -> None:
    from powertrain.jax import JaxTrainer

    result = fits.trainer(
        jax_digits.train_digits,
        kind=JaxTrainer,
        name="killed",
        train_loop_config={"rows_per_worker": ROWS // 2, "killed_in": 24},
        datasets={"train": powertrain.data.from_pandas(digits_frame().iloc[:ROWS])},
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    ).fit()

    assert result.state == "finished"
    assert [fact.attempt for fact in fits.facts("killed") if isinstance(fact, ev.TrainingStarted)] == [0, 1]
    assert result.return_value == {"begun": 20, "devices": 2, "has_torch": False}, (
        "continues after the commit"
    )
    assert result.metrics["step"] == jax_digits.STEPS - 1
    expected = of_one_process(tmp_path)
    with result.checkpoint.as_directory() as directory, np.load(Path(directory, "weights.npz")) as saved:
        difference = max(abs(saved[name] - value).max() for name, value in expected.items())
    record_property("difference", float(difference))
    assert difference < TOLERANCE
