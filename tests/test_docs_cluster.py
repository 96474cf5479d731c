"""docs/cluster.md holds: its code runs from top to bottom on a node of a cluster, and its figures are the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.test_docs_data import python_of
from tests.ray_nodes import RayNodes

pytest.importorskip("ray")
GUIDE = Path(__file__).parents[1] / "docs" / "cluster.md"


def test_every_block_of_the_guide_runs(ray_nodes: RayNodes, tmp_path: Path) -> None:
    code = python_of(GUIDE.read_text("utf-8"))
    assert code.count("ScalingConfig(") >= 5
    script = tmp_path / "guide.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": ray_nodes.address},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_its_seconds_and_sizes_are_those_of_the_code() -> None:
    from powertrain.engine.ray import agents
    from powertrain.engine.ray.node import agent, files
    from powertrain.run.scaling import policy

    text = " ".join(GUIDE.read_text("utf-8").split())
    assert f"heals within {agent.FENCE_TIMEOUT_S:g} s" in text
    assert f"after {agent.FENCE_TIMEOUT_S:g} s without an answer the node ends" in text
    assert f"after {agents.LOST_TIMEOUT_S:g} s the controller gives the node up" in text
    assert f"silent is given up after {agents.LOST_TIMEOUT_S:g} s" in text
    assert f"room for {policy.GROW_DELAY_S:g} s" in text
    assert f"files up to {files._LARGEST_FILE // 2**20} MiB each" in text
    assert f"more than {files._MOST_FILES:,} files or {files._MOST_BYTES // 2**20} MiB" in text


def test_what_it_links_to_is_there() -> None:
    text = GUIDE.read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 12
    for link in links:
        file, _, part = link.partition("#")
        if not file.startswith("https://"):
            document = (GUIDE.parent / file).read_text("utf-8") if file else text
            assert not part or part in anchors(document), link


def anchors(document: str) -> set[str]:
    """The names by which headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
