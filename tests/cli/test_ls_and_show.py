from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import record
from typer.testing import CliRunner

from powertrain.checkpoint import manifest as mf
from powertrain.cli.main import app, main
from powertrain.cli.show import describe
from powertrain.errors import StorageError
from powertrain.lookup.summaries import summarize
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record.journal import Journal
from powertrain.run.remote.protocol import Description
from powertrain.storage import Storage, open_storage
from powertrain.trace.recording import phases

_CHECKPOINT = "checkpoint_000003"


@pytest.fixture
def place() -> Storage:
    """The storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


def started(name: str, *, at: float, pid: int | None = None, host: str = "") -> ev.RunStarted:
    return ev.RunStarted(
        time=at,
        name=name,
        lease=1,
        host=host or socket.gethostname(),
        pid=pid or os.getpid(),
        version="0.1.0",
        engine="local",
    )


def trained(
    name: str, *, at: float, world_size: int = 2, pid: int | None = None, host: str = ""
) -> list[ev.Event]:
    """The facts of a run that has got as far as training."""
    return [
        started(name, at=at, pid=pid, host=host),
        ev.SlotsRequested(time=at, attempt=0, count=world_size),
        ev.AttemptStarted(time=at, attempt=0, world_size=world_size, first_row=1),
        ev.TrainingStarted(time=at, attempt=0),
    ]


def write(place: Storage, name: str, events: list[ev.Event]) -> None:
    journal = Journal(place.child(name), 1)
    for event in events:
        journal.append(event)
    journal.close()


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --------------------------------------------------------------------------- ls


def test_ls_lists_the_newest_run_first_with_rows_workers_and_age(place: Storage) -> None:
    now = time.time()
    ended = ev.Ended(time=now - 7000, state="finished", reason="", rows=12, seconds=200.0)
    write(place, "older", [*trained("older", at=now - 7260), ended])
    write(place, "newer", trained("newer", at=now - 3660, world_size=4, host="elsewhere"))
    _, first, second = output_of("ls").splitlines()
    assert first.split() == ["newer", "training", "0", "4", "1", "1", "h", "01", "min", "ago"]
    assert second.split() == ["older", "finished", "12", "2", "1", "2", "h", "01", "min", "ago"]


def test_ls_calls_a_run_interrupted_whose_process_is_gone(place: Storage) -> None:
    write(place, "cut", trained("cut", at=time.time(), pid=dead_pid()))
    assert output_of("ls").splitlines()[1].split()[:2] == ["cut", "interrupted"]


def test_ls_calls_a_run_interrupted_whose_number_now_belongs_to_a_younger_process(place: Storage) -> None:
    write(place, "reused", trained("reused", at=time.time() - 1e7, pid=os.getpid()))
    assert output_of("ls").splitlines()[1].split()[:2] == ["reused", "interrupted"]


def test_ls_does_not_judge_a_run_of_another_machine(place: Storage) -> None:
    write(place, "far", trained("far", at=time.time(), pid=dead_pid(), host="elsewhere"))
    assert output_of("ls").splitlines()[1].split()[:2] == ["far", "training"]


def test_ls_counts_committed_rows_of_a_run_that_has_not_ended(place: Storage) -> None:
    at = time.time()
    commit = ev.Committed(time=at, attempt=0, row=3, checkpoint=_CHECKPOINT)
    write(place, "going", [*trained("going", at=at), commit])
    assert output_of("ls").splitlines()[1].split()[:3] == ["going", "training", "3"]


def test_ls_passes_over_directories_that_are_no_runs(place: Storage) -> None:
    place.put("notes/journal.txt", b"no run")
    place.put("file", b"no run either")
    write(place, "real", trained("real", at=time.time()))
    assert [line.split()[0] for line in output_of("ls").splitlines()] == ["run", "real"]


def test_ls_as_json_has_each_run_with_its_state(place: Storage) -> None:
    for name, at in (("old", time.time() - 100), ("new", time.time())):
        journal = Journal(place.child(name), 1)
        for fact in trained(name, at=at):
            journal.append(fact)
        journal.close()
    found = json.loads(CliRunner().invoke(app, ["ls", "--json"]).output)
    assert [(run["name"], run["world_size"]) for run in found["runs"]] == [("new", 2), ("old", 2)]
    assert (found["sweeps"], found["path"]) == ([], place.uri)


def test_ls_says_when_there_are_no_runs(tmp_path: Path) -> None:
    assert output_of("ls", str(tmp_path)).strip() == f"There are no runs in {tmp_path}."


# --------------------------------------------------------------------------- show


def failed_once(name: str) -> list[ev.Event]:
    """A run whose first attempt failed after row 3, and whose second finished."""
    at = time.time() - 60
    broken = ev.WorkerFailure(
        rank=1,
        kind="raised",
        summary="rank 1 raised ValueError",
        error_type="ValueError",
        message="bad label 11",
        file="train.py",
        line=42,
        function="loop",
        source="raise ValueError(label)",
        row=3,
    )
    echo = ev.WorkerFailure(rank=0, kind="raised", summary="rank 0 raised RuntimeError", secondary=True)
    return [
        *trained(name, at=at),
        ev.Committed(time=at, attempt=0, row=3, checkpoint=_CHECKPOINT),
        ev.Failed(time=at, attempt=0, failures=(broken, echo), decision="retry", reason="1 of 2 used"),
        ev.SlotsRequested(time=at, attempt=1, count=2),
        ev.AttemptStarted(time=at, attempt=1, world_size=2, first_row=4, checkpoint=_CHECKPOINT),
        ev.TrainingStarted(time=at, attempt=1),
        ev.Ended(time=at + 30, state="finished", reason="all ranks returned", rows=12, seconds=30.0),
    ]


def commit(place: Storage, run: str, **more: Any) -> None:
    files = [mf.ManifestFile(name="state.pt", size=1500, xxh3="0" * 32, rank=0)]
    manifest = mf.Manifest(
        name=_CHECKPOINT,
        row=3,
        attempt=0,
        metrics={"loss": 0.5},
        world_size=2,
        lease=1,
        parent="",
        created=time.time(),
        files=files,
        **more,
    )
    place.put(f"{run}/checkpoints/{_CHECKPOINT}/{mf.MANIFEST_NAME}", mf.encode(manifest))


def test_show_reports_state_attempts_checkpoints_and_failures(place: Storage) -> None:
    write(place, "digits", failed_once("digits"))
    commit(place, "digits")
    lines = output_of("show", "digits").splitlines()
    assert lines[:3] == [
        "run       digits",
        f"path      {place.uri}/digits",
        "state     finished: all ranks returned",
    ]
    assert "rows      12" in lines
    text = "\n".join(lines)
    assert "0: 2 workers, from row 1; failed, then retry: 1 of 2 used" in text
    assert f"1: 2 workers, from row 4 after {_CHECKPOINT}; finished after 30.0 s" in text
    assert f"{_CHECKPOINT}: row 3, 1 file, 1.5 kB" in text
    assert "attempt 0: Rank 1 raised ValueError: bad label 11" in text
    assert "train.py:42 in loop" in text


def test_show_reports_how_far_data_had_been_read_at_the_newest_checkpoint(place: Storage) -> None:
    write(place, "digits", failed_once("digits"))
    commit(place, "digits", extras={"data": {"train": {"epoch": 3, "position": 9, "rows": 20}}})
    assert "data      train: epoch 3, 45 %" in output_of("show", "digits").splitlines()


def test_show_ends_with_what_rank_0_reported_last(place: Storage) -> None:
    write(place, "digits", trained("digits", at=time.time()))
    store = MetricsStore(place.child("digits"), 1)
    for row, rank, loss in ((1, 0, 0.75), (2, 0, 0.5), (2, 1, 9.0)):
        store.add([PointRecord(rank=rank, attempt=0, row=row, at=1.0, solo=False, metrics={"loss": loss})])
    store.close()
    assert output_of("show", "digits").splitlines()[-2:] == ["last metrics of rank 0", "  loss = 0.5"]


def test_show_reports_why_a_run_that_got_no_room_failed_and_its_clock_stands(place: Storage) -> None:
    at = time.time() - 600
    reason = "There was no room for the run within 5 s: 2 GPUs are missing."
    facts: list[ev.Event] = [
        started("crowded", at=at, pid=dead_pid()),
        ev.SlotsRequested(time=at, attempt=0, count=2),
        ev.Ended(time=at + 5, state="failed", reason=reason, seconds=5.0),
    ]
    write(place, "crowded", facts)
    lines = output_of("show", "crowded").splitlines()
    assert lines[2:4] == [f"state     failed: {reason}", "started   10 min 00 s ago, ran for 5.00 s"]
    assert output_of("ls").splitlines()[1].split()[:2] == ["crowded", "failed"]


def test_the_clock_of_an_interrupted_run_stands_at_the_last_that_is_known_of_it(place: Storage) -> None:
    at = time.time() - 600
    facts = trained("cut", at=at, pid=dead_pid())
    write(place, "cut", [*facts, ev.Committed(time=at + 7, attempt=0, row=3, checkpoint=_CHECKPOINT)])
    assert output_of("show", "cut").splitlines()[2:4] == [
        "state     interrupted",
        "started   10 min 00 s ago, ran for 7.00 s",
    ]


def test_show_takes_the_path_of_a_run(place: Storage) -> None:
    write(place, "digits", trained("digits", at=time.time()))
    assert output_of("show", f"{place.uri}/digits/").splitlines()[0] == "run       digits"


def test_show_leaves_out_what_a_run_does_not_have(place: Storage) -> None:
    write(place, "young", trained("young", at=time.time()))
    text = output_of("show", "young")
    assert "attempts" in text
    assert not {"checkpoints", "failures", "last metrics of rank 0"} & set(text.splitlines())


def test_show_reports_what_a_run_under_way_is_doing() -> None:
    facts = trained("digits", at=1000.0)
    stands = Description(
        state="training",
        row=12,
        row_age=0.3,
        awaited=[3],
        uploads=2,
        upload_bytes=1_500_000,
        upload_age=12.0,
        debugged=[1],
    )
    lines = describe(summarize("digits", facts, 12), "/runs/digits", facts, [], {}, 1060.0, (), stands)
    assert lines[lines.index("rows      12") + 1 :][:4] == [
        "now       row 12, 0.30 s ago",
        "waiting   for rank 3 at row 13",
        "uploads   2 checkpoints (1.5 MB) uploading for 12.0 s",
        "debugger  attached to rank 1",
    ]
    young = describe(summarize("digits", facts), "", facts, [], {}, 1060.0, (), Description(state="starting"))
    assert "now       no row yet" in young


def test_show_reports_what_a_run_without_room_waits_for() -> None:
    now = time.time()
    asked: list[ev.Event] = [started("digits", at=now), ev.SlotsRequested(time=now, attempt=0, count=1)]
    reason = "waiting for 1 GPU held by run letters (pid 7 on here); 1st in line"
    waits: list[ev.Event] = [*asked, ev.SlotsWaited(time=now, attempt=0, granted=0, count=1, reason=reason)]

    def shown(facts: list[ev.Event]) -> list[str]:
        lines = describe(summarize("digits", facts), "/runs/digits", facts, [], {}, now)
        return [line for line in lines if line.startswith("queue")]

    assert shown(waits) == [f"queue     {reason}"]
    assert shown([*waits, ev.AttemptStarted(time=now, attempt=0, world_size=1, first_row=1)]) == []
    assert shown([started("digits", at=now, pid=dead_pid()), *waits[1:]]) == [], "nobody waits any more"


def test_show_prints_all_of_it_for_programs_too(place: Storage) -> None:
    write(place, "digits", failed_once("digits"))
    commit(place, "digits")
    shown = json.loads(output_of("show", "digits", "--json"))
    assert (shown["name"], shown["state"], shown["rows"], shown["now"]) == ("digits", "finished", 12, None)
    assert [attempt["first_row"] for attempt in shown["attempts"]] == [1, 4]
    assert [(one["name"], one["row"], one["bytes"]) for one in shown["checkpoints"]] == [
        (_CHECKPOINT, 3, 1500)
    ]
    assert shown["failures"][0]["failures"][0]["error_type"] == "ValueError"


@pytest.mark.parametrize("content", [b"{", b'{"schema_version": 99}'])
def test_show_makes_the_diagnosis_again_where_the_summary_cannot_be_read(
    place: Storage, content: bytes
) -> None:
    record(place.child("slow"), synthetic.run(0, synthetic.late(1, phases.INPUT, 0.03)))
    place.put("slow/final_summary.json", content)
    lines = output_of("show", "slow").splitlines()
    assert lines[0] == "run       slow"
    assert lines[lines.index("diagnosis") + 1].startswith("  input_straggler: Rank 1")


def test_show_says_in_one_line_that_nothing_can_be_read_of_a_runs_steps(
    place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, "digits", failed_once("digits"))
    place.put("digits/final_summary.json", b"{")
    lines = output_of("show", "digits").splitlines()
    assert lines[lines.index("diagnosis") + 1 :][:2] == [
        "  final_summary.json cannot be read, and the run has no other record of its steps",
        "",
    ]
    assert "failures" in lines

    def broken(*_: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("powertrain.diagnosis.final.report_of", broken)
    assert (
        "  the record of the run's steps cannot be read: ValueError: two lines"
        in output_of("show", "digits").splitlines()
    )


def test_show_of_an_unknown_run_names_those_that_are_there(place: Storage) -> None:
    write(place, "digits", trained("digits", at=time.time()))
    with pytest.raises(StorageError, match=r"no run 'digit' in .* It has 'digits'\."):
        CliRunner().invoke(app, ["show", "digit"], catch_exceptions=False)


def test_an_error_ends_in_one_sentence_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["powertrain", "show", "nothing"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("Error: There is no run 'nothing'")
    assert "Traceback" not in told


def test_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert output_of("--version").strip() == f"powertrain {version('powertrain')}"
