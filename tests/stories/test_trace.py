"""Every run records where its time goes, and says so at its end: on every engine, and whatever ends it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import story as stage
import traced
from tests.s3_server import S3Server
from tests.stories.engines import ON_BOTH, on, ranks
from typer.testing import CliRunner

from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, TraceConfig
from powertrain.cli.main import app
from powertrain.result.result import Result
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer
from powertrain.trace import store


def recorded(run: Path) -> dict[int, list[int]]:
    """The numbers of the steps of the newest attempt, by rank."""
    found = store.read(open_storage(run)).steps
    return {rank: table["step"].tolist() for rank, table in found[max(found)].items()} if found else {}


@on("local", "inline", "ray", smoke=["local", "inline"])
def test_a_run_says_at_its_end_what_it_spent_its_time_on(
    fits: Any, engine: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    trainer = fits.trainer(
        traced.steps,
        train_loop_config={},
        name="told",
        trace=TraceConfig(logs_dir=str(logs), session_id="here", flops_per_sample=1e6, peak_flops=1e9),
    )
    result = trainer.fit()
    run = Path(result.path)
    assert recorded(run) == {rank: list(range(150)) for rank in ranks(engine)}
    assert result.findings
    assert "diagnosis of told:" in capfd.readouterr().out
    kept = json.loads((run / "final_summary.json").read_text())
    assert kept["steps"] == 150
    assert {one["phase"] for one in kept["phases"]} == {"inside", "report"}
    assert json.loads((logs / "here" / "final_summary.json").read_text()) == kept
    assert Result.from_path(run).findings == result.findings


@ON_BOTH
def test_a_run_says_how_much_it_computes_and_how_much_of_its_time_it_trains(fits: Any) -> None:
    trainer = fits.trainer(traced.replicated_steps, train_loop_config={}, name="measured", kind=TorchTrainer)
    result = trainer.fit()
    kept = json.loads(Path(result.path, "final_summary.json").read_text())
    speed = kept["throughput"]
    assert result.return_value > 0
    assert speed["flops_per_second"] == pytest.approx(2 * result.return_value * speed["steps_per_second"])
    shares = {one["cause"]: one["share"] for one in kept["time"]}
    assert 0 < shares["training"] < 1
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_run_that_is_not_traced_records_nothing(fits: Any, capfd: pytest.CaptureFixture[str]) -> None:
    result = fits.trainer(traced.steps, train_loop_config={}, name="untraced", trace=False).fit()
    assert "diagnosis" not in capfd.readouterr().out
    assert not Path(result.path, "telemetry").exists()
    assert not Path(result.path, "final_summary.json").exists()
    assert result.findings == ()


@pytest.mark.parametrize(("trace", "count"), [(None, 30), (False, 0)])
def test_what_a_loop_marks_itself_is_recorded_unless_it_is_not_traced(
    fits: Any, trace: bool | None, count: int
) -> None:
    made = fits.trainer(traced.marked_steps, train_loop_config={}, name=f"marked-{count}", trace=trace)
    assert made.fit().return_value == count


@ON_BOTH
def test_a_rank_that_is_killed_leaves_what_it_had_recorded(fits: Any) -> None:
    config = {"dies": 1, "at": 120}
    outcome = fits.outcome(traced.steps, train_loop_config=config, name="killed")
    assert outcome["raised"] == "TrainingFailedError"
    steps = recorded(fits.directory / "storage" / "killed")
    # What was noted becomes a step after a tenth of a second: fifty of these.
    assert steps[1] == list(range(len(steps[1])))
    assert 40 <= len(steps[1]) <= 121
    assert steps[0] == list(range(len(steps[0])))
    assert Path(fits.directory / "storage" / "killed" / "final_summary.json").exists()


@ON_BOTH
def test_a_killed_driver_leaves_a_record_of_which_the_summary_is_made_again(
    stories: Any, engine: str
) -> None:
    driver = stories.start("trace_until_killed", engine)
    driver.await_told("rank 0 trains", "rank 1 trains")
    run, deadline = stories.storage / "cut-off", time.monotonic() + stage.PATIENCE
    while (
        len(there := recorded(run)) < 2 or min(map(len, there.values())) <= 100
    ):  # sent and written twice a second
        assert time.monotonic() < deadline, driver.output
        time.sleep(0.05)
    driver.kill()
    for numbers in recorded(run).values():
        assert len(numbers) > 100
        assert numbers == list(range(len(numbers)))
    assert not (run / "final_summary.json").exists()
    made = CliRunner().invoke(app, ["diagnose", str(run), "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["name"] == "cut-off"
    assert Result.from_path(run).findings
    stories.assert_nothing_left()


def test_the_record_of_a_resumed_run_goes_on_and_its_old_summary_goes(fits: Any) -> None:
    first = fits.trainer(traced.steps, train_loop_config={"steps": 60}, name="again").fit()
    assert json.loads(Path(first.path, "final_summary.json").read_text())["steps"] == 60
    fits.outcome(traced.steps, train_loop_config={"steps": 300, "dies": 0, "at": 250}, name="again")
    kept = store.read(open_storage(first.path)).steps
    first_length, second_length = (len(tables[1]) for _, tables in sorted(kept.items()))
    assert first_length == 60
    assert second_length > 60
    assert json.loads(Path(first.path, "final_summary.json").read_text())["steps"] != 60


def test_findings_are_said_while_a_run_goes_on(
    fits: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from powertrain.diagnosis import live, recorded

    looks: list[int] = []
    monkeypatch.setattr(live, "ANALYSIS_INTERVAL_S", 0.3)
    found = recorded.report_of

    def counted(*args: Any) -> Any:
        looks.append(1)
        return found(*args)

    monkeypatch.setattr(recorded, "report_of", counted)
    config = {"steps": 400, "seconds": 0.005}
    fits.trainer(traced.steps, train_loop_config=config, name="live", trace=TraceConfig(mode="cli")).fit()
    assert looks


def test_a_run_in_a_bucket_is_recorded_there(s3: S3Server, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        spool = tmp_path / "spool"
        spool.mkdir()
        patch.setenv("TMPDIR", str(spool))
        result = DataParallelTrainer(
            traced.steps,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="in-a-bucket", storage_path=s3.uri("runs")),
        ).fit()
    found = store.read(open_storage(result.path, filesystem=result.filesystem))
    assert {rank: len(table) for rank, table in found.steps[0].items()} == {0: 150, 1: 150}
    assert result.findings
    assert Result.from_path(result.path, result.filesystem).findings == result.findings
    made = open_storage(result.path, filesystem=result.filesystem).get("report.html")
    assert b'"name":"in-a-bucket"' in made
    told = CliRunner().invoke(app, ["report", s3.uri("runs/in-a-bucket"), "-o", str(tmp_path / "again.html")])
    assert told.exit_code == 0, told.output
    again = (tmp_path / "again.html").read_bytes()
    assert abs(len(again) - len(made)) < 200, "the same page, but for the time at which it was made"
