"""Who holds what of the machine, over all processes of a user: nothing twice, and nothing for the dead."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from powertrain.engine.base import SlotShape
from powertrain.engine.local import claims as files
from powertrain.engine.local import directory_watch, locks
from powertrain.engine.local import ledger as ledgers
from powertrain.engine.local.ledger import Ledger, SlotRequest
from powertrain.engine.resources import Machine
from powertrain.errors import EngineError

PATIENCE = 20.0
#: A number that no process has, because the kernel gives out smaller ones only.
NO_PROCESS = 1 << 23
TWO_GPUS = Machine(cpus=8, gpus=("g",) * 2, visible=("0", "1"), custom={"license": 3.0})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runtime"


def request(
    id: str, count: int = 1, shape: SlotShape | None = None, owner: str = "", machine: Machine = TWO_GPUS
) -> SlotRequest:
    """A request of a run called ``id``; by default for whole GPUs."""
    return SlotRequest(
        id=id,
        owner=owner or f"engine of {id}",
        run=f"run {id}",
        host="here",
        machine=machine,
        count=count,
        shape=shape or SlotShape(gpus=1),
    )


class Book:
    """A ledger as one process has it, with the grants and reasons that it gave."""

    def __init__(self, root: Path) -> None:
        self.ledger = Ledger(lambda: root)
        self.got: dict[str, tuple[str, ...]] = {}
        self.reasons: dict[str, list[str]] = {}
        self.told: list[int] = []
        self._changed = threading.Condition()

    def claim(self, *args: object, **options: object) -> str:
        """Claim; return the reason why it has to wait, or "" when it need not."""
        wanted = request(*args, **options)  # type: ignore[arg-type]
        self.reasons.pop(wanted.id, None)
        self.ledger.claim(
            wanted,
            granted=lambda gpus: self._granted(wanted.id, gpus),
            waits=lambda reason: self._waits(wanted.id, reason),
        )
        self.wait_until(lambda: wanted.id in self.got or wanted.id in self.reasons)
        return self.reasons[wanted.id][-1] if wanted.id in self.reasons else ""

    def watch(self, owner: str, shape: SlotShape, machine: Machine = TWO_GPUS) -> None:
        self.ledger.watch(owner, machine, shape, self._told)

    def give_back(self, id: str) -> None:
        """All that a claim of whole GPUs holds."""
        for gpu in self.got.pop(id):
            self.ledger.give_back_slot(id, [gpu])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), (self.got, self.reasons, self.told)

    def _granted(self, id: str, gpus: tuple[str, ...]) -> None:
        with self._changed:
            self.got[id] = gpus
            self._changed.notify_all()

    def _waits(self, id: str, reason: str) -> None:
        with self._changed:
            self.reasons.setdefault(id, []).append(reason)
            self._changed.notify_all()

    def _told(self, count: int) -> None:
        with self._changed:
            self.told.append(count)
            self._changed.notify_all()


@pytest.fixture
def book(root: Path) -> Book:
    return Book(root)


@pytest.fixture
def elsewhere(root: Path) -> Book:
    """Another ledger over the same directory: to it the first one is another process."""
    return Book(root)


def claims(root: Path) -> list[Path]:
    return sorted((root / "claims").iterdir()) if (root / "claims").exists() else []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "powertrain-capacity"]


# --------------------------------------------------------------------------- within one process


def test_waiting_claims_are_served_in_order(book: Book) -> None:
    assert book.claim("a", 2) == ""
    pid = os.getpid()
    assert book.claim("b", 2) == f"waiting for 2 GPUs held by run a (pid {pid} on here); 1st in line"
    assert book.claim("c", 1) == (
        f"waiting for 1 GPU held by run a (pid {pid} on here); 2nd in line, behind run b (pid {pid} on here)"
    )
    assert book.got == {"a": ("0", "1")}
    book.give_back("a")
    assert book.got == {"b": ("0", "1")}
    book.give_back("b")
    assert book.got == {"c": ("0",)}
    book.give_back("c")


def test_a_claim_that_gives_up_waiting_no_longer_stands_in_the_way(book: Book) -> None:
    book.claim("a", 1)
    book.claim("b", 2)
    assert book.claim("c", 1).startswith("waiting for 1 GPU; 2nd in line, behind run b (pid ")
    book.ledger.withdraw("b")
    assert book.got == {"a": ("0",), "c": ("1",)}
    book.give_back("a")
    book.give_back("c")
    assert "b" not in book.got


def test_withdrawing_a_claim_that_was_granted_changes_nothing(book: Book, root: Path) -> None:
    book.claim("a", 1)
    book.ledger.withdraw("a")
    assert len(claims(root)) == 1
    book.give_back("a")


def test_a_claim_that_wants_nothing_that_is_waited_for_is_served_at_once(book: Book) -> None:
    book.claim("a", 2)
    book.claim("b", 2)
    license = SlotShape(custom={"license": 1.0})
    assert book.claim("other", 3, license) == ""
    assert "waiting for 1 license held by run other" in book.claim("late", 1, license)
    for _ in range(3):
        book.ledger.give_back_slot("other", [])
    assert "late" in book.got
    book.ledger.give_back_slot("late", [])
    book.give_back("a")
    book.give_back("b")


def test_a_claim_of_nothing_countable_never_waits_and_never_comes_near_the_disk(
    book: Book, root: Path
) -> None:
    assert book.claim("many", 64, SlotShape()) == ""
    assert book.got == {"many": ()}
    for _ in range(64):
        book.ledger.give_back_slot("many", [])
    book.ledger.withdraw("many")
    assert not root.exists()
    assert not threads()


def test_each_slot_that_is_given_back_is_free_at_once(book: Book) -> None:
    cpus = SlotShape(cpus=2, explicit=True)
    book.claim("a", 4, cpus)
    assert "waiting for 2 CPUs held by run a" in book.claim("b", 1, cpus)
    book.ledger.give_back_slot("a", [])
    assert "b" in book.got
    assert "waiting for 4 CPUs held by run a" in book.claim("c", 2, cpus)
    book.ledger.give_back_slot("a", [])
    assert "c" not in book.got
    book.ledger.give_back_slot("b", [])
    assert "c" in book.got
    for id in ("a", "a", "c", "c"):
        book.ledger.give_back_slot(id, [])


def test_the_directory_of_claims_goes_with_the_last_claim(book: Book, root: Path) -> None:
    book.claim("a", 1)
    book.claim("b", 1)
    assert len(claims(root)) == 2
    assert (root.stat().st_mode & 0o777, claims(root)[0].stat().st_mode & 0o777) == (0o700, 0o600)
    book.give_back("a")
    assert len(claims(root)) == 1
    book.give_back("b")
    assert list(root.iterdir()) == []


# --------------------------------------------------------------------------- the room there is


def test_the_room_counts_what_the_engine_holds_and_not_what_others_do(book: Book, elsewhere: Book) -> None:
    elsewhere.claim("other", 1)
    book.watch("mine", SlotShape(gpus=0.5))
    book.wait_until(lambda: book.told == [2])
    book.claim("training", 1, SlotShape(gpus=0.5), owner="mine")
    elsewhere.give_back("other")
    book.wait_until(lambda: book.told == [2, 4])
    book.claim("validation", 1, SlotShape(gpus=1.0), owner="mine")
    book.wait_until(lambda: book.told == [2, 4, 2])
    book.give_back("validation")
    book.give_back("training")
    book.ledger.unwatch("mine")


def test_the_room_of_one_is_not_what_another_of_the_process_waits_for(book: Book) -> None:
    four = Machine(cpus=1, gpus=("g",) * 4, visible=("0", "1", "2", "3"))
    book.claim("mine", 2, owner="me", machine=four)
    book.watch("me", SlotShape(gpus=1), machine=four)
    book.wait_until(lambda: book.told == [4])
    book.claim("patient", 3, machine=four)
    book.wait_until(lambda: book.told == [4, 2])
    book.ledger.withdraw("patient")
    book.wait_until(lambda: book.told == [4, 2, 4])
    book.give_back("mine")
    book.ledger.unwatch("me")


def test_a_second_watch_of_an_engine_takes_the_place_of_the_first(book: Book) -> None:
    book.watch("me", SlotShape(gpus=1))
    book.wait_until(lambda: book.told == [2])
    book.watch("me", SlotShape(gpus=0.5))
    book.wait_until(lambda: book.told == [2, 4])
    book.ledger.unwatch("me")


def test_the_thread_exists_only_while_something_waits_or_watches(book: Book) -> None:
    book.claim("a", 2)
    assert not threads()
    book.claim("b", 1)
    assert len(threads()) == 1
    book.watch("me", SlotShape(gpus=1))
    book.ledger.withdraw("b")
    book.wait_until(lambda: book.told == [0])
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "powertrain-capacity"]
    book.ledger.unwatch("me")
    thread.join(PATIENCE)
    assert not threads()
    book.give_back("a")


def test_nothing_is_reported_once_a_watch_has_ended(book: Book, elsewhere: Book) -> None:
    book.watch("me", SlotShape(gpus=1))
    book.wait_until(lambda: book.told == [2])
    book.ledger.unwatch("me")
    elsewhere.claim("a", 1)
    elsewhere.give_back("a")
    assert book.told == [2]


# --------------------------------------------------------------------------- between processes


HOLD = textwrap.dedent(
    """
    import os, sys, threading
    from pathlib import Path
    from powertrain.engine.base import SlotShape
    from powertrain.engine.local.ledger import Ledger, SlotRequest
    from powertrain.engine.resources import Machine
    ledger = Ledger(lambda: Path(sys.argv[1]))
    machine = Machine(cpus=8, gpus=("g",) * 2, visible=("0", "1"))
    def claim(id, count):
        granted = threading.Event()
        shape = SlotShape(gpus=1)
        ledger.claim(SlotRequest(id, id, f"run {id}", "here", machine, count, shape), lambda gpus: granted.set(), len)
        return granted
    """
)


@contextmanager
def process(script: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that can claim, and says a line when it has; killed afterwards."""
    command = [sys.executable, "-c", HOLD + textwrap.dedent(script), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "holding\n"
            yield started
        finally:
            started.kill()


HOLD_BOTH = """
    assert claim("holder", 2).is_set()
    print("holding", flush=True)
    sys.stdin.readline()
    for gpu in "01":
        ledger.give_back_slot("holder", [gpu])
    sys.stdin.readline()
"""


def test_slots_of_a_killed_process_go_to_the_waiting_claim(book: Book, root: Path) -> None:
    with process(HOLD_BOTH, root) as holder:
        held = f"waiting for 1 GPU held by run holder (pid {holder.pid} on here); 1st in line"
        assert book.claim("mine", 1) == held
        holder.send_signal(signal.SIGKILL)
        book.wait_until(lambda: book.got == {"mine": ("0",)})
        assert [path.name.split("-")[0] for path in claims(root)] == [str(os.getpid())]
        book.give_back("mine")
    assert not claims(root)


def test_void_claims_are_swept_and_live_ones_stay(book: Book, root: Path) -> None:
    files.sweep(root)
    assert not root.exists(), "a look leaves nothing"
    with process(HOLD_BOTH, root) as holder:
        files.sweep(root)
        assert len(claims(root)) == 1
        holder.kill()
        holder.wait()
        assert len(claims(root)) == 1
        files.sweep(root)
    assert list(root.iterdir()) == []


def test_slots_that_another_process_gives_back_go_to_the_waiting_claim(book: Book, root: Path) -> None:
    with process(HOLD_BOTH, root) as holder:
        book.watch("me", SlotShape(gpus=1))
        book.claim("mine", 2, owner="me")
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        book.wait_until(lambda: book.got == {"mine": ("0", "1")})
        book.wait_until(lambda: book.told[-1] == 2)
        book.ledger.unwatch("me")
        book.give_back("mine")


def test_a_claim_waits_where_its_holder_cannot_be_seen(
    book: Book, elsewhere: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: NO_PROCESS)  # as it looks from another container
        book.claim("mine", 2)
    assert "held by run mine" in elsewhere.claim("other", 1)
    book.give_back("mine")
    elsewhere.wait_until(lambda: "other" in elsewhere.got)
    elsewhere.give_back("other")


def test_a_child_that_outlives_its_killed_parent_holds_nothing_of_it(book: Book, root: Path) -> None:
    script = """
        assert claim("holder", 2).is_set()
        child = os.fork()
        if child == 0:
            print("holding", flush=True)
            sys.stdin.readline()  # until the test lets it go
            os._exit(0)
        os.waitpid(child, 0)
    """
    with process(script, root) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert book.claim("mine", 2) == ""
        book.give_back("mine")


def test_a_child_that_ends_takes_nothing_from_its_parent(book: Book, root: Path) -> None:
    script = """
        assert claim("holder", 2).is_set()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print("holding", flush=True)
        sys.stdin.readline()
    """
    with process(script, root):
        assert "held by run holder" in book.claim("mine", 1)
        book.ledger.withdraw("mine")


def test_no_gpu_is_given_twice_while_processes_take_and_give_back_all_the_time(
    book: Book, root: Path, tmp_path: Path
) -> None:
    """The holder of both GPUs makes a directory that no other process may make meanwhile."""
    script = f"""
        print("holding", flush=True)
        sys.stdin.readline()
        for turn in range(60):
            assert claim(f"turn {{turn}}", 2).wait(20)
            os.mkdir({str(tmp_path / "in use")!r})
            os.rmdir({str(tmp_path / "in use")!r})
            for gpu in "01":
                ledger.give_back_slot(f"turn {{turn}}", [gpu])
        print("done", flush=True)
    """
    with process(script, root) as one, process(script, root) as other:
        for started in (one, other):
            assert started.stdin is not None
            started.stdin.write("\n")
            started.stdin.flush()
        for started in (one, other):
            assert started.stdout is not None
            assert started.stdout.readline() == "done\n"
    assert list(root.iterdir()) == []


# --------------------------------------------------------------------------- one line over all processes


def test_waiting_claims_of_different_processes_are_served_in_the_order_in_which_they_came(
    book: Book, elsewhere: Book, root: Path
) -> None:
    third = Book(root)
    book.claim("holder", 2)
    elsewhere.claim("first", 2)
    third.claim("second", 2)
    book.claim("third", 2)
    book.give_back("holder")
    elsewhere.wait_until(lambda: "first" in elsewhere.got)
    assert (third.got, book.got) == ({}, {})
    elsewhere.give_back("first")
    third.wait_until(lambda: "second" in third.got)
    assert book.got == {}
    third.give_back("second")
    book.wait_until(lambda: "third" in book.got)
    book.give_back("third")
    assert list(root.iterdir()) == []


def test_a_new_claim_of_another_process_does_not_pass_a_waiting_one(book: Book, elsewhere: Book) -> None:
    book.claim("holder", 1)
    book.claim("patient", 2)
    assert elsewhere.claim("late", 1).startswith("waiting for 1 GPU; 2nd in line, behind run patient (pid ")
    assert elsewhere.claim("other", 1, SlotShape(custom={"license": 1.0})) == "", "it wants nothing of theirs"
    book.give_back("holder")
    book.wait_until(lambda: "patient" in book.got)
    assert "late" not in elsewhere.got
    book.give_back("patient")
    elsewhere.wait_until(lambda: "late" in elsewhere.got)
    elsewhere.give_back("late")
    elsewhere.ledger.give_back_slot("other", [])


WAIT_FOR_BOTH = """
    waiting = claim("waiter", 2)
    assert not waiting.is_set()
    print("holding", flush=True)
    waiting.wait()
"""


def test_a_claim_of_a_killed_process_no_longer_stands_in_the_way(book: Book, root: Path) -> None:
    book.claim("holder", 1)
    with process(WAIT_FOR_BOTH, root) as waiter:
        assert f"behind run waiter (pid {waiter.pid} on here)" in book.claim("mine", 1)
        waiter.send_signal(signal.SIGKILL)
        book.wait_until(lambda: "mine" in book.got)
    book.give_back("holder")
    book.give_back("mine")
    assert list(root.iterdir()) == []


def test_a_stopped_process_at_the_head_of_the_line_holds_no_resources_that_it_does_not_need(
    book: Book, root: Path
) -> None:
    three = Machine(cpus=1, gpus=("g",) * 3, visible=("0", "1", "2"))
    book.claim("holder", 3, machine=three)
    with process(WAIT_FOR_BOTH, root) as waiter:
        with files.locked(root):  # no process is stopped while it holds the lock: that would hold up all
            waiter.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, waiter.pid, os.WSTOPPED)
        book.claim("mine", 1, machine=three)
        book.give_back("holder")
        book.wait_until(lambda: book.got == {"mine": ("2",)})
        book.give_back("mine")


