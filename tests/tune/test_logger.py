"""Loggers write each report once, whatever happens to the process in between."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.trackers.text_files import cut_to_whole_lines
from powertrain.tune import logger as lg
from powertrain.tune.logger.base import as_json, flatten
from powertrain.tune.trial import Trial


@pytest.fixture(autouse=True)
def _variable_of_tensorboardx() -> Iterator[None]:
    """Importing tensorboardX sets a variable, and no test may leave one behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRC32C_SW_MODE", "auto")
        yield


def make_trial(path: Any, **changes: Any) -> Trial:
    config = {"lr": 0.1, "model": {"depth": 3}}
    trial = Trial("7f3a2_00000", 0, "train_7f3a2_00000", config, path=str(path))
    trial.evaluated_params = {"lr": 0.1, "model/depth": 3}
    for name, value in changes.items():
        setattr(trial, name, value)
    return trial


def report(iteration: int, **metrics: Any) -> dict[str, Any]:
    return {
        "training_iteration": iteration,
        "time_total_s": float(iteration),
        "config": {"lr": 0.1},
        **metrics,
    }


def send(logger: lg.LoggerCallback, trial: Trial, *results: dict[str, Any]) -> None:
    """Make the calls of a sweep for these reports."""
    for result in results:
        trial.add_report(result)
        logger.on_trial_result(1, [trial], trial, result)


def start(logger: lg.LoggerCallback, trial: Trial) -> None:
    logger.on_trial_start(1, [trial], trial)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------- the base class


def test_the_hooks_of_a_callback_call_those_of_a_logger(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Own(lg.LoggerCallback):
        def log_trial_start(self, trial: Trial) -> None:
            calls.append(("start", trial))

        def log_trial_restore(self, trial: Trial) -> None:
            calls.append(("restore", trial))

        def log_trial_save(self, trial: Trial) -> None:
            calls.append(("save", trial))

        def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
            calls.append((iteration, trial, result))

        def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
            calls.append((failed, trial))

    trial, own = make_trial(tmp_path), Own()
    for hook in ("start", "restore", "save", "complete", "error"):
        getattr(own, f"on_trial_{hook}")(iteration=1, trials=[trial], trial=trial, later=1)
    own.on_trial_result(iteration=4, trials=[trial], trial=trial, result={"loss": 1.0}, later=1)
    assert calls == [
        ("start", trial),
        ("restore", trial),
        ("save", trial),
        (False, trial),
        (True, trial),
        (4, trial, {"loss": 1.0}),
    ]


def test_a_report_is_printed_without_its_configuration() -> None:
    text = lg.pretty_print(
        {"loss": np.float32(0.5), "config": {"lr": 1}, "a": {"b": [1]}, "no": 1}, exclude={"no"}
    )
    assert text == "a:\n  b:\n  - 1\nloss: 0.5\n"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=10,
    )
)
def test_plain_values_come_back_from_json(value: Any) -> None:
    def with_text_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): with_text_keys(item) for key, item in value.items()}
        return [with_text_keys(item) for item in value] if isinstance(value, list) else value

    assert json.loads(as_json(value)) == with_text_keys(value)


def test_objects_become_text_in_json() -> None:
    value = {
        "path": Path("/a"),
        "array": np.arange(2),
        "number": np.int64(3),
        "function": start,
        ("a", 1): {1.5: 2},
    }
    found = json.loads(as_json(value))
    assert found.pop("function").startswith("<function start")
    assert found == {"path": "/a", "array": [0, 1], "number": 3, "('a', 1)": {"1.5": 2}}


def test_nested_metrics_become_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {}}) == {"a/b": 1, "a/c/d": 2, "e": 3, "f": {}}


@given(
    rows=st.lists(st.lists(st.text(st.characters(codec="utf-8")), min_size=2), max_size=5), cut=st.integers(0)
)
def test_what_is_left_of_a_csv_file_that_was_cut_are_its_whole_rows(rows: list[list[str]], cut: int) -> None:
    text = io.StringIO(newline="")
    ends = [0]
    for row in rows:
        csv.writer(text, lineterminator="\n").writerow(row)
        ends.append(len(text.getvalue().encode()))
    content = text.getvalue().encode()
    cut %= len(content) + 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "progress.csv")
        path.write_bytes(content[:cut])
        kept = cut_to_whole_lines(path, has_quotes=True).encode()
        assert kept == path.read_bytes() == content[: max(end for end in ends if end <= cut)]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert cut_to_whole_lines(tmp_path / "result.json") == ""
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- CSV


