"""docs/frameworks.md holds: its code runs from top to bottom, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.test_docs_data import python_of

GUIDE = Path(__file__).parents[1] / "docs" / "frameworks.md"


@pytest.mark.timeout(300)
def test_every_block_of_python_in_the_guide_runs(tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    pytest.importorskip("lightgbm")
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count(".fit()") == 2
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_what_it_links_to_is_there() -> None:
    text = GUIDE.read_text("utf-8")
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 5
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (GUIDE.parent / link).exists(), link