def test_the_reason_is_reported_again_when_it_changes_and_never_after_the_grant(
    book: Book, elsewhere: Book
) -> None:
    book.claim("holder", 2)
    book.claim("first", 2)
    elsewhere.claim("mine", 1)
    here = f"(pid {os.getpid()} on here)"
    book.give_back("holder")
    elsewhere.wait_until(lambda: len(elsewhere.reasons["mine"]) == 2)
    assert elsewhere.reasons["mine"] == [
        f"waiting for 1 GPU held by run holder {here}; 2nd in line, behind run first {here}",
        f"waiting for 1 GPU held by run first {here}; 1st in line",
    ]
    book.give_back("first")
    elsewhere.wait_until(lambda: "mine" in elsewhere.got)
    elsewhere.give_back("mine")
    assert len(elsewhere.reasons["mine"]) == 2


@pytest.mark.parametrize("end", [lambda waiting: waiting.hand_out(("0",)), lambda waiting: waiting.leave()])
def test_a_reason_that_was_found_before_the_end_of_waiting_is_not_reported_after_it(
    end: Callable[[ledgers._Waiting], None],
) -> None:
    told: list[str] = []
    waiting = ledgers._Waiting(request("a"), lambda gpus: None, told.append)
    waiting.report("first")
    waiting.due = 0.0
    end(waiting)
    waiting.report("second")
    assert told == ["first"]


