"""Where the seconds before the first step went: one fact for each attempt, on every engine."""

from __future__ import annotations

import json
import time
from typing import Any

import loops
import pytest
import starting
from tests.stories.engines import ON_ALL, ON_ONE_MACHINE, ranks
from typer.testing import CliRunner

import powertrain.data
from powertrain import FailureConfig
from powertrain.cli.main import app
from powertrain.run import events as ev
from powertrain.run.startup import timeline
from powertrain.torch import TorchTrainer

#: Seconds are written down to so many; and two clocks of one machine may differ by this over a story.
ROUNDED, CLOCKS = 1e-4, 0.02


def starts(fits: Any, name: str) -> list[ev.StartupMeasured]:
    return [fact for fact in fits.facts(name) if isinstance(fact, ev.StartupMeasured)]


def assert_phases_add_up(fact: ev.StartupMeasured) -> None:
    """The path takes all of the time, and each rank's own phases no more than that."""
    tolerance = ROUNDED * len(timeline.PHASES)
    assert sum(fact.path.values()) == pytest.approx(fact.seconds, abs=tolerance)
    for column, _ in enumerate(fact.ranks):
        assert sum(seconds[column] for seconds in fact.phases.values()) <= fact.seconds + tolerance


@pytest.mark.smoke
def test_every_second_from_fit_to_the_first_step_is_accounted_for(
    fits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = powertrain.data.from_items([{"x": number} for number in range(16)])
    trainer = fits.trainer(starting.from_a_shard, kind=TorchTrainer, datasets={"train": rows})
    called = time.time()
    trainer.fit()

    (fact,) = starts(fits, "from_a_shard")
    assert_phases_add_up(fact)
    assert set(fact.phases) == set(timeline.PHASES) - {timeline.CLEARING}
    for phase in (timeline.DATASETS, timeline.PREPARE, timeline.HELLO, timeline.PROCESS_GROUP, timeline.DATA):
        assert fact.path[phase] > 0, phase
    (begun,) = (found.time for found in fits.facts("from_a_shard") if isinstance(found, ev.RunStarted))
    assert called - CLOCKS <= fact.time - fact.seconds <= begun + CLOCKS, "it is counted from the call of fit"
    assert (fact.ranks, fact.unfinished, fact.world_size) == ((0, 1), (), 2)
    assert "[from_a_shard] first step after " in capfd.readouterr().out


def test_a_rank_whose_data_are_late_is_named(fits: Any, capfd: pytest.CaptureFixture[str]) -> None:
    fits.outcome(starting.beside_a_slow_loader, kind=TorchTrainer, train_loop_config={"seconds": 3.0})

    (fact,) = starts(fits, "beside_a_slow_loader")
    assert_phases_add_up(fact)
    assert fact.rank == 1
    assert fact.phases["data"][1] >= 3.0 > fact.phases["data"][0]
    assert fact.path["data"] == fact.phases["data"][1]
    assert "(rank 1 was last)" in capfd.readouterr().out
    path = str(fits.directory / "storage" / "beside_a_slow_loader")
    shown = CliRunner().invoke(app, ["show", path]).output
    assert "start-up" in shown.splitlines()
    assert "(rank 1 was last)" in shown
    (start,) = json.loads(CliRunner().invoke(app, ["show", "--json", path]).output)["startup"]
    assert start["path"] == fact.path


@ON_ONE_MACHINE
def test_a_restart_has_a_timeline_of_its_own(fits: Any, engine: str) -> None:
    fits.outcome(
        loops.recover,
        engine,
        train_loop_config={"how": "raise"},
        failure_config=FailureConfig(max_failures=1),
    )

    first, second = starts(fits, "recover")
    (failed,) = (fact.time for fact in fits.facts("recover") if isinstance(fact, ev.Failed))
    for fact in (first, second):
        assert_phases_add_up(fact)
        assert fact.ranks == tuple(ranks(engine))
    assert (first.attempt, second.attempt) == (0, 1)
    assert timeline.PREPARE in first.path
    assert timeline.CLEARING not in first.path
    assert timeline.CLEARING in second.path
    assert timeline.PREPARE not in second.path
    assert second.time - second.seconds <= failed + CLOCKS, "it is counted from the end of the attempt before"


@ON_ALL
def test_a_report_is_a_first_step_on_every_engine(fits: Any, engine: str) -> None:
    fits.outcome(loops.count_to_three, engine)

    (fact,) = starts(fits, "count_to_three")
    assert_phases_add_up(fact)
    assert (fact.ranks, fact.unfinished) == (tuple(ranks(engine)), ())


def test_a_function_that_makes_no_step_is_reported_at_its_end(fits: Any) -> None:
    fits.outcome(starting.never_at_a_step, "inline")

    (fact,) = starts(fits, "never_at_a_step")
    assert_phases_add_up(fact)
    assert (fact.ranks, fact.unfinished) == ((0,), (0,))
