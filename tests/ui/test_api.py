"""What the dashboard's pages fetch."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.hostile_run import HOSTILE, HOSTILE_NAME, is_harmless, write_hostile_run
from tests.recorded_run import EVENTFUL, at, points, write
from tests.ui import sample_runs
from tests.ui.signing_in import sign_in

from powertrain.errors import StorageError
from powertrain.lookup.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.storage import open_storage
from powertrain.storage.local import LocalStorage
from powertrain.ui.app import make_app
from powertrain.ui.listing import RunList
from powertrain.ui.live import version_text
from powertrain.ui.log_pages import MOST_BYTES, last_lines, new_lines
from powertrain.ui.places import Places, name_of
from powertrain.ui.run_pages import run_overview
from powertrain.ui.security import Access
from powertrain.views.encoding import id_of
from powertrain.views.log_ends import shown_line

TOKEN = "a-token-of-my-own"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = make_app(Places(str(tmp_path)), Access(TOKEN), port=80, names=frozenset({"testserver"}))
    with TestClient(app) as client:
        sign_in(client, TOKEN)
        yield client


def get(client: TestClient, path: str, **query: Any) -> Any:
    reply = client.get(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_list_has_runs_sweeps_small_curves_and_findings(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_all(tmp_path)
    content = get(client, "/api/runs")
    runs = {run["name"]: run for run in content["runs"]}
    assert runs["resnet50-imagenet"]["state"] == "finished"
    assert (runs["resnet50-imagenet"]["rows"], runs["resnet50-imagenet"]["attempts"]) == (600, 2)
    assert runs["vit-base-augment"]["state"] == "failed"
    assert [(one["name"], one["done"]) for one in content["sweeps"]] == [("lr-search", 24)]
    (small,) = get(client, "/api/sparks", run="resnet50-imagenet")
    assert small["spark"]["name"] == "loss"
    assert len(small["spark"]["rows"]) <= 80
    assert small["finding"]["ranks"] == [sample_runs.STRAGGLER]


def test_a_run_has_its_attempts_marks_goodput_checkpoints_and_findings(
    client: TestClient, tmp_path: Path
) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    page = get(client, "/api/run", run="run")
    assert (page["state"], page["ranks"], page["is_live"]) == ("finished", 4, False)
    assert page["metrics"] == ["loss", "accuracy", "lr", "grad_norm", "eval/loss", "eval/f1"]
    assert [mark["kind"] for mark in page["marks"]] == ["failure", "restart"]
    assert {one["cause"] for one in page["goodput"]} >= {"training", "redone", "recovery", "startup"}
    saved = page["checkpoints"]["committed"]
    assert [one["row"] for one in saved] == [300, 400, 500, 600]
    assert [one["name"] for one in saved if one["is_best"]] == ["checkpoint_000600"]
    assert page["diagnosis"]["findings"][0]["ranks"] == [sample_runs.STRAGGLER]
    assert page["unread"] == {}


def test_curves_have_as_many_pixels_as_were_asked_for_and_can_be_zoomed(
    client: TestClient, tmp_path: Path
) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    (line,) = get(client, "/api/lines", run="run", metric="loss", pixels=50)["lines"]
    assert (len(line["rows"]), line["points"]) == (47, 600), "pixels are whole rows: 13 each"
    assert all(low <= high for low, high in zip(line["low"], line["high"], strict=True))
    zoomed = get(client, "/api/lines", run="run", metric="loss", pixels=200, first=250, last=300)
    assert zoomed["lines"][0]["rows"] == list(range(250, 301))
    assert "low" not in zoomed["lines"][0], "a pixel of one value has no band"
    ranks = get(client, "/api/lines", run="run", metric=["loss", "accuracy"], rank="all")["lines"]
    assert [(one["name"], one["rank"]) for one in ranks] == [
        (name, rank) for name in ("loss", "accuracy") for rank in range(4)
    ]


def test_steps_and_resources_are_by_rank(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    steps = get(client, "/api/steps", run="run", columns=100)
    assert [row["rank"] for row in steps["rows"]] == [0, 1, 2, 3]
    machine = {chart["field"]: chart for chart in get(client, "/api/resources", run="run")["charts"]}
    busy = {line["rank"]: max(filter(None, line["values"])) for line in machine["gpu_busy"]["lines"]}
    assert min(busy, key=lambda rank: busy[rank]) == sample_runs.STRAGGLER
    assert machine["gpu_memory"]["limit"] == 40960


def test_a_page_has_the_share_of_its_rows_and_the_times_of_uploads(tmp_path: Path) -> None:
    made = points(range(1, 9), lambda row, rank: {"loss": 1.0 / row})
    storage = write(tmp_path / "run", made, checkpoints={4: {"loss": 0.25}, 8: {"loss": 0.125}})
    first = run_overview(Places(str(tmp_path)), "run")
    assert first["progress"] is None
    names = [one["name"] for one in first["checkpoints"]["committed"]]
    journal = Journal(storage, 2)
    # The clock of another host may be behind.
    for name, row, lag in zip(names, (4, 8), (2.5, -1.0), strict=True):
        journal.append(ev.Committed(time=at(row) + lag, attempt=0, row=row, checkpoint=name))
    journal.append(ev.Ended(time=at(9), state="finished", reason="", rows=8))
    journal.close()
    storage.put("run.json", b'{"run_config": {"stop": {"training_iteration": 32}}}')
    page = run_overview(Places(str(tmp_path)), "run")
    assert page["progress"] == {"rows": 32, "share": 0.25}
    assert [one["lag"] for one in page["checkpoints"]["committed"]] == [pytest.approx(2.5, abs=0.01), 0.0]


def test_rates_are_those_of_the_steps(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    charts = {chart["field"]: chart for chart in get(client, "/api/resources", run="run")["charts"]}
    assert [line["rank"] for line in charts["steps"]["lines"]] == [0, 1, 2, 3]
    rates = [value for value in charts["steps"]["lines"][0]["values"] if value is not None]
    assert sorted(rates)[len(rates) // 2] == pytest.approx(1 / sample_runs.ROW_S, rel=0.2)
    assert "tokens" not in charts, "no step has counted any"


def test_a_run_without_telemetry_has_a_page(client: TestClient, tmp_path: Path) -> None:
    write(tmp_path / "run", points(range(1, 4), lambda row, rank: {"loss": float("nan")}), facts=EVENTFUL)
    assert get(client, "/api/steps", run="run") is None
    assert get(client, "/api/resources", run="run") is None
    page = get(client, "/api/run", run="run")
    assert page["diagnosis"] is None
    (line,) = get(client, "/api/lines", run="run", metric="loss")["lines"]
    assert set(line["last"]) == {None}


def test_logs_are_read_from_their_end_searched_and_followed(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    page = get(client, "/api/logs", run="run")
    assert (page["attempt"], page["rank"], page["ranks"]) == (1, 0, [0, 1, 2, 3])
    assert page["lines"][-1].startswith("step  600")
    found = get(client, "/api/logs", run="run", rank=2, attempt=0, search="STEP   25")["lines"]
    assert [line.split()[1] for line in found] == ["25"]
    with (tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log").open("a") as file:
        file.write("one more\nhalf a li")
    newer = get(client, "/api/logs", run="run", after=page["offset"])
    assert newer["lines"] == ["one more"], "a line that is not complete comes later"
    assert newer["rest"] == "half a li"
    again = get(client, "/api/logs", run="run", after=newer["offset"])
    assert (again["lines"], again["rest"], again["offset"]) == ([], "half a li", newer["offset"])


def test_a_log_far_ahead_of_its_viewer_is_shown_from_its_end(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    path = tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log"
    page = get(client, "/api/logs", run="run")
    with path.open("ab") as file:
        file.write(b"x" * 70 + b"\n")
        file.write((b"y" * 99 + b"\n") * (MOST_BYTES // 50) + b"\r 10 %\r 20 %")
    newer = get(client, "/api/logs", run="run", after=page["offset"])
    assert newer["is_cut"]
    assert (len(newer["lines"]), newer["rest"]) == (500, " 20 %")
    older = get(client, "/api/logs", run="run", before=newer["searched_from"], search="step  600")
    assert older["lines"] == [], "the search is bounded"
    older = get(client, "/api/logs", run="run", before=older["searched_from"], search="step  600")
    assert len(older["lines"]) == 1
    assert older["searched_from"] == 0


def test_a_request_reads_a_bounded_part_of_a_log(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    with (tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log").open("ab") as file:
        file.truncate(50 << 20)
    read = LocalStorage.get_range
    asked: list[int] = []

    def counted(self: LocalStorage, key: str, start: int, length: int) -> Any:
        asked.append(length)
        return read(self, key, start, length)

    monkeypatch.setattr(LocalStorage, "get_range", counted)
    for query in ({}, {"search": "absent"}, {"after": "1"}, {"before": "40000000", "search": "absent"}):
        asked.clear()
        get(client, "/api/logs", run="run", **query)
        assert 0 < sum(length for length in asked if length > 4096) <= 2 * MOST_BYTES, query


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\0", b"\n")), st.data())
def test_reading_on_loses_no_line_and_shows_none_twice(data: bytes, draws: st.DataObject) -> None:
    offset, lines, end = 0, list[str](), 0
    while end < len(data):
        end = draws.draw(st.integers(end + 1, len(data)))
        part = new_lines(data[offset:end], offset, None)
        lines += part.lines
        assert part.offset == data.rfind(b"\n", 0, end) + 1
        offset = part.offset
    assert lines == [shown_line(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]]


@given(st.lists(st.sampled_from([b"a", b"ab", b"", b"b" * 30]), max_size=40), st.integers(5, 60))
def test_searching_further_finds_each_line_once(lines: list[bytes], step: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    end, found = len(data), list[str]()
    while end > 0:
        start = max(0, end - step)
        part = last_lines(data[start:end], start, re.compile("a"))
        assert part.searched_from < end, "each search goes further"
        found[:0] = part.lines
        end = part.searched_from
    assert [line for line in found if line] == [line.decode() for line in lines if b"a" in line]


def test_a_page_names_its_version_and_has_a_bounded_number_of_events(
    client: TestClient, tmp_path: Path
) -> None:
    many = [ev.Warned(time=at(row), attempt=0, message=f"warning {row}") for row in range(400)]
    write(tmp_path / "run", points(range(1, 4), lambda row, rank: {"loss": 1.0}), facts=[*EVENTFUL, *many])
    page = get(client, "/api/run", run="run")
    assert len(page["events"]) == 300
    assert page["events"][-1]["words"] == "warning 399", "the newest"
    places = Places(str(tmp_path))
    assert page["version"] == version_text(places.version("run")), "as events name it"
    assert get(client, "/api/runs")["version"] == version_text(RunList(places).version())


def test_a_grown_journal_is_read_on_and_a_new_run_of_the_name_from_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.ui.places._LOCAL_AGE_S", 0.0)
    storage = open_storage(tmp_path / "run")
    begun = Journal(storage, 1)
    start = ev.RunStarted(time=at(0), name="run", lease=1, host="h", pid=1, version="0", engine="local")
    begun.append(start)
    places = Places(str(tmp_path))
    first = places.record("run")
    begun.append(EVENTFUL[0])
    begun.close()
    second = places.record("run")
    assert (first.facts, second.facts) == ([start], [start, EVENTFUL[0]])
    assert second.watch is first.watch, "only what was added was read"
    shutil.rmtree(tmp_path / "run")
    other = Journal(storage, 1)
    again = msgspec.structs.replace(start, time=at(7))
    for fact in (again, EVENTFUL[0], EVENTFUL[0]):
        other.append(fact)
    other.close()
    assert places.record("run").facts[0] == again


def test_more_runs_than_are_kept_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        ended = ev.Ended(time=at(9), state="finished", reason="")
        write(tmp_path / f"run-{number}", points(range(1, 3), lambda row, rank: {"loss": 1.0}), end=ended)
    monkeypatch.setattr("powertrain.ui.places._MOST_RECORDS", 2)
    looks: list[int] = []
    monkeypatch.setattr(RunWatch, "look", lambda self, look=RunWatch.look: looks.append(1) or look(self))
    runs = RunList(Places(str(tmp_path)))
    assert runs.all() == runs.all() == runs.all()
    assert len(looks) == 5


def test_a_run_is_found_without_a_look_at_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, points(range(1, 3), lambda row, rank: {"loss": 1.0}))

    def names(*_: object) -> Any:
        raise AssertionError("all runs were listed")

    monkeypatch.setattr("powertrain.ui.places.names_in", names)
    places = Places(str(tmp_path))
    assert places.record("one").facts
    with pytest.raises(StorageError, match="There is no run 'three' here"):
        places.find("three")


def test_the_list_changes_with_the_metrics_of_a_run_that_goes_on_and_its_silence_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.ui.places._LOCAL_AGE_S", 0.0)
    storage = open_storage(tmp_path / "run")
    journal = Journal(storage, 1)
    journal.append(
        ev.RunStarted(time=at(0), name="run", lease=1, host="elsewhere", pid=1, version="0", engine="local")
    )
    journal.close()
    runs = RunList(Places(str(tmp_path)))
    before = runs.version()
    assert runs.version() == before
    storage.put("metrics/new", b"")
    assert runs.version() != before
    (row,) = runs.all()["runs"]
    assert row["silent_since"] == 0
    long_ago = time.time() - 86400
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    (row,) = runs.all()["runs"]
    assert row["silent_since"] == pytest.approx(long_ago, abs=1)
    storage.put("lease/0001.beat", b"")
    (row,) = runs.all()["runs"]
    assert row["silent_since"] == 0, "its heart beats"


def test_a_sweep_has_trials_axes_curves_and_importance(client: TestClient, tmp_path: Path) -> None:
    sample_runs.write_search(open_storage(tmp_path / "sweep"), 1.7e9)
    page = get(client, "/api/sweep", run="sweep")
    assert len(page["trials"]) == len(page["curves"]) == 24
    axes = {axis["path"]: axis for axis in page["axes"]}
    assert set(axes) == {"lr", "width", "dropout", "optimizer"}
    assert axes["lr"]["is_log"]
    assert max(axes, key=lambda path: axes[path]["importance"]) == "lr"
    scores = {trial["name"]: trial["score"] for trial in page["trials"]}
    assert page["best_trial"] == min(scores, key=lambda name: scores[name])


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/api/lines", {"rank": "-1"}),
        ("/api/lines", {"rank": "1e9"}),
        ("/api/lines", {"pixels": "many"}),
        ("/api/lines", {"first": "1", "last": "\u0663"}),
        ("/api/steps", {"begin": "2", "end": "1"}),
        ("/api/steps", {"begin": "nan", "end": "inf"}),
        ("/api/logs", {"attempt": "x"}),
        ("/api/logs", {"search": "x" * 500}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    client: TestClient, tmp_path: Path, path: str, query: Any
) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    reply = client.get(path, params={"run": "run", "metric": "loss", **query})
    assert reply.status_code == 400
    assert "error" in reply.json()


def test_a_run_that_is_not_there_is_one_sentence(client: TestClient) -> None:
    reply = client.get("/api/run", params={"run": "none"})
    assert reply.status_code == 404
    assert reply.json()["error"].startswith("There is no run 'none' here.")


def test_a_run_that_an_enemy_wrote_is_shown_and_hides_no_other(client: TestClient, tmp_path: Path) -> None:
    write_hostile_run(open_storage(tmp_path).child(HOSTILE_NAME), ended=True)
    write(tmp_path / "good", points(range(1, 4), lambda row, rank: {"loss": 1.0}))
    (tmp_path / "damaged" / "journal").mkdir(parents=True)
    (tmp_path / "damaged" / "journal" / "0001-000001.jsonl").write_bytes(b"\xff\x00 no facts\n")
    own = id_of(HOSTILE_NAME)
    assert name_of(own) == HOSTILE_NAME
    listed = client.get("/api/runs")
    assert {run["state"] for run in listed.json()["runs"]} >= {"failed", "unreadable"}
    assert len(listed.json()["runs"]) == 3
    for path in ("/api/run", "/api/lines", "/api/steps", "/api/resources", "/api/logs"):
        reply = client.get(path, params={"run": own, "metric": HOSTILE})
        assert reply.status_code == 200, reply.text
        assert is_harmless(reply.text.replace("\n", "")), path


def test_one_run_can_be_shown_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, points(range(1, 4), lambda row, rank: {"loss": 1.0}))
    places = Places(str(tmp_path), "one")
    app = make_app(places, Access(TOKEN), port=80, names=frozenset({"testserver"}))
    with TestClient(app) as client:
        sign_in(client, TOKEN)
        assert [run["name"] for run in get(client, "/api/runs")["runs"]] == ["one"]
        assert client.get("/api/run", params={"run": "two"}).status_code == 404
