"""docs/tracing.md holds: its code runs from top to bottom, and its table has every option of TraceConfig."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import powertrain
from powertrain import TraceConfig, trace

GUIDE = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text("utf-8")
SOURCES = str(Path(powertrain.__file__).parents[1])


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "logs" / "attempt-7" / "final_summary.json").exists()
    assert done.stdout.count("diagnosis of ") >= 4
    assert "\ndiagnosis: " in done.stdout, "the script itself is told, too"


def test_every_option_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", GUIDE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in dataclasses.fields(TraceConfig)} <= named


def test_every_public_name_is_in_the_guide() -> None:
    written = set(re.findall(r"\w+", GUIDE))
    assert set(trace.__all__) <= written
