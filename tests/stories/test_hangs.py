"""Ranks that hang: who is named, at which line, and what only looks like a hang.

The floor of the watchdog is a second here instead of five, so that a story takes seconds; ``benchmarks/hangs.py``
measures the real one.

Who hangs is decided from beats and stacks, which on the cluster come by way of a node's agent: two kinds play there,
one that the stacks of all ranks tell, and one in a process that cannot answer. What only looks like a hang is the
watchdog's judgement alone, and told on one machine.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import time
from typing import Any

import hanging
import psutil
import pytest
from tests.stories.engines import on, on_cases

from powertrain import FailureConfig
from powertrain.engine.local.warm_server import server_pids
from powertrain.run import events as ev
from powertrain.run.health import watchdog
from powertrain.run.health.hangs import Hangs
from powertrain.torch import TorchTrainer
from powertrain.trace.stacks import stacks
from powertrain.trace.stacks.stacks import py_spy

KINDS = {
    "missed_all_reduce": 3,
    "extra_all_reduce": 3,
    "mismatched_reports": 2,
    "loader": 2,
    "collate_in_a_worker": 2,
    "lock": 2,
    "sleep": 2,
    "stopped": 2,
    "c_with_the_lock": 2,
    "c_without_the_lock": 2,
    "slow_read": 2,
    "endless_loop": 2,
}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 1.0)


@pytest.fixture
def _acts_once_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's time is over as soon as the notice was shown, however long that took, for all kinds but one.

    Not before two heartbeats: an older one does not know what its rank does now.
    """
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 2.5)
    tell = Hangs._noticed

    def noticed(self: Hangs, *told: Any) -> ev.HangNoticed:
        assert self._dog is not None
        self._dog._timeout, self._dog._due = watchdog.NOTICE_DELAY_S, 0.0
        return tell(self, *told)

    if kind != ON_TIME:
        monkeypatch.setattr(Hangs, "_noticed", noticed)


def line_of(mark: str) -> int:
    lines = inspect.getsource(hanging).splitlines()
    return 1 + next(number for number, line in enumerate(lines) if re.search(rf"{mark}\b", line))


def notices(fits: Any, name: str) -> list[ev.HangNoticed]:
    return [fact for fact in fits.facts(name) if isinstance(fact, ev.HangNoticed)]


#: The kind that is acted on when the user's time is really over.
ON_TIME = "sleep"
ON_THE_CLUSTER = ("missed_all_reduce", "stopped")


@on_cases(
    ("engine", "kind"), [*(("local", kind) for kind in KINDS), *(("ray", kind) for kind in ON_THE_CLUSTER)]
)
@pytest.mark.usefixtures("_acts_once_noticed")
def test_a_hang_is_noticed_with_the_right_rank_and_line_and_acted_on(fits: Any, kind: str) -> None:
    limits = FailureConfig(hang_timeout_s=6.0 if kind == ON_TIME else 40.0, on_hang="fail")
    outcome = fits.outcome(
        getattr(hanging, kind), kind=TorchTrainer, workers=KINDS[kind], failure_config=limits
    )

    noticed = notices(fits, kind)
    assert noticed, outcome["message"]
    first = noticed[0]
    seen = f"{first.message}\n{(fits.directory / 'storage' / kind / first.stacks).read_text()}"
    assert first.ranks == (hanging.CULPRIT,), seen
    if kind != "stopped" or py_spy():
        assert os.path.basename(first.file) == "hanging.py", seen
        assert first.line == line_of(f"hangs: {kind}"), seen
    assert f"ank {hanging.CULPRIT}" in first.message
    assert (outcome["raised"], outcome["class"]) == ("TrainingFailedError", "NCCLHangError")
    assert [failure["kind"] for failure in outcome["failures"]][:1] == ["hung"]


