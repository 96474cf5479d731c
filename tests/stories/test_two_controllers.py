"""Two drivers on one run, on a disk and in a bucket: only one at a time, and one that was taken over never commits.

They play on this machine: who holds a run is decided between drivers and storage, before and without any engine. That
nodes which a driver of a cluster no longer hears end what they run is told in ``test_ray_nodes.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.s3_server import S3Server

from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import Storage, open_storage
from powertrain.testing import faults
from powertrain.testing.faults import Boundary, Delay, Fault, Freeze

_DRIVER = Path(__file__).parent / "drivers" / "two_controllers.py"
_NAME = "run"
#: A story that does not get on within this time has hung.
PATIENCE = 60.0
#: A holder's beats, and how long it is awaited: in a hurry, and as they are.
QUICK_LEASE = {"BEAT_INTERVAL_S": 0.5, "SILENCE_TIMEOUT_S": 2.0, "_POLL_INTERVAL_S": 0.1}
REAL_LEASE: dict[str, float] = {}


@pytest.fixture(
    scope="module", autouse=True
)  # or the first story in a bucket would be the one that leaves it behind
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


class Driver:
    """One driver process with all that came from it."""

    def __init__(self, stage: Stage, who: str, lease: dict[str, float], script: dict[str, str]) -> None:
        self._marks, self._who = stage.marks, who
        settings = {
            "storage": stage.address,
            "name": _NAME,
            "who": who,
            "marks": str(stage.marks),
            "lease": lease,
        }
        self._output = stage.marks / f"output-{who}"
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(_DRIVER), json.dumps(settings)],
                env={**os.environ, **stage.environment(who), **script},
                cwd=stage.marks,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._frozen: list[psutil.Process] = []

    def facts(self, kind: type[Any]) -> list[Any]:
        path = self._marks / f"facts-{self._who}"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [fact for fact in map(ev.decode, lines) if isinstance(fact, kind)]

    def until(self, come: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not come():
            ended = self.process.poll() is not None
            if (ended and not come()) or time.monotonic() > deadline:
                how = f"it ended with {self.process.returncode}" if ended else "it has not ended"
                pytest.fail(f"{self._who} has not come to this: {what}; {how}\n{self._output.read_text()}")
            time.sleep(0.01)

    def until_commits(self, count: int) -> None:
        self.until(lambda: len(self.facts(ev.Committed)) >= count, f"{count} commits")

    def stop(self) -> None:
        (self._marks / f"stop-{self._who}").touch()

    def outcome(self) -> dict[str, str]:
        """How it ended, by itself."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self._who} has not ended\n{self._output.read_text()}")
        outcome: dict[str, str] = json.loads((self._marks / f"outcome-{self._who}").read_text())
        return outcome

    def freeze(self) -> None:
        """Stop the driver, its server, the ranks and the uploader where they are."""
        driver = psutil.Process(self.process.pid)
        self._frozen = [driver, *driver.children(recursive=True)]
        for process in self._frozen:
            process.suspend()
        titles = [process.name() for process in self._frozen]
        assert "uploader" in titles, f"there is no uploader among {titles}"

    def is_stopped(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def thaw(self) -> None:
        for process in self._frozen:
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # the driver ends its ranks as soon as it runs again
                process.resume()
        self._frozen = []

    def end(self) -> None:
        """Whatever a failed story left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            for process in [*driver.children(recursive=True), driver]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.process.wait()


class Stage:
    """Where a story plays: the storage, and what its drivers need."""

    def __init__(self, kind: str, marks: Path, address: str) -> None:
        self.kind, self.marks, self.address = kind, marks, address
        #: True when the drivers have their temporary directories in common, as on one machine.
        self.one_machine = False
        self._drivers: list[Driver] = []

    def environment(self, who: str) -> dict[str, str]:
        room = "one" if self.one_machine else who
        places = {"TMPDIR": self.marks / f"tmp-{room}", "XDG_RUNTIME_DIR": self.marks / "run"}
        for place in places.values():
            place.mkdir(mode=0o700, exist_ok=True)
        return {name: str(place) for name, place in places.items()}

    def start(
        self, who: str, lease: dict[str, float] = QUICK_LEASE, script: dict[str, str] | None = None
    ) -> Driver:
        self._drivers.append(Driver(self, who, lease, script or {}))
        return self._drivers[-1]

    @property
    def storage(self) -> Storage:
        address, mark, query = self.address.partition("?")
        return open_storage(f"{address}/{_NAME}{mark}{query}")

    def make_takeover_possible(self) -> None:
        """In a bucket silence is enough. A frozen process keeps its file lock, so do what an operator would do who
        takes it for dead; on a file system without locks it is the same."""
        if self.kind == "local":
            path = self.storage.local_path("lease/lock")
            assert path is not None
            path.unlink()

    def remove_run(self) -> None:
        """``rm -rf`` of the run's directory, which a live driver may be writing to."""
        if self.kind == "local":
            subprocess.run(
                [
                    "sh",
                    "-c",
                    'until rm -rf "$0" 2>/dev/null && ! test -e "$0/lease"; do :; done',
                    self.address,
                ],
                check=True,
            )
        for entry in self.storage.list():
            self.storage.delete(entry.key)

    def close(self) -> None:
        for driver in self._drivers:
            driver.end()


@pytest.fixture(params=["local", "s3"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    # Not pytest's own directory: a socket's path must fit into 107 bytes.
    marks = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))
    address = str(marks / "storage")
    if request.param == "s3":
        address = request.getfixturevalue("s3").uri(marks.name)
    stage = Stage(request.param, marks, address)
    try:
        yield stage
    finally:
        stage.close()
        shutil.rmtree(marks)


# --------------------------------------------------------------------------- the first lives


@pytest.mark.smoke
def test_a_second_start_is_refused_while_the_first_lives(stage: Stage) -> None:
    first = stage.start("first")
    first.until_commits(1)

    # The first must beat before the second would take it for dead, also where it is held up for seconds.
    refused = stage.start("second", {**QUICK_LEASE, "SILENCE_TIMEOUT_S": 15.0}).outcome()
    assert refused["raised"] == "RunInUseError"
    assert f"process {first.process.pid} " in refused["message"]
    assert repr(socket.gethostname()) in refused["message"]

    committed = len(first.facts(ev.Committed))
    first.until_commits(committed + 1)
    first.stop()
    assert first.outcome()["raised"] == ""
    assert not first.facts(ev.CheckpointFailed)


# --------------------------------------------------------------------------- the first was taken for dead


def test_a_first_that_wakes_after_a_takeover_cannot_commit(stage: Stage) -> None:
    """Frozen anywhere, with the real seconds of a lease."""
    first = stage.start("first", REAL_LEASE)
    first.until_commits(2)
    first.freeze()

    second = take_over(stage, REAL_LEASE)
    first.thaw()
    check_fenced(stage, first, second)


def test_a_first_frozen_between_its_link_and_its_manifest_cannot_commit(stage: Stage) -> None:
    """The worst moment: its place in the chain is claimed, and the last write of the commit is on its way."""
    write = "link" if stage.kind == "local" else "put"
    before = Boundary(role="controller", kind=write, target="*/.powertrain-manifest.json", number=3)
    # A process takes a moment to stop, and must not take its next step in it.
    script = faults.environment(
        Fault(before, Freeze()), Fault(before, Delay(0.5)), directory=stage.marks / "chronicle"
    )
    first = stage.start("first", script=script)
    first.until(first.is_stopped, "the moment before the third manifest")
    first.freeze()
    assert len(first.facts(ev.Committed)) == 2
    claimed = [link for _, link in links(stage.storage) if link["checkpoint"]]
    assert len(claimed) == 3

    second = take_over(stage)
    first.thaw()
    check_fenced(stage, first, second)
    assert claimed[-1]["checkpoint"] not in {m.name for m in checkpoint_committed.committed(stage.storage)}


def test_on_one_machine_the_first_s_end_takes_nothing_from_the_second(stage: Stage) -> None:
    """Both keep what storage has not taken yet in one place."""
    stage.one_machine = True
    first = stage.start("first")
    first.until_commits(1)
    first.freeze()

    second = take_over(stage)
    first.thaw()
    check_fenced(stage, first, second)
    kept = [fact.checkpoint for fact in journal.read(stage.storage) if isinstance(fact, ev.Committed)]
    assert kept == [fact.checkpoint for driver in (first, second) for fact in driver.facts(ev.Committed)]


# --------------------------------------------------------------------------- the run's directory was removed


def test_of_two_with_one_lease_number_only_the_second_commits(stage: Stage) -> None:
    """The directory of a live run is removed, so that a second start begins with lease 1 again."""
    first = stage.start("first")
    first.until_commits(2)
    first.freeze()  # or it may see that its directory is gone before there is a second
    stage.remove_run()
    second = stage.start("second")
    second.until_commits(2)
    thawed = time.time()
    first.thaw()

    outcome = first.outcome()
    assert outcome["raised"] == "ControllerError"
    assert f"rocess {second.process.pid} on host {socket.gethostname()!r}" in outcome["message"]
    # The fact of a commit that was made just before the freeze may be written after the thaw.
    assert len([fact for fact in first.facts(ev.Committed) if fact.time >= thawed]) <= 1
    seen = len(second.facts(ev.Committed))
    second.until_commits(seen + 2)
    second.stop()
    assert second.outcome() == {"raised": "", "message": ""}
    assert not second.facts(ev.CheckpointFailed)
    manifests = checkpoint_committed.committed(stage.storage)
    assert [m.name for m in manifests] == [fact.checkpoint for fact in second.facts(ev.Committed)]
    for manifest in manifests:
        checkpoint_committed.verify(stage.storage, manifest)
    by_token = {link["token"]: link["lease"] for _, link in links(stage.storage) if link["checkpoint"]}
    assert set(by_token.values()) == {1}
    released = {entry.key for entry in stage.storage.list("lease")}
    assert "lease/0001.released" in released, "by its own holder"


def test_a_run_whose_directory_is_removed_ends_and_says_so(stage: Stage) -> None:
    first = stage.start("first")
    first.until_commits(1)
    stage.remove_run()

    outcome = first.outcome()
    assert outcome["raised"] == "ControllerError"
    assert "was removed while the run was going on" in outcome["message"], outcome


def take_over(stage: Stage, lease: dict[str, float] = QUICK_LEASE) -> Driver:
    stage.make_takeover_possible()
    second = stage.start("second", lease)
    second.until_commits(2)
    return second


def check_fenced(stage: Stage, first: Driver, second: Driver) -> None:
    """The first ends by itself with the reason and without a commit; the second goes on as if it were alone.

    Whether a commit of the first was refused or its look at the lease ended it before the next commit is a matter of
    timing: both give the outcome below.
    """
    outcome = first.outcome()
    assert outcome["raised"] == "ControllerError"
    assert f"rocess {second.process.pid} on host {socket.gethostname()!r}" in outcome["message"]
    failed = [fact.reason for fact in first.facts(ev.CheckpointFailed)]
    # "not whole" and "No such file": the second's start had swept away what they had in storage. "Its files are in":
    # the run ended while they were on their way. "never made": it ended before all ranks had reported. "Did not finish
    # in time": the run had woken and ended before its uploader, on a busy machine.
    swept = (
        "taken over",
        "not whole in",
        "No such file or directory",
        "Its files are in",
        "never made that",
        "did not finish in time",
    )
    assert all(any(words in reason for words in swept) for reason in failed), failed
    seen = len(second.facts(ev.Committed))
    second.until_commits(seen + 2)
    second.stop()
    assert second.outcome() == {"raised": "", "message": ""}
    assert not second.facts(ev.CheckpointFailed)
    check_storage(stage.storage, first, second)


def check_storage(storage: Storage, first: Driver, second: Driver) -> None:
    (takeover,) = [number for number, link in links(storage) if link["lease"] == 2 and not link["checkpoint"]]
    manifests = checkpoint_committed.committed(storage)
    assert {m.name for m in manifests if m.lease == 1} == {f.checkpoint for f in first.facts(ev.Committed)}
    assert {m.name for m in manifests if m.lease == 2} == {f.checkpoint for f in second.facts(ev.Committed)}
    assert all(m.link < takeover for m in manifests if m.lease == 1)
    for manifest in manifests:
        checkpoint_committed.verify(storage, manifest)


def links(storage: Storage) -> list[tuple[int, dict[str, Any]]]:
    """The commit chain as it lies in storage."""
    return [
        (int(entry.key.rpartition("/")[2]), msgspec.json.decode(storage.get(entry.key)))
        for entry in storage.list("commits")
    ]