def test_a_file_whose_process_is_ending_is_looked_at_again_soon_and_then_less_and_less() -> None:
    closing = ledgers._Closing()
    quiet = closing.pause({"a", "b"})
    closing.add({"a"})
    pauses = [closing.pause({"a", "b"}) for _ in range(20)]
    assert pauses[0] < 0.01, "the kernel lets go of the lock in a moment"
    assert sorted(pauses) == pauses
    assert pauses[-1] == quiet, "somebody else may hold it on"
    closing.add({"b"})
    assert closing.pause({"a", "b"}) == pauses[0]
    assert closing.pause(set()) == quiet


def test_a_reason_that_changes_all_the_time_is_reported_now_and_then(book: Book, elsewhere: Book) -> None:
    book.claim("holder", 2)
    for turn in range(50):
        book.ledger.claim(request(f"ahead {turn}", 2), lambda _: None, lambda _: None)
    elsewhere.claim("mine", 1)
    for turn in range(50):
        book.ledger.withdraw(f"ahead {turn}")
    elsewhere.wait_until(lambda: "1st in line" in elsewhere.reasons["mine"][-1])
    assert len(elsewhere.reasons["mine"]) <= 8
    elsewhere.ledger.withdraw("mine")
    book.give_back("holder")


def test_the_room_of_one_is_not_what_another_process_waits_for(book: Book, elsewhere: Book) -> None:
    four = Machine(cpus=1, gpus=("g",) * 4, visible=("0", "1", "2", "3"))
    book.claim("mine", 2, owner="me", machine=four)
    book.watch("me", SlotShape(gpus=1), machine=four)
    book.wait_until(lambda: book.told == [4])
    elsewhere.claim("patient", 3, machine=four)
    book.wait_until(lambda: book.told == [4, 2])
    elsewhere.ledger.withdraw("patient")
    book.wait_until(lambda: book.told == [4, 2, 4])
    book.give_back("mine")
    book.ledger.unwatch("me")


