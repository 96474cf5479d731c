"""The pool of processes: what it does, and that nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pyarrow as pa
import pytest

import powertrain.data.operations.pool as pool_module
from powertrain.data.operations.pool import (
    PoolClosed,
    ProcessDied,
    ProcessPool,
    describe_exit,
    picklable_error,
)

_PATIENCE = 10.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """False as well for one that has ended and was not waited for yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def everything_of(pool: ProcessPool) -> list[int]:
    """The pool's processes and their server."""
    return [*pool.pids(), psutil.Process(pool.pids()[0]).ppid()]


def pool_of(work: Callable[[Any], Any], processes: int = 1) -> ProcessPool:
    return ProcessPool(cloudpickle.dumps(lambda: work), processes)


def called(task: Any) -> Any:
    """Calls what it is given, so that tests can say in place what happens in a process."""
    function, *arguments = task
    return function(*arguments)


@pytest.fixture(scope="module", autouse=True)
def _light_processes() -> Iterator[None]:
    """Processes load neither this file nor what other tests have loaded: they start in a moment."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_PRELOADED", ("numpy", "pyarrow"))
        yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two(_light_processes: None) -> Iterator[ProcessPool]:
    """Two processes for tests that do them no harm."""
    pool = pool_of(called, 2)
    pool.map([(abs, 1)])
    yield pool
    pool.close()


@pytest.fixture
def one() -> Iterator[ProcessPool]:
    """One process for a test that may end it."""
    pool = pool_of(called)
    yield pool
    pool.close()


# -- work


def test_results_come_in_the_order_of_their_tasks(two: ProcessPool) -> None:
    assert two.map((pow, number, 2) for number in range(50)) == [number**2 for number in range(50)]


def test_tasks_are_spread_over_the_processes_while_they_are_busy(two: ProcessPool) -> None:
    both = two.map([(lambda: (time.sleep(0.05), os.getpid())[1],)] * 2)
    assert sorted(both) == sorted(two.pids())


def test_no_process_is_there_before_the_first_task() -> None:
    before = psutil.Process().children(recursive=True)
    pool = pool_of(abs, 2)
    assert pool.pids() == []
    assert psutil.Process().children(recursive=True) == before
    pool.close()


def test_work_is_made_once_in_each_process() -> None:
    def make() -> Callable[[Any], int]:
        made_in = os.getpid()
        calls: list[None] = []

        def work(_: Any) -> int:
            calls.append(None)
            return len(calls) if made_in == os.getpid() else -1

        return work

    pool = ProcessPool(cloudpickle.dumps(make), 1)
    try:
        assert [pool.map([0])[0] for _ in range(3)] == [1, 2, 3]
    finally:
        pool.close()


def test_arrays_arrive_whole_and_writable(two: ProcessPool) -> None:
    big = np.arange(3_000_000, dtype=np.int32).reshape(1000, 3000)

    def doubled(array: Any) -> Any:
        array *= 2  # fails where it is read-only
        return array

    (back,) = two.map([(doubled, big)])
    assert np.array_equal(back, np.arange(3_000_000, dtype=np.int32).reshape(1000, 3000) * 2)
    assert back.flags.writeable


def test_a_slice_of_an_arrow_array_travels_without_the_rest(two: ProcessPool) -> None:
    text = pa.array(["x" * 1000] * 10_000)[17:19]

    def size_there(array: Any) -> Any:
        return array, sum(buffer.size for buffer in array.buffers() if buffer is not None)

    ((back, size),) = two.map([(size_there, text)])
    assert back.equals(text)
    assert size < 10_000


def test_libraries_that_the_owner_has_or_the_work_names_are_there_before_the_first_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_PRELOADED", ("turtledemo", "xmlrpc.client", "wave"))
    monkeypatch.setitem(
        sys.modules, "xmlrpc.client", sys
    )  # any module: what counts is that the name is there

    def loaded(names: list[str]) -> list[bool]:
        return [name in sys.modules for name in ("turtledemo", *names)]

    fresh = pool_of(loaded)
    try:
        assert fresh.map([["xmlrpc.client", "wave"]]) == [[True, True, False]]
    finally:
        fresh.close()


def test_many_threads_share_few_processes(two: ProcessPool) -> None:
    sums: dict[int, list[int]] = {}

    def ask(start: int) -> None:
        sums[start] = two.map((pow, start + number, 1) for number in range(20))

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(0, 800, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    assert sums == {start: [start + number for number in range(20)] for start in range(0, 800, 100)}


# -- errors


def test_an_exception_is_raised_here_with_its_traceback_of_there(two: ProcessPool) -> None:
    def divide(number: int) -> float:
        return 1 / number

    with pytest.raises(ZeroDivisionError) as caught:
        two.map([(divide, 1), (divide, 0), (divide, 2)])
    assert "return 1 / number" in str(caught.value.__cause__)
    assert two.map([(divide, 4)]) == [0.25]


def test_an_exception_that_cannot_be_opened_again_says_the_same_in_another(two: ProcessPool) -> None:
    def fail() -> None:
        class TwoArguments(Exception):
            def __init__(self, first: str, second: str) -> None:
                super().__init__(f"{first} and {second}")

        raise TwoArguments("this", "that")

    with pytest.raises(RuntimeError, match="TwoArguments: this and that"):
        two.map([(fail,)])


def test_leaving_the_interpreter_is_an_exception_like_others(two: ProcessPool) -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        two.map([(sys.exit, 3)])
    assert two.map([(abs, -1)]) == [1]


def test_what_cannot_be_pickled_is_said_and_the_process_goes_on(two: ProcessPool) -> None:
    with pytest.raises(TypeError, match="pickle"):
        two.map([(abs, threading.Lock())])
    with pytest.raises(TypeError, match="pickle"):
        two.map([(threading.Lock,)])
    assert two.map([(abs, -1)] * 4) == [1] * 4


class OpensOnlyIn:
    """Cannot be unpickled in any other process than the one that is named."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["pid"] != os.getpid():
            raise EOFError("not here")
        vars(self).update(state)


