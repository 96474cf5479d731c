"""Progress of long work: nothing for a second, then a bar on a terminal, or a line now and then."""

from __future__ import annotations

import contextlib
import io
import os
import pty
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

import powertrain.data
from powertrain import Checkpoint
from powertrain.text import progress
from powertrain.text.progress import ProgressBar


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_short_work_shows_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("verifying", 100, stream=stream, clock=clock) as bar:
        clock.now += 0.9
        bar.advance(100)
    assert stream.getvalue() == ""


def test_without_a_terminal_a_line_comes_after_a_second_then_twice_a_minute_and_one_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("verifying checkpoint_000010", 400 << 20, stream=stream, clock=clock) as bar:
        for _ in range(4):
            clock.now += 10.1
            bar.advance(100 << 20)
    assert stream.getvalue().splitlines() == [
        "verifying checkpoint_000010: 100 MiB, 25%",
        "verifying checkpoint_000010: 400 MiB, 100%",
        "verifying checkpoint_000010: done",
    ]


def test_work_of_unknown_size_is_counted() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("computing", unit="rows", stream=stream, clock=clock) as bar:
        clock.now += 2
        bar.advance(12_000)
    assert stream.getvalue().splitlines()[0] == "computing: 12,000 rows"


def test_failed_work_is_not_called_done() -> None:
    stream, clock = io.StringIO(), Clock()
    with pytest.raises(OSError, match="gone"), ProgressBar("x", 2, stream=stream, clock=clock) as bar:
        clock.now += 2
        bar.advance(1)
        raise OSError("gone")
    assert "done" not in stream.getvalue()


def test_on_a_terminal_it_is_a_bar_that_disappears() -> None:
    ours, theirs = pty.openpty()
    clock = Clock()
    with (
        os.fdopen(theirs, "w") as stream,
        ProgressBar("verifying [bold]x", 100, stream=stream, clock=clock) as bar,
    ):
        clock.now += 2
        bar.advance(40)
        bar.advance(60)
    shown = ""
    with contextlib.suppress(OSError):  # the end, once the other side is closed
        while part := os.read(ours, 65536):
            shown += part.decode()
    os.close(ours)
    assert "verifying [bold]x" in shown
    assert "100/100 bytes" in shown
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_stream_that_breaks_does_not_break_the_work() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock()
    with ProgressBar("x", 2, stream=Broken(), clock=clock) as bar:
        clock.now += 2
        bar.advance(1)
        bar.advance(1)


def test_downloads_and_computed_rows_show_their_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 0.0)
    powertrain.data.range(1000).map_batches(lambda batch: batch).materialize()
    assert "computing rows of a dataset: 1,000 rows" in capsys.readouterr().err
    memory = fsspec.filesystem("memory")
    memory.pipe("/saved/model.pt", bytes(1 << 20))
    handler: Any = fs.FSSpecHandler
    Checkpoint("/saved", fs.PyFileSystem(handler(memory))).to_directory(tmp_path / "copy")
    assert "1 MiB, 100%" in capsys.readouterr().err
