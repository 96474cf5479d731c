"""Import lines of Ray Tune work with their first word renamed, or say what to use instead."""

from __future__ import annotations

import importlib
import subprocess
import sys

import cloudpickle
import pytest

from powertrain import tune
from powertrain.errors import ConfigError
from powertrain.tune.registry import find_trainable

LINES = [
    "from powertrain.tune.analysis import ExperimentAnalysis",
    "from powertrain.tune.callback import Callback",
    "from powertrain.tune.context import TuneContext, get_context",
    "from powertrain.tune.error import TuneError",
    "from powertrain.tune.execution.placement_groups import PlacementGroupFactory",
    "from powertrain.tune.experiment import Trial",
    "from powertrain.tune.experiment.trial import Trial",
    "from powertrain.tune.integration.lightgbm import TuneReportCallback",
    "from powertrain.tune.integration.pytorch_lightning import TuneReportCheckpointCallback",
    "from powertrain.tune.integration.ray_train import TuneReportCallback",
    "from powertrain.tune.integration.xgboost import TuneReportCheckpointCallback",
    "from powertrain.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback, LoggerCallback",
    "from powertrain.tune.logger.json import JsonLoggerCallback",
    "from powertrain.tune.progress_reporter import CLIReporter, JupyterNotebookReporter",
    "from powertrain.tune.registry import register_trainable",
    "from powertrain.tune.result_grid import ResultGrid",
    "from powertrain.tune.schedulers.async_hyperband import ASHAScheduler, AsyncHyperBandScheduler",
    "from powertrain.tune.schedulers.median_stopping_rule import MedianStoppingRule",
    "from powertrain.tune.schedulers.pbt import PopulationBasedTraining, PopulationBasedTrainingReplay",
    "from powertrain.tune.schedulers.trial_scheduler import FIFOScheduler, TrialScheduler",
    "from powertrain.tune.search.basic_variant import BasicVariantGenerator",
    "from powertrain.tune.search.concurrency_limiter import ConcurrencyLimiter",
    "from powertrain.tune.search.optuna import OptunaSearch",
    "from powertrain.tune.search.sample import uniform",
    "from powertrain.tune.search.searcher import Searcher",
    "from powertrain.tune.stopper import CombinedStopper, ExperimentPlateauStopper, FunctionStopper, NoopStopper",
    "from powertrain.tune.stopper.maximum_iteration import MaximumIterationStopper",
    "from powertrain.tune.stopper.timeout import TimeoutStopper",
    "from powertrain.tune.stopper.trial_plateau import TrialPlateauStopper",
    "from powertrain.tune.trainable.trainable import Trainable",
    "from powertrain.tune.tune_config import TuneConfig",
    "from powertrain.tune.tuner import Tuner",
    "import powertrain.tune.experiment.trial",
]


def test_import_lines_work_with_their_first_word_renamed() -> None:
    """In one process that has imported nothing else, and each in it twice."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*LINES, *LINES])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_function_that_uses_the_package_travels_to_another_process() -> None:
    """cloudpickle sends along every module below a package whose name the function has among its names."""

    def uses(trainable: object, experiment: object, hyperopt: object) -> object:
        return tune.trainable, tune.experiment, tune.search.hyperopt

    assert callable(cloudpickle.loads(cloudpickle.dumps(uses)))


@pytest.mark.parametrize("name", ["Experiment", "run_experiments", "register_env"])
def test_a_name_that_is_not_here_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no {name}. Use "):
        getattr(tune, name)


@pytest.mark.parametrize(("module", "name"), [("hb_bohb", "HyperBandForBOHB"), ("pb2", "PB2Config")])
def test_a_scheduler_that_is_not_here_is_refused_at_its_import(module: str, name: str) -> None:
    found = importlib.import_module(f"powertrain.tune.schedulers.{module}")
    with pytest.raises((ConfigError, AttributeError), match=name):
        getattr(found, name)


def test_a_trainable_is_found_by_the_name_that_it_was_registered_under() -> None:
    def train(config: dict[str, float]) -> None:
        """Do nothing."""

    tune.register_trainable("my-train", train)
    assert find_trainable("my-train") is train
    assert tune.Tuner("my-train")._trainable is train


@pytest.mark.parametrize(
    ("name", "trainable", "message"),
    [("", len, "takes a text"), ("x", 3, "takes a trainer, a function"), (4, len, "takes a text")],
)
def test_what_cannot_be_registered_is_refused(name: str, trainable: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune.register_trainable(name, trainable)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    tune.register_trainable("resnet", len)
    with pytest.raises(ConfigError, match=r"No trainable is registered as 'resnt'.*resnet"):
        tune.Tuner("resnt")
