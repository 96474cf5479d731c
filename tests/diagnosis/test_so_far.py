"""``summary()`` and ``final_summary()``: in a script, in the ranks of a run, and where there is nothing to say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.diagnosis import synthetic

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, trace
from powertrain.diagnosis import so_far
from powertrain.diagnosis.report import diagnose, from_json
from powertrain.errors import OutsideWorkerError
from powertrain.trace.recording import current, patches, phases, standalone
from powertrain.worker import session

#: So many that a step or two that a busy machine holds up do not count.
STEPS = 60


@pytest.fixture
def _forgotten() -> Iterator[None]:
    yield
    patches.uninstall()
    standalone.forget()
    current.use(None)


def take_steps(count: int = STEPS, fetch: float = 0.004) -> None:
    for _ in trace.wrap_dataloader_fetch(time.sleep(fetch) for _ in range(count)):
        with trace.trace_step():
            pass


# --------------------------------------------------------------------------- as plain values


def test_plain_values_have_the_weightiest_finding_and_the_times() -> None:
    report = diagnose(synthetic.run(0, synthetic.late(1, phases.INPUT, 0.03)), name="slow")
    values = so_far.flat(report)
    assert values["trace/kind"] == "input_straggler"
    assert values["trace/severity"] == report.findings[0].severity
    assert values["trace/step_ms"] == pytest.approx(report.step_seconds * 1000)
    assert {f"trace/{time.phase}_ms" for time in report.phases} <= values.keys()
    assert all(isinstance(value, (str, int, float)) for value in values.values())


def test_plain_values_of_nothing_are_few() -> None:
    assert so_far.flat(from_json(b'{"schema_version": 1}')) == {"trace/steps": 0, "trace/step_ms": 0.0}


# --------------------------------------------------------------------------- in a script


@pytest.mark.usefixtures("_forgotten")
def test_a_script_gets_a_diagnosis_so_far_and_goes_on_until_its_final_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace.init(mode="manual")
    take_steps()
    values = trace.summary(print_text=True)
    assert values is not None
    assert (values["trace/steps"], values["trace/kind"]) == (STEPS, "input_bound")
    assert "input_bound" in capsys.readouterr().out
    take_steps()
    final = trace.final_summary()
    assert final is not None
    assert (final["steps"], final["findings"][0]["kind"]) == (2 * STEPS, "input_bound")
    assert trace.final_summary() == final
    assert capsys.readouterr().out == ""
    assert current.recording() is None


@pytest.mark.usefixtures("_forgotten")
def test_other_ranks_of_a_script_get_notices_only_where_they_insist() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        trace.init(mode="manual")
        take_steps()
        assert trace.summary() is None
        insisted = trace.final_summary(rank0_only=False)
    assert insisted is not None
    assert [rank["rank"] for rank in insisted["ranks"]] == [1]


@pytest.mark.usefixtures("_forgotten")
def test_a_script_that_only_marks_its_steps_gets_a_report_on_them() -> None:
    take_steps()
    final = trace.final_summary()
    assert final is not None
    assert final["steps"] == STEPS


def test_where_nothing_is_recorded_the_error_says_what_to_do() -> None:
    with pytest.raises(OutsideWorkerError, match=r"Call powertrain.trace.init\(\) before"):
        trace.summary()


# --------------------------------------------------------------------------- in a run


class Elsewhere:
    """Storage that has no files on this machine."""

    def local_path(self, key: str) -> None:
        return None


def train_and_ask(config: dict[str, Any]) -> Any:
    if config["is_kept_elsewhere"]:
        vars(session.current("train_and_ask"))["storage"] = Elsewhere()
    take_steps()
    values = trace.summary(timeout_sec=0)
    take_steps()
    final = trace.final_summary()
    if powertrain.get_context().get_world_rank() != 0:
        assert (values, final) == (None, None)
    return final


def run(workers: int, is_kept_elsewhere: bool = False, **options: Any) -> Any:
    trainer = DataParallelTrainer(
        train_and_ask,
        train_loop_config={"is_kept_elsewhere": is_kept_elsewhere},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**options),
    )
    return trainer.fit().return_value


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_rank_gets_the_diagnosis_of_all_ranks_until_now(workers: int) -> None:
    final = run(workers)
    # Another rank may have noted up to 50 steps that it has not sent yet.
    unsent = 50 if workers else 0
    assert 2 * STEPS - unsent <= final["steps"] <= 2 * STEPS
    assert [rank["rank"] for rank in final["ranks"]] == list(range(max(workers, 1)))
    assert final["findings"][0]["kind"] == "input_bound"
    assert final["name"]


def ask_at_once(config: dict[str, Any]) -> Any:
    return trace.final_summary()


def test_a_rank_without_a_step_learns_at_once_that_there_is_too_little_to_judge() -> None:
    began = time.monotonic()
    final = DataParallelTrainer(
        ask_at_once, train_loop_config={}, scaling_config=ScalingConfig(num_workers=0)
    ).fit()
    assert time.monotonic() - began < 15
    assert [finding["kind"] for finding in final.return_value["findings"]] == ["incomplete"]


def test_where_the_run_is_kept_out_of_reach_a_rank_gets_its_own_diagnosis() -> None:
    final = run(0, is_kept_elsewhere=True)
    assert final["steps"] == 2 * STEPS
    assert [rank["rank"] for rank in final["ranks"]] == [0]
    assert "Only rank 0 is covered" in final["notes"][0]


def test_a_rank_that_is_not_traced_gets_no_notices() -> None:
    assert run(0, trace=False) is None
