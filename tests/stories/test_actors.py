"""``put``, ``wait`` and actors: what scripts written for Ray do beside their training, here and on a cluster."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import threading
from typing import Any

import pytest

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.errors import ArgumentError, ConfigError, TaskError


class Counter:
    """Counts, and fails when it is asked to."""

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def add(self, amount: int | None = None) -> int:
        self.value += self.step if amount is None else amount
        return self.value

    def where(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("asked to fail")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Reader:
    """Reads files, and waits for those that are pipes."""

    def read(self, path: str) -> str:
        with open(path) as file:
            return file.read()


def test_an_actor_keeps_its_state_in_one_process_of_its_own(place: str) -> None:
    counter = powertrain.remote(Counter).remote(10, step=2)

    values = powertrain.get([counter.add.remote(), counter.add.remote(amount=5), counter.add.remote()])

    assert values == [12, 17, 19]
    first, second = powertrain.get([counter.where.remote(), counter.where.remote()])
    assert first == second != os.getpid()
    with pytest.raises(ValueError, match="asked to fail"):
        powertrain.get(counter.fail.remote())
    assert powertrain.get(counter.add.remote()) == 21, "an error ends the call, and not the actor"
    powertrain.kill(counter)
    if place == "here":  # Ray's kill returns before the actor has ended
        with pytest.raises(TaskError, match="was ended by kill"):
            powertrain.get(counter.add.remote())


@pytest.mark.usefixtures("place")
def test_a_value_that_was_put_is_an_argument_of_tasks_and_actors() -> None:
    @powertrain.remote
    def total(numbers: list[int], more: int = 0) -> int:
        return sum(numbers) + more

    numbers = [1, 2, 3]
    reference = powertrain.put(numbers)
    numbers.append(100)
    assert powertrain.get(reference) == [1, 2, 3]
    first = total.remote(reference)
    assert powertrain.get(total.remote(reference, more=first)) == 12
    counter = powertrain.remote(Counter).remote(first)
    assert powertrain.get(counter.add.remote(first)) == 12
    powertrain.kill(counter)


@pytest.mark.usefixtures("place")
def test_wait_gives_what_is_done_and_what_is_not() -> None:
    done, more = powertrain.put(1), powertrain.put(2)
    ready, others = powertrain.wait([done, more])
    assert (len(ready), len(others), {*ready, *others}) == (1, 1, {done, more})
    ready, others = powertrain.wait([done, more], num_returns=2)
    assert ({*ready}, others) == ({done, more}, [])
    with pytest.raises(ArgumentError, match="num_returns=3"):
        powertrain.wait([done, more], num_returns=3)
    with pytest.raises(ArgumentError, match="a list of references"):
        powertrain.wait(done)


def test_wait_returns_when_its_time_is_over(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "fifo")

    @powertrain.remote
    def read() -> str:
        return (tmp_path / "fifo").read_text()  # waits for a writer

    reading = read.remote()
    assert powertrain.wait([reading], timeout=0.05) == ([], [reading])
    (tmp_path / "fifo").write_text("written")
    assert powertrain.wait([reading]) == ([reading], [])
    assert powertrain.get(reading) == "written"


class Gate:
    """Lets a call through once others have come: only calls that are under way at once can open it."""

    def __init__(self, parties: int) -> None:
        self.parties, self.order = parties, list[str]()
        self.opened = asyncio.Event()
        self.made_in_loop = asyncio.get_event_loop()

    async def enter(self, name: str) -> list[str]:
        self.order.append(name)
        if len(self.order) == self.parties:
            self.opened.set()
        await self.opened.wait()
        return self.order

    def is_made_in_its_loop(self) -> bool:
        return asyncio.get_running_loop() is self.made_in_loop

    async def fail(self) -> None:
        raise ValueError("asked to fail")


def test_coroutines_of_an_actor_are_under_way_at_once_and_begin_in_order_here(place: str) -> None:
    gate = powertrain.remote(Gate).remote(3)
    calls = [gate.enter.remote(name) for name in "abc"]
    orders = powertrain.get(calls, timeout=60)
    assert orders[0] == orders[1] == orders[2]
    # Ray begins coroutines in any order: https://docs.ray.io/en/latest/ray-core/actors/task-orders.html
    assert (orders[0] if place == "here" else sorted(orders[0])) == ["a", "b", "c"]
    assert powertrain.get(gate.is_made_in_its_loop.remote(), timeout=60)
    with pytest.raises(ValueError, match="asked to fail"):
        powertrain.get(gate.fail.remote())
    assert powertrain.get(gate.enter.remote("d")) == [*orders[0], "d"]
    powertrain.kill(gate)


class Turns:
    """Notes when its calls begin and end."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def turn(self, name: str) -> None:
        self.notes.append(f"{name} begins")
        for _ in range(2000):  # long enough for the next call to come, and to begin if it may
            await asyncio.sleep(0)
        self.notes.append(f"{name} ends")

    def all_notes(self) -> list[str]:
        return self.notes