def test_reports_become_rows(tmp_path: Path) -> None:
    trial, logger = make_trial(tmp_path / "new"), lg.CSVLoggerCallback()
    start(logger, trial)
    send(
        logger,
        trial,
        report(1, eval={"loss": 0.5}, note='a "b",\nc'),
        report(2, eval={"loss": 0.25}, note="d"),
    )
    rows = rows_of(tmp_path / "new" / "progress.csv")
    assert [row["eval/loss"] for row in rows] == ["0.5", "0.25"]
    assert [row["note"] for row in rows] == ['a "b",\nc', "d"]
    assert "config" not in rows[0]
    assert "config/lr" not in rows[0]


def test_metrics_that_appear_later_are_left_out_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial, logger = make_trial(tmp_path), lg.CSVLoggerCallback()
    with caplog.at_level(logging.WARNING, "powertrain"):
        send(logger, trial, report(1, loss=1.0), report(2, loss=0.5, late=1), report(3, late=2, later=3))
    assert [row["loss"] for row in rows_of(tmp_path / "progress.csv")] == ["1.0", "0.5", ""]
    assert len(caplog.records) == 1
    assert "'late'" in caplog.text
    assert "train_7f3a2_00000" in caplog.text


def test_after_a_restart_rows_are_added_below_the_same_columns(tmp_path: Path) -> None:
    send(lg.CSVLoggerCallback(), make_trial(tmp_path), report(1, a=1, b=2), report(2, a=3, b=4))
    path = tmp_path / "progress.csv"
    with path.open("a") as file:
        file.write('3,"half a')
    trial, again = make_trial(tmp_path, iteration=2), lg.CSVLoggerCallback()
    start(again, trial)
    for iteration in (1, 2, 3):
        again.log_trial_result(1, trial, report(iteration, b=6, a=5))
    assert [(row["training_iteration"], row["a"], row["b"]) for row in rows_of(path)] == [
        ("1", "1", "2"),
        ("2", "3", "4"),
        ("3", "5", "6"),
    ]


def test_a_row_with_a_long_value_can_be_read_again(tmp_path: Path) -> None:
    trial = make_trial(tmp_path)
    send(lg.CSVLoggerCallback(), trial, report(1, weights=[0.123456789] * 20_000))
    send(lg.CSVLoggerCallback(), trial, report(2, weights=[]))
    assert len((tmp_path / "progress.csv").read_text().splitlines()) == 3


# --------------------------------------------------------------------------- JSON


def test_reports_become_lines_and_the_configuration_files(tmp_path: Path) -> None:
    trial, logger = make_trial(tmp_path), lg.JsonLoggerCallback()
    start(logger, trial)
    send(logger, trial, report(1, loss=float("inf")), report(2, loss=0.5))
    assert [line["loss"] for line in lines_of(tmp_path / "result.json")] == [float("inf"), 0.5]
    assert json.loads((tmp_path / "params.json").read_text()) == trial.config
    assert pickle.loads((tmp_path / "params.pkl").read_bytes()) == trial.config


def test_a_changed_configuration_replaces_the_files(tmp_path: Path) -> None:
    trial, logger = make_trial(tmp_path), lg.JsonLoggerCallback()
    start(logger, trial)
    send(logger, trial, report(1))
    trial.config = {"lr": 0.2, "function": start}
    start(logger, trial)
    written = json.loads((tmp_path / "params.json").read_text())
    assert written["lr"] == 0.2
    assert "start" in written["function"]
    assert {path.name for path in tmp_path.iterdir()} == {"params.json", "params.pkl", "result.json"}
    assert len(lines_of(tmp_path / "result.json")) == 1


def iter_nothing() -> Iterator[None]:
    yield from ()


