from __future__ import annotations

import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st
from tests.recorded_run import BEGAN, EVENTFUL, RAISED, points, write

from powertrain import Result
from powertrain.diagnosis.finding import Finding
from powertrain.result.html import CheckpointCard, ResultCard, Spark, TimeCard, Unread, html, sparkline
from powertrain.run import events as ev
from powertrain.run.startup import report

#: All elements that a card is made of; none of them runs, loads or asks for anything.
HARMLESS = {"div", "span", "pre", "table", "tr", "td", "svg", "polygon", "polyline", "circle", "line"}
VOID = {"polygon", "polyline", "circle", "line"}


class Page(HTMLParser):
    """What a browser would make of a piece of HTML: its elements, their attributes and its words."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"these are not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


words = st.text(min_size=1, max_size=20)
numbers = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def sparks(draw: st.DrawFn) -> Spark:
    rows = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=8)))
    edges = [tuple(draw(st.lists(numbers, min_size=len(rows), max_size=len(rows)))) for _ in range(3)]
    return Spark(draw(words), draw(words), tuple(rows), *edges)


cards = st.builds(
    ResultCard,
    path=words,
    state=words,
    reason=words,
    name=words,
    about=st.lists(st.tuples(words, words), max_size=3).map(tuple) | st.builds(Unread, words),
    error=st.text(max_size=40),
    metrics=st.none() | st.lists(st.tuples(words, words), max_size=3).map(tuple),
    sparks=st.tuples(st.lists(sparks(), max_size=2).map(tuple), st.integers(0, 3)) | st.builds(Unread, words),
    checkpoints=st.lists(
        st.builds(CheckpointCard, words, st.integers(0), words, words, st.booleans(), st.booleans()),
        max_size=3,
    ).map(tuple)
    | st.builds(Unread, words),
    findings=st.lists(
        st.builds(Finding, kind=words, severity=words, summary=words, action=st.text(max_size=20)), max_size=2
    ).map(tuple)
    | st.builds(Unread, words),
)


@given(cards)
def test_no_word_of_a_run_becomes_markup_and_nothing_is_run_or_loaded(card: ResultCard) -> None:
    page = Page(html(card))
    assert set(page.tags) <= HARMLESS
    assert not {name for name in page.attributes if name.startswith("on") or name in ("href", "src")}
    assert " ".join(card.path.split()) in page.text


def test_markup_in_names_values_and_errors_is_shown_as_it_is() -> None:
    evil = "<script>alert('&')</script>\"><img src=x onerror=y>"
    card = ResultCard(
        path=evil, state=evil, reason=evil, name=evil, about=((evil, evil),), error=evil, metrics=((evil, evil),),
        sparks=((Spark(evil, evil, (1,), (0.0,), (0.0,), (0.0,)),), 0),
        checkpoints=(CheckpointCard(evil, 1, evil, evil),),
        findings=(Finding(kind=evil, severity=evil, summary=evil, action=evil),),
    )  # fmt: skip
    page = Page(html(card))
    assert set(page.tags) <= HARMLESS
    assert page.text.count(evil) == 15


@given(sparks())
def test_a_small_curve_stays_within_its_frame_whatever_the_numbers_are(spark: Spark) -> None:
    drawing = ElementTree.fromstring(sparkline(spark))
    width, height = float(drawing.get("width", 0)), float(drawing.get("height", 0))
    for shape in drawing:
        for x, y in re.findall(r"([-\w.]+),([-\w.]+)", shape.get("points", "")):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
        assert all(math.isfinite(float(shape.get(name, 0))) for name in ("cx", "cy", "x1", "x2"))


def test_a_small_curve_is_broken_where_there_is_no_number_and_says_so() -> None:
    values = (1.0, 2.0, math.nan, 4.0, 5.0, math.inf, 7.0)
    drawing = ElementTree.fromstring(sparkline(Spark("a", "7", tuple(range(1, 8)), values, values, values)))
    kinds = [shape.tag for shape in drawing]
    assert (kinds.count("polyline"), kinds.count("circle"), kinds.count("line")) == (2, 1, 2)


def test_of_many_checkpoints_the_newest_and_the_best_are_shown() -> None:
    kept = tuple(
        CheckpointCard(f"c{row}", row, "1 B", "", is_best=row == 3, is_newest=row == 30)
        for row in range(1, 31)
    )
    text = Page(html(ResultCard(path="p", state="finished", checkpoints=kept))).text
    assert re.findall(r"\bc(\d+)\b", text) == ["3", *map(str, range(23, 31))]
    assert "c3 \N{BLACK STAR} best" in text
    assert "c30 newest" in text
    assert "and 21 older" in text


# --------------------------------------------------------------------------- of a run's directory


def page_of(path: Path) -> Page:
    return Page(Result.from_path(path)._repr_html_())


def test_a_run_is_reported_with_all_that_it_left(tmp_path: Path) -> None:
    start = ev.StartupMeasured(time=BEGAN + 3, attempt=0, seconds=2.5, world_size=2, path={"fork": 2.5})
    failed = ev.Ended(time=BEGAN + 100, state="failed", reason="that was enough", rows=1234, seconds=100.0)
    again = ev.Failed(
        time=BEGAN + 99, attempt=2, failures=(RAISED,), decision="give_up", reason="that was enough"
    )
    records = points(range(1, 9), lambda row, rank: {"loss": 1 / row, "note": "<b>"})
    write(
        tmp_path / "run", records, facts=[*EVENTFUL, start, again], checkpoints={4: {"loss": 0.25}, 8: {"loss": 1}},
        score=("loss", "min"), end=failed,
    )  # fmt: skip
    text = page_of(tmp_path / "run").text
    assert text.startswith(f"run failed that was enough {tmp_path / 'run'}")
    assert "took 1 min 40 s rows 1,234 workers 3 restarts 2" in text
    assert f"start-up {report.line(start)}" in text
    assert "Rank 1 raised ValueError: shard 7 is <empty> at train.py:12 in loop raise ValueError" in text
    assert "loss 0.25 note" in text
    assert "note <b>" in text
    assert re.search(r"c4 \N{BLACK STAR} best row 4 .* c8 newest row 8", text)


def test_the_findings_are_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "run", points([1], lambda row, rank: {"loss": 1}))
    result = Result.from_path(tmp_path / "run")
    found = Finding(kind="input_bound", severity="warning", summary="Ranks wait.", action="Add workers.")
    monkeypatch.setitem(result.__dict__, "findings", (found,))  # where the cached property keeps it
    assert (
        "diagnosis \N{BLACK CIRCLE} input_bound Ranks wait. do: Add workers."
        in Page(result._repr_html_()).text
    )


def test_a_run_that_never_reported_says_so(tmp_path: Path) -> None:
    write(tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert "rank 0 never reported" in page.text
    assert "svg" not in page.tags


def test_a_result_whose_storage_cannot_even_be_opened_is_still_shown() -> None:
    text = Page(Result(path="gone://away/run", state="finished", metrics={"loss": 0.5})._repr_html_()).text
    assert "gone://away/run" in text
    assert "its journal cannot be read: StorageError" in text
    assert "loss 0.5" in text


def test_a_run_whose_directory_is_gone_is_still_shown(tmp_path: Path) -> None:
    write(tmp_path / "run", points([1], lambda row, rank: {"loss": 0.5}))
    result = Result.from_path(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    text = Page(result._repr_html_()).text
    assert "its journal cannot be read: StorageError" in text
    assert "holds no run, or not any more" in text
    assert "loss 0.5" in text, "what is in memory is told"


class Closed(DirFileSystem):
    """A file system that does not let this user look at checkpoints."""

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if "/checkpoints/" in path:
            raise PermissionError(f"no access to {path}")
        return super().open(path, *arguments, **options)


def test_one_part_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path / "run", points([1, 2], lambda row, rank: {"loss": row}), checkpoints={1: {}})
    result = Result.from_path(tmp_path / "run", storage_filesystem=Closed("/", LocalFileSystem()))
    assert repr(result).endswith("checkpoint=<unread: PermissionError>)")
    page = Page(result._repr_html_())
    assert re.search(r"checkpoints its checkpoints cannot be read: \w+: .*no access to", page.text), page.text
    assert "svg" in page.tags
    assert "loss 2" in page.text


def test_more_metrics_than_there_is_room_for_are_counted(tmp_path: Path) -> None:
    def many(row: int, rank: int) -> dict[str, Any]:
        return {f"m{number}": number for number in range(20)}

    write(tmp_path / "run", points([1, 2], many))
    page = page_of(tmp_path / "run")
    assert page.tags.count("svg") == 12
    assert "and 8 more curves" in page.text


def test_phases_of_a_step_are_one_bar_with_speed_and_goodput_below() -> None:
    time = TimeCard((("forward", 0.75), ("<input>", 0.25)), 0.031, "32 steps/s", "91 % of 60 s in training")
    text = html(ResultCard(path="p", state="training", time=time))
    assert "time of a step (31.0 ms)" in text
    assert "width:75.00%" in text
    assert "&lt;input&gt; 25%" in text
    assert "32 steps/s" in Page(text).text
    assert "91 % of 60 s in training" in Page(text).text
    assert "time of a step" not in html(ResultCard(path="p", state="training"))