def test_max_concurrency_1_makes_coroutines_take_turns() -> None:
    turns = powertrain.remote(max_concurrency=1)(Turns).remote()
    powertrain.get([turns.turn.remote(name) for name in "ab"])
    assert powertrain.get(turns.all_notes.remote()) == ["a begins", "a ends", "b begins", "b ends"]
    powertrain.kill(turns)


def test_max_concurrency_gives_an_actor_threads() -> None:
    class Meeting:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)

        def meet(self) -> int:
            return self.barrier.wait(60)

    meeting = powertrain.remote(max_concurrency=2)(Meeting).remote()
    assert sorted(powertrain.get([meeting.meet.remote(), meeting.meet.remote()], timeout=60)) == [0, 1]
    powertrain.kill(meeting)


def test_an_actor_with_coroutines_ends_with_its_last_handle_after_its_calls(tmp_path: Any) -> None:
    gate = powertrain.remote(Gate).remote(1)
    owner = gate._client
    last = gate.enter.remote("a")
    del gate
    assert powertrain.get(last) == ["a"]
    assert owner._exited.wait(30), "the process is still there"


def test_the_death_of_an_actor_is_decoded_for_all_its_calls() -> None:
    counter = powertrain.remote(Counter).remote()
    calls = [counter.die.remote(), counter.add.remote()]
    for call in calls:
        with pytest.raises(TaskError, match=r"Counter\.\w+ was killed by SIGKILL"):
            powertrain.get(call)
    with pytest.raises(TaskError, match="was killed by SIGKILL"):
        powertrain.get(counter.add.remote())


def test_an_actor_that_cannot_be_made_says_why_at_its_first_call() -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no weights")

        def method(self) -> None:
            pass

    broken = powertrain.remote(Broken).remote()
    with pytest.raises(TaskError, match="no weights"):
        powertrain.get(broken.method.remote())
    powertrain.kill(broken)


def test_an_actor_ends_with_its_last_handle_after_the_calls_that_were_made() -> None:
    counter = powertrain.remote(Counter).remote()
    pid = powertrain.get(counter.where.remote())
    last = counter.add.remote(5)
    pidfd = os.pidfd_open(pid)
    del counter
    assert powertrain.get(last) == 5
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(30_000), "the process is still there"
    os.close(pidfd)


def test_a_detached_actor_outlives_the_handle_that_it_was_made_with(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "go")
    actor = powertrain.remote(lifetime="detached", max_restarts=1)(Reader).remote()
    owner, copied = actor._client, pickle.loads(pickle.dumps(actor))
    read = actor.read.remote(str(tmp_path / "go"))
    del actor
    try:
        # An actor that is to end is watched by this thread for as long as a call is under way.
        assert "powertrain-actor-end" not in [thread.name for thread in threading.enumerate()]
        (tmp_path / "go").write_text("gone on")
        assert powertrain.get(read) == "gone on"
        assert powertrain.get(copied.read.remote("/dev/null")) == ""
    finally:
        owner.kill()


def test_what_is_not_a_method_or_an_option_is_refused() -> None:
    kind = powertrain.remote(Counter)
    with pytest.raises(TypeError, match=r"Counter\.remote"):
        kind()
    with pytest.raises(ConfigError, match="num_cpu"):
        kind.options(num_cpu=1)
    counter = kind.remote()
    with pytest.raises(AttributeError, match="'subtract'"):
        counter.subtract.remote()
    with pytest.raises(TypeError, match=r"Counter\.add\.remote"):
        counter.add()
    powertrain.kill(counter)


def count_from_workers(config: dict[str, Any]) -> None:
    powertrain.report({"value": powertrain.get(config["counter"].add.remote())})


def test_workers_of_a_run_call_an_actor_of_the_script(tmp_path: Any) -> None:
    counter = powertrain.remote(Counter).remote()
    DataParallelTrainer(
        count_from_workers,
        train_loop_config={"counter": counter},
        scaling_config=ScalingConfig(num_workers=2, engine="local"),
        run_config=RunConfig(name="counted", storage_path=str(tmp_path)),
    ).fit()
    assert powertrain.get(counter.add.remote(0)) == 2
    powertrain.kill(counter)