def test_a_holder_that_dies_is_noticed_without_looking_again_and_again(
    book: Book, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "POLL_INTERVAL_S", 10 * PATIENCE)
    monkeypatch.setattr(ledgers, "_MAX_POLL_INTERVAL_S", 10 * PATIENCE)
    with process(HOLD_BOTH, root) as holder:
        book.claim("mine", 2)
        holder.send_signal(signal.SIGKILL)
        book.wait_until(lambda: "mine" in book.got)
        book.give_back("mine")


def test_a_process_that_was_lent_a_claim_holds_it_until_it_ends(book: Book, root: Path) -> None:
    """As a worker does, which lives for a moment after its driver was killed."""
    script = """
        import subprocess
        assert claim("holder", 2).is_set()
        lent = ledger.lend("holder")
        os.set_inheritable(lent, True)
        code = "import sys; print('holding', flush=True); sys.stdin.readline()"
        subprocess.run([sys.executable, "-c", code], close_fds=False)
    """
    with process(script, root) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert "held by run holder" in book.claim("mine", 1)
        assert holder.stdin is not None
        holder.stdin.close()  # which is what the worker reads
        book.wait_until(lambda: "mine" in book.got)
        book.give_back("mine")


def test_what_was_lent_is_free_as_soon_as_it_is_given_back(book: Book, elsewhere: Book) -> None:
    book.claim("a", 2)
    lent = book.ledger.lend("a")
    assert lent is not None
    book.give_back("a")
    assert elsewhere.claim("b", 2) == ""
    elsewhere.give_back("b")
    locks.close(lent)
    assert book.ledger.lend("a") is None


