"""docs/sharing.md holds: its code runs from top to bottom, and what it shows is what is said and written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.data.test_docs_data import python_of

from powertrain.engine.local import claims
from powertrain.engine.local.waiting_line import QueuePosition, ResourceRequest, reason
from powertrain.engine.resources import Holding, Machine

GUIDE = Path(__file__).parents[1] / "docs" / "sharing.md"
ONE_GPU = Machine(cpus=1, gpus=("g",), visible=("0",))


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count("ScalingConfig(") >= 2
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_example_of_a_waiting_run_is_what_the_product_prints() -> None:
    mine = wish("run letters", 1)
    held = Holding(run="run digits", host="host-a", pid=4711, gpus=("0",))
    told = reason(mine, [held], QueuePosition(2, wish("run words", 4802)))
    assert f"0 of 1 slots are available, {told}; it waits" in " ".join(GUIDE.read_text("utf-8").split())


def test_the_files_have_the_names_that_it_gives_them(tmp_path: Path) -> None:
    files = [
        claims.write_claim(tmp_path, Holding(run="run digits", host="host-a", pid=4711)),
        claims.write_ticket(tmp_path, 7, wish("run words", 4802)),
    ]
    given = re.findall(r"`([^`]*<pid>[^`]*\.json)`", GUIDE.read_text("utf-8"))
    assert len(given) == 2
    for file, pattern in zip(files, given, strict=True):
        assert re.fullmatch(re.sub("<(pid|number|random)>", "[0-9a-f]+", pattern), file.name)
        file.remove()


def test_what_it_links_to_is_there() -> None:
    text = GUIDE.read_text("utf-8")
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 5
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (GUIDE.parent / link).exists(), link


def wish(run: str, pid: int) -> ResourceRequest:
    return ResourceRequest(run=run, host="host-a", pid=pid, wanted={"GPU": 1.0}, machine=ONE_GPU)
