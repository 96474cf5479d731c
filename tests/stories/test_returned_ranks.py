"""A rank that returns early, or never comes, while others wait for it: the error names that rank, and comes soon.

The floor of the watchdog is a second here instead of five; the two minutes that it gives a rank of which it cannot be
certain are left as they are.
"""

from __future__ import annotations

from typing import Any

import hanging
import pytest
from tests.stories.engines import ON_BOTH, on

from powertrain import FailureConfig
from powertrain.run import events as ev
from powertrain.run.health import watchdog
from powertrain.torch import TorchConfig, TorchTrainer


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 1.0)


def failed(fits: Any, name: str) -> ev.Failed:
    (fact,) = [fact for fact in fits.facts(name) if isinstance(fact, ev.Failed)]
    return fact


@on("local", "ray", smoke=["local"])
def test_a_rank_that_returns_while_others_wait_in_all_reduce_ends_the_run_at_once(fits: Any) -> None:
    loop = hanging.returns_before_an_all_reduce
    outcome = fits.outcome(loop, kind=TorchTrainer, workers=3)
    assert outcome["raised"] == "TrainingFailedError"
    first, *others = outcome["message"].splitlines()
    assert first.startswith("Rank 1 returned while ranks 0 and 2 waited for it: nothing moved for ")
    assert any("Ranks 0 and 2 wait in all_reduce at " in line for line in others), outcome["message"]
    assert not [line for line in others if line.startswith("  at ")], "a rank that has returned is at no line"
    fact = failed(fits, loop.__name__)
    # A rank that is ended later may see the connections of one that is ended before it close.
    assert [failure.rank for failure in fact.failures if not failure.secondary] == [1]
    # A machine that stood still for a second may have been noticed before, and that notice withdrawn.
    *_, noticed = [fact for fact in fits.facts(loop.__name__) if isinstance(fact, ev.HangNoticed)]
    assert fact.time - noticed.time < watchdog.ACT_TIMEOUT_S / 4, (
        "it was not the usual two minutes that ended it"
    )


@ON_BOTH
def test_a_rank_that_returns_early_does_not_keep_others_in_a_report_barrier(fits: Any) -> None:
    outcome = fits.outcome(hanging.returns_before_a_report_barrier, workers=2)
    assert (outcome["raised"], outcome["metrics"]) == ("", {"step": hanging.STEPS - 1}), outcome


@ON_BOTH
def test_a_rank_that_returns_early_ends_a_barrier_of_the_run_with_an_error(fits: Any) -> None:
    outcome = fits.outcome(hanging.returns_before_a_barrier_of_the_run, workers=2)
    assert outcome["raised"] == "TrainingFailedError"
    assert "CollectiveError: Rank 1 " in outcome["message"]


@on("local", "ray", smoke=["local"])
def test_a_rank_stuck_in_the_users_code_is_named_before_those_that_wait_in_all_reduce(fits: Any) -> None:
    limits = FailureConfig(hang_timeout_s=6.0)
    outcome = fits.outcome(hanging.sleep, kind=TorchTrainer, workers=2, failure_config=limits)
    assert outcome["message"].startswith("Rank 1 hung: nothing moved for ")
    assert [failure["rank"] for failure in outcome["failures"] if not failure.get("secondary")] == [1]


@on("local")
def test_a_timeout_of_torch_names_the_rank_that_never_came_before_those_that_gave_up(fits: Any) -> None:
    outcome = fits.outcome(hanging.sleep, kind=TorchTrainer, workers=2, torch_config=TorchConfig(timeout_s=8))
    assert outcome["message"].startswith("Rank 1 hung: nothing moved for "), outcome["message"]
    assert "Rank 1 has not entered the all_reduce that rank 0 waits in" in outcome["message"]
    assert "time.sleep(FOR_EVER)  # hangs: sleep" in outcome["message"]
    first, second = failed(fits, "sleep").failures
    assert (first.rank, first.kind) == (1, "hung")
    assert (second.rank, second.kind, second.secondary) == (0, "raised", True)
