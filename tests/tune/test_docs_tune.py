"""docs/tune.md holds: its code runs from top to bottom, what it names is there, and its figures are the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.data.test_docs_data import python_of

from powertrain import tune
from powertrain.run.ending import INTERRUPT_TIMEOUT_S
from powertrain.tune import plots, schedulers, search, stopper
from powertrain.tune.sweep.trial_run import SECTIONS

GUIDE = Path(__file__).parents[2] / "docs" / "tune.md"


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count(".fit()") >= 6
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_its_table_of_spaces_names_every_distribution() -> None:
    table = GUIDE.read_text("utf-8").partition("## Search spaces")[2].partition("```")[0]
    told = set(re.findall(r"`tune\.(\w+)\(", table))
    there = {name for name in tune.__all__ if name.islower() and ("uniform" in name or "rand" in name)}
    assert told == there | {"choice", "sample_from", "grid_search"}


def test_its_figures_and_names_are_those_of_the_code() -> None:
    text = " ".join(GUIDE.read_text("utf-8").split())
    assert f"after {INTERRUPT_TIMEOUT_S:g} s is ended" in text
    assert f"needs {plots.LEAST_TRIALS} ended trials" in text
    for name in SECTIONS:
        assert name == "run_config" or f"`{name}`" in text
    for name in re.findall(r"`(\w+(?:Stopper))`", text):
        assert hasattr(stopper, name), name
    for name in ("ASHAScheduler", "HyperBandScheduler", "MedianStoppingRule", "PopulationBasedTraining"):
        assert f"`{name}" in text
        assert hasattr(schedulers, name)
    for name in ("OptunaSearch", "ConcurrencyLimiter", "Repeater", "BasicVariantGenerator"):
        assert f"`{name}(" in text
        assert hasattr(search, name)


def test_what_it_links_to_is_there() -> None:
    text = GUIDE.read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 12
    for link in links:
        file, _, part = link.partition("#")
        assert (GUIDE.parent / file).exists() if file else part in anchors, link
