"""docs/results.md holds: its code runs from top to bottom, and what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.data.test_docs_data import python_of

from powertrain import Result
from powertrain.result import return_value
from powertrain.terminal.text import data_size

GUIDE = Path(__file__).parents[1] / "docs" / "results.md"


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count("plot(") >= 5
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "both.svg").read_bytes()


def test_its_table_names_every_attribute_of_a_result() -> None:
    rows = [line.split("|")[1] for line in GUIDE.read_text("utf-8").splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    methods = {"from_path", "plot", "open_return_value"}  # each has a paragraph of its own
    read = {name for name in (*dir(Result), *vars(Result(path="p", state="s"))) if not name.startswith("_")}
    assert documented == read - methods


def test_its_limit_is_that_of_the_code() -> None:
    assert f"more than {data_size(return_value.LARGEST)} are not kept" in GUIDE.read_text("utf-8")
