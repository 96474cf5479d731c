"""Whole runs and their checkpoints: every way to report one, a full disk, a dead uploader, a run made again.

On the cluster play those in which staged files must get from a node to storage: every way to report, a killed uploader,
a rank killed right after its report. Disks that are mounted for a story, file systems of the user's own and trainers
made again are this machine's and the driver's alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import ON_ONE_MACHINE, on, on_cases

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)
from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.errors import ConfigError, TrainingFailedError
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer
from powertrain.worker.session import current

ONE_WORKER_HERE = ScalingConfig(num_workers=1, engine="local")


def of_kind(facts: list[Any], kind: type[Any]) -> list[Any]:
    return [fact for fact in facts if isinstance(fact, kind)]


def content(checkpoint: Checkpoint | None) -> dict[str, str]:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {
            path.relative_to(directory).as_posix(): path.read_text()
            for path in files
            if not path.name.startswith(".powertrain-")
        }


# --------------------------------------------------------------------------- ways to report one


def save_in_every_way(config: dict[str, Any]) -> None:
    rank = powertrain.get_context().get_world_rank()
    lasting = Path(config["lasting"])

    def write(directory: str, text: str) -> Checkpoint:
        Path(directory, f"rank-{rank}").write_text(text)
        return Checkpoint.from_directory(directory)

    with tempfile.TemporaryDirectory() as directory:
        powertrain.report({"way": "temporary"}, checkpoint=write(directory, "temporary"))
    with powertrain.checkpoint_dir() as directory:
        powertrain.report({"way": "own"}, checkpoint=write(directory, "own"))
        assert not os.path.exists(directory)
    with tempfile.TemporaryDirectory() as directory:
        powertrain.report(
            {"way": "sync"},
            checkpoint=write(directory, "sync"),
            checkpoint_upload_mode=CheckpointUploadMode.SYNC,
        )
        storage = open_storage(powertrain.get_context().get_trial_dir())
        newest = checkpoint_committed.newest(storage)
        assert newest is not None
        assert newest.row == 3
    given = tempfile.mkdtemp()
    powertrain.report(
        {"way": "given"}, checkpoint=write(given, "given"), delete_local_checkpoint_after_upload=True
    )
    assert not os.path.exists(given)
    asked = tempfile.mkdtemp()
    powertrain.report(
        {"way": "asked"},
        checkpoint=write(asked, "asked"),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
    )
    assert not os.path.exists(asked)
    lasting.mkdir(exist_ok=True)
    powertrain.report(
        {"way": "there"}, checkpoint=write(str(lasting), "there"), checkpoint_upload_mode="NO_UPLOAD"
    )

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        target = Path(f"{lasting}-{name}")
        shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
        return Checkpoint.from_directory(str(target))

    with tempfile.TemporaryDirectory() as directory:
        powertrain.report(
            {"way": "function"}, checkpoint=write(directory, "function"), checkpoint_upload_fn=upload
        )
    with tempfile.TemporaryDirectory() as directory:
        powertrain.report({"way": "named"}, checkpoint=write(directory, "named"), checkpoint_dir_name="last")


@on("local", "inline", "ray", smoke=["local", "inline"])
def test_every_way_to_report_a_checkpoint_ends_in_a_commit(fits: Any, engine: str) -> None:
    outcome = fits.outcome(
        save_in_every_way, engine, train_loop_config={"lasting": str(fits.directory / "lasting")}
    )

    assert outcome["raised"] == "", outcome.get("message")
    result = Result.from_path(outcome["path"])
    ways = ["temporary", "own", "sync", "given", "asked", "there", "function", "named"]
    assert [metrics["way"] for _, metrics in result.best_checkpoints] == ways
    for checkpoint, metrics in result.best_checkpoints:
        assert content(checkpoint)["rank-0"] == metrics["way"]
        if engine != "inline" and metrics["way"] != "function":
            assert content(checkpoint)["rank-1"] == metrics["way"]
    assert os.path.basename(result.best_checkpoints[-1][0].path) == "last"
    storage = open_storage(outcome["path"])
    for manifest in checkpoint_committed.committed(storage):
        checkpoint_committed.verify(storage, manifest)
    assert not os.path.exists(os.path.join(outcome["path"], ".staging"))


def save_on_rank_0_and_report_on_all(config: dict[str, Any]) -> None:
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as directory:
            if config["writes"] and powertrain.get_context().get_world_rank() == 0:
                Path(directory, "model.pt").write_text(f"epoch {epoch}")
            powertrain.report(
                {"epoch": epoch},
                checkpoint=Checkpoint.from_directory(directory),
                checkpoint_upload_mode=config["mode"],
            )


@pytest.mark.parametrize("mode", ["ASYNC", "SYNC", "NO_UPLOAD"])
def test_a_rank_that_reports_an_empty_directory_adds_nothing_to_the_checkpoint(fits: Any, mode: str) -> None:
    if mode == "NO_UPLOAD":
        loop = report_a_place_that_only_rank_0_filled
        config: dict[str, Any] = {"place": str(fits.directory / "lasting")}
    else:
        loop, config = save_on_rank_0_and_report_on_all, {"writes": True, "mode": mode}
    outcome = fits.outcome(loop, train_loop_config=config)

    assert outcome["raised"] == "", outcome.get("message")
    result = Result.from_path(outcome["path"])
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {"model.pt": "epoch 0"},
        {"model.pt": "epoch 1"},
    ]


def report_a_place_that_only_rank_0_filled(config: dict[str, Any]) -> None:
    rank = powertrain.get_context().get_world_rank()
    for epoch in range(2):
        own = Path(config["place"], str(epoch), "" if rank == 0 else "unused")
        own.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (own / "model.pt").write_text(f"epoch {epoch}")
        checkpoint = Checkpoint.from_directory(own)
        powertrain.report({"epoch": epoch}, checkpoint=checkpoint, checkpoint_upload_mode="NO_UPLOAD")


def test_a_checkpoint_that_no_rank_wrote_into_is_committed_empty_and_said_once(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"writes": False, "mode": "ASYNC"}
    outcome = fits.outcome(save_on_rank_0_and_report_on_all, train_loop_config=config)

    assert outcome["raised"] == "", outcome.get("message")
    result = Result.from_path(outcome["path"])
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == [{}, {}]
    assert capsys.readouterr().out.count("Write files into the directory on at least one rank") == 1


def upload_to_the_wrong_place(config: dict[str, Any]) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        os.makedirs(config["empty"], exist_ok=True)
        return Checkpoint.from_directory(config["empty"])

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.pt").write_text("weights")
        checkpoint = Checkpoint.from_directory(directory)
        powertrain.report({}, checkpoint=checkpoint, checkpoint_upload_fn=upload)


def test_an_upload_that_leaves_nothing_is_lost_loudly_and_never_committed_empty(
    fits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"empty": str(fits.directory / "empty")}
    outcome = fits.outcome(upload_to_the_wrong_place, workers=1, train_loop_config=config)

    assert Result.from_path(outcome["path"]).checkpoint is None
    assert "which holds no file" in capsys.readouterr().out


def report_what_holds_the_launch_directory() -> None:
    launched_from = Path(powertrain.get_context().launch_dir)
    powertrain.report({}, checkpoint=Checkpoint.from_directory(launched_from.parent))


def report_the_run() -> None:
    powertrain.report({}, checkpoint=Checkpoint.from_directory(powertrain.get_context().get_storage()))


def report_its_scratch_directory() -> None:
    Path("model").write_text("1")
    powertrain.report({}, checkpoint=Checkpoint.from_directory("."))


@pytest.mark.parametrize("loop", [report_what_holds_the_launch_directory, report_the_run])
def test_a_directory_that_was_surely_not_meant_is_refused(fits: Any, loop: Any) -> None:
    outcome = fits.outcome(loop, workers=1)

    assert outcome["raised"] == "TrainingFailedError"
    assert "CheckpointError" in outcome["message"]
    assert not (fits.directory / "storage" / loop.__name__ / "checkpoints").exists()


def test_the_scratch_directory_can_be_a_checkpoint(fits: Any) -> None:
    outcome = fits.outcome(report_its_scratch_directory, workers=1, working_dir="scratch")

    assert outcome["raised"] == "", outcome.get("message")
    assert content(Result.from_path(outcome["path"]).checkpoint) == {"model": "1"}


def ask_for_checkpoints() -> None:
    rank = powertrain.get_context().get_world_rank()
    for number in range(3):
        with powertrain.checkpoint_dir() as directory:
            Path(directory, f"rank-{rank}").write_text(str(number))
            powertrain.report({"number": number}, checkpoint=Checkpoint(directory))
        found = powertrain.get_all_reported_checkpoints()
        assert [one.metrics["number"] for one in found] == list(range(number + 1))[-2:]
        assert content(found[-1].checkpoint)[f"rank-{rank}"] == str(number)
        assert found[-1].status is powertrain.ReportedCheckpointStatus.COMMITTED
        powertrain.collective.barrier()  # or retention may delete what another rank still reads


@ON_ONE_MACHINE
def test_a_rank_can_ask_which_checkpoints_are_kept(fits: Any, engine: str) -> None:
    outcome = fits.outcome(ask_for_checkpoints, engine, checkpoint_config=CheckpointConfig(num_to_keep=2))

    assert outcome["raised"] == "", outcome.get("message")


# --------------------------------------------------------------------------- trouble with storage


@pytest.fixture
def small_disk(mount_small_disk: Callable[[str], Path]) -> Path:
    return mount_small_disk("8m")


def save_sizes(config: dict[str, Any]) -> None:
    """The first is committed before the next is begun, which may fill the disk while the first is on its way."""
    for number, megabytes in enumerate(config["sizes"]):
        mode = CheckpointUploadMode.ASYNC if number else CheckpointUploadMode.SYNC
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_bytes(os.urandom(megabytes << 20))
            checkpoint = Checkpoint(directory)
            powertrain.report({"megabytes": megabytes}, checkpoint=checkpoint, checkpoint_upload_mode=mode)


def test_on_a_full_disk_training_goes_on_and_what_was_not_saved_is_reported(small_disk: Path) -> None:
    result = powertrain.DataParallelTrainer(
        save_sizes,
        train_loop_config={"sizes": [1, 20, 1, 1]},
        scaling_config=ONE_WORKER_HERE,
        run_config=RunConfig(
            name="full",
            storage_path=str(small_disk),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            sync_config=SyncConfig(sync_timeout=5),
        ),
    ).fit()

    facts = journal_of(small_disk / "full")
    assert result.metrics == {"megabytes": 1}
    assert [fact.row for fact in of_kind(facts, ev.CheckpointFailed)] == [2]
    assert "No space left" in of_kind(facts, ev.CheckpointFailed)[0].reason
    assert [fact.row for fact in of_kind(facts, ev.Committed)] == [1, 3, 4]
    assert any("tmpfs" in fact.message for fact in of_kind(facts, ev.Warned))
    storage = open_storage(small_disk / "full")
    checkpoint_committed.verify(storage, checkpoint_committed.committed(storage)[-1])


def journal_of(path: Path) -> list[Any]:
    from powertrain.run.record import journal

    return journal.read(open_storage(path))


# --------------------------------------------------------------------------- deaths


def kill_the_uploader_then_save() -> None:
    """Rank 0 ends the process that uploads its shares, twice, right after it has handed one over."""
    for number in range(3):
        with powertrain.checkpoint_dir() as directory:
            for part in range(20):
                Path(directory, f"part-{part}").write_bytes(bytes(1 << 18))
            powertrain.report({"number": number}, checkpoint=Checkpoint(directory))
        if number < 2:
            end_the_uploader()


def end_the_uploader() -> None:
    import psutil

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for process in psutil.Process(os.getppid()).children():
            try:
                if process.name() == "uploader":
                    process.send_signal(signal.SIGKILL)
                    return
            except psutil.NoSuchProcess:
                continue
    raise AssertionError("there is no uploader")


@on("local", "ray", smoke=["local"])
def test_an_uploader_that_is_killed_is_replaced_and_nothing_is_lost(fits: Any) -> None:
    outcome = fits.outcome(kill_the_uploader_then_save, workers=1)

    assert outcome["raised"] == "", outcome.get("message")
    committed = of_kind(fits.facts("kill_the_uploader_then_save"), ev.Committed)
    assert [fact.row for fact in committed] == [1, 2, 3]
    storage = open_storage(outcome["path"])
    for manifest in checkpoint_committed.committed(storage):
        checkpoint_committed.verify(storage, manifest)


def die_once_after_a_report(config: dict[str, Any]) -> None:
    """All ranks report a checkpoint; when all reports have returned, one rank is killed. The next attempt looks."""
    rank = powertrain.get_context().get_world_rank()
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is not None:
        powertrain.report({"went_on_from": sorted(content(checkpoint).items())})
        return
    with powertrain.checkpoint_dir() as directory:
        if rank == 0:
            Path(directory, "state").write_text("saved")
            powertrain.report({"row": 1}, checkpoint=Checkpoint(directory))
        else:
            powertrain.report({"row": 1})
    kill_the_victim_once_all_have_reported(config)


def kill_the_victim_once_all_have_reported(config: dict[str, Any]) -> None:
    context = powertrain.get_context()
    rank = context.get_world_rank()
    Path(config["marks"], f"returned-{rank}").touch()
    if rank == config["victim"]:
        while len(os.listdir(config["marks"])) < context.get_world_size():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def outcome_with_a_victim(fits: Any, loop: Any, victim: int) -> dict[str, Any]:
    marks = fits.directory / "marks"
    marks.mkdir()
    outcome: dict[str, Any] = fits.outcome(
        loop,
        train_loop_config={"victim": victim, "marks": str(marks)},
        failure_config=powertrain.FailureConfig(max_failures=1),
    )
    assert outcome["raised"] == "", outcome.get("message")
    return outcome


@on_cases(("engine", "victim"), [("local", 0), ("local", 1), ("ray", 0), ("ray", 1)])
def test_what_was_reported_on_all_ranks_is_committed_although_a_rank_is_killed(
    fits: Any, victim: int
) -> None:
    outcome = outcome_with_a_victim(fits, die_once_after_a_report, victim)
    assert outcome["metrics"] == {"went_on_from": [("state", "saved")]}


def die_once_before_plain_reports_are_sent(config: dict[str, Any]) -> None:
    """Rank 1 makes reports and never sends them; once they have returned, one rank is killed. Then all go on."""
    rank = powertrain.get_context().get_world_rank()
    if powertrain.get_checkpoint() is not None:
        powertrain.report({"value": 100})
        return
    if rank == 1:
        current("the story").service.post = lambda message, **_: None  # type: ignore[method-assign]
    for row in range(1, 4):
        if row == 3 and rank == 0:
            with powertrain.checkpoint_dir() as directory:
                Path(directory, "state").write_text("saved")
                powertrain.report({"value": row}, checkpoint=Checkpoint(directory))
        else:
            powertrain.report({"value": row * (1 + rank)})
    kill_the_victim_once_all_have_reported(config)


@on_cases(("engine", "victim"), [("local", 0), ("local", 1), ("ray", 0), ("ray", 1)])
def test_reports_that_a_killed_rank_had_not_sent_are_in_the_metrics(fits: Any, victim: int) -> None:
    outcome = outcome_with_a_victim(fits, die_once_before_plain_reports_are_sent, victim)
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    assert frame[frame["rank"] == 0]["value"].tolist() == [1, 2, 3, 100]
    assert frame[frame["rank"] == 1]["value"].tolist() == [2, 4, 6, 100]


# --------------------------------------------------------------------------- making a trainer again


def count_up(config: dict[str, Any]) -> None:
    checkpoint = powertrain.get_checkpoint()
    start = int(content(checkpoint)["number"]) if checkpoint else 0
    for number in range(start + 1, start + 1 + config["steps"]):
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "number").write_text(str(number))
            powertrain.report({"number": number}, checkpoint=Checkpoint(directory))


@pytest.mark.smoke
def test_a_trainer_can_be_made_again_from_its_run(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        count_up,
        train_loop_config={"steps": 2},
        scaling_config=ONE_WORKER_HERE,
        run_config=RunConfig(name="again", storage_path=str(tmp_path)),
    )
    assert trainer.fit().metrics == {"number": 2}

    assert TorchTrainer.can_restore(tmp_path / "again")
    assert not TorchTrainer.can_restore(tmp_path / "never")
    assert TorchTrainer.restore(str(tmp_path / "again")).fit().metrics == {"number": 4}
    changed = TorchTrainer.restore(tmp_path / "again", train_loop_config={"steps": 1})
    assert changed.fit().metrics == {"number": 5}


def test_a_run_that_another_user_wrote_is_not_trusted_but_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TorchTrainer(
        count_up,
        train_loop_config={"steps": 1},
        scaling_config=ONE_WORKER_HERE,
        run_config=RunConfig(name="foreign", storage_path=str(tmp_path)),
    ).fit()
    (tmp_path / "foreign" / "trainer.pickle").write_bytes(b"cos\nabort\n(tR.")

    with pytest.raises(ConfigError, match="not written by you"):
        TorchTrainer.restore(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="no run at"):
        TorchTrainer.restore(tmp_path / "never")
    trainer = TorchTrainer.restore(
        tmp_path / "foreign",
        train_loop_per_worker=count_up,
        train_loop_config={"steps": 1},
        scaling_config=ONE_WORKER_HERE,
    )
    assert trainer.fit().metrics == {"number": 2}


def test_an_upload_that_fails_is_reported_and_training_goes_on(fits: Any) -> None:
    def loop() -> None:
        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            raise RuntimeError("the bucket is closed on Sundays")

        with powertrain.checkpoint_dir() as directory:
            Path(directory, "state").write_text("1")
            powertrain.report({"row": 1}, checkpoint=Checkpoint(directory), checkpoint_upload_fn=upload)
        powertrain.report({"row": 2})

    outcome = fits.outcome(loop, workers=1, checkpoint_config=CheckpointConfig(on_lost="warn"))
    assert (outcome["raised"], outcome["metrics"]) == ("", {"row": 2}), outcome
    (failed,) = of_kind(fits.facts("loop"), ev.CheckpointFailed)
    assert "closed on Sundays" in failed.reason


def test_sync_raises_when_the_checkpoint_cannot_be_committed(fits: Any) -> None:
    def loop() -> None:
        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            raise RuntimeError("the bucket is closed on Sundays")

        with powertrain.checkpoint_dir() as directory:
            Path(directory, "state").write_text("1")
            powertrain.report(
                {},
                checkpoint=Checkpoint(directory),
                checkpoint_upload_fn=upload,
                checkpoint_upload_mode="SYNC",
            )

    with pytest.raises(TrainingFailedError, match="closed on Sundays"):
        fits.trainer(loop, workers=1).fit()


def test_a_run_on_a_file_system_of_the_users_own_goes_on_and_says_what_it_lacks(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "root").mkdir()
    own = fsspec.filesystem("dir", path=str(tmp_path / "root"), fs=fsspec.filesystem("local"))

    def fit() -> Any:
        return TorchTrainer(
            count_up,
            train_loop_config={"steps": 2},
            scaling_config=ONE_WORKER_HERE,
            run_config=RunConfig(name="own", storage_path="runs", storage_filesystem=own),
        ).fit()

    assert fit().metrics == {"number": 2}
    result = fit()
    assert result.metrics == {"number": 4}
    assert content(result.checkpoint) == {"number": "4"}
    warnings = [fact.message for fact in of_kind(journal_of(tmp_path / "root" / "runs" / "own"), ev.Warned)]
    assert any("could both win" in warning for warning in warnings)


def give_its_own_checkpoint_away(config: dict[str, Any]) -> None:
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        count_up({"steps": 1})
    else:
        powertrain.report({}, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)


def test_a_committed_checkpoint_cannot_be_given_away(fits: Any) -> None:
    for _ in range(2):
        outcome = fits.outcome(give_its_own_checkpoint_away, "inline")
        assert outcome["raised"] == "", outcome.get("message")
    storage = open_storage(outcome["path"])
    assert [manifest.row for manifest in checkpoint_committed.committed(storage)] == [1, 2]
    for manifest in checkpoint_committed.committed(storage):
        checkpoint_committed.verify(storage, manifest)


def test_a_run_whose_newest_checkpoint_was_removed_by_hand_saves_that_row_again(fits: Any) -> None:
    outcome = fits.outcome(count_up, "inline", train_loop_config={"steps": 2})
    shutil.rmtree(outcome["checkpoint"])
    again = fits.outcome(count_up, "inline", train_loop_config={"steps": 1})
    assert again["metrics"] == {"number": 2}
    assert not of_kind(fits.facts("count_up"), ev.CheckpointFailed)
    assert content(Result.from_path(again["path"]).checkpoint)["number"] == "2"


def ask_before_the_others_have_reported(config: dict[str, Any]) -> None:
    if powertrain.get_context().get_world_rank() == 0:
        powertrain.report({"row": 1})
        Path(config["marks"], "asks").touch()
        assert powertrain.get_all_reported_checkpoints() == []
        return
    while not Path(config["marks"], "asks").exists():
        time.sleep(0.001)
    powertrain.report({"row": 1})


def test_a_query_for_checkpoints_is_answered_when_a_row_without_one_closes(fits: Any) -> None:
    outcome = fits.outcome(
        ask_before_the_others_have_reported, train_loop_config={"marks": str(fits.directory)}
    )
    assert outcome["raised"] == "", outcome.get("message")


def test_a_run_of_another_version_is_refused_and_nothing_of_it_is_moved(fits: Any) -> None:
    from powertrain.checkpoint import manifest as mf
    from powertrain.errors import OtherVersionError

    outcome = fits.outcome(count_up, "inline", train_loop_config={"steps": 1})
    path = Path(outcome["checkpoint"], ".powertrain-manifest.json")
    path.write_bytes(mf.seal({**mf.unseal(path.read_bytes(), "it"), "schema": 2}))
    with pytest.raises(OtherVersionError, match="Use the version that wrote it"):
        fits.trainer(count_up, "inline", train_loop_config={"steps": 1}).fit()
    assert path.exists()


def test_a_damaged_checkpoint_of_another_run_is_not_begun_from(fits: Any) -> None:
    from powertrain.errors import CheckpointError

    outcome = fits.outcome(count_up, "inline", train_loop_config={"steps": 1})
    Path(outcome["checkpoint"], "number").write_text("2")
    with pytest.raises(CheckpointError, match="has changed since it was committed"):
        fits.trainer(
            count_up,
            "inline",
            name="other",
            train_loop_config={"steps": 1},
            resume_from_checkpoint=Checkpoint(outcome["checkpoint"]),
        ).fit()


def pile_up_while_the_disk_is_full(config: dict[str, Any]) -> None:
    def save(**options: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for name in ("model", "optimizer"):
                Path(directory, name).write_bytes(os.urandom(1 << 20))
            powertrain.report({}, checkpoint=Checkpoint(directory), **options)

    save(checkpoint_upload_mode="SYNC")
    filler = Path(config["disk"], "filler")
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    for _ in range(8):
        save()
    filler.unlink()


def test_what_piled_up_is_all_committed_although_the_disk_holds_only_a_part_of_it(
    small_disk: Path, tmp_path: Path
) -> None:
    """Newer ones must not take the room that the oldest needs: then none could be committed, and none deleted."""
    powertrain.DataParallelTrainer(
        pile_up_while_the_disk_is_full,
        train_loop_config={"disk": str(small_disk)},
        scaling_config=ONE_WORKER_HERE,
        run_config=RunConfig(
            name="piled",
            storage_path=str(small_disk),
            checkpoint_config=CheckpointConfig(num_to_keep=1, staging_dir=tmp_path / "staging"),
            sync_config=SyncConfig(sync_timeout=60),
        ),
    ).fit()

    facts = journal_of(small_disk / "piled")
    assert sorted({fact.row for fact in of_kind(facts, ev.Committed)}) == list(range(1, 10))
    assert not of_kind(facts, ev.CheckpointFailed)


def test_a_disk_that_is_full_at_the_last_moment_costs_the_checkpoint_and_not_the_training(fits: Any) -> None:
    from powertrain.storage import boundaries

    def full_at_the_seal(kind: str, target: str) -> None:
        if target.endswith("part.json"):
            raise OSError(28, "No space left on device")

    boundaries.install(full_at_the_seal)
    try:
        outcome = fits.outcome(count_up, "inline", train_loop_config={"steps": 2})
    finally:
        boundaries.install(None)
    assert (outcome["raised"], outcome["metrics"]) == ("CheckpointError", {"number": 2}), outcome
    failed = of_kind(fits.facts("count_up"), ev.CheckpointFailed)
    assert [(fact.row, "No space left" in fact.reason) for fact in failed] == [(1, True), (2, True)]
    assert not os.path.exists(os.path.join(outcome["path"], ".staging"))
