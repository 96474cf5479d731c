"""Somebody profiles a run that trains, from another terminal."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traced
from tests.stories.engines import on
from typer.testing import Result

from powertrain import ProfileConfig
from powertrain.errors import ConfigError


@on("local", "ray", smoke=["local"])
def test_a_live_run_is_profiled_trains_on_and_keeps_the_trace(
    stories: Any, at_another_terminal: Callable[..., Result]
) -> None:
    driver = stories.start("train_until_told")
    driver.await_told("rank 0 trains", "rank 1 trains")
    profiled = at_another_terminal("profile", "live", "--rank", "0,1", "--steps", "2", "--memory")
    assert profiled.exit_code == 0, profiled.output
    assert "rank 0: 2 steps of " in profiled.output
    assert "rank 1: 2 steps of " in profiled.output
    # Which operators took longest depends on what else the machine does; that all were recorded is checked below.
    for line in ("traced.py:", "in loss_of", "backward of ", " aten::", "lines, by allocated memory"):
        assert line in profiled.output, profiled.output

    again = json.loads(at_another_terminal("profile", "live", "--steps", "1", "--json").output)
    (only,) = again["profiles"]
    assert (only["record"]["rank"], only["record"]["steps"]) == (0, 1)
    beyond = at_another_terminal("profile", "live", "--rank", "7")
    assert beyond.exit_code == 1
    assert "There is no rank 7 in attempt 0: its last is rank 1." in beyond.output

    (stories.root / "enough").touch()
    assert driver.outcome()["state"] == "finished"
    run = Path(stories.storage, "live")
    assert len(list((run / "profiles").glob("*.trace.json.gz"))) == 3
    trace = json.loads(gzip.decompress((run / only["record"]["trace"]).read_bytes()))
    assert {"aten::addmm", "aten::relu"} <= {event.get("name") for event in trace["traceEvents"]}
    kept = at_another_terminal("profile", str(run))
    assert kept.exit_code == 0, kept.output
    assert "rank 0: 1 step of " in kept.output
    stories.assert_nothing_left()


def test_a_rank_that_makes_no_steps_is_named_when_the_time_is_over(
    stories: Any, at_another_terminal: Callable[..., Result]
) -> None:
    driver = stories.start("never_at_a_boundary")
    driver.await_told("rank 0 trains", "rank 1 trains")
    profiled = at_another_terminal("profile", "killed", "--timeout", "1")
    assert profiled.exit_code == 1
    assert "Rank 0 did not finish the steps within 1 s." in " ".join(profiled.output.split())
    stopped = at_another_terminal("stop", "killed", "--now")
    assert stopped.exit_code == 0, stopped.output
    assert driver.outcome()["state"] == "stopped"
    kept = at_another_terminal("profile", str(stories.storage / "killed"))
    assert kept.exit_code == 1
    assert "It has no profiles" in kept.output


@on("local", "inline")
def test_given_steps_are_profiled_and_the_end_of_the_run_has_the_tables(
    fits: Any, engine: str, at_another_terminal: Callable[..., Result]
) -> None:
    result = fits.trainer(
        traced.some_torch_steps,
        name="given",
        profile=ProfileConfig(start_step=5, steps=2),
    ).fit()
    assert result.state == "finished"
    kept = at_another_terminal("profile", result.path)
    assert kept.exit_code == 0, kept.output
    assert "rank 0: 2 steps of " in kept.output
    assert "in loss_of" in kept.output


def test_given_steps_need_a_trace(fits: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"RunConfig\(profile=...\) profiles given steps, and without a trace"
    ):
        fits.trainer(traced.some_torch_steps, name="untraced", trace=False, profile=3).fit()
