"""Runs of one user share one machine: they wait in one line for scarce resources, also when others die meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sharing
from tests.engine.test_ledger import Book

import powertrain
from powertrain.engine import resources
from powertrain.engine.base import SlotShape
from powertrain.engine.local import claims
from powertrain.engine.local import ledger as ledgers
from powertrain.engine.resources import Machine
from powertrain.storage.files import private_roots

#: Starts a driver of a run with this name and these wishes.
Start = Callable[..., Any]
ONE_GPU = Machine(cpus=1, gpus=("g",), visible=("0",), uuids=(sharing.GPU,), custom={"license": 1.0})
HOST = socket.gethostname()


@pytest.fixture
def start(stories: Any, monkeypatch: pytest.MonkeyPatch) -> Start:
    def started(name: str, **wants: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv(sharing.NAME, name)
            patch.setenv(sharing.WANTS, json.dumps(wants))
            return stories.start("share_the_machine")

    return started


@pytest.fixture
def holder(stories: Any) -> Book:
    """Somebody else of this user, in the runtime directory of the story."""
    return Book(stories.runtime / "powertrain")


def holders(stories: Any) -> list[str]:
    with claims.locked(stories.runtime / "powertrain") as directory:
        return [holding.run for holding in claims.read(directory).held]


def reasons(stories: Any, name: str) -> list[str]:
    """The reason that a run was given for its wait."""
    return [fact.reason for fact in stories.facts(name) if type(fact).__name__ == "SlotsWaited"]


def await_reason(driver: Any, stories: Any, name: str, words: str) -> None:
    driver._await(lambda: any(words in reason for reason in reasons(stories, name)), words, 60)


@pytest.mark.smoke
def test_three_runs_and_one_gpu_whose_holder_is_killed(start: Start, stories: Any) -> None:
    first = start("first", use_gpu=True)
    first.await_told("first uses it")
    second = start("second", use_gpu=True)
    await_reason(
        second,
        stories,
        "second",
        f"waiting for 1 GPU held by run first (pid {first.process.pid} on {HOST}); 1st",
    )
    third = start("third", use_gpu=True)
    await_reason(
        third, stories, "third", f"2nd in line, behind run second (pid {second.process.pid} on {HOST});"
    )

    server = int((stories.root / "first uses it").read_text())
    os.kill(server, signal.SIGSTOP)
    first.kill()
    assert holders(stories) == ["run first"], "its worker lives, because the server has not ended it yet"
    os.kill(server, signal.SIGCONT)
    second.await_told("second uses it")
    again = start("first", use_gpu=True)
    await_reason(again, stories, "first", f"behind run third (pid {third.process.pid} on {HOST})")
    for name, driver in (("second", second), ("third", third), ("first", again)):
        (stories.root / f"{name} may end").touch()
        assert driver.ended() == 0, driver.output

    assert (stories.root / "notes").read_text().splitlines() == [
        "first begins on 0",
        "second begins on 0",
        "second ends",
        "third begins on 0",
        "third ends",
        "first begins on 0",
        "first ends",
    ]
    assert json.loads((stories.root / "outcome-0.json").read_text())["metrics"] == {"epoch": 1}, "it went on"
    assert second.output.count("slots are available, waiting for 1 GPU held by run first") == 1, second.output


def test_a_run_whose_time_in_the_line_is_over_ends_with_what_it_lacked(
    start: Start, stories: Any, holder: Book
) -> None:
    holder.claim("holder", machine=ONE_GPU)
    hasty = start("hasty", use_gpu=True, queue_timeout_s=0.5)
    assert hasty.ended() == 1
    assert (
        "ResourceError: There was no room for the run within 0.5 s: waiting for 1 GPU held by run holder "
        f"(pid {os.getpid()} on here); 1st in line. Wait longer with ScalingConfig(queue_timeout_s=...)"
    ) in hasty.output
    assert_only_held(stories)
    holder.give_back("holder")


def test_ctrl_c_in_the_line_ends_the_run_and_gives_up_its_place(
    start: Start, stories: Any, holder: Book
) -> None:
    holder.claim("holder", machine=ONE_GPU)
    driver = start("impatient", use_gpu=True)
    await_reason(driver, stories, "impatient", "waiting for 1 GPU held by run holder")
    driver.interrupt()
    assert driver.ended() != 0
    assert "KeyboardInterrupt" in driver.output
    assert_only_held(stories)
    holder.give_back("holder")


def nobody_hears(_: object) -> None:
    """For what a ledger tells of."""


def assert_only_held(stories: Any) -> None:
    """The holder keeps its resources, the line is empty, and no worker was started."""
    left = list((stories.runtime / "powertrain" / "claims").iterdir())
    assert [path.name.split("-")[0] for path in left] == [str(os.getpid())]
    assert not (stories.root / "notes").exists()


@pytest.mark.parametrize(
    ("held", "wants", "words"),
    [
        ((1, SlotShape(custom={"license": 1.0})), {"license": 1}, "waiting for 1 license held by run holder"),
        (
            (resources.detect().cpus, SlotShape(explicit=True)),
            {"CPU": 1},
            "waiting for 1 CPU held by run holder",
        ),
    ],
    ids=["a custom resource", "CPUs that were named"],
)
def test_what_was_asked_for_by_name_is_waited_for(
    start: Start, stories: Any, holder: Book, held: tuple[int, SlotShape], wants: dict[str, float], words: str
) -> None:
    holder.ledger.claim(
        ledgers.SlotRequest("h", "h", "run holder", "here", machine(), *held), nobody_hears, nobody_hears
    )
    driver = start("patient", resources_per_worker=wants)
    await_reason(driver, stories, "patient", words)
    for _ in range(held[0]):
        holder.ledger.give_back_slot("h", [])
    (stories.root / "patient may end").touch()
    assert driver.ended() == 0, driver.output


def machine() -> Machine:
    return resources.detect({"license": 1.0})


# --------------------------------------------------------------------------- tasks


@pytest.fixture
def pretended_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "detect", lambda custom=None: ONE_GPU)
        yield


@pytest.mark.usefixtures("pretended_gpu")
def test_a_task_waits_in_the_same_line_as_runs_do() -> None:
    holder = Book(private_roots.runtime_root())
    holder.claim("holder", machine=ONE_GPU)

    @powertrain.remote(num_gpus=1)
    def seen() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    task = seen.remote()
    assert "behind" in holder.claim("later", machine=ONE_GPU)
    with pytest.raises(
        TimeoutError, match=r"^seen has not ended within 2 s: it is waiting for 1 GPU held by"
    ):
        powertrain.get(task, timeout=2)
    holder.give_back("holder")
    assert powertrain.get(task, timeout=60) == "0"
    holder.wait_until(lambda: "later" in holder.got)
    holder.give_back("later")
