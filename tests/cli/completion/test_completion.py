"""Completion: the words that come next, and the script in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.recorded_run import write
from typer.testing import CliRunner

from powertrain.cli.completion.candidates import complete
from powertrain.cli.main import app

ROOT: Any = typer.main.get_command(app)


def after(*words: str) -> list[str]:
    return complete(ROOT, words, lambda: ["digits", "digits-2", "other", "$(touch evil)", "a b", "x\ny"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("met",), ["metrics"]),
        (("sto",), ["stop"]),
        (("show", "dig"), ["digits", "digits-2"]),
        (("show", ""), ["digits", "digits-2", "other"]),
        (("compare", "digits", "o"), ["other"]),
        (("metrics", "digits", "--p"), ["--plot"]),
        (("metrics", "--metric", "dig"), []),
        (("metrics", "--plot", "dig"), ["digits", "digits-2"]),
        (("trace", "exp"), ["export"]),
        (("trace", "export", "ot"), ["other"]),
        (("doctor", ""), []),
        (("nonsense", ""), []),
    ],
    ids=" ".join,
)
def test_the_words_that_may_come_next(words: tuple[str, ...], found: list[str]) -> None:
    assert after(*words) == found


def test_every_verb_is_offered_and_every_option_of_one() -> None:
    assert set(after("")) == set(ROOT.commands) == set(complete(ROOT, [], list))
    assert {"--json", "--storage", "--help"} <= set(after("show", "--"))


def test_an_unknown_shell_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["completion", "tcsh"]).exit_code == 2
    for shell in ("bash", "zsh", "fish"):
        assert "powertrain completion words --" in CliRunner().invoke(app, ["completion", shell]).output


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_and_runs_with_the_script(tmp_path: Path) -> None:
    write(Path(os.environ["POWERTRAIN_STORAGE"]) / "digits")
    command = tmp_path / "powertrain"
    command.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'from powertrain.cli.main import main; main()' \"$@\"\n"
    )
    command.chmod(0o755)
    script = (
        'source <(powertrain completion bash)\n'
        'COMP_WORDS=(powertrain sho); COMP_CWORD=1; _powertrain; echo "${COMPREPLY[*]}"\n'
        'COMP_WORDS=(powertrain show ""); COMP_CWORD=2; _powertrain; echo "${COMPREPLY[*]}"\n'
    )  # fmt: skip
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=110, env=environment
    )
    assert done.stdout.splitlines() == ["show", "digits"], done.stderr
