"""Sweeps on the command line: one row of ``ls``, a page of ``show``, trials as runs, and ``stop``."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_logs import invoke, put_log
from tests.cli.test_logs import write as write_run
from tests.s3_server import S3Server
from tests.tune.recorded_sweep import RECORD, started, trial_facts, trial_id, trial_name, write_sweep

from powertrain.errors import StorageError
from powertrain.lookup.finding import find_run, find_run_or_sweep
from powertrain.lookup.sweeps import count_trials, leave_out_superseded, summarize
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage
from powertrain.storage.files.private_roots import runtime_roots
from powertrain.tune import trial as tr
from powertrain.tune.sweep.control import SweepVisits
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.record import read_journal
from powertrain.tune.sweep.journal.state import SweepState, replay


@pytest.fixture
def place() -> Storage:
    """The storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


def three_trials(at: float, **of_last: Any) -> list[list[ev.SweepEvent]]:
    return [
        trial_facts(0, {"lr": 0.1, "layers": 1}, [3.0, 2.0], at=at),
        trial_facts(1, {"lr": 0.01, "layers": 2}, [3.0, 1.0], at=at),
        trial_facts(2, {"lr": 0.5, "layers": 1}, [9.0], at=at, **of_last),
    ]


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --------------------------------------------------------------------------- ls


def test_ls_shows_a_sweep_in_one_row_above_the_runs(place: Storage) -> None:
    at = time.time() - 120
    write_sweep(place.child("digits"), three_trials(at), start=started(at))
    write_run(place.child("digits").child(trial_name(0)))
    write_run(place.child("plain"))
    lines = invoke("ls").output.splitlines()
    assert lines[0].split() == ["sweep", "state", "trials", "best", "started", "process"]
    assert lines[1].split()[:4] == ["digits", "finished", "3/3", "loss=1"]
    assert lines[1].rstrip().endswith("2 min 00 s ago")
    assert [line.split()[0] for line in lines[2:] if line] == ["run", "plain"]


def test_ls_of_a_sweep_lists_its_trials_as_runs(place: Storage) -> None:
    write_sweep(place.child("digits"), three_trials(1000.0))
    for number in (0, 1):
        write_run(place.child("digits").child(trial_name(number)))
    listed = [line.split()[0] for line in invoke("ls", f"{place.uri}/digits").output.splitlines()]
    assert listed == ["run", trial_name(0), trial_name(1)]


def test_ls_knows_a_sweep_that_runs_elsewhere_was_stopped_or_was_cut_off(place: Storage) -> None:
    now = time.time()
    for name, start, state in (
        ("here", started(now), ""),
        ("far", started(now - 20, host="elsewhere"), ""),
        ("cut", started(now - 30, pid=dead_pid()), ""),
        ("left", started(now - 40), "stopped"),
    ):
        write_sweep(place.child(name), three_trials(now - 5, status=tr.RUNNING), start=start, state=state)
    rows = [line.split()[:3] for line in invoke("ls").output.splitlines()[1:5]]
    assert rows == [
        ["here", "running", "2/8"],
        ["far", "running", "2/8"],
        ["cut", "interrupted", "2/8"],
        ["left", "stopped", "2/8"],
    ]


def test_ls_goes_on_after_a_sweep_that_cannot_be_read(place: Storage) -> None:
    write_sweep(place.child("good"), three_trials(1000.0))
    place.put("bad/sweep.json", b"{")
    place.put("bad/journal/0001-000001.jsonl", b"no facts\n")
    place.put("none/sweep.json", b"{}")
    listed = invoke("ls")
    assert listed.exit_code == 0
    states = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines() if line}
    assert states == {"sweep": "state", "good": "finished", "bad": "unreadable"}
    assert "sweep.json of the sweep" in listed.stderr


@pytest.mark.parametrize(
    ("samples", "space", "total"),
    [
        (4, {"lr": "uniform(0, 1)"}, 4),
        (2, {"a": {"grid_search": [1, 2, 3]}, "b": {"c": {"grid_search": [1, 2]}, "d": 5}}, 12),
        (-1, {"lr": "uniform(0, 1)"}, None),
        ("many", {}, None),
    ],
)
def test_the_number_of_trials_is_shown_where_it_is_known(
    samples: Any, space: dict[str, Any], total: int | None
) -> None:
    assert count_trials(SweepState(), {"num_samples": samples, "param_space": space}) == total
    ended = replay([ev.SearchEnded(time=1.0)])
    assert count_trials(ended, {"num_samples": samples, "param_space": space}) == 0


