"""A small share of what ``python -m tests.fuzz.run_files`` tries: see there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.damage import CUT, EXTEND, FLIP, FORGE, Damage
from tests.fuzz.judging import RAW, SILENT, Tally, fault_of
from tests.fuzz.readers import Reading
from tests.fuzz.run_files import fuzz

#: Damages that are tried here, and seconds after which no further one is begun.
MOST, BUDGET = 60, 12.0


@pytest.mark.timeout(120)
def test_no_damaged_file_of_a_run_crashes_hangs_or_misleads_a_reader(tmp_path: Path) -> None:
    tally = fuzz(tmp_path, seed=20, budget=BUDGET, most=MOST)
    assert tally.damages > 0
    assert not tally.faults, "\n".join(tally.lines())


def test_damage_changes_bytes() -> None:
    assert Damage("r", "f", FLIP, 1, 0xFF).changed(b"\x00\x00\x00") == b"\x00\xff\x00"
    assert Damage("r", "f", CUT, 1).changed(b"abc") == b"a"
    assert len(Damage("r", "f", EXTEND, 5, 1).changed(b"abc")) == 8
    forged = Damage("r", "lease/0001", FORGE, 0, 0).changed(b'{"pid": 5}')
    assert forged == b'{"pid": -1}'


def test_a_reading_is_judged_by_what_it_says_and_warns_of() -> None:
    flip, whole = Damage("finished", "run.json", FLIP, 1, 1), Reading("true")
    assert fault_of("result", flip, whole, Reading("false")) == SILENT
    assert fault_of("result", flip, whole, Reading(raw="KeyError")) == RAW
    assert fault_of("result", flip, whole, Reading("false", ("damaged",))) == ""
    assert fault_of("result", flip, whole, Reading(refusal="StorageError")) == ""
    assert fault_of("result", flip, whole, Reading("true")) == ""
    growing = Damage("killed", "metrics/0001.open", CUT, 1)
    assert fault_of("frame", growing, whole, Reading("false")) == ""
    tally = Tally()
    tally.add(flip, {"result": whole}, {"result": Reading("false")})
    assert tally.faults == {SILENT: 1}