def test_without_inotify_changes_are_found_by_looking_and_that_is_said(
    book: Book, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "POLL_INTERVAL_S", 0.02)

    def refuse() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(directory_watch, "_open_inotify", refuse)
    with process(HOLD_BOTH, root) as holder:
        reason = book.claim("mine", 1)
        assert reason.endswith(
            "; 1st in line (looked at every 0.02 s, because inotify cannot be used: Too many open files)"
        )
        holder.send_signal(signal.SIGKILL)
        book.wait_until(lambda: "mine" in book.got)
        book.give_back("mine")


# --------------------------------------------------------------------------- directories that are not as they should be


def test_a_file_that_cannot_be_read_keeps_no_run_from_starting(
    book: Book, elsewhere: Book, root: Path
) -> None:
    elsewhere.claim("other", 1)
    (path,) = claims(root)
    path.write_bytes(b'{"written": "by a later version"}')
    assert book.claim("mine", 2) == ""
    assert path.exists(), "its owner lives"
    book.give_back("mine")
    elsewhere.give_back("other")


def test_files_that_are_none_of_ours_are_left_alone_and_hold_nothing_up(
    book: Book, elsewhere: Book, root: Path
) -> None:
    elsewhere.claim("holder", 2)
    directory = root / "claims"
    (directory / "line-000000000001-1-0123456789.json").write_text("no ticket: its name is too long")
    (directory / "README").write_text("mine")
    (directory / "line-000000000007-1-01234567.json").mkdir()
    os.mkfifo(directory / "8-01234567.json")
    assert book.claim("mine", 1).endswith("; 1st in line")
    assert (directory / "README").read_text() == "mine"
    elsewhere.give_back("holder")
    book.wait_until(lambda: "mine" in book.got)
    book.give_back("mine")


