"""The code of docs/data.md runs, from top to bottom, in an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"


def python_of(document: str) -> str:
    """The Python blocks of a document, each line where it is there, so that a traceback names lines of the document."""
    lines, inside = [], False
    for line in document.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def test_the_reader_keeps_only_python_and_its_lines() -> None:
    document = "text\n```python\na = 1\n```\n```\nshell\n```\n```python\nb = 2\n```\n"
    assert python_of(document).splitlines() == ["", "", "a = 1", "", "", "", "", "", "b = 2", ""]


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert len(re.findall(r"^```python$", GUIDE.read_text("utf-8"), re.MULTILINE)) >= 8
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
