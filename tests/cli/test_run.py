"""``powertrain run`` before any process starts: what is refused, and what the ranks will be given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from powertrain.cli import run as verb
from powertrain.cli.main import app, main
from powertrain.config.run import RunConfig
from powertrain.config.scaling import ScalingConfig
from powertrain.engine import resources
from powertrain.errors import ConfigError
from powertrain.torch.launcher import Program


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text("print('trained')")
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.chdir(tmp_path)
        yield path


def error_of(*words: str) -> str:
    """What the command says before it starts anything."""
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["run", *words], catch_exceptions=False)
    return str(caught.value)


def test_a_missing_script_is_named(script: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["powertrain", "run", "--nproc", "2", "trian.py", "--lr", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said == f"Error: The script 'trian.py' does not exist in {os.getcwd()!r}. Check the path.\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("folder",), "'folder' is a directory, not a script."),
        (("package.train",), "A module is run with -m."),
        (("--nproc=0", "folder/train.py"), "--nproc=0 is not valid"),
        (("--nproc=many", "folder/train.py"), "--nproc=many is not valid"),
        (("--engine=slurm", "folder/train.py"), "--engine=slurm is not one of auto, local, ray"),
        (("--engine=local", "--address=auto", "folder/train.py"), "--address names a Ray cluster"),
        (("--hang-timeout=-1", "folder/train.py"), "hang_timeout_s"),
    ],
)
def test_what_makes_no_sense_is_refused(script: Path, words: tuple[str, ...], said: str) -> None:
    assert said in error_of(*words)


def test_a_run_without_a_script_is_a_wrong_command(script: Path) -> None:
    assert CliRunner().invoke(app, ["run", "--nproc=2"]).exit_code == 2


class Given:
    """Stands for the trainer: what it was made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program: Program | None = None
        self.scaling, self.run, self.ranks = ScalingConfig(), RunConfig(), dict[str, Any]()
        monkeypatch.setattr(verb, "_fit", self._fit)

    def _fit(self, program: Program, scaling: ScalingConfig, run: RunConfig) -> int:
        self.program, self.scaling, self.run, self.ranks = program, scaling, run, program.for_ranks()
        return 7


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(monkeypatch)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["folder/train.py"], []),
        (["folder/train.py", "--nproc", "9", "--help"], ["--nproc", "9", "--help"]),
        (["--", "folder/train.py", "--lr", "1"], ["--lr", "1"]),
        (["folder/train.py", "--", "--lr"], ["--", "--lr"]),
        (["folder/train.py", "two words", "-m"], ["two words", "-m"]),
    ],
)
def test_what_follows_the_script_is_the_scripts(
    script: Path, given: Given, words: list[str], argv: list[str]
) -> None:
    ended = CliRunner().invoke(app, ["run", "--nproc=2", *words])
    assert ended.exit_code == 7, "the exit code is the run's"
    assert (given.ranks["argv"], given.ranks["name"]) == (argv, "folder/train.py")
    assert given.scaling.num_workers == 2


def test_options_become_those_of_a_run(script: Path, given: Given) -> None:
    words = "--num-workers=3 --name=digits --storage-path=runs --max-restarts=4 --hang-timeout=9 --no-trace --no-gpu"
    CliRunner().invoke(app, ["run", *words.split(), "folder/train.py"])
    assert (given.run.name, given.run.storage_path, given.run.trace) == ("digits", "runs", False)
    assert (given.run.failure_config.max_failures, given.run.failure_config.hang_timeout_s) == (4, 9.0)
    assert (given.scaling.num_workers, given.scaling.engine, given.scaling.use_gpu) == (3, "local", False)


@pytest.mark.parametrize(
    ("nproc", "gpus", "workers", "use_gpu"),
    [
        ("1", 0, 1, False),
        ("2", 4, 2, True),
        ("5", 4, 5, False),
        ("gpu", 4, 4, True),
        ("auto", 4, 4, True),
        ("auto", 0, 3, False),
        ("cpu", 2, 3, False),
    ],
)
def test_ranks_are_counted_as_torchrun_counts_them(
    monkeypatch: pytest.MonkeyPatch, nproc: str, gpus: int, workers: int, use_gpu: bool
) -> None:
    names = tuple(str(gpu) for gpu in range(gpus))
    machine = resources.Machine(cpus=3, gpus=names, visible=names)
    monkeypatch.setattr(resources, "detect", lambda custom=None: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    scaling = verb._scaling(nproc, "auto", None, None)
    assert (scaling.num_workers, scaling.use_gpu, scaling.engine) == (workers, use_gpu, "local")


def test_gpus_that_are_not_there_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = resources.Machine(cpus=3, gpus=(), visible=())
    monkeypatch.setattr(resources, "detect", lambda custom=None: machine)
    with pytest.raises(ConfigError, match="--nproc=gpu needs a GPU"):
        verb._scaling("gpu", "local", None, None)


def test_the_import_path_of_ranks_begins_with_the_scripts_directory(script: Path) -> None:
    before = list(sys.path)
    program = Program("folder/train.py")
    with program.as_main():
        given = program.for_ranks()
        assert sys.modules["__main__"].__file__ == str(script)
    assert given["import_path"] == [str(script.parent), *before[1:]]
    assert sys.path == before
    module = Program("json.tool", is_module=True)
    with module.as_main():
        assert module.for_ranks()["import_path"][0] == os.getcwd()


def test_a_link_to_a_script_finds_the_modules_beside_the_script(script: Path) -> None:
    Path("link.py").symlink_to(script)
    program = Program("link.py")
    with program.as_main():
        assert program.for_ranks()["import_path"][0] == str(script.parent)


@pytest.mark.parametrize(
    ("target", "is_module", "name"),
    [("folder/train.py", False, "train"), ("a b.py", False, "a-b"), ("package.train", True, "package.train")],
)
def test_runs_are_named_after_their_program(script: Path, target: str, is_module: bool, name: str) -> None:
    Path("a b.py").touch()
    assert Program(target, is_module=is_module).name == name
