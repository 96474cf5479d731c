"""``powertrain logs`` on directories as runs leave them, and the lines of log files, whatever they hold."""

from __future__ import annotations

import io
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from tests.s3_server import S3Server
from typer.testing import CliRunner, Result

from powertrain.cli.common.ranks import parse_ranks
from powertrain.cli.main import app
from powertrain.errors import StorageError
from powertrain.lookup import log_lines
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.log_files import LogFiles, Readings
from powertrain.lookup.log_lines import LineSplitter, for_terminal, last_matching, start_of_last
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.run.remote.protocol import Card, LiveRun
from powertrain.storage import Storage, open_storage

_NOW = time.time()
#: What log files are made of: short lines, no lines, bytes that are no text.
contents = st.lists(
    st.sampled_from([b"\n", b"a", b"\xff\x00", b"loss 0.5\n", b"\r", b"xy" * 20]), max_size=40
).map(b"".join)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def write(
    place: Storage, attempts: int = 1, *, ended: str = "finished", pid: int = 0, engine: str = "local"
) -> None:
    """The journal of a run of two ranks with so many attempts; ``ended`` is "" where it has not come to its end."""
    facts: list[ev.Event] = [
        ev.RunStarted(
            time=_NOW,
            name="run",
            lease=1,
            host=socket.gethostname(),
            pid=pid or os.getpid(),
            version="0",
            engine=engine,
        )
    ]
    for attempt in range(attempts):
        if attempt:
            facts.append(ev.Failed(time=_NOW, attempt=attempt - 1, failures=(), decision="retry", reason=""))
        facts += [
            ev.SlotsRequested(time=_NOW, attempt=attempt, count=2),
            ev.AttemptStarted(time=_NOW, attempt=attempt, world_size=2, first_row=1),
            ev.TrainingStarted(time=_NOW, attempt=attempt),
        ]
    if ended:
        facts.append(ev.Ended(time=_NOW, state=ended, reason="every rank's function returned", seconds=3.0))
    journal = Journal(place, 1)
    for fact in facts:
        journal.append(fact)
    journal.close()


def put_log(place: Storage, rank: int, content: bytes, attempt: int = 0) -> None:
    place.put(f"logs/attempt-{attempt}/rank-{rank:05d}.log", content)


