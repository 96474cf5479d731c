"""Commands that meet a run which cannot be read: one sentence that names the file, and the other runs go on."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_run import EVENTFUL, points, write
from typer.testing import CliRunner

import powertrain
from powertrain.cli.main import app, main
from powertrain.errors import PowertrainError, StorageError
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.storage.files import descriptors

JOURNAL = "journal/0001-000001.jsonl"


@pytest.fixture
def root() -> Path:
    """The storage path that commands look at when none is given, with two runs in it."""
    root = Path(os.environ["POWERTRAIN_STORAGE"])
    end = ev.Ended(time=time.time(), state="finished", reason="", rows=9)
    for name in ("bad", "good"):
        records = points(range(1, 10), lambda row, rank: {"loss": 1 / row})
        write(root / name, records, facts=EVENTFUL, checkpoints={3: {"loss": 1.0}}, end=end)
    return root


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_huge(path: Path) -> None:
    """No room on any disk, and more than any memory: it has no blocks."""
    os.truncate(path, 1 << 40)


def as_garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 100 + b"\n")


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[Path], None]]:
    """A file that the system refuses to open for any user: root may read everything."""

    def refusing(number: int) -> Callable[[Path], None]:
        def refuse(path: Path) -> None:
            opened = descriptors._open_named

            def open_named(name: str, flags: int, mode: int, parent: int, whole: str) -> int:
                if whole == str(path):
                    raise OSError(number, os.strerror(number), whole)
                return opened(name, flags, mode, parent, whole)

            monkeypatch.setattr(descriptors, "_open_named", open_named)

        return refuse

    return refusing


def listed() -> dict[str, str]:
    result = CliRunner().invoke(app, ["ls"], catch_exceptions=False)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()[1:] if " is running at " not in line]
    return {words[0]: words[1] for words in lines if words}


@pytest.mark.parametrize("damage", [as_directory, as_pipe, as_huge, as_garbage])
def test_ls_shows_a_run_as_unreadable_and_goes_on_with_the_others(root: Path, damage: Any) -> None:
    damage(root / "bad" / JOURNAL)
    assert listed() == {"good": "finished", "bad": "unreadable"}


@pytest.mark.parametrize(
    ("directory", "state"), [("bad/journal", "unreadable"), ("bad/artifacts", "finished"), ("other", "")]
)
def test_ls_goes_on_where_directories_are_nested_too_deep(
    root: Path, directory: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = root / directory
    top.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        patch.chdir(top)
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
    try:
        assert listed() == {"good": "finished", "bad": state or "finished"}
    finally:
        subprocess.run(["rm", "-rf", top / "d"], check=True)  # pytest itself cannot remove them


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_journal_that_the_system_refuses_is_named(
    root: Path, number: int, unreadable: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    unreadable(number)(root / "bad" / JOURNAL)
    assert listed() == {"good": "finished", "bad": "unreadable"}
    with pytest.raises(StorageError, match=JOURNAL):
        Result.from_path(root / "bad")
    for verb in ("show", "diagnose"):
        with pytest.raises(PowertrainError):
            CliRunner().invoke(app, [verb, "bad"], catch_exceptions=False)


@pytest.mark.parametrize("damage", [as_directory, as_pipe, as_huge, as_garbage])
@pytest.mark.parametrize("verb", [["show"], ["show", "--json"], ["logs"], ["diagnose"], ["compare", "good"]])
def test_other_commands_refuse_a_run_without_a_journal_in_words(
    root: Path, damage: Any, verb: list[str]
) -> None:
    damage(root / "bad" / JOURNAL)
    result = CliRunner().invoke(app, [*verb, "bad"])
    assert result.exception is None or isinstance(result.exception, (PowertrainError, SystemExit))


@pytest.mark.parametrize("damage", [as_directory, as_pipe])
@pytest.mark.parametrize(
    "file", ["run.json", "lease/lock", "commits/00000001", "commits/00000002", JOURNAL, "metrics/0001-000001.arrow",
             "checkpoints/c3/.powertrain-manifest.json", "checkpoints/c3/model"],
)  # fmt: skip
def test_a_start_of_a_run_with_something_else_in_the_place_of_a_file_ends_in_words(
    root: Path, damage: Any, file: str
) -> None:
    path = root / "bad" / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    damage(path)
    config = powertrain.RunConfig(name="bad", storage_path=str(root))
    scaling = powertrain.ScalingConfig(num_workers=0)
    with contextlib.suppress(PowertrainError):
        powertrain.DataParallelTrainer(lambda: None, scaling_config=scaling, run_config=config).fit()
    if not file.endswith("model"):
        assert list((root / "bad").rglob("model")), "the files of the checkpoint are still there"


@pytest.mark.parametrize(
    "file", ["run.json", "lease/0001", "lease/0009", "commits/00000001", "commits/00000002", JOURNAL,
             "checkpoints/c3/.powertrain-manifest.json", "checkpoints/c3/.powertrain-validation.json",
             "metrics/0001.open"],
)  # fmt: skip
def test_a_huge_file_ends_a_start_and_a_look_in_words(root: Path, file: str) -> None:
    path = root / "bad" / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    as_huge(path)
    with contextlib.suppress(PowertrainError):
        result = Result.from_path(root / "bad")
        result.metrics_dataframe  # noqa: B018
    for verb in ("show", "diagnose"):
        CliRunner().invoke(app, [verb, "bad"])
    config = powertrain.RunConfig(name="bad", storage_path=str(root))
    scaling = powertrain.ScalingConfig(num_workers=0)
    with contextlib.suppress(PowertrainError):
        powertrain.DataParallelTrainer(lambda: None, scaling_config=scaling, run_config=config).fit()
    assert list((root / "bad").rglob("model")), "the files of the checkpoint are still there"


def test_main_says_what_the_system_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere")

    monkeypatch.setattr("powertrain.cli.main.app", refuse)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "Error: Permission denied ('/somewhere'). Check the path and its permissions.\n"
    )


def test_a_damaged_summary_is_named_and_the_diagnosis_made_again(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "bad" / "final_summary.json").write_bytes(b'{"schema_version": 1, "findings": 5}')
    assert Result.from_path(root / "bad").findings == ()
    assert "final_summary.json" in caplog.text