def test_what_cannot_be_opened_on_the_other_side_is_said_and_the_process_goes_on(two: ProcessPool) -> None:
    with pytest.raises(EOFError, match="not here"):
        two.map([(abs, OpensOnlyIn(os.getpid())), (abs, 1)])
    with pytest.raises(EOFError, match="not here"):
        two.map([(lambda: OpensOnlyIn(os.getpid()),), (abs, 1)])
    assert two.map([(abs, -1)] * 4) == [1] * 4


def test_work_that_cannot_be_made_fails_its_tasks() -> None:
    def make() -> Any:
        raise ImportError("no such library")

    pool = ProcessPool(cloudpickle.dumps(make), 1)
    try:
        with pytest.raises(ImportError, match="no such library"):
            pool.map([1])
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGKILL, "was ended by SIGKILL (the usual reason is that the machine ran out of memory)"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-99, "was ended by signal 99"),
        (None, "is gone, and so is the one that could say how it ended"),
    ],
)
def test_an_end_is_reported_in_words(code: int | None, words: str) -> None:
    assert describe_exit(code) == words


def test_an_exception_that_can_travel_stays_itself() -> None:
    error = ValueError("as it is")
    assert picklable_error(error) is error


# -- deaths


def killed_in_the_middle(pool: ProcessPool, signal_number: int, marker: Path) -> ProcessDied:
    """The error of a caller whose second task is under way when its process gets a signal."""

    def stay(path: str) -> None:
        Path(path).touch()
        time.sleep(60)

    caught: list[BaseException] = []

    def ask() -> None:
        try:
            pool.map([(abs, 1), (stay, str(marker))])
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(marker.exists)
    os.kill(pool.pids()[0], signal_number)
    thread.join(_PATIENCE)
    assert isinstance(caught[0], ProcessDied)
    return caught[0]


def test_a_process_that_is_killed_in_the_middle_of_a_task_is_reported_with_its_signal(
    one: ProcessPool, tmp_path: Path
) -> None:
    death = killed_in_the_middle(one, signal.SIGKILL, tmp_path / "begun")
    assert (death.code, death.task) == (-signal.SIGKILL, 1)
    with pytest.raises(ProcessDied, match="SIGKILL") as later:
        one.map([(abs, 1)])
    assert later.value.task is None