def test_a_ticket_that_cannot_be_read_keeps_its_number_and_holds_nothing_up(
    book: Book, elsewhere: Book, root: Path
) -> None:
    book.claim("holder", 2)
    elsewhere.claim("strange", 2)
    (ticket,) = (path for path in claims(root) if path.name.startswith("line-"))
    ticket.write_bytes(b'{"run": "half-wri')
    assert book.claim("mine", 1).endswith("; 1st in line")
    numbers = sorted(path.name.split("-")[1] for path in claims(root) if path.name.startswith("line-"))
    assert numbers == ["000000000001", "000000000002"]
    elsewhere.ledger.withdraw("strange")
    book.give_back("holder")
    book.give_back("mine")


def test_a_disk_that_is_full_when_it_is_ones_turn_is_waited_for_and_reported(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "POLL_INTERVAL_S", 0.02)
    book.claim("holder", 2)
    book.claim("mine", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, offset: 3)
        book.give_back("holder")
        book.wait_until(lambda: "No space left on device" in book.reasons["mine"][-1])
    book.wait_until(lambda: "mine" in book.got)
    book.give_back("mine")


def test_a_claim_says_which_run_holds_what(book: Book, root: Path) -> None:
    machine = Machine(cpus=4, gpus=("g",), visible=("3",), uuids=("GPU-a",), cores=frozenset({5, 1}))
    book.claim("mine", 1, SlotShape(cpus=2, gpus=1, custom={}, explicit=True), machine=machine)
    (path,) = claims(root)
    assert json.loads(path.read_bytes()) == {
        "run": "run mine",
        "host": "here",
        "pid": os.getpid(),
        "gpus": ["GPU-a"],
        "amounts": {"CPU": 2.0},
        "cores": [1, 5],
    }
    book.give_back("mine")


