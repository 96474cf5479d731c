"""Ranks of JAX and TensorFlow that die, raise or hang beside others in a collective: who is named, and resuming."""

from __future__ import annotations

import importlib
import threading
from importlib.util import find_spec
from typing import Any

import adding_up
import pytest
import story
from typer.testing import CliRunner

from powertrain import FailureConfig
from powertrain.cli.main import app
from powertrain.errors import WorkerGroupError
from powertrain.run import events as ev

pytestmark = pytest.mark.timeout(400)

TRAINERS = {"jax": "JaxTrainer", "tensorflow": "TensorflowTrainer"}
VARIABLES = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
#: Seconds without a step that end the run: more than the import of the framework takes, which is before the first one.
HANG_TIMEOUT_S = {"jax": 20, "tensorflow": 60}


@pytest.fixture(params=TRAINERS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-frameworks, or pip install {name}")
    return name


def trainer(fits: Any, framework: str, grief: str, rank: int, **options: Any) -> Any:
    waits = options.pop("waits", {})
    return fits.trainer(
        adding_up.train,
        kind=getattr(importlib.import_module(f"powertrain.{framework}"), TRAINERS[framework]),
        name=grief,
        train_loop_config={"framework": framework, "grief": grief, "rank": rank, "waits": waits},
        worker_runtime_env={"env_vars": VARIABLES},
        **options,
    )


@pytest.mark.parametrize(
    ("grief", "rank", "words"),
    [
        ("killed", 0, "Rank 0 was killed by SIGKILL"),
        ("killed", 1, "Rank 1 was killed by SIGKILL"),
        ("raised", 1, "Rank 1 raised ValueError: there is no more to add"),
    ],
)
def test_the_rank_that_failed_is_named_and_not_the_one_that_met_a_closed_connection(
    fits: Any, framework: str, grief: str, rank: int, words: str
) -> None:
    with pytest.raises(WorkerGroupError) as raised:
        trainer(fits, framework, grief, rank).fit()

    assert str(raised.value).startswith(words)
    assert rank in raised.value.worker_failures
    assert raised.value.result.checkpoint is not None


def test_a_rank_that_never_comes_to_a_collective_is_named_with_its_line(fits: Any, framework: str) -> None:
    bounded = FailureConfig(hang_timeout_s=HANG_TIMEOUT_S[framework], on_hang="fail")
    with pytest.raises(WorkerGroupError) as raised:
        trainer(fits, framework, "hung", 1, failure_config=bounded).fit()

    # Collectives of JAX and TensorFlow are not known: the rank that waits inside of one is named as well.
    assert 1 in raised.value.worker_failures
    assert "time.sleep(1000)" in str(raised.value)
    assert raised.value.result.checkpoint is not None


def test_an_elastic_run_adds_up_the_same_after_a_kill_and_with_a_worker_less(
    fits: Any, framework: str
) -> None:
    def resize() -> None:
        for step in (0, 4, 8):  # each attempt imports the framework anew, and is waited for by itself
            story.await_told(f"step-{step}")
        storage = str(fits.directory / "storage")
        done = CliRunner().invoke(app, ["resize", "killed", "1", "--storage", storage])
        story.tell("answer", done.output)

    asking = threading.Thread(target=resize)
    asking.start()
    elastic = {"workers": (1, 2), "failure_config": FailureConfig(max_failures=1), "waits": {"9": ["answer"]}}
    try:
        result = trainer(fits, framework, "killed", 1, **elastic).fit()
    finally:
        asking.join()

    assert result.state == "finished"
    facts = fits.facts("killed")
    assert [fact.world_size for fact in facts if isinstance(fact, ev.AttemptStarted)] == [2, 2, 1]
    [failed] = [fact for fact in facts if isinstance(fact, ev.Failed)]
    assert failed.failures[0].summary.startswith("rank 1 was killed by SIGKILL")
    assert result.return_value["workers"] == 1
    assert result.return_value["total"] == adding_up.STEPS * adding_up.WHOLE
    assert result.metrics["step"] == adding_up.STEPS