@pytest.fixture
def run() -> Storage:
    """The run "run" of the storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"]).child("run")


# --------------------------------------------------------------------------- which lines are printed


def test_the_newest_attempt_is_printed_rank_by_rank(run: Storage) -> None:
    write(run, attempts=2)
    put_log(run, 0, b"old\n")
    put_log(run, 1, b"c\n", attempt=1)
    put_log(run, 0, b"a\nb", attempt=1)
    run.put("logs/uploader.log", b"not a rank's\n")
    assert invoke("logs", "run").stdout == "[rank 0] a\n[rank 0] b\n[rank 1] c\n"


def test_one_rank_has_no_prefix_and_its_bytes_come_as_they_are(run: Storage) -> None:
    write(run)
    put_log(run, 0, b"\xff\x00\x1b[2Jjunk\r50%\r100%\n")
    put_log(run, 1, b"other\n")
    assert invoke("logs", "run", "--rank", "0").stdout_bytes == b"\xff\x00\x1b[2Jjunk\r50%\r100%\n"


def test_attempts_are_chosen_by_number_or_all_with_a_head_each(run: Storage) -> None:
    write(run, attempts=2)
    put_log(run, 0, b"first\n")
    put_log(run, 0, b"second\n", attempt=1)
    assert invoke("logs", "run", "--attempt", "0").stdout == "[rank 0] first\n"
    both = invoke("logs", "run", "--all-attempts")
    assert both.stdout == "[rank 0] first\n[rank 0] second\n"
    assert both.stderr == "--- attempt 1 ---\n"


def test_grep_and_lines_leave_the_last_that_match(run: Storage) -> None:
    write(run)
    put_log(run, 0, b"".join(b"step %d\nnoise\n" % step for step in range(100)))
    assert (
        invoke("logs", "run", "--grep", r"step \d+", "-n", "2").stdout
        == "[rank 0] step 98\n[rank 0] step 99\n"
    )
    assert invoke("logs", "run", "-n", "1").stdout == "[rank 0] noise\n"
    assert invoke("logs", "run", "--grep", "nowhere").stdout == ""


def test_a_huge_log_is_never_held_in_memory(run: Storage, tmp_path: Path) -> None:
    """A sparse file of 4 GiB without an end of a line, then the words that are asked for."""
    write(run)
    put_log(run, 0, b"")
    path = run.local_path("logs/attempt-0/rank-00000.log")
    assert path is not None
    with path.open("r+b") as file:
        file.truncate(4 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert invoke("logs", "run", "-n", "1").stdout == "[rank 0] the end\n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


# --------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "7"], r"no logs of rank 7 in attempt 0, only of rank 0\."),
        (["--attempt", "3"], r"no logs of attempt 3, only of \[0\]\."),
    ],
)
def test_a_missing_log_is_reported_with_those_that_exist(
    run: Storage, arguments: list[str], said: str
) -> None:
    write(run)
    put_log(run, 0, b"a\n")
    with pytest.raises(StorageError, match=said):
        invoke("logs", "run", *arguments)


def test_a_run_whose_ranks_print_to_its_terminal_says_so(run: Storage) -> None:
    write(run, engine="inline")
    for arguments in ([], ["--follow"]):
        with pytest.raises(StorageError, match="no log files: with the engine 'inline'"):
            invoke("logs", "run", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grep", "("], "is not a regular expression"),
        (["--rank", "a"], "is not a rank"),
        (["--attempt", "0", "--all-attempts"], "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(run: Storage, arguments: list[str], said: str) -> None:
    refused = invoke("logs", "run", *arguments)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.replace("│", " ").split())


# --------------------------------------------------------------------------- following


def test_following_a_run_that_is_over_ends_with_how_it_ended(run: Storage) -> None:
    write(run)
    put_log(run, 0, b"all\n")
    followed = invoke("logs", "run", "-f")
    assert (followed.exit_code, followed.stdout) == (0, "[rank 0] all\n")
    assert followed.stderr == "The run 'run' has finished after 3.00 s: every rank's function returned.\n"


def test_following_a_run_whose_process_is_gone_ends_and_says_so(run: Storage) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(run, ended="", pid=gone.pid)
    put_log(run, 0, b"half a line")
    followed = invoke("logs", "run", "-f", "--rank", "0")
    assert (followed.exit_code, followed.stdout) == (0, "half a line\n")
    assert f"its process ({gone.pid}) is gone, and left it training" in followed.stderr


def test_following_shows_whole_lines_and_ends_quietly_on_ctrl_c(run: Storage, tmp_path: Path) -> None:
    write(run, ended="")
    put_log(run, 0, b"first\nhal")
    log = run.local_path("logs/attempt-0/rank-00000.log")
    assert log is not None
    command = [sys.executable, "-c", "from powertrain.cli.main import main; main()", "logs", "run", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        deadline = threading.Timer(30.0, following.kill)
        deadline.start()
        assert following.stdout.readline() == b"[rank 0] first\n"
        with log.open("ab") as file:
            file.write(b"f\n")
        assert following.stdout.readline() == b"[rank 0] half\n"
        following.send_signal(2)
        assert following.wait() == 130
        deadline.cancel()
        assert (following.stdout.read(), following.stderr.read()) == (b"", b"")


def test_logs_in_an_object_store_are_fetched(s3: S3Server) -> None:
    run = open_storage(s3.uri("logs")).child("far")
    run.put(
        "journal/0001-000001.jsonl",
        b"".join(
            ev.encode(fact) + b"\n"
            for fact in (
                ev.RunStarted(
                    time=_NOW, name="far", lease=1, host="elsewhere", pid=1, version="0", engine="ray"
                ),
                ev.SlotsRequested(time=_NOW, attempt=0, count=1),
                ev.AttemptStarted(time=_NOW, attempt=0, world_size=1, first_row=1),
                ev.TrainingStarted(time=_NOW, attempt=0),
                ev.Ended(time=_NOW, state="failed", reason="it broke", seconds=1.0),
            )
        ),
    )
    put_log(run, 0, b"a\nb\n")
    followed = invoke("logs", run.uri, "-f", "-n", "1")
    assert followed.stdout == "[rank 0] b\n"
    assert followed.stderr == "The run 'far' has failed after 1.00 s: it broke.\n"


def test_lines_are_read_where_they_grow_and_then_from_storage_each_once(tmp_path: Path) -> None:
    stored, growing = open_storage(tmp_path / "stored"), open_storage(tmp_path / "growing")
    card = Card(name="run", path=stored.uri, pid=os.getpid(), files=growing.uri)
    files = LogFiles(FoundRun("run", stored, LiveRun(card, tmp_path)))
    shown: list[tuple[int, bytes]] = []
    readings = Readings(files, lambda rank, lines: shown.extend((rank, line) for line in lines), None)

    put_log(growing, 1, b"one\ntw")
    put_log(stored, 1, b"on")  # what has been put so far
    (log,) = files.list(0)
    readings.read(log)
    assert shown == [(1, b"one")]
    put_log(stored, 1, b"one\ntwo\nthree")
    growing.delete_tree("logs")
    readings.read(log)  # as it was before
    (log,) = files.list(0)
    readings.read(log)
    readings.finish(log)
    assert shown == [(1, b"one"), (1, b"two"), (1, b"three")]


# --------------------------------------------------------------------------- lines, whatever a file holds


@given(contents, st.integers(0, 50))
def test_the_last_lines_are_found_from_the_end(content: bytes, count: int) -> None:
    start = start_of_last(io.BytesIO(content), count)
    ends = content.split(b"\n")
    lines = [line + b"\n" for line in ends[:-1]] + ([ends[-1]] if ends[-1] else [])
    assert content[start:] == b"".join(lines[max(0, len(lines) - count) :])


def test_the_last_lines_may_begin_in_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"one\ntwo\nthree\n"
    for size in range(1, len(content) + 2):
        monkeypatch.setattr(log_lines, "_PIECE", size)
        found = [content[start_of_last(io.BytesIO(content), count) :] for count in range(5)]
        assert found == [b"", b"three\n", b"two\nthree\n", content, content]


@given(contents, st.lists(st.integers(0, 60), max_size=8))
def test_lines_do_not_depend_on_the_pieces_in_which_they_come(content: bytes, cuts: list[int]) -> None:
    lines, found, before = LineSplitter(), [], 0
    for cut in [*sorted(cuts), len(content)]:
        found += lines.feed(content[before:cut])
        before = max(before, cut)
    found += lines.finish()
    ends = content.split(b"\n")
    assert found == ends[:-1] + ([ends[-1]] if ends[-1] else [])


@given(st.integers(0, 50), st.lists(st.integers(1, 20), max_size=6))
def test_a_line_that_is_too_long_comes_in_pieces_and_whole(length: int, sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "LONGEST", 7)
        content = bytes(65 + n % 26 for n in range(length))
        lines, found, position = LineSplitter(), [], 0
        for size in [*sizes, length]:
            found += lines.feed(content[position : position + size])
            position += size
        found += lines.finish()
    assert b"".join(found) == content
    assert all(0 < len(piece) <= 7 for piece in found)


def test_the_last_that_match_are_found_without_the_rest() -> None:
    pattern = re.compile("a")
    assert last_matching(io.BytesIO(b"a1\nb\na2\na3\n"), 2, pattern) == ([b"a2", b"a3"], 11)
    assert last_matching(io.BytesIO(b"a1\nb\na2\na3"), 2, pattern) == ([b"a2"], 8), "the last is one of them"
    assert last_matching(io.BytesIO(b"a1\nb\na2\nb3"), 2, pattern) == ([b"a1", b"a2"], 8)
    assert last_matching(io.BytesIO(b"a1\na2"), 0, pattern) == ([], 3)


def test_a_line_that_is_still_being_written_is_matched_and_shown_whole(tmp_path: Path) -> None:
    place, log = open_storage(str(tmp_path)), "logs/attempt-0/rank-0.log"
    shown: list[bytes] = []
    files = LogFiles(FoundRun("run", place))
    readings = Readings(files, lambda _, lines: shown.extend(lines), re.compile("loss"))
    for content in (b"loss 1\nnothing\nepoch 2, loss ", b"loss 1\nnothing\nepoch 2, loss 0.5\n"):
        place.put(log, content)
        readings.read(files.list()[0], last=5)
    assert shown == [b"loss 1", b"epoch 2, loss 0.5"]


@given(st.binary(max_size=60))
def test_a_terminal_gets_nothing_that_moves_it(line: bytes) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", for_terminal(line).decode())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_a_terminal_gets_colours_and_the_last_of_a_progress_bar() -> None:
    assert for_terminal(b"10%\r100%\r") == b"100%"
    assert for_terminal(b"\x1b[31mred\x1b[0m\x1b[2J\x1b[H") == b"\x1b[31mred\x1b[0m"


# --------------------------------------------------------------------------- ranks on the command line


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranks_are_read_as_they_are_written(ranks: set[int]) -> None:
    assert parse_ranks([",".join(map(str, ranks))]) == tuple(sorted(ranks))
    assert parse_ranks([f"{min(ranks)}-{max(ranks)}"]) == tuple(range(min(ranks), max(ranks) + 1))


@pytest.mark.parametrize("word", ["", "-", "1-", "-3", "3-1", "a", "1,,2", "1.5", "0-99999999999"])
def test_what_is_no_rank_is_refused(word: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"not a rank|no ranks"):
        parse_ranks([word])
