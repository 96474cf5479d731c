"""Where ranks work: in the directory that the script was started in, in a scratch directory, or where a path says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loops
import pytest
from tests.stories.engines import ON_BOTH, on

import powertrain
from powertrain.errors import EngineError
from powertrain.worker.scripts.working_directory import enter_launch_dir


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A directory with a data file, which the script is started in."""
    made = tmp_path / "project"
    made.mkdir()
    (made / "words.txt").write_text("hello")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made


def read_a_file_beside_the_script() -> str:
    rank = powertrain.get_context().get_world_rank()
    Path(f"seen-by-{rank}").write_text(os.getcwd())
    powertrain.report({"words": Path("words.txt").read_text()})
    return os.getcwd()


@on("local", "ray", smoke=["local"])
def test_a_relative_path_means_the_same_in_a_rank_as_in_the_script(fits: Any, project: Path) -> None:
    outcome = fits.outcome(read_a_file_beside_the_script)

    assert outcome["raised"] == "", outcome.get("message")
    assert outcome["metrics"] == {"words": "hello"}
    assert outcome["return_value"] == str(project)
    assert {path.name for path in project.glob("seen-by-*")} == {"seen-by-0", "seen-by-1"}


def test_the_next_fit_starts_in_the_directory_that_the_script_has_changed_to(
    fits: Any, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / name)
            place = fits.outcome(loops.describe_place, name=name)["return_value"]
        assert place["cwd"] == place["launch_dir"] == str(tmp_path / name)


def test_working_dir_dot_is_the_launch_directory(fits: Any) -> None:
    place = fits.outcome(loops.describe_place, working_dir=".")["return_value"]
    assert place["cwd"] == place["launch_dir"] == os.getcwd()


def test_working_dir_names_a_directory(fits: Any, tmp_path: Path) -> None:
    place = fits.outcome(loops.describe_place, working_dir=tmp_path / "new")["return_value"]
    assert place["cwd"] == str(tmp_path / "new")


def leave_a_file_in_scratch() -> tuple[str, str]:
    context = powertrain.get_context()
    Path(f"left-by-{context.get_world_rank()}").touch()
    return os.getcwd(), context.launch_dir


@ON_BOTH
def test_scratch_is_one_directory_that_goes_with_the_run(
    fits: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fits.outcome(leave_a_file_in_scratch, working_dir="scratch")

    assert outcome["raised"] == "", outcome.get("message")
    cwd, launch_dir = outcome["return_value"]
    assert launch_dir == str(project)
    assert Path(cwd).name == "scratch"
    assert not os.path.exists(cwd)
    if fits.engine == "local":  # both ranks are on this machine
        shown = " ".join(capsys.readouterr().out.split())
        assert "removed now: scratch/left-by-0, scratch/left-by-1." in shown


def open_a_file_that_is_missing() -> None:
    Path("data/missing.csv").read_text()


def open_a_missing_file_for_a_library() -> None:
    try:
        Path("words.txt").read_text()
    except FileNotFoundError as error:
        raise ValueError("no vocabulary") from error


def test_a_missing_relative_path_is_explained_by_where_ranks_run(fits: Any, project: Path) -> None:
    outcome = fits.outcome(open_a_file_that_is_missing, workers=1)

    assert outcome["raised"] == "TrainingFailedError"
    expected = (
        f"'data/missing.csv' is a relative path, and this rank runs in {str(project)!r}, the directory that the "
        "script was started in."
    )
    assert expected in " ".join(outcome["message"].split())
    assert expected in (Path(outcome["path"]) / "logs/attempt-0/rank-00000.log").read_text()


def test_a_path_that_only_the_launch_directory_has_is_found_there(fits: Any, project: Path) -> None:
    outcome = fits.outcome(open_a_missing_file_for_a_library, working_dir="scratch", workers=1)

    message = " ".join(outcome["message"].split())
    assert "the scratch directory of this node (RunConfig(working_dir='scratch'))." in message
    assert f"The path exists in {str(project)!r}: join it to powertrain.get_context().launch_dir." in message


def open_an_absolute_path() -> None:
    Path("/no/such/file").read_text()


def test_a_missing_absolute_path_is_not_explained(fits: Any) -> None:
    assert "relative path" not in fits.outcome(open_an_absolute_path, workers=1)["message"]


def test_a_launch_directory_that_was_removed_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(EngineError, match=f"cannot start in the directory '{gone}'.*No such file"):
        enter_launch_dir(gone)
