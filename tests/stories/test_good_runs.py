"""Runs that end well: what they leave, how they are stopped early, how ranks meet, what callbacks get.

Those in which something comes from other processes run on the cluster too: output, values, hooks, stops, Ctrl-C while
slots are being placed, two runs at once. What only the controller and the run's directory decide runs on one
machine.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import loops
import pytest
from tests.stories.engines import ON_ALL, ON_BOTH, ON_ONE_MACHINE, on, ranks

from powertrain import Checkpoint, DataConfig, FailureConfig, SyncConfig, UserCallback
from powertrain.backend import Backend, BackendConfig
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer


@pytest.mark.smoke
@ON_ALL
def test_a_good_run_leaves_metrics_checkpoint_value_and_path(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.improve, engine, kind=TorchTrainer, train_loop_config={"lr": 0.01})

    size = len(ranks(engine))
    assert outcome["raised"] == ""
    assert outcome["state"] == "finished"
    assert outcome["metrics"] == {"epoch": 2, "rank_plus_epoch": 2}
    assert outcome["return_value"] == {"rank": 0, "world_size": size}
    assert outcome["path"] == str(fits.directory / "storage" / "improve")
    assert outcome["points"] == [[rank, 0, row] for row in (1, 2, 3) for rank in range(size)]
    files = {path.name: path.read_text() for path in Path(outcome["checkpoint"]).glob("rank-*")}
    assert files == {f"rank-{rank}": "2" for rank in range(size)}
    record = json.loads(Path(outcome["path"], "run.json").read_text())
    assert (record["name"], record["engine"]) == ("improve", engine)


@ON_BOTH
def test_each_rank_has_its_own_log(fits: Any, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = fits.outcome(loops.improve, kind=TorchTrainer)

    for rank in (0, 1):
        log = Path(outcome["path"], "logs", "attempt-0", f"rank-{rank:05d}.log")
        assert log.read_text().splitlines() == [f"hello from rank {rank}"]
    shown = capfd.readouterr()
    assert "[rank 1] hello from rank 1" in shown.out + shown.err


@ON_BOTH
def test_log_to_file_keeps_workers_off_the_terminal(fits: Any, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = fits.outcome(loops.describe_place, log_to_file=True)

    shown = capfd.readouterr()
    assert "to the log" not in shown.out + shown.err
    assert Path(outcome["path"], "logs/attempt-0/rank-00001.log").read_text() == "to the log\n"


@pytest.mark.smoke
def test_the_run_directory_holds_the_same_facts_later(fits: Any) -> None:
    outcome = fits.outcome(loops.count_to_three)

    later = Result.from_path(outcome["path"])
    assert later.state == "finished"
    assert later.metrics == {"step": 3}
    assert list(later.metrics_dataframe["step"]) == [1, 2, 3], "those of rank 0"
    assert list(later.dataframe(ranks="all")["step"]) == [1, 1, 2, 2, 3, 3]
    assert later.filesystem.get_file_info(outcome["path"]).is_file is False


def test_a_finished_run_that_is_started_again_says_so_and_how_to_begin_anew(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fits.outcome(loops.improve, name="twice", kind=TorchTrainer)
    assert "had finished" not in capsys.readouterr().out
    outcome = fits.outcome(loops.improve, name="twice", kind=TorchTrainer)
    shown = " ".join(capsys.readouterr().out.split())
    assert "This run had finished already; this start continues from checkpoint_" in shown
    assert f"give RunConfig(name=...) another name, or remove {outcome['path']}." in shown
    assert outcome["raised"] == ""


def set_up_a_group_again() -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo")


def test_init_process_group_in_a_rank_says_what_to_remove(fits: Any) -> None:
    outcome = fits.outcome(set_up_a_group_again, kind=TorchTrainer, workers=1)

    assert outcome["raised"] == "TrainingFailedError"
    message = " ".join(outcome["message"].split())
    assert "TorchTrainer has called init_process_group in this rank already" in message
    assert "Remove init_process_group and destroy_process_group from the training function." in message


def warn_on_every_rank() -> None:
    import warnings

    warnings.warn("the learning rate is high", stacklevel=1)


def test_a_warning_of_every_rank_is_shown_in_full_once_and_kept_in_each_log(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fits.outcome(warn_on_every_rank)
    shown = capsys.readouterr().out
    assert shown.count("UserWarning: the learning rate is high") == 1, shown
    assert shown.count("the same UserWarning as rank") == 1
    for rank in (0, 1):
        log = Path(outcome["path"], "logs", "attempt-0", f"rank-{rank:05d}.log").read_text()
        assert "UserWarning: the learning rate is high" in log


def test_a_run_without_a_name_gets_one(fits: Any) -> None:
    first, second = (fits.outcome(loops.count_to_three, name=None)["path"] for _ in range(2))
    assert first != second
    assert Path(first).name.startswith("DataParallelTrainer_")


def test_settings_of_rays_without_effect_here_are_accepted_and_said_once(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fits.outcome(
        loops.count_to_three,
        failure_config=FailureConfig(controller_failure_limit=2),
        sync_config=SyncConfig(sync_artifacts=True),
        dataset_config=DataConfig(execution_options={}),
    )

    assert outcome["raised"] == "", outcome.get("message")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "without effect here" in line]
    for name in ("controller_failure_limit=2", "sync_artifacts=True", "execution_options={}"):
        assert name in line


def test_nan_and_other_odd_values_survive(fits: Any) -> None:
    outcome = fits.outcome(loops.report_oddities)

    metrics = outcome["metrics"]
    assert math.isnan(metrics.pop("nan"))
    assert metrics == {"infinity": math.inf, "numpy": 0.5, "tensor": 2, "nested": {"a": 1}}
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    assert frame["nan"].isna().all()
    assert list(frame["nested/a"]) == [1, 1]


# --------------------------------------------------------------------------- stopping early


@ON_ALL
def test_stop_as_a_dict_ends_at_the_first_row_that_reaches_it(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.report_until_stopped, engine, stop={"step": 5})

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    last = {rank: max(row for r, _, row in outcome["points"] if r == rank) for rank in ranks(engine)}
    assert set(last.values()) <= {5, 6, 7}, "a boundary just ahead, the same for all"
    assert len(set(last.values())) == 1
    assert any(
        isinstance(f, ev.Stopping) and "step=5" in f.reason for f in fits.facts("report_until_stopped")
    )


def test_stop_by_training_iteration_needs_no_metric(fits: Any) -> None:
    outcome = fits.outcome(loops.report_until_stopped, stop={"training_iteration": 3})
    assert outcome["metrics"]["step"] >= 3
    assert outcome["metrics"]["step"] <= 5


@ON_ALL
def test_ranks_that_meet_in_every_step_stop_at_the_same_one(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.reduce_until_stopped, engine, kind=TorchTrainer, stop={"step": 20})

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    last = {rank: max(row for r, _, row in outcome["points"] if r == rank) for rank in ranks(engine)}
    assert len(set(last.values())) == 1


@ON_ONE_MACHINE
def test_stop_as_a_function_sees_name_and_metrics(fits: Any, engine: str) -> None:
    seen: list[tuple[str, int]] = []

    def enough(name: str, metrics: dict[str, Any]) -> bool:
        seen.append((name, metrics["step"]))
        return bool(metrics["step"] >= 4)

    outcome = fits.outcome(loops.report_until_stopped, engine, stop=enough)
    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    assert seen[:4] == [("report_until_stopped", step) for step in (1, 2, 3, 4)]


class CtrlC(UserCallback):
    """Presses Ctrl-C when row 3 is complete, or when the workers begin to start."""

    def __init__(self, when: str) -> None:
        self._when = when

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if self._when == "row 3" and metrics[0]["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def on_event(self, run_context: Any, event: Any) -> None:
        if self._when == "start" and isinstance(event, ev.AttemptStarted):
            os.kill(os.getpid(), signal.SIGINT)


@on("local", "inline", "ray", smoke=["local", "inline"])
def test_ctrl_c_ends_a_loop_at_its_next_report(fits: Any, engine: str) -> None:
    outcome = fits.outcome(
        loops.reduce_until_stopped, engine, kind=TorchTrainer, name="cut", callbacks=[CtrlC("row 3")]
    )

    assert outcome["raised"] == "KeyboardInterrupt"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is back"
    result = Result.from_path(fits.directory / "storage" / "cut")
    assert result.state == "stopped"
    last = result.dataframe(ranks="all").groupby("rank")["training_iteration"].max()
    assert len(last) == len(ranks(engine))
    assert last.nunique() == 1


@ON_ALL
def test_ctrl_c_while_workers_start_ends_the_run_at_once(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.count_to_three, engine, callbacks=[CtrlC("start")])

    assert outcome["raised"] == "KeyboardInterrupt"
    assert Result.from_path(fits.directory / "storage" / "count_to_three").state == "stopped"


# --------------------------------------------------------------------------- ranks meet


@ON_ALL
def test_ranks_meet_at_barrier_broadcast_and_row(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.meet_the_others, engine)

    assert outcome["return_value"] == {"received": {"from": 0, "at": [1, 2]}, "rows_met": True}
    solo = [[rank, 0, 0] for rank in ranks(engine)]
    assert outcome["points"] == solo + [[rank, 0, row] for row in (1, 2) for rank in ranks(engine)]
    assert outcome["metrics"] == {"step": 2}, "a solo report is not the row's"


def test_the_run_goes_on_without_a_rank_that_never_reports(
    fits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 0.2)

    outcome = fits.outcome(loops.one_rank_reports)

    assert (outcome["raised"], outcome["metrics"]) == ("", {"step": 1})
    assert [f.ranks for f in fits.facts("one_rank_reports") if isinstance(f, ev.RanksAbsent)] == [(1,)]
    assert sorted(p.name for p in Path(outcome["checkpoint"]).glob("rank-*")) == ["rank-0"]


# --------------------------------------------------------------------------- the user's hooks


class Listener(UserCallback):
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.checkpoints: list[Any] = []
        self.facts: list[str] = []
        self.failures: list[Any] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.rows.append((run_context.name, metrics))
        self.checkpoints.append(checkpoint)

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.failures.append(list(worker_exceptions))

    def on_event(self, run_context: Any, event: Any) -> None:
        self.facts.append(type(event).__name__)


class Clumsy(UserCallback):
    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        raise RuntimeError("clumsy")


@ON_ALL
def test_callbacks_get_rows_checkpoints_and_facts(fits: Any, engine: str) -> None:
    listener = Listener()
    outcome = fits.outcome(loops.improve, engine, kind=TorchTrainer, callbacks=[Clumsy(), listener])

    assert listener.rows == [
        ("improve", [{"epoch": epoch, "rank_plus_epoch": rank + epoch} for rank in ranks(engine)])
        for epoch in range(3)
    ]
    assert listener.checkpoints[-1].path == outcome["checkpoint"]
    assert listener.facts[0] == "RunStarted"
    assert listener.facts[-1] == "Ended"
    assert not listener.failures
    warnings = [f.message for f in fits.facts("improve") if isinstance(f, ev.Warned)]
    assert len([w for w in warnings if "Clumsy.after_report raised RuntimeError: clumsy" in w]) == 1


def test_callbacks_get_failures(fits: Any) -> None:
    listener = Listener()
    fits.outcome(loops.die, train_loop_config={"how": "SIGKILL"}, callbacks=[listener])
    assert listener.failures == [[1]]


class HookBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        pids = worker_group.execute(os.getpid)
        assert pids == [worker.pid for worker in worker_group.workers]
        assert worker_group.execute_single(len(worker_group) - 1, os.getpid) == pids[-1]
        HOOKS.append("on_start")

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        def set_variable(value: str) -> None:
            os.environ["STORY_HOOK"] = value

        for future in worker_group.execute_async(set_variable, backend_config.value):
            future.result()
        HOOKS.append("on_training_start")

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        HOOKS.extend(worker_group.execute(lambda: os.environ["STORY_HOOK"]))


class HookConfig(BackendConfig):
    value = "set by the backend"

    @property
    def backend_cls(self) -> type[Backend]:
        return HookBackend


HOOKS: list[Any] = []


@ON_BOTH
def test_a_backend_of_the_users_own_reaches_every_worker(fits: Any) -> None:
    HOOKS.clear()
    outcome = fits.outcome(loops.describe_place, backend_config=HookConfig())

    assert outcome["return_value"]["hook"] == "set by the backend"
    assert HOOKS == ["on_start", "on_training_start", "set by the backend", "set by the backend"]


class BrokenBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute_single(1, int, "no number")


class BrokenConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return BrokenBackend


def test_a_failing_hook_names_the_rank_it_failed_in(fits: Any) -> None:
    outcome = fits.outcome(loops.describe_place, backend_config=BrokenConfig())

    assert outcome["raised"] == "TrainingFailedError"
    assert outcome["failures"][0]["rank"] == 1
    assert outcome["failures"][0]["kind"] == "start"
    assert "invalid literal for int()" in outcome["message"]


@ON_BOTH
# --------------------------------------------------------------------------- several fits


def test_two_fits_one_after_another_are_two_runs(fits: Any) -> None:
    outcomes = [fits.outcome(loops.improve, kind=TorchTrainer, name=name) for name in ("first", "second")]
    assert [outcome["raised"] for outcome in outcomes] == ["", ""]
    assert [Path(outcome["path"]).name for outcome in outcomes] == ["first", "second"]


@ON_BOTH
def test_two_fits_at_once_in_threads_do_not_mix(fits: Any) -> None:
    outcomes: dict[str, Any] = {}

    def one(name: str) -> None:
        outcomes[name] = fits.outcome(loops.improve, kind=TorchTrainer, name=name)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("left", "right"):
        assert outcomes[name]["raised"] == ""
        assert outcomes[name]["path"].endswith(name)
        assert outcomes[name]["points"] == [[rank, 0, row] for row in (1, 2, 3) for rank in (0, 1)]


def test_a_run_can_begin_from_a_checkpoint_of_another(fits: Any) -> None:
    first = fits.outcome(loops.improve, kind=TorchTrainer)
    second = fits.outcome(
        loops.go_on_from_elsewhere,
        name="second",
        resume_from_checkpoint=Checkpoint.from_directory(first["checkpoint"]),
    )
    assert second["return_value"] == 3


def test_a_finished_run_started_again_goes_on_and_names_what_changed(fits: Any) -> None:
    fits.outcome(loops.improve, kind=TorchTrainer)
    again = fits.outcome(loops.improve, kind=TorchTrainer, workers=1)

    assert again["raised"] == ""
    assert again["metrics"] == {"epoch": 2, "rank_plus_epoch": 2}, (
        "the restored row's; nothing was left to do"
    )
    facts = [f.message for f in fits.facts("improve") if isinstance(f, ev.Warned)]
    warnings = [message for message in facts if "started before with other settings" in message]
    assert len(warnings) == 1
    assert "scaling_config.num_workers: 2 -> 1" in warnings[0]
