"""Lightning's Trainer in a run: killed in mid-epoch it goes on where it was, and ends where it would have ended.

What it would have come to is found in this very process, with one rank that takes the rows of both: a step has the same
rows at any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import in_lightning
import pytest
import story
import torch
from tests.stories.engines import on, on_cases, ranks
from tests.stories.test_data import lineage
from tests.stories.tracker_stores import assert_one_run

import powertrain.data
from powertrain import FailureConfig
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer

#: A rank imports Lightning in each of its starts, and some stories have three fits.
pytestmark = pytest.mark.timeout(600)

#: An epoch has 7 steps, the last one with a single row. The death is in the second epoch, after a step that was saved.
CONFIG: dict[str, Any] = {"epochs": 3, "batch": 9, "every": 2, "kills": [[0, 12]]}
EACH_ONCE = Counter(range(in_lightning.ROWS))
IN_EACH_EPOCH = dict.fromkeys(range(3), EACH_ONCE)


def fit(fits: Any, name: str = "fed", engine: str = "", workers: int = 2, **config: Any) -> dict[str, Any]:
    failures = config.pop("failures", 1)
    trackers = config.pop("trackers", ())
    config = {**CONFIG, "raises": "inline" in (engine, fits.engine), **config}
    rows = powertrain.data.from_items([{"id": number} for number in range(in_lightning.ROWS)])
    trainer = fits.trainer(
        in_lightning.fits_with_lightning,
        engine,
        kind=TorchTrainer,
        workers=workers,
        train_loop_config=config,
        torch_config=in_lightning.WithLightning(),
        datasets={"train": rows.random_shuffle(seed=3)},
        name=name,
        failure_config=FailureConfig(max_failures=failures),
        trackers=trackers,
        tracker_timeout_s=300.0,
    )
    return story.outcome_of(trainer.fit)


def uninterrupted(fits: Any, **config: Any) -> dict[str, Any]:
    """The outcome without a death; its rows are counted nowhere."""
    outcome = fit(fits, "whole", "inline", **{**config, "batch": 18, "kills": [], "strategy": "ddp"})
    assert outcome["raised"] == "", outcome
    for path in fits.directory.glob("fed-*.jsonl"):
        path.unlink()
    return outcome


def through_a_death(fits: Any, **config: Any) -> dict[str, Any]:
    """The outcome of a run that dies once: restarted by itself, or started again where the rank is this process."""
    if fits.engine != "inline":
        return fit(fits, **config)
    died = fit(fits, **{**config, "batch": 18, "failures": 0})
    assert died["raised"] == "TrainingFailedError", died
    return fit(fits, **{**config, "batch": 18, "failures": 0})


def close_to(values: Any, rel: float = 1e-4) -> Any:
    return pytest.approx(values, rel=rel, abs=1e-5)


def attempts(fits: Any) -> list[Any]:
    return [fact for fact in fits.facts("fed") if isinstance(fact, ev.AttemptStarted)]


@on_cases(
    ("engine", "data"),
    [
        pytest.param("local", "loader", marks=pytest.mark.smoke),
        ("local", "shard"),
        ("local", "without_length"),
        ("ray", "loader"),
    ],
)
def test_a_killed_rank_costs_no_row_and_the_loss_is_that_of_an_uninterrupted_run(
    fits: Any, data: str
) -> None:
    """And the trackers have one run, with each of its steps once."""
    whole = uninterrupted(fits, data=data)
    store = f"sqlite:///{fits.directory}/mlflow.db"
    is_tracked = data == "shard" or fits.engine == "ray"
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("MLFLOW_TRACKING_URI", store)
        outcome = fit(fits, data=data, trackers=["tensorboard", "mlflow"] if is_tracked else [])
    assert outcome["raised"] == "", outcome
    if is_tracked:
        # A report after every second step and at the end of each epoch, which has seven.
        assert_one_run(Path(outcome["path"]), store, "step", [2, 4, 6, 7, 8, 10, 12, 14, 16, 18, 20, 21])
    assert [fact.attempt for fact in attempts(fits)] == [0, 1]
    assert attempts(fits)[1].first_row > attempts(fits)[0].first_row + 4, "it went on in the second epoch"
    assert lineage(fits) == IN_EACH_EPOCH
    assert outcome["return_value"] == close_to(whole["return_value"])
    assert outcome["metrics"]["step"] == whole["metrics"]["step"] == 21


@on("local", "inline", "ray")
def test_with_accumulated_gradients_and_a_validation_loop_it_goes_on_where_it_was(fits: Any) -> None:
    """Checkpoints are made between optimizer steps, and the last step of an epoch may have fewer batches. The function
    asks for the checkpoint itself, and gives ``fit`` its path."""
    options: dict[str, Any] = {
        "trainer": {"accumulate_grad_batches": 3, "val_check_interval": 4},
        "validates": True,
    }
    whole = uninterrupted(fits, **options, every=1)
    outcome = through_a_death(fits, **options, every=1, ckpt_path="path")
    assert outcome["raised"] == "", outcome
    assert lineage(fits) == IN_EACH_EPOCH
    assert outcome["return_value"] == close_to(whole["return_value"])
    assert outcome["metrics"]["val_loss"] == close_to(whole["metrics"]["val_loss"], rel=1e-3)
    assert outcome["metrics"]["step"] == whole["metrics"]["step"] == 9


@on_cases(
    ("engine", "state_dict_type"),
    [("local", "full"), ("local", "sharded"), ("inline", "full"), ("inline", "sharded"), ("ray", "sharded")],
)
def test_a_sharded_model_goes_on_from_either_kind_of_checkpoint(fits: Any, state_dict_type: str) -> None:
    whole = uninterrupted(fits)
    outcome = through_a_death(fits, strategy=state_dict_type)
    assert outcome["raised"] == "", outcome
    assert lineage(fits) == IN_EACH_EPOCH
    saved = Path(outcome["checkpoint"], "checkpoint.ckpt")
    shards = {path.name for path in saved.glob("*.distcp")} if saved.is_dir() else set()
    written = {f"__{rank}_0.distcp" for rank in ranks(fits.engine)}
    assert shards == (written if state_dict_type == "sharded" else set())
    assert weights_in(saved, fits.directory) == close_to(
        weights_in(Path(whole["checkpoint"], "checkpoint.ckpt"))
    )


def weights_in(saved: Path, scratch: Path = Path()) -> dict[str, float]:
    """Each weight in a checkpoint of Lightning's, by its parameter's name and its place there."""
    name = "state_dict"
    if saved.is_dir():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(saved, scratch / "whole.pt")
        saved, name = scratch / "whole.pt", "model"
    state = torch.load(saved, weights_only=False)[name]
    return {
        f"{key.removeprefix('_forward_module.')}[{place}]": value
        for key in sorted(state)
        for place, value in enumerate(state[key].flatten().tolist())
    }


def test_another_number_of_workers_goes_on_in_the_same_epoch(fits: Any) -> None:
    """One, then two, then one, each in the middle of an epoch: Lightning counts batches, whose number changes."""
    ends = [
        ("inline", "TrainingFailedError", [[0, 6]]),
        ("", "TrainingFailedError", [[1, 9]]),
        ("inline", "", []),
    ]
    for engine, raised, kills in ends:
        outcome = fit(fits, engine=engine, kills=kills, failures=0)
        assert outcome["raised"] == raised, outcome
    assert [fact.world_size for fact in attempts(fits)] == [1, 2, 1]
    assert lineage(fits) == IN_EACH_EPOCH


@pytest.mark.parametrize("ckpt_path", ["last", "path"])
@on("inline")
def test_without_workers_an_attempt_that_raised_is_gone_on_with(fits: Any, ckpt_path: str) -> None:
    options: dict[str, Any] = {"ckpt_path": ckpt_path, "batch": 18, "kills": [[0, 4], [1, 6]]}
    whole = uninterrupted(fits)
    for raised in ("TrainingFailedError", "TrainingFailedError", ""):
        outcome = fit(fits, failures=0, **options)
        assert outcome["raised"] == raised, outcome
    assert lineage(fits) == IN_EACH_EPOCH
    assert outcome["return_value"] == close_to(whole["return_value"])


@on("inline")
def test_a_run_that_is_limited_by_steps_goes_on_after_the_end_of_an_epoch(fits: Any) -> None:
    """Every third step coincides with no end of an epoch, and the attempt ends just after one."""
    options: dict[str, Any] = {"batch": 18, "epochs": -1, "trainer": {"max_steps": 17}, "every": 3}
    for raised, kills in (("TrainingFailedError", [[0, 8]]), ("", [])):
        outcome = fit(fits, failures=0, **options, kills=kills)
        assert outcome["raised"] == raised, outcome
    found = lineage(fits)
    assert {epoch: sum(rows.values()) for epoch, rows in found.items()} == {0: 109, 1: 109, 2: 3 * 18}
    assert found[0] == found[1] == EACH_ONCE
    assert outcome["metrics"]["step"] == 17


def test_a_rank_that_is_asked_to_end_leaves_a_checkpoint_in_mid_epoch(fits: Any) -> None:
    """Lightning's own handler of SIGTERM would have the ranks wait for each other in different places."""
    stopped = fit(fits, epochs=1000, every=10**6, kills=[], terminates=[[0, 4]], pace=0.05)
    assert stopped["raised"] == "PreemptedError", stopped
    assert stopped["message"].startswith(
        "the run was preempted and can be resumed: rank 1 was asked to end by SIGTERM"
    )
    reached = max(lineage(fits))
    outcome = fit(fits, epochs=reached + 1, kills=[])
    assert outcome["raised"] == "", outcome
    assert lineage(fits) == dict.fromkeys(range(reached + 1), EACH_ONCE)
