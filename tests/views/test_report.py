"""``report.html``: one file under a limit, which no value of a run can make do anything."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recorded_run import at, attempt, points, write
from tests.ui import sample_runs

from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import Storage, open_storage
from powertrain.trace import store
from powertrain.views.log_ends import LogFile, chosen_logs, log_ends
from powertrain.views.report import content
from powertrain.views.report.bundle import bundle
from powertrain.views.report.content import logs_in, run_report, within_limit
from powertrain.views.report.detail import MOST_BYTES, choose_curves
from powertrain.views.report.document import document
from powertrain.views.report.writing import REPORT, keep_report
from powertrain.views.run_page import ShownRun

ENDED = ev.Ended(time=at(9), state="finished", reason="")


def replies_in(made: bytes) -> dict[str, Any]:
    """What the file's data block holds."""
    block = made.decode().partition('id="replies">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(block)
    return found


def shown(storage: Storage, name: str = "run") -> ShownRun:
    return ShownRun(name, storage, journal.read(storage), lambda: store.read(storage))


# --------------------------------------------------------------------------- the whole


def test_a_run_with_everything_is_one_small_file_with_all_parts(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "eventful")
    sample_runs.write_eventful(storage, 1.7e9)
    keep_report(storage, "eventful")
    made = (tmp_path / "eventful" / REPORT).read_bytes()
    assert len(made) < MOST_BYTES
    found = replies_in(made)
    run = found["run"]
    assert (run["state"], run["rows"], run["left_out"], run["unread"]) == ("finished", 600, [], {})
    assert run["diagnosis"]["findings"]
    assert {mark["kind"] for mark in run["marks"]} == {"failure", "restart"}
    assert {one["cause"] for one in run["goodput"]} >= {"training", "redone"}
    assert run["kept_ranks"] == [0, 1, 2, 3]
    assert {(line["name"], line["rank"]) for line in found["lines"]["lines"]} == {
        (name, rank) for name in run["metrics"] for rank in range(4)
    }
    assert [row["rank"] for row in found["steps"]["rows"]] == [0, 1, 2, 3]
    assert found["resources"]["charts"]
    assert {(log["attempt"], log["rank"]) for log in found["logs"]} == {
        (number, rank) for number in (0, 1) for rank in range(4)
    }


def test_nothing_is_written_for_a_directory_without_a_journal(tmp_path: Path) -> None:
    keep_report(open_storage(tmp_path), "run")
    assert not (tmp_path / REPORT).exists()


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    storage = write(tmp_path / "run", points(range(1, 9), lambda row, rank: {"loss": row}), end=ENDED)

    def broken() -> Any:
        raise OSError("the disk is gone")

    made = run_report(dataclasses.replace(shown(storage), telemetry=broken), logs_in(shown(storage)))
    found = replies_in(made)
    assert "the disk is gone" in found["run"]["unread"]["steps"]
    assert "the disk is gone" in found["run"]["unread"]["resources"]
    assert found["steps"] is None
    assert [line["name"] for line in found["lines"]["lines"]] == ["loss"]


def test_curves_that_would_take_too_long_are_left_out_and_named(tmp_path: Path) -> None:
    many = points(range(1, 5), lambda row, rank: {f"m{number}": row for number in range(20)}, ranks=(0, 1))
    storage = write(tmp_path / "run", many, facts=(attempt(0, 2, 1),), end=ENDED)
    run = shown(storage)
    found = replies_in(run_report(run, logs_in(run), seconds=-1.0))
    assert found["run"]["metrics"] == [f"m{number}" for number in range(8)]
    assert {line["rank"] for line in found["lines"]["lines"]} == {0}
    assert "8 of 20 metrics, of rank 0" in found["run"]["left_out"][0]
    whole = replies_in(run_report(run, logs_in(run)))
    assert (len(whole["run"]["metrics"]), whole["run"]["left_out"]) == (20, [])
    assert {line["rank"] for line in whole["lines"]["lines"]} == {0, 1}


def test_other_ranks_are_left_out_before_metrics_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = points(range(1, 5), lambda row, rank: {f"m{number}": row for number in range(10)}, ranks=(0, 1, 2))
    storage = write(tmp_path / "run", few, facts=(attempt(0, 3, 1),), end=ENDED)
    run = shown(storage)
    times = iter([0.0, 0.1, 0.2])  # the begin, and a look before each of the two parts of rank 0
    clock = SimpleNamespace(monotonic=lambda: next(times, 9.0), time=time.time)
    monkeypatch.setattr(content, "time", clock)
    found = replies_in(run_report(run, logs_in(run), seconds=1.0))
    assert found["run"]["kept_ranks"] == [0]
    assert [line["name"] for line in found["lines"]["lines"]] == found["run"]["metrics"]
    assert len(found["run"]["metrics"]) == 10
    assert found["run"]["left_out"] == [
        "This report has the metrics of rank 0. The dashboard shows those of all ranks."
    ]


# --------------------------------------------------------------------------- its size


@given(st.integers(0, 3000), st.integers(1, 5000))
def test_curves_fit_into_their_share_whatever_the_run_has(count: int, world_size: int) -> None:
    detail = choose_curves([f"metric-{number}" for number in range(count)], world_size)
    pixels = len(detail.metrics) * len(detail.ranks) * detail.pixels
    assert pixels * 34 <= 600_000
    assert 0 in detail.ranks
    assert 60 <= detail.pixels <= 400
    assert len(detail.metrics) == count or detail.ranks == [0]


def test_many_ranks_metrics_checkpoints_and_long_logs_stay_below_the_limit(tmp_path: Path) -> None:
    def metrics(row: int, rank: int) -> dict[str, float]:
        return {f"metric-{number}": 1 / (row + number + rank / 7) for number in range(60)}

    storage = write(
        tmp_path / "run",
        points(range(1, 300), metrics, ranks=range(8)),
        facts=(attempt(0, 8, 1),),
        end=ev.Ended(time=at(9), state="failed", reason="long " * 5000),
    )
    for rank in range(8):
        storage.put(f"logs/attempt-0/rank-{rank}.log", b"a line of the log <b>\n" * 50_000)
    run = shown(storage)
    made = run_report(run, logs_in(run))
    assert len(made) < MOST_BYTES
    found = replies_in(made)
    assert len(found["run"]["metrics"]) == 60
    assert "of rank 0" in found["run"]["left_out"][0]
    assert len(found["run"]["reason"]) < 2000
    assert all(log["is_cut"] and len(log["lines"]) > 1000 for log in found["logs"])


def small_replies(**parts: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "lines": {"lines": [], "times": None},
        "steps": None,
        "resources": None,
        "logs": [],
    }
    return {"run": {"left_out": [], "name": "run"}, **empty, **parts}


def test_a_part_that_is_too_large_is_left_out_and_named() -> None:
    logs = [{"lines": ["x" * 100_000]}]
    steps = {"cells": "y" * 50_000}
    limit = len(document("run", small_replies(steps=steps))) + 1000
    found = replies_in(within_limit("run", small_replies(steps=steps, logs=logs), limit))
    assert (found["logs"], found["steps"]) == ([], steps)
    assert "the ends of the logs" in found["run"]["left_out"][0]
    least = len(document("run", small_replies())) + 1000
    found = replies_in(within_limit("run", small_replies(steps=steps, logs=logs), least))
    assert (found["logs"], found["steps"]) == ([], None)
    assert len(found["run"]["left_out"]) == 2


def test_a_report_that_is_too_large_without_any_part_is_refused_with_its_size() -> None:
    with pytest.raises(StorageError, match=r"'run' would have .* 'powertrain ui'"):
        within_limit("run", small_replies(), 1000)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300), st.integers(0, 10**9))), st.integers(1, 10**6)
)
def test_logs_share_their_bytes_and_the_newest_attempt_is_chosen_first(
    files: list[tuple[int, int, int]], budget: int
) -> None:
    logs = [LogFile(number, rank, f"{number}-{rank}", size) for number, rank, size in files]
    chosen, each = chosen_logs(logs, budget)
    assert each * len(chosen) <= budget
    left = set(logs) - set(chosen)
    assert all(log.attempt <= min(one.attempt for one in chosen) for log in left)