def test_a_configuration_that_cannot_be_pickled_is_written_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = make_trial(tmp_path, config={"generator": iter_nothing()})
    with caplog.at_level(logging.WARNING, "powertrain"):
        start(lg.JsonLoggerCallback(), trial)
    assert "generator" in json.loads((tmp_path / "params.json").read_text())
    assert "params.pkl of trial train_7f3a2_00000 is not written: TypeError" in caplog.text


def test_after_a_restart_lines_are_added(tmp_path: Path) -> None:
    send(lg.JsonLoggerCallback(), make_trial(tmp_path), report(1, a=1), report(2, a=2))
    path = tmp_path / "result.json"
    with path.open("a") as file:
        file.write('not of a report\n{"training_iteration": 3, "a"')
    trial, again = make_trial(tmp_path, iteration=2), lg.JsonLoggerCallback()
    start(again, trial)
    for iteration in (2, 3):
        again.log_trial_result(1, trial, report(iteration, a=9))
    assert [line for line in path.read_text().splitlines() if "{" not in line] == ["not of a report"]
    kept = [json.loads(line) for line in path.read_text().splitlines() if "{" in line]
    assert [(line["training_iteration"], line["a"]) for line in kept] == [(1, 1), (2, 2), (3, 9)]


# --------------------------------------------------------------------------- TensorBoard