# --------------------------------------------------------------------------- show

numbers = st.floats(-9, 9)
reports = st.tuples(
    st.integers(0, 2),
    st.dictionaries(
        st.sampled_from("abc"),
        st.one_of(numbers, st.booleans(), st.just("text"), st.dictionaries(st.sampled_from("xy"), numbers)),
    ),
)


@given(st.lists(st.one_of(reports, st.sampled_from(["start", "revive", "revive again", "end"])), max_size=40))
def test_reports_that_are_left_out_change_nothing_of_where_trials_stand(steps: list[Any]) -> None:
    facts: list[ev.SweepEvent] = [started(0.0)]
    for number in range(3):
        facts += trial_facts(number, {}, [], at=0.0, status=tr.RUNNING)
    for at, step in enumerate(steps, 1):
        if step == "start":
            facts.append(started(float(at)))
        elif step in ("revive", "revive again"):
            facts.append(ev.TrialRevived(time=float(at), trial=trial_id(0), fresh_name=step[6:]))
        elif step == "end":
            facts.append(ev.TrialEnded(time=float(at), trial=trial_id(1), status=tr.TERMINATED))
        else:
            trial, metrics = step
            facts.append(
                ev.TrialReported(
                    time=float(at), trial=trial_id(trial), iteration=at, seconds=float(at), metrics=metrics
                )
            )
    whole, short = replay(facts), replay(leave_out_superseded(facts))
    assert whole.seconds == short.seconds
    for name, trial in whole.trials.items():
        other = short.trials[name]
        assert (trial.last_result, trial.iteration, trial.status) == (
            other.last_result,
            other.iteration,
            other.status,
        )
        assert {key: history.last for key, history in trial.metrics.items()} == {
            key: history.last for key, history in other.metrics.items()
        }


def test_show_reports_what_was_searched_for_the_trials_and_the_best(place: Storage) -> None:
    at = time.time() - 60
    failed = {"status": tr.ERROR, "reason": "ValueError: bad \x1b[31mlabel\nTraceback"}
    write_sweep(place.child("digits"), three_trials(at, **failed), start=started(at))
    text = invoke("show", "digits").output
    lines = text.splitlines()
    assert lines[:3] == ["sweep      digits", f"path       {place.uri}/digits", "state      finished"]
    assert "by         ada@here pid 42, train.py" in lines
    assert "search     BasicVariantGenerator, 4 samples, min loss" in lines
    assert "scheduler  ASHAScheduler" in lines
    assert lines[lines.index("space") + 1 :][:3] == [
        "  lr = loguniform(0.0001, 0.1)",
        "  layers = grid_search([1, 2])",
        "  seed = 7",
    ]
    rows = [line.split()[0:2] for line in lines if trial_name(1) in line]
    assert rows[0] == ["*", trial_name(1)]
    assert re.search(rf"{trial_name(2)}.*ValueError: bad \\x1b\[31mlabel", text)
    assert f"3/3 trials done, 1 failed, best loss=1 ({trial_name(1)})" in lines
    assert "\x1b" not in text


def test_show_reports_how_a_sweep_that_was_left_is_continued(place: Storage) -> None:
    at = time.time() - 60
    write_sweep(
        place.child("digits"), three_trials(at, status=tr.RUNNING), start=started(at), state="stopped"
    )
    lines = invoke("show", "digits").output.splitlines()
    assert "state      stopped: why" in lines
    assert any(line.startswith("2/8 trials done, 1 running, best loss=1") for line in lines)
    assert (
        lines[-1]
        == f"Start the same script again to resume it, or call Tuner.restore('{place.uri}/digits').fit()."
    )


