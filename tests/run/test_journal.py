from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.record import journal as journal_module
from powertrain.run.record.journal import Journal, read, read_counting, replay
from powertrain.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def started(lease: int) -> ev.RunStarted:
    return ev.RunStarted(time=1.0, name="r", lease=lease, host="h", pid=1, version="0", engine="local")


STORY: list[ev.Event] = [
    started(1),
    ev.SlotsRequested(time=2.0, attempt=0, count=2),
    ev.AttemptStarted(time=3.0, attempt=0, world_size=2, first_row=1),
    ev.TrainingStarted(time=4.0, attempt=0),
    ev.Committed(time=5.0, attempt=0, row=3, checkpoint="checkpoint_000003"),
    ev.Ended(time=6.0, state="finished", reason="done", rows=3),
]


def written(storage: Storage, events: list[ev.Event], lease: int = 1) -> Path:
    journal = Journal(storage, lease)
    for event in events:
        journal.append(event)
    journal.close()
    path = storage.local_path(f"journal/{lease:04d}-000001.jsonl")
    assert path is not None
    return path


def test_facts_come_back_as_they_were_over_all_controllers(storage: Storage) -> None:
    second: list[ev.Event] = [started(2), ev.Warned(time=7.0, message="line\nbreak ü")]
    written(storage, second, lease=2)
    written(storage, STORY, lease=1)
    assert read(storage) == STORY + second
    assert replay(read(storage)).state == lifecycle.WAITING


def test_a_run_without_a_journal_is_new(storage: Storage) -> None:
    assert read(storage) == []
    assert replay([]) == lifecycle.RunState()


def test_closing_twice_is_fine(storage: Storage) -> None:
    journal = Journal(storage, 1)
    journal.close()
    journal.close()


def test_each_fact_is_one_write_and_only_those_others_act_on_are_flushed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(storage, 1)
    calls: list[str] = []
    write, fsync = os.write, os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *a: (calls.append("write"), write(*a))[1])
        patch.setattr(os, "fsync", lambda *a: (calls.append("fsync"), fsync(*a))[1])
        for event in STORY:
            journal.append(event)
    journal.close()
    assert calls == ["write"] * 5 + ["fsync", "write", "fsync"]


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_journal_cut_in_its_last_line_replays_up_to_there(storage: Storage, kept: int) -> None:
    path = written(storage, STORY)
    whole = path.read_bytes()
    start_of_last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    path.write_bytes(whole[: start_of_last + kept])
    reading = read_counting(storage)
    assert reading.events == STORY[:-1]
    assert reading.torn == (1 if kept else 0)


def test_damage_in_the_middle_costs_one_fact_and_no_error(storage: Storage) -> None:
    path = written(storage, STORY)
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"\xff\x00" + lines[1][5:]
    path.write_bytes(b"\n".join(lines))
    reading = read_counting(storage)
    assert reading.events == [STORY[0], *STORY[2:]]
    assert reading.torn == 1


def test_facts_of_a_later_version_are_passed_over_and_counted(storage: Storage) -> None:
    path = written(storage, STORY[:1])
    with path.open("ab") as file:
        file.write(b'{"fact": "teleported", "time": 1.0}\n')
        file.write(b'{"fact": "warned", "time": 1.0, "message": "m", "colour": "new field"}\n')
    reading = read_counting(storage)
    assert reading.unknown == 1
    assert reading.torn == 0
    assert reading.events == [STORY[0], ev.Warned(time=1.0, message="m")]


def test_a_write_cut_short_by_a_full_disk_harms_no_later_fact(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(storage, 1)
    journal.append(STORY[0])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(OSError, match="10 of"):
            journal.append(STORY[1])
    journal.append(STORY[2])
    journal.close()
    assert read_counting(storage) == journal_module.Reading([STORY[0], STORY[2]], torn=1)


@pytest.mark.parametrize("place", range(0, 60, 9))
def test_a_changed_character_is_found_and_warned_about(
    storage: Storage, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(storage, STORY)
    data = path.read_bytes()
    at = data.index(b'"checkpoint_000003"') - 40 + place
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert read(storage) == [*STORY[:4], *STORY[5:]]
    assert "journal/0001-000001.jsonl" in caplog.text
    assert "1 of its lines" in caplog.text


def test_lines_of_an_earlier_version_are_read_without_a_word(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.put("journal/0001-000001.jsonl", b"".join(ev.encode(event) + b"\n" for event in STORY))
    assert read(storage) == STORY
    assert caplog.text == ""


def test_a_journal_without_its_end_is_warned_about_where_its_controller_came_to_one(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    written(storage, STORY[:4])
    assert read(storage) == STORY[:4]
    assert caplog.text == ""  # it may be under way, or was killed
    storage.put("lease/0001.released", b"")
    read(storage)
    assert "journal/0001-000001.jsonl" in caplog.text
    assert "lacks its end" in caplog.text


def test_a_start_that_failed_before_its_first_fact_is_no_damage(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    written(storage, [])
    storage.put("lease/0001.released", b"")
    assert read(storage) == []
    assert caplog.text == ""


def test_a_pipe_in_the_place_of_a_journal_is_an_error_that_names_it(storage: Storage) -> None:
    path = written(storage, STORY)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"journal/0001-000001\.jsonl"):
        read(storage)


@pytest.mark.parametrize("line", [
    b'{"fact":"attempt_started","time":1.0,"attempt":4611686018427387904,"world_size":2,"first_row":1}',
    b'{"fact":"attempt_started","time":1.0,"attempt":0,"world_size":-2,"first_row":1}',
    b'{"fact":"training_started","time":1e300,"attempt":0}',
    b'{"fact":"startup_measured","time":1.0,"attempt":0,"ranks":[0],"phases":{"a":[1.0,2.0]}}',
])  # fmt: skip
def test_a_fact_with_an_impossible_value_is_none(storage: Storage, line: bytes) -> None:
    path = written(storage, STORY[:1])
    with path.open("ab") as file:
        file.write(line + b"\n")
    assert read(storage) == STORY[:1]


def test_replay_passes_over_what_cannot_have_happened_and_counts_the_rest() -> None:
    state = replay([STORY[0], STORY[3], *STORY[1:4]])
    assert state.state == lifecycle.TRAINING
    assert state.facts == 4


_WRITER = """
import sys
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.storage import open_storage
journal = Journal(open_storage(sys.argv[1]), 1)
number = 0
while True:
    journal.append(ev.Warned(time=0.0, message=str(number)))
    number += 1
    print(number, flush=True)
"""


def test_every_appended_fact_survives_sigkill(storage: Storage) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, storage.uri], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    for _ in range(500):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    process.stdout.close()
    told = 500 + rest.count("\n")
    messages = [event.message for event in read(storage) if isinstance(event, ev.Warned)]
    assert len(messages) >= told
    assert messages == [str(number) for number in range(len(messages))]