@on("local", "ray", smoke=["local"])
def test_a_hang_is_restarted_from_the_newest_commit_where_that_is_allowed(fits: Any) -> None:
    limits = FailureConfig(hang_timeout_s=5.0, max_failures=1)
    outcome = fits.outcome(hang_once, kind=TorchTrainer, failure_config=limits)
    assert (outcome["raised"], outcome["metrics"]) == ("", {"step": hanging.STEPS - 1}), outcome
    (failed,) = [fact for fact in fits.facts("hang_once") if isinstance(fact, ev.Failed)]
    assert (failed.decision, failed.failures[0].kind) == ("retry", "hung")


def hang_once() -> None:
    import powertrain

    first = powertrain.get_context().get_attempt() == 0
    hanging._steps(lambda: time.sleep(hanging.FOR_EVER) if first else None)


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("long_first_step", None),
        ("long_first_step_of_one", hanging.CULPRIT),
        ("evaluation_on_rank_0", 0),
        ("long_checkpoint", 0),
        ("paused_debugger", None),
    ],
)
def test_a_call_that_only_takes_long_is_not_acted_on_and_no_other_rank_is_blamed(
    fits: Any, kind: str, culprit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two minutes are half a second here: what is left alone is so because of what it is, and not for want of time.
    monkeypatch.setattr(watchdog, "ACT_TIMEOUT_S", 0.5)
    # More than a busy machine holds up a rank in an ordinary step, so that no other rank is noticed.
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 2.5)
    outcome = fits.outcome(getattr(hanging, kind), kind=TorchTrainer, train_loop_config={"seconds": 6.0})
    assert (outcome["raised"], outcome["metrics"]) == ("", {"step": hanging.STEPS - 1}), outcome
    named = {fact.ranks for fact in notices(fits, kind)}
    assert named == (set() if culprit is None else {(culprit,)})
    over = [fact for fact in fits.facts(kind) if isinstance(fact, ev.HangOver)]
    assert len(over) == len(notices(fits, kind)), "what was noticed was withdrawn"


def test_inline_a_pause_is_reported_and_never_acted_on(fits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session's cluster is below this process, and a look at all of it would outlast the pause.
    monkeypatch.setattr(stacks, "_CHILDREN_WITHIN", 0.2)
    limits = FailureConfig(hang_timeout_s=1.5)
    outcome = fits.outcome(
        hanging.pause_alone, "inline", train_loop_config={"seconds": 6.0}, failure_config=limits
    )
    assert (outcome["raised"], outcome["metrics"]) == ("", {"step": hanging.STEPS - 1}), outcome
    (noticed,) = notices(fits, "pause_alone")
    assert noticed.ranks == (0,)
    assert noticed.source.startswith("time.sleep(")


def test_under_torchrun_a_hang_ends_the_process_so_that_torchrun_can_begin_again(stories: Any) -> None:
    driver = stories.start("hang", "torchrun")
    assert driver.ended() == 1, driver.output
    facts = stories.facts("hangs")
    (noticed,) = [fact for fact in facts if isinstance(fact, ev.HangNoticed)]
    assert (noticed.ranks, noticed.line) == ((hanging.CULPRIT,), line_of("hangs: sleep"))
    (failed,) = [fact for fact in facts if isinstance(fact, ev.Failed)]
    assert failed.failures[0].kind == "hung"
    assert "Rank 1 hung: nothing moved for" in driver.output


def test_a_stop_of_everything_is_nobodys_hang(fits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 4.5)
    trainer = fits.trainer(hanging.steady, kind=TorchTrainer, train_loop_config={"seconds": 11.0})

    def ours() -> list[psutil.Process]:
        """The server and what it has forked; a cluster that other stories play on is not of this one."""
        servers = [psutil.Process(pid) for pid in server_pids()]
        return [*servers, *(child for server in servers for child in server.children(recursive=True))]

    def stop_all() -> None:
        while not any("rank" in process.name() for process in ours()):
            time.sleep(0.05)
        time.sleep(2.0)
        everyone = [os.getpid(), *(process.pid for process in ours())]
        helper = os.fork()  # this process is stopped as well: another one must wake it
        if helper == 0:
            for pid in everyone:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(6.0)
            for pid in everyone:
                os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.waitpid(helper, 0)

    thread = threading.Thread(target=stop_all)
    thread.start()
    trainer.fit()
    thread.join()
    assert not notices(fits, "steady")
