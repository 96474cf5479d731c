"""Signals that announce a process's end: seen at once, without a handler, and in this process only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from powertrain.worker.signals import SAME_NOTICE_INTERVAL_S, NoticedSignals, handling, notice_signals

PATIENCE = 30.0


@pytest.fixture
def noticed() -> Iterator[NoticedSignals]:
    listening = NoticedSignals()
    yield listening
    listening.close()


def test_a_signal_is_there_to_be_read_and_the_process_lives_on(noticed: NoticedSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert select.select([noticed.descriptor], [], [], PATIENCE)[0]
    assert noticed.take() == [signal.SIGTERM]
    assert noticed.take() == []


def test_a_hangup_is_a_notice_unless_the_process_was_started_with_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in notice_signals({})
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert notice_signals({}) == (signal.SIGTERM,)
        listening = NoticedSignals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert listening.take() == []
        listening.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_signals_are_no_notice(noticed: NoticedSignals) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert select.select([noticed.descriptor], [], [], PATIENCE)[0]
        assert noticed.take() == []
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_all_is_as_it_was_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    NoticedSignals().close()
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == before


def test_a_handler_of_the_users_own_stays_and_the_signal_is_noticed_all_the_same() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        listening = NoticedSignals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert listening.take() == [signal.SIGTERM]
        listening.close()
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", ["descriptor", "handler"])
def test_a_forked_child_is_ended_by_a_signal_that_comes_at_once(how: str) -> None:
    told: list[signal.Signals] = []
    for _ in range(20):  # the child may not have come to undo anything yet
        listening = NoticedSignals() if how == "descriptor" else None
        with handling(told.append) if how == "handler" else contextlib.nullcontext():
            child = os.fork()
            if child == 0:
                time.sleep(PATIENCE)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
        if listening is not None:
            assert listening.take() == []
            listening.close()
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert told == []


def test_a_process_that_only_its_owner_may_end_is_ended_by_the_second_signal() -> None:
    class Ended(BaseException): ...

    def end() -> None:
        raise Ended

    before = signal.getsignal(signal.SIGTERM)
    listening = NoticedSignals(end)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # at once: the same one, by another way
    time.sleep(SAME_NOTICE_INTERVAL_S + 0.05)
    with pytest.raises(Ended):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) == before, "the next one does what it always did"
    listening.close()


def test_the_grace_signals_of_slurm_count_within_its_jobs_only() -> None:
    grace = {signal.SIGUSR1, signal.SIGUSR2}
    assert not grace & set(notice_signals({}))
    assert grace < set(notice_signals({"SLURM_JOB_ID": "7"}))
