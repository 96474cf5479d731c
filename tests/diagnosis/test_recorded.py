"""A run's directory is enough: what its ranks recorded becomes tables, and a diagnosis, whatever ended the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.looks import looks
from tests.diagnosis.run_directory import record, records

from powertrain.diagnosis import recorded as recorded_module
from powertrain.diagnosis.recorded import read, report_of
from powertrain.diagnosis.tables.steps import RECORD
from powertrain.errors import StorageError
from powertrain.storage import Storage, open_storage
from powertrain.trace.recording import phases
from powertrain.trace.store import STEPS, PartFrame, TelemetryStore, encode


@pytest.fixture
def place(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def test_steps_samples_and_hosts_come_back(place: Storage) -> None:
    steps = synthetic.run(0, synthetic.late(1, phases.FORWARD, 0.03), hosts=["node-a", "node-b"])
    record(place, steps, [looks(rank, 40, rss=500.0) for rank in (0, 1)])
    recorded = read(place)
    assert (recorded.attempt, recorded.steps.ranks, recorded.steps.hosts) == (0, (0, 1), ("node-a", "node-b"))
    np.testing.assert_allclose(recorded.steps.phases, steps.phases, rtol=1e-6)
    assert {rank: (len(one), one.host) for rank, one in recorded.samples.items()} == {
        0: (40, "node-a"),
        1: (40, "node-b"),
    }
    report = report_of(place, "digits")
    assert (report.name, report.findings[0].kind, report.findings[0].ranks) == (
        "digits",
        "forward_straggler",
        (1,),
    )
    assert report.findings[0].hosts == ("node-b",)


def test_the_newest_attempt_with_enough_steps_is_judged(place: Storage) -> None:
    for attempt, count in ((0, 100), (1, 60), (2, 5)):
        record(place, synthetic.run(attempt, steps=count), attempt=attempt)
    assert len(read(place).steps) == 60
    assert len(read(place, 0).steps) == 100
    assert report_of(place).notes == ("This is attempt 1; 3 attempts were recorded, the first is 0.",)


def test_the_longest_attempt_is_judged_where_none_has_enough(place: Storage) -> None:
    for attempt, count in ((0, 7), (1, 3)):
        record(place, synthetic.run(attempt, steps=count), attempt=attempt)
    assert read(place).attempt == 0


def test_a_rank_that_recorded_nothing_is_named(place: Storage) -> None:
    record(place, synthetic.run(0, ranks=2), world=3)
    assert "No steps were recorded on rank 2." in report_of(place).notes


def test_what_was_cut_off_in_the_middle_of_a_frame_is_passed_over(place: Storage, tmp_path: Path) -> None:
    record(place, synthetic.run(0, ranks=1, steps=50))
    (tmp_path / "telemetry" / "0009.open").write_bytes(encode([PartFrame(0, 0, 0, b"x" * 1000)])[:200])
    assert len(read(place).steps) == 50


def test_facts_that_ranks_sent_reach_the_report(place: Storage) -> None:
    facts = {"flops_per_sample": 1e9, "peak_flops": 1e12, "seen": {"outside": "train.py:31 in evaluate"}}
    record(place, synthetic.run(0, synthetic.bound(phases.OUTSIDE, 0.05)), facts=facts)
    report = report_of(place)
    assert report.throughput.mfu == pytest.approx(report.throughput.samples_per_second * 1e9 / 2e12)
    assert "train.py:31 in evaluate" in report.findings[0].summary


def test_a_run_that_recorded_nothing_and_an_attempt_that_is_not_there_are_refused_in_words(
    place: Storage,
) -> None:
    with pytest.raises(StorageError, match="has no recorded steps"):
        read(place)
    record(place, synthetic.run(0))
    with pytest.raises(StorageError, match=r"no recorded steps of attempt 3, only of 0\."):
        read(place, 3)


def test_a_long_run_is_judged_by_its_newest_steps_that_all_ranks_have(
    place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_module, "_RECORDS_LIMIT", 200)
    steps = synthetic.run(3, steps=400)
    record(place, steps)
    longer = TelemetryStore(place, 2)  # rank 0 goes on alone
    alone = np.frombuffer(records(steps, 0), RECORD).copy()
    alone["step"] += 400
    longer.add(PartFrame(0, 0, STEPS, alone.tobytes()))
    longer.close()
    report = report_of(place, "long")
    assert report.steps == 100
    assert "Findings are based on the newest 100 of 800 recorded steps." in report.notes
    assert len(read(place).steps) == 400