def test_a_root_that_cannot_be_made_is_refused_in_words_and_nothing_stays_queued(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    book = Book(in_the_way / "runtime")
    with pytest.raises(EngineError, match=r"cannot be used for.*Set XDG_RUNTIME_DIR or TMPDIR"):
        book.claim("a", 1)
    in_the_way.unlink()
    assert book.claim("b", 2) == ""
    assert list(book.got) == ["b"]
    book.give_back("b")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_root_that_cannot_be_written_to_is_refused_in_words(book: Book, root: Path) -> None:
    root.mkdir(mode=0o500)
    with pytest.raises(EngineError, match="Set XDG_RUNTIME_DIR or TMPDIR"):
        book.claim("a", 1)


def test_a_full_disk_is_refused_in_words_and_leaves_no_claim(
    book: Book, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, offset: 3)
        with pytest.raises(EngineError, match="No space left on device"):
            book.claim("a", 1)
    assert not claims(root)
    assert book.claim("b", 2) == ""
    book.give_back("b")


def test_a_disk_without_room_for_a_ticket_is_refused_in_words_and_leaves_none(
    mount_small_disk: Callable[[str], Path],
) -> None:
    disk = mount_small_disk("16k")
    book = Book(disk / "runtime")
    book.claim("holder", 2)
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(1 << 16))
    with pytest.raises(EngineError, match="No space left on device"):
        book.claim("late", 1)
    assert len(claims(disk / "runtime")) == 1
    (disk / "filler").unlink()
    assert "held by run holder" in book.claim("later", 1)
    book.give_back("holder")
    book.give_back("later")


def test_a_claim_that_cannot_wait_for_want_of_descriptors_is_refused_in_words_and_leaves_no_ticket(
    book: Book, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.claim("holder", 2)

    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(locks, "unshared_pipe", none_left)
        with pytest.raises(EngineError, match="Too many open files"):
            book.claim("late", 1)
    assert len(claims(root)) == 1
    book.give_back("holder")
    assert book.claim("next", 2) == "", "nobody stands before it"
    assert "late" not in book.got
    book.give_back("next")


def test_a_link_in_place_of_the_claims_is_refused(book: Book, root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (root / "claims").symlink_to(tmp_path)
    with pytest.raises(EngineError, match="symbolic link"):
        book.claim("a", 1)


def test_a_holder_that_gives_back_after_the_directory_was_cleared_away_is_done(
    book: Book, root: Path
) -> None:
    book.claim("a", 2)
    for path in claims(root):
        path.unlink()
    (root / "claims").rmdir()
    book.give_back("a")
    assert book.claim("b", 2) == ""
    book.give_back("b")
