"""docs/parallelism.md holds: its code runs from top to bottom, and its figures are the code's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.test_docs_data import python_of

from powertrain.checkpoint.parallel import holdings

GUIDE = Path(__file__).parents[1] / "docs" / "parallelism.md"


@pytest.mark.timeout(180)
def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count("TorchTrainer(") == 3
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_its_figures_are_those_of_the_code() -> None:
    text = " ".join(GUIDE.read_text("utf-8").split())
    assert holdings._SAMPLED == 8
    assert "Ranks compare eight elements of each parameter" in text
    assert f"a tolerance of {holdings._DRIFT * 100:g} % of the largest one" in text
    assert holdings._DRIFT_STEPS == 4
    assert "four units of precision in bfloat16" in text