def events_in(directory: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for path in sorted(directory.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            length = struct.unpack("<Q", content[:8])[0]
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars_in(directory: Path) -> list[tuple[str, int, float]]:
    return [
        (value.tag, event.step, value.simple_value)
        for event in events_in(directory)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def tags_in(directory: Path) -> set[str]:
    return {value.tag for event in events_in(directory) for value in event.summary.value}


def test_numbers_become_charts_and_drawn_values_hyperparameters(tmp_path: Path) -> None:
    trial, logger = make_trial(tmp_path), lg.TBXLoggerCallback()
    start(logger, trial)
    send(
        logger,
        trial,
        report(1, eval={"loss": 0.5}, bad=float("nan")),
        report(2, eval={"loss": 0.25}, ok=True),
    )
    logger.on_trial_complete(1, [trial], trial)
    assert scalars_in(tmp_path) == [("ray/tune/eval/loss", 1, 0.5), ("ray/tune/eval/loss", 2, 0.25)]
    assert {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"} <= tags_in(
        tmp_path
    )
    assert any(b"model/depth" in event.SerializeToString() for event in events_in(tmp_path))


def test_lists_and_arrays_become_histograms_and_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial, logger = make_trial(tmp_path), lg.TBXLoggerCallback()
    image = np.zeros((3, 4, 4), dtype=np.uint8)
    with caplog.at_level(logging.WARNING, "powertrain"):
        for iteration in (1, 2):
            send(logger, trial, report(iteration, some=[1.0, 2.0], image=image, words=["a"], none=[]))
        logger.on_experiment_end([trial])
    kinds = {
        value.tag: value.WhichOneof("value") for event in events_in(tmp_path) for value in event.summary.value
    }
    assert kinds == {"ray/tune/some": "histo", "ray/tune/image": "image"}
    assert len(caplog.records) == 1
    assert "'ray/tune/words' has no chart" in caplog.text


def test_steps_are_those_that_a_trial_counts_itself(tmp_path: Path) -> None:
    trial, logger = make_trial(tmp_path), lg.TBXLoggerCallback()
    send(logger, trial, report(1, loss=0.5, timesteps_total=1000))
    logger.on_trial_error(1, [trial], trial)
    assert ("ray/tune/loss", 1000, 0.5) in scalars_in(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\x07", struct.pack("<Q", 2**62) + b"1234", b"\x00" * 11])
def test_after_a_restart_events_are_added(tmp_path: Path, damage: bytes) -> None:
    trial, first = make_trial(tmp_path), lg.TBXLoggerCallback()
    start(first, trial)
    send(first, trial, report(1, loss=0.5), report(300, loss=0.25))
    first.on_experiment_end([trial])
    (path,) = tmp_path.glob("events*")
    before = scalars_in(tmp_path)
    path.write_bytes(path.read_bytes() + damage)
    again = pickle.loads(pickle.dumps(first))
    start(again, trial)
    for iteration in (300, 301):
        again.log_trial_result(1, trial, report(iteration, loss=0.125))
    again.on_trial_complete(1, [trial], trial)
    path.write_bytes(path.read_bytes()[: -len(damage) or None])
    assert sorted(scalars_in(tmp_path)) == sorted([*before, ("ray/tune/loss", 301, 0.125)])


def test_a_trial_that_had_reported_all_before_a_restart_gets_its_hyperparameters(tmp_path: Path) -> None:
    trial, first = make_trial(tmp_path), lg.TBXLoggerCallback()
    send(first, trial, report(1, loss=0.5))
    first.on_experiment_end([trial])
    lg.TBXLoggerCallback().on_trial_complete(1, [trial], trial)
    assert "_hparams_/session_end_info" in tags_in(tmp_path)


def test_without_a_package_that_writes_events_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lg.has_tensorboard()
    find = importlib.util.find_spec
    without = lambda name: None if name.startswith("tensorboard") else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert not lg.has_tensorboard()
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        lg.TBXLoggerCallback()


# --------------------------------------------------------------------------- what holds for all


LOGGERS: dict[str, tuple[Callable[[], lg.LoggerCallback], Callable[[Path], list[int]]]] = {
    "csv": (
        lg.CSVLoggerCallback,
        lambda directory: [int(row["training_iteration"]) for row in rows_of(directory / "progress.csv")],
    ),
    "json": (
        lg.JsonLoggerCallback,
        lambda directory: [line["training_iteration"] for line in lines_of(directory / "result.json")],
    ),
    "tensorboard": (
        lg.TBXLoggerCallback,
        lambda directory: sorted(step for tag, step, _ in scalars_in(directory) if tag == "ray/tune/loss"),
    ),
}


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_trial_that_begins_anew_leaves_its_earlier_files(kind: str, tmp_path: Path) -> None:
    make, iterations = LOGGERS[kind]
    trial, logger = make_trial(tmp_path), make()
    start(logger, trial)
    send(logger, trial, report(1, loss=1.0), report(2, loss=1.0), report(3, loss=1.0))
    logger.on_trial_error(1, [trial], trial)
    fresh = make_trial(tmp_path)
    start(logger, fresh)
    send(logger, fresh, report(1, loss=0.5))
    logger.on_trial_complete(1, [fresh], fresh)
    assert iterations(tmp_path) == [1]


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_trial_that_was_paused_continues_its_file(kind: str, tmp_path: Path) -> None:
    make, iterations = LOGGERS[kind]
    trial, logger = make_trial(tmp_path), make()
    for iteration in (1, 2, 3):
        start(logger, trial)
        send(logger, trial, report(iteration, loss=1.0))
    logger.on_trial_complete(1, [trial], trial)
    assert iterations(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("kind", LOGGERS)
@pytest.mark.parametrize(
    "address", ["s3://key:secret@bucket/sweep", "/of/a/file/system/given", "bucket/sweep"]
)
def test_trials_on_other_file_systems_have_no_files_which_is_said_once(
    kind: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = LOGGERS[kind][0]()
    with caplog.at_level(logging.WARNING, "powertrain"):
        for number in range(2):
            trial = make_trial(f"{address}/trial-{number}")
            start(logger, trial)
            send(logger, trial, report(1, loss=1.0))
            logger.on_trial_complete(1, [trial], trial)
    assert len(caplog.records) == 1
    assert address[-5:] in caplog.text
    assert "secret" not in caplog.text
    assert not os.path.exists(address)


@pytest.mark.parametrize("kind", LOGGERS)
def test_addresses_of_files_are_directories_of_this_machine(kind: str, tmp_path: Path) -> None:
    make, iterations = LOGGERS[kind]
    trial, logger = make_trial(f"file://{tmp_path}/a%20b"), make()
    start(logger, trial)
    send(logger, trial, report(1, loss=1.0))
    logger.on_trial_complete(1, [trial], trial)
    assert iterations(tmp_path / "a b") == [1]


@pytest.mark.parametrize("kind", LOGGERS)
def test_a_trial_without_a_place_writes_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, logger = make_trial(""), LOGGERS[kind][0]()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        start(logger, trial)
        send(logger, trial, report(1, loss=1.0))
        logger.on_trial_complete(1, [trial], trial)
    assert list(tmp_path.iterdir()) == []
