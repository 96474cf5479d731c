"""The commands of docs/kubernetes.md render, with the script that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from powertrain.cli.main import app
from powertrain.kubernetes import options

TEXT = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text("utf-8")
COMMANDS = re.findall(r"```shell\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_commands_for_a_claim_a_bucket_an_image_and_a_queue() -> None:
    words = " ".join(COMMANDS)
    assert all(option in words for option in ("pvc:", "s3://", "claim:", "--script-in-image", "--queue"))


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    """The script of the page, in the directory that commands run in."""
    (text,) = re.findall(r"```python\n# train\.py\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").write_text(text, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_renders_a_job(command: str, script: str) -> None:
    compile(script, "train.py", "exec")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    text = Path("job.yaml").read_text("utf-8") if "--output" in command else result.stdout
    assert list(yaml.safe_load_all(text))[-1]["kind"] == "RayJob"


def test_paths_and_modes_are_those_of_the_code() -> None:
    assert f"`{options.STORAGE_MOUNT}`" in TEXT
    assert f"python {options.SCRIPT_DIRECTORY}/train.py" in TEXT
    assert all(f"`{mode}`" in TEXT for mode in options.SUBMISSION_MODES)