def test_show_prints_all_of_it_for_programs_too(place: Storage) -> None:
    at = time.time() - 60
    trials = [*three_trials(at), trial_facts(3, {"lr": 1.0}, [math.nan], at=at)]
    write_sweep(place.child("digits"), trials, start=started(at))
    shown = json.loads(invoke("show", "digits", "--json").output)
    assert (shown["name"], shown["state"], shown["done"], shown["total"]) == ("digits", "finished", 4, 4)
    assert (shown["metric"], shown["mode"], shown["best"]) == ("loss", "min", trial_name(1))
    assert shown["record"] == RECORD
    assert [trial["trial_id"] for trial in shown["trials"]] == [trial_id(number) for number in range(4)]
    assert shown["trials"][1]["params"] == {"lr": 0.01, "layers": 2}
    assert shown["trials"][1]["metrics"]["loss"] == 1.0
    assert shown["trials"][3]["metrics"]["loss"] is None


def test_show_of_2000_trials_reads_the_journal_and_no_directory_of_a_trial(
    place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = place.child("large")
    facts = [
        trial_facts(number, {"lr": number / 2000, "layers": number % 5}, [5.0, 4.0, 3.0, 2.0, 1.0], at=1000.0)
        for number in range(2000)
    ]
    write_sweep(own, facts)
    own.put(f"{trial_name(0)}/run.json", b"{}")
    opened: list[str] = []
    monkeypatch.setattr("os.open", _noting(os.open, opened))
    monkeypatch.setattr("os.listdir", _noting(os.listdir, opened))
    monkeypatch.setattr("os.scandir", _noting(os.scandir, opened))
    shown = invoke("show", f"{place.uri}/large")
    assert "2000/2000 trials done" in shown.output
    assert any("journal" in path for path in opened)
    assert not [path for path in opened if trial_name(0) in path]


def _noting(function: Callable[..., Any], paths: list[str]) -> Callable[..., Any]:
    def call(path: Any = ".", *arguments: Any, **more: Any) -> Any:
        paths.append(str(path))
        return function(path, *arguments, **more)

    return call


# --------------------------------------------------------------------------- trials as runs


def test_a_trial_is_a_run_that_is_named_below_its_sweep(place: Storage, tmp_path: Path) -> None:
    write_sweep(place.child("digits"), three_trials(1000.0))
    trial = place.child("digits").child(trial_name(0))
    write_run(trial)
    put_log(trial, 0, b"hello from the trial\n")
    for words in (
        [f"digits/{trial_name(0)}"],
        [f"digits/{trial_name(0)}/"],
        [f"{place.uri}/digits/{trial_name(0)}"],
        [trial_name(0), "--storage", f"{place.uri}/digits"],
        [f"digits/{trial_name(0)}", "--storage", place.uri],
    ):
        assert invoke("show", *words).output.splitlines()[0] == f"run       {trial_name(0)}"
        assert "hello from the trial" in invoke("logs", *words).output
    found = find_run(f"digits/{trial_name(0)}")
    assert (found.name, found.place.uri) == (trial_name(0), f"{place.uri}/digits/{trial_name(0)}")


def test_a_path_goes_before_a_name_below_the_storage_path(place: Storage, tmp_path: Path) -> None:
    write_run(place.child("digits/run"))
    write_run(open_storage(str(tmp_path / "digits/run")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert find_run("digits/run").place.uri == str(tmp_path / "digits/run")
    assert find_run("digits/run").place.uri == f"{place.uri}/digits/run"


def test_an_unknown_trial_is_reported_with_those_of_its_sweep(place: Storage) -> None:
    write_sweep(place.child("digits"), three_trials(1000.0))
    write_run(place.child("digits").child(trial_name(0)))
    for storage in ("", place.uri):
        with pytest.raises(
            StorageError, match=rf"no run 'train_abcde' in .*digits\. It has '{trial_name(0)}'"
        ):
            find_run("digits/train_abcde", storage)
    with pytest.raises(
        StorageError, match=r"There is no run at 'letters/x'.*Nor is there a sweep 'letters' in "
    ):
        find_run("letters/x")


@pytest.mark.parametrize(
    "words", [["logs"], ["stacks"], ["diagnose"], ["resize", "digits", "2"], ["trace", "export"]]
)
def test_verbs_for_runs_say_that_a_sweep_has_trials(place: Storage, words: list[str]) -> None:
    write_sweep(place.child("digits"), three_trials(1000.0))
    given = words if "digits" in words else [*words, "digits"]
    with pytest.raises(
        StorageError, match=r"'digits' is a sweep, and this command takes a run\. .*digits/TRIAL"
    ):
        invoke(*given)


def test_a_sweep_in_an_object_store_is_shown_as_one_on_a_disk(s3: S3Server, tmp_path: Path) -> None:
    local, far = open_storage(str(tmp_path)), open_storage(s3.uri("sweeps"))
    write_sweep(local.child("digits"), three_trials(1000.0))
    write_run(local.child("digits").child(trial_name(0)))
    write_run(local.child("plain"))
    for key, _ in local.list():
        far.put(key, local.get(key))
    lines = invoke("ls", far.uri).output.splitlines()
    assert lines[1].split()[:4] == ["digits", "finished", "3/3", "loss=1"]
    assert [line.split()[0] for line in lines[2:] if line] == ["run", "plain"]
    assert "3/3 trials done" in invoke("show", far.child("digits").uri).output
    shown = invoke("show", f"digits/{trial_name(0)}", "--storage", far.uri).output
    assert shown.splitlines()[0] == f"run       {trial_name(0)}"


# --------------------------------------------------------------------------- stop


def test_a_sweep_that_is_over_cannot_be_stopped_and_says_how_it_ended(place: Storage) -> None:
    write_sweep(place.child("digits"), three_trials(1000.0))
    stopped = invoke("stop", "digits")
    assert stopped.exit_code == 1
    assert stopped.stderr == "The sweep 'digits' has finished. 3 of 3 trials are done.\n"


def test_a_sweep_of_another_machine_is_out_of_reach(place: Storage) -> None:
    own = place.child("digits")
    write_sweep(own, three_trials(1000.0), start=started(1.0, host="elsewhere"), state="")
    stopped = invoke("stop", "digits")
    assert stopped.exit_code == 1
    assert stopped.stderr.startswith(f"The sweep 'digits' at {own.uri} is not running on this machine")


class FakeLoop:
    """A loop that counts how often it was interrupted."""

    def __init__(self, state: SweepState) -> None:
        self.state, self.lock = state, threading.Condition(threading.RLock())
        self.is_interrupted = False
        self.interrupts = 0

    def interrupt(self) -> None:
        self.is_interrupted = True
        self.interrupts += 1


@pytest.fixture
def visits() -> Iterator[SimpleNamespace]:
    """Visits of a sweep with three trials, of which one runs."""
    facts = [started(1.0), *(fact for trial in three_trials(2.0, status=tr.RUNNING) for fact in trial)]
    loop: Any = FakeLoop(replay(facts))
    made = SweepVisits(loop, "digits")

    def ask(question: protocol.Request) -> list[protocol.Reply]:
        client = protocol.ControlClient()
        made.post_request(question, client)
        return list(client.replies())

    yield SimpleNamespace(loop=loop, ask=ask)
    made.close()


def test_stop_interrupts_the_loop_once_and_now_once_more(visits: Any) -> None:
    (answer,) = visits.ask(protocol.StopRequest(by="me"))
    assert answer.ok
    assert answer.message.startswith("The sweep 'digits' begins no more trials; 1 trial under way")
    visits.ask(protocol.StopRequest(by="me"))
    assert visits.loop.interrupts == 1, "asked again, trials still come to their boundaries"
    visits.ask(protocol.StopRequest(by="me", now=True))
    visits.ask(protocol.StopRequest(by="me", now=True))
    assert visits.loop.interrupts == 2


def test_stop_now_interrupts_twice_at_once(visits: Any) -> None:
    (answer,) = visits.ask(protocol.StopRequest(by="me", now=True))
    assert "1 trial under way end at once" in answer.message
    assert visits.loop.interrupts == 2


def test_stop_within_some_seconds_ends_what_still_runs_then(visits: Any) -> None:
    (answer,) = visits.ask(protocol.StopRequest(by="me", within=0.05))
    assert "within 0.05 s are ended" in answer.message
    deadline = time.monotonic() + 20.0
    while visits.loop.interrupts < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert visits.loop.interrupts == 2


def test_a_stop_that_is_waited_for_too_long_is_not_carried_out_after_the_end(visits: Any) -> None:
    visits.ask(protocol.StopRequest(by="me", within=3600.0))
    assert visits.loop.interrupts == 1  # and the fixture's close() does not wait an hour


def test_a_sweep_that_has_ended_meanwhile_is_not_interrupted(visits: Any) -> None:
    visits.loop.state.apply(ev.SweepEnded(time=9.0, state="finished"))
    (answer,) = visits.ask(protocol.StopRequest(by="me"))
    assert (answer.ok, visits.loop.interrupts) == (False, 0)


def test_a_sweep_describes_itself_and_sends_other_questions_to_its_trials(visits: Any) -> None:
    stands, _ = visits.ask(protocol.Describe())
    assert (stands.state, stands.workers, stands.row) == ("running", 1, 2)
    assert stands.reason == "2 of 3 trials done, 1 running"
    visits.ask(protocol.StopRequest(by="me"))
    assert visits.ask(protocol.Describe())[0].state == "stopping"
    for question in (protocol.LookAround(), protocol.ResizeRequest(workers=2)):
        (answer,) = visits.ask(question)
        assert not answer.ok
        assert "that is for runs. Name one of its trials: digits/TRIAL" in answer.message


# --------------------------------------------------------------------------- a real one

SCRIPT = """
import time
from powertrain import tune

def train(config):
    print("begins", flush=True)
    for step in range(1, 100_000):
        tune.report({"loss": config["x"] / step})
        time.sleep(0.02)

if __name__ == "__main__":
    tuner = tune.Tuner(
        train,
        param_space={"x": tune.grid_search([1.0, 2.0, 3.0])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="live", verbose=0),
    )
    print("results of", len(tuner.fit()))
"""


@pytest.fixture
def live_sweep(place: Storage, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep under way in a process of its own, two of whose trials have reported."""
    (tmp_path / "script.py").write_text(SCRIPT)
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 90.0
        while len(reporting(place)) < 2:
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline, "no two trials have reported"
            time.sleep(0.1)
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def reporting(place: Storage) -> list[str]:
    """The names of the trials of the live sweep that have reported."""
    trials = replay(read_journal(place.child("live"))).trials.values()
    return [trial.name for trial in trials if trial.iteration]


def test_a_sweep_under_way_is_found_and_stopped_so_that_it_can_be_continued(
    place: Storage, live_sweep: subprocess.Popen[str]
) -> None:
    listed = invoke("ls").output.splitlines()
    assert listed[1].split()[:3] == ["live", "running", "0/3"]
    assert listed[1].rstrip().endswith(f"pid {live_sweep.pid}")
    assert "is running at" not in "\n".join(listed), "its trials are below it"
    assert f"process    {live_sweep.pid}" in invoke("show", "live").output.splitlines()
    first = reporting(place)[0]
    assert re.search(r"^now       row \d+", invoke("show", f"live/{first}").output, re.MULTILINE)
    deadline = time.monotonic() + 30.0
    # What is printed takes another way than a report, and may come later.
    while "begins" not in invoke("logs", f"live/{first}", "-n", "5").output:
        assert time.monotonic() < deadline, "its output did not come"
        time.sleep(0.05)
    found = find_run_or_sweep("live")
    assert found.is_sweep
    assert found.live is not None
    assert summarize(found).pid == live_sweep.pid
    *_, answer = protocol.send_request(found.live.directory, protocol.LookAround())
    assert "Name one of its trials: live/TRIAL" in getattr(answer, "message", "")

    one = invoke("stop", f"live/{first}")
    assert one.exit_code == 0, one.output
    stopped = invoke("stop", "live")
    assert stopped.exit_code == 0, stopped.output
    assert re.search(
        r"begins no more trials; \d trials? under way end at their next boundary", stopped.output
    )
    assert "The sweep 'live' was stopped: " in stopped.output
    assert f"Tuner.restore('{place.uri}/live')" in stopped.output
    said, _ = live_sweep.communicate(timeout=60)
    # The third trial may have begun in the place of the one that was stopped.
    assert re.search("results of [23]", said), "as with a run, the script continues with the results so far"
    assert f"can be continued: Tuner.restore('{place.uri}/live')" in said
    assert protocol.live_runs(*runtime_roots()) == []
    state = replay(read_journal(place.child("live")))
    assert state.state == "stopped"
    ended = {trial.name: trial.reason for trial in state.trials.values() if trial.is_ended}
    assert list(ended) == [first], "only the trial that was stopped by itself has ended for good"
    assert ended[first].startswith("powertrain stop, asked by ")
