"""docs/command_line.md names every verb there is, and each of its examples is understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from powertrain.cli.main import app

GUIDE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text("utf-8")
_ROW = re.compile(r"^\| `(?P<verb>\w+)` \| .+ \| `powertrain (?P<example>.+)` \|$", re.MULTILINE)


def verbs() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_the_table_lists_exactly_the_verbs_that_there_are() -> None:
    assert [row["verb"] for row in _ROW.finditer(GUIDE)] == list(verbs())


@pytest.mark.parametrize("example", [row["example"] for row in _ROW.finditer(GUIDE)])
def test_every_example_is_a_command_that_is_understood(example: str) -> None:
    verb, *words = shlex.split(example)
    command = verbs()[verb]
    before = 2 if hasattr(command, "commands") else 1
    # At once after the verb: what follows the script of ``run`` is the script's own.
    asking = [verb, *words[: before - 1], "--help", *words[before - 1 :]]
    understood = CliRunner().invoke(app, asking)
    assert understood.exit_code == 0, understood.output
    if hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def test_every_verb_says_in_one_line_what_it_does() -> None:
    for name, command in verbs().items():
        assert command.get_short_help_str(200).endswith("."), name


def test_the_package_can_be_run_in_place_of_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "powertrain", "ls", "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "powertrain ls" in shown.stdout
