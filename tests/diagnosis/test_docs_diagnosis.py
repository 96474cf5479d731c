"""docs/diagnosis.md holds: every kind, field and exit code of the code is in it, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import record

from powertrain import diagnosis
from powertrain.diagnosis import compare
from powertrain.diagnosis.finding import SEVERITIES, Finding
from powertrain.diagnosis.rules import memory, stragglers
from powertrain.diagnosis.summary import SCHEMA_VERSION, PhaseTime, RankTimes, Report, Throughput
from powertrain.storage import open_storage
from powertrain.trace.recording import phases

GUIDE = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text("utf-8")
SOURCES = sorted(Path(diagnosis.__path__[0]).rglob("*.py"))


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables, heads and rules left out."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip("| ") for cell in line] for line in lines if line[0].strip() not in ("kind", "field")]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def literals(node: ast.AST | None) -> Iterator[str]:
    """Strings that an expression can be: itself, or either side of a choice."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def kinds_in_code() -> set[str]:
    """What is given as ``kind`` to a finding, or to a function of ours that makes one, or assigned to ``kind``."""
    found = set(stragglers.KINDS.values())
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
                found |= {kind for key in node.keywords if key.arg == "kind" for kind in literals(key.value)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_growth_finding":
                found |= set(literals(node.args[0]))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("(kind, "):
                assert isinstance(node.value, ast.Tuple)
                found |= set(literals(node.value.elts[0]))
    return found


def test_every_kind_of_finding_is_documented_and_no_other() -> None:
    documented = [name for row in rows(section("Findings")) for name in names(row[0])]
    assert len(documented) == len(set(documented))
    assert set(documented) == kinds_in_code()
    assert all(
        severity.strip() in SEVERITIES for row in rows(section("Findings")) for severity in row[1].split(",")
    )


def test_every_phase_is_documented() -> None:
    documented = [name for row in rows(section("Reading the card")) for name in names(row[0])]
    assert sorted(documented) == sorted(phases.NAMES)


def test_the_schema_of_the_summary_is_that_of_the_code() -> None:
    table, _, finding = section("final_summary.json").partition("A finding:")
    documented = {name: row for row in rows(table) for name in names(row[0])}
    assert documented.keys() == {
        *Report.__struct_fields__,
        "seal",
    }  # the last of the file, and none of the report
    assert documented["schema_version"][2] == str(SCHEMA_VERSION)
    for field, struct in (("phases", PhaseTime), ("ranks", RankTimes), ("throughput", Throughput)):
        assert names(documented[field][1]) == list(struct.__struct_fields__)
    of_finding = [name for row in rows(finding) for name in names(row[0])]
    assert sorted(of_finding) == sorted(Finding.__struct_fields__)


def test_exit_codes_and_thresholds_are_those_of_the_code() -> None:
    text = section("Comparing two runs")
    codes = {name: int(row[0]) for row in rows(text) if row[0].isdigit() for name in names(row[1])}
    assert codes == compare.EXIT_CODES
    assert f"above {1 + compare.TOLERANCE:.2f}" in text
    assert f"below {1 - compare.TOLERANCE:.2f}" in text
    assert f"fewer than {compare.LEAST_STEPS} steps" in text
    assert f"short above {memory.FULL:.0%}".replace("%", " %") in section("Memory findings")


def test_the_code_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(open_storage(str(tmp_path)), synthetic.run(0, synthetic.bound(phases.INPUT, 0.05)))
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert "/data/runs/digits" in code
    space: dict[str, object] = {}
    exec(code.replace("/data/runs/digits", str(tmp_path)), space)
    assert "input_bound ()" in capsys.readouterr().out
    assert msgspec.json.decode(str(space["summary"], "utf-8"))["steps"] == 200  # type: ignore[call-overload]