def test_a_death_wakes_threads_that_wait_for_the_process(one: ProcessPool, tmp_path: Path) -> None:
    told: list[BaseException] = []

    def wait() -> None:
        try:
            one.map([(abs, 1)])
        except ProcessDied as error:
            told.append(error)

    def stay(path: str) -> None:
        Path(path).touch()
        time.sleep(60)

    def hold() -> None:
        try:
            one.map([(stay, str(tmp_path / "begun"))])
        except ProcessDied as error:
            told.append(error)

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    until((tmp_path / "begun").exists)
    threads += [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    os.kill(one.pids()[0], signal.SIGSEGV)
    for thread in threads:
        thread.join(_PATIENCE)
    assert len(told) == 4


def leave(code: int) -> None:
    os._exit(code)  # which `make coverage` replaces with a function that cannot be sent


def test_a_process_that_leaves_by_itself_is_reported_with_its_exit_code(one: ProcessPool) -> None:
    with pytest.raises(ProcessDied, match="exit code 7"):
        one.map([(leave, 7)])


def test_a_server_that_is_killed_takes_its_processes_along_and_is_reported(one: ProcessPool) -> None:
    one.map([(abs, 1)])
    processes = everything_of(one)
    os.kill(processes[-1], signal.SIGKILL)
    until(lambda: not any(is_running(pid) for pid in processes))
    with pytest.raises(ProcessDied, match="is gone"):
        one.map([(abs, 1)])


# -- the end


def test_closing_ends_processes_that_are_busy_and_notifies_waiting_threads(
    one: ProcessPool, tmp_path: Path
) -> None:
    def stay(path: str) -> None:
        Path(path).touch()
        time.sleep(60)

    told: list[type[BaseException]] = []

    def ask() -> None:
        try:
            one.map([(stay, str(tmp_path / "begun"))])
        except BaseException as error:
            told.append(type(error))

    thread = threading.Thread(target=ask)
    thread.start()
    until((tmp_path / "begun").exists)
    processes = everything_of(one)
    one.close()
    assert not any(is_running(pid) for pid in processes)
    thread.join(_PATIENCE)
    assert told == [PoolClosed]
    with pytest.raises(PoolClosed):
        one.map([(abs, 1)])


def test_an_interrupted_call_ends_the_pool(one: ProcessPool) -> None:
    def tasks() -> Iterator[Any]:
        yield (time.sleep, 60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.map(tasks())
    assert not any(is_running(pid) for pid in one.pids())
    with pytest.raises(PoolClosed):
        one.map([(abs, 1)])


def test_a_pool_that_no_process_holds_any_more_ends() -> None:
    pool = pool_of(abs)
    pool.map([1])
    processes = everything_of(pool)
    del pool
    until(lambda: not any(is_running(pid) for pid in processes))


def test_sigterm_and_ctrl_c_to_every_process_of_a_job_do_not_end_the_pool(two: ProcessPool) -> None:
    for pid in everything_of(two):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert two.map([(abs, -number) for number in range(8)]) == list(range(8))
    assert all(is_running(pid) for pid in everything_of(two))


#: A script as people write them: without a guard around its main part. Its pool is busy when the script prints.
_OWNER = """
import os, sys, threading, time
import cloudpickle
from powertrain.data.operations.pool import ProcessPool

print("script runs", flush=True)
pool = ProcessPool(cloudpickle.dumps(lambda: lambda seconds: time.sleep(seconds)), 2)
pool.map([0])
threading.Thread(target=pool.map, args=([60, 60],), daemon=True).start()
held_by = os.fork() if sys.argv[1] == "forked" else -1
if held_by == 0:  # keeps what it has inherited open, as processes of a DataLoader do
    time.sleep(60)
server = open(f"/proc/{pool.pids()[0]}/stat").read().split()[3]
print(*pool.pids(), server, held_by, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["alone", "forked"])
def test_when_the_owner_is_killed_no_process_is_left(kind: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, kind], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as said:
        assert said.readline() == "script runs\n"
        *processes, forked = map(int, said.readline().split())
        try:
            assert len(processes) == 3
            assert all(is_running(pid) for pid in processes)
            owner.kill()
            owner.wait(_PATIENCE)
            until(lambda: not any(is_running(pid) for pid in processes))
        finally:
            if forked > 0:
                os.kill(forked, signal.SIGKILL)
        assert said.read() == "", "a process of the pool has run the script again"