def test_the_end_of_a_log_begins_with_a_whole_line_and_one_that_is_gone_is_left_out() -> None:
    data = {"a": b"first line\nsecond\nthird\n", "b": b"unfinished"}

    def read(log: LogFile, start: int, length: int) -> bytes:
        if log.key == "gone":
            raise FileNotFoundError(log.key)
        return data[log.key][start : start + length]

    logs = [LogFile(0, 0, "a", 24), LogFile(0, 1, "b", 10), LogFile(0, 2, "gone", 9)]
    assert log_ends(logs, read, 3 * 2000) == [
        {"attempt": 0, "rank": 0, "lines": ["first line", "second", "third"], "is_cut": False},
        {"attempt": 0, "rank": 1, "lines": ["unfinished"], "is_cut": False},
    ]
    assert log_ends(logs[:1], read, 15) == [
        {"attempt": 0, "rank": 0, "lines": ["second", "third"], "is_cut": True}
    ]


# --------------------------------------------------------------------------- its safety


def test_only_the_two_blocks_with_the_hashes_of_the_policy_can_run_and_nothing_is_loaded() -> None:
    page = document("run", small_replies()).decode()
    policy = html.unescape(page.partition('Content-Security-Policy" content="')[2].partition('"')[0])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "trusted-types 'none'" in policy
    rest = page.replace(script, "").replace(style, "")
    assert re.findall(r"(?:src|href)=\"([^\"]*)", rest)[1:] == ["#content"], (
        "and the icon, which is in the file"
    )
    assert not re.search(r"https?://|\bon\w+=|\bstyle=", rest)
    assert "https:" not in script.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<script") == 2


@given(st.text(), st.text())
def test_any_text_of_a_run_is_only_data(name: str, text: str) -> None:
    attack = f"</script><script>alert(1)</script><!--{text}"
    replies = {"run": {"name": attack, attack: [attack]}}
    page = document(f"{attack}{name}", replies).decode()
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert page.count("<title>") == page.count("</title>") == 1
    block = page.partition('id="replies">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(block)


# --------------------------------------------------------------------------- one script of many


def test_modules_become_functions_that_hand_on_their_exports() -> None:
    modules = {
        "low": "export const ONE = 1;\nexport function two() { return 2; }\nexport class Three {}\n",
        "high": 'import { ONE, two as second } from "./low.js";\nuse(ONE, second());\n',
        "other": "never()",
    }
    made = bundle(modules, "high")
    assert "const { ONE, second }" not in made
    assert "const { ONE, two: second } = module_low;" in made
    assert "return { ONE, two, Three };" in made
    assert made.index("module_low = ") < made.index("use(ONE")
    assert "never()" not in made


def circle() -> dict[str, str]:
    return {"a": 'import { b } from "./b.js";', "b": 'import { a } from "./a.js";'}


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (circle, "a -> b -> a"),
        (lambda: {"a": "export default 3;"}, "export default"),
        (lambda: {"a": 'import * as x from "./b.js";'}, "import"),
    ],
    ids=["circle", "default", "star"],
)
def test_what_cannot_be_bundled_is_named(modules: Callable[[], dict[str, str]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bundle(modules(), "a")
