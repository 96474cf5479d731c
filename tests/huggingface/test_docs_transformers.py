"""The code of docs/transformers.md runs, from top to bottom, in an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.test_docs_data import python_of

from powertrain.huggingface import transformers

GUIDE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.timeout(400)
def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    script.write_text(python_of(GUIDE.read_text("utf-8")), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_it_names_every_public_name() -> None:
    named = set(re.findall(r"\w+", GUIDE.read_text("utf-8")))
    assert set(transformers.__all__) <= named
