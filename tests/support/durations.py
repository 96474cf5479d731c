"""Recorded durations of tests: ``python -m tests.support.durations REPORT.xml ...`` updates them.

The reports are pytest's (``--junitxml``), together of all tests, on an otherwise idle machine. Only tests that
take a noticeable time are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).parent / "durations.json"
_NOTICEABLE_S = 0.3


def recorded() -> dict[str, float]:
    """Return the seconds of each test that takes a noticeable time, by node id."""
    seconds: dict[str, float] = json.loads(FILE.read_text())
    return seconds


def read_report(text: str) -> dict[str, float]:
    """Return the seconds of each test in a report of pytest's, by node id."""
    seconds = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        folder, _, inside = case.attrib["classname"].rpartition(".test_")
        module, *classes = inside.split(".")
        file = f"{folder.replace('.', '/')}/test_{module}.py"
        nodeid = "::".join([file, *classes, case.attrib["name"]])
        seconds[nodeid] = round(float(case.attrib["time"]), 1)
    return seconds


def main(reports: Sequence[str]) -> None:
    """Write the durations of the tests in ``reports`` to :data:`FILE`."""
    seconds: dict[str, float] = {}
    for report in reports:
        seconds |= read_report(Path(report).read_text())
    kept = {name: value for name, value in sorted(seconds.items()) if value >= _NOTICEABLE_S}
    FILE.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")
    print(
        f"{len(kept)} of {len(seconds)} tests take {_NOTICEABLE_S} s or more; {sum(seconds.values()):,.0f} s in all"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
