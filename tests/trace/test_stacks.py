"""Stacks of real processes: whatever they are stuck in, they are seen, and none is harmed by being looked at."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine import process
from powertrain.trace.machine import processes
from powertrain.trace.stacks import frames, stacks
from powertrain.wire.values import Frame, ProcessStack, ThreadStack, Where

T = TypeVar("T")
PATIENCE = 20.0
SOURCES = str(Path(stacks.__file__).parents[3])
NEEDS_PY_SPY = pytest.mark.skipif(not stacks.py_spy(), reason="py-spy is not installed")
WAYS = ["signal", pytest.param("py-spy", marks=NEEDS_PY_SPY)]


def eventually(look: Callable[[], T | None]) -> T:
    """What ``look`` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return found


class Program:
    """A process that is armed and runs ``text``; its lines can be asked for by what they say."""

    def __init__(self, directory: Path, text: str) -> None:
        self.path = directory / "program.py"
        self.dump = str(directory / "stacks" / "0-1")
        self.path.write_text(
            "import ctypes, os, sys, threading, time\n"
            "from powertrain.trace.stacks import stacks\n"
            "if __name__ == '__main__': stacks.arm(sys.argv[1])\n" + textwrap.dedent(text)
        )
        self.running = subprocess.Popen(
            [sys.executable, str(self.path), self.dump],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCES, *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid = self.running.pid

    def look(self) -> ProcessStack:
        return stacks.stacks_of(self.pid, "rank 1", self.dump)

    def children(self) -> list[ProcessStack]:
        return stacks.children_stacks(self.pid, "rank 1", self.dump)

    def is_at(self, seen: ProcessStack, source: str) -> bool:
        """True when the user's innermost frame is the line of the program that reads ``source``."""
        where = frames.where_of(seen)
        return where is not None and (where.frame.file, where.frame.source) == (str(self.path), source)

    def seen_at(self, source: str) -> ProcessStack:
        """What is seen from outside once the main thread stands at that line."""
        return eventually(lambda: seen if self.is_at(seen := self.look(), source) else None)

    def says(self) -> Any:
        assert self.running.stdout is not None
        return json.loads(self.running.stdout.readline())

    def tell(self, text: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(text.encode())
        self.running.stdin.flush()

    def error_line(self) -> str:
        """The next line of its errors; with all that follow where it has died of one, so that a test can show it."""
        assert self.running.stderr is not None
        line = self.running.stderr.readline()
        if line.startswith(b"Traceback"):
            line += self.running.stderr.read()
        return line.decode()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    with contextlib.ExitStack() as stack:

        def start(text: str) -> Program:
            started = Program(tmp_path, text)
            stack.callback(started.running.communicate)
            stack.callback(_end_with_children, started.pid)
            return started

        yield start


def _end_with_children(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
        process.kill_scope(pid)
        psutil.wait_procs(below, timeout=5)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not run for a while answers late, and would be taken for one that cannot answer."""
    for timeout in ("_ANSWER_WITHIN", "_NATIVE_WITHIN", "_PYTHON_WITHIN"):
        monkeypatch.setattr(stacks, timeout, PATIENCE / 4)
    monkeypatch.setattr(stacks, "_TURN_WITHIN", PATIENCE)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "signal":
        monkeypatch.setattr(stacks, "py_spy", lambda: "")
    return str(request.param)


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: "")


# --------------------------------------------------------------------------- from outside

STUCK = {
    "a lock": "lock = threading.Lock(); lock.acquire()\ndef stuck():\n    lock.acquire()\nstuck()",
    "a sleep": "def stuck():\n    time.sleep(60)\nstuck()",
    "C with the interpreter held": "def stuck():\n    ctypes.PyDLL(None).sleep(60)\nstuck()",
    "C without the interpreter": "def stuck():\n    ctypes.CDLL(None).sleep(60)\nstuck()",
    "an endless loop": "def stuck():\n    while True: pass\nstuck()",
}


@pytest.mark.parametrize("kind", STUCK)
def test_the_line_at_which_a_process_is_stuck_is_seen(
    program: Callable[[str], Program], way: str, kind: str
) -> None:
    idle = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    running = program(idle + STUCK[kind])
    source = STUCK[kind].splitlines()[-2].strip()
    seen = running.seen_at(source)
    assert (seen.title, seen.pid, seen.remark) == ("rank 1", running.pid, "")
    assert [thread.main for thread in seen.threads] == [True, False]
    again = running.look()
    assert running.is_at(again, source), "looking at it has moved it"
    assert again.state == ("running" if "loop" in kind else "sleeping")


@NEEDS_PY_SPY
def test_frames_of_c_are_seen_with_py_spy(program: Callable[[str], Program]) -> None:
    running = program("def stuck():\n    ctypes.PyDLL(None).sleep(60)\nstuck()")
    source = "ctypes.PyDLL(None).sleep(60)"
    running.seen_at(source)
    eventually(  # py-spy cannot find the frames of C in the first moments of an interpreter
        lambda: any(
            "sleep" in frame.function and frame.line == 0 and ".so" in frame.file
            for frame in running.seen_at(source).threads[0].frames
        )
    )


def test_a_stopped_process_is_said_to_be_stopped(program: Callable[[str], Program], way: str) -> None:
    running = program("def stuck():\n    time.sleep(60)\nstuck()")
    running.seen_at("time.sleep(60)")
    os.kill(running.pid, signal.SIGSTOP)
    eventually(lambda: processes.state(running.pid) == "stopped")
    seen = running.look()
    if way == "signal":
        assert (seen.threads, seen.remark) == (
            [],
            "Its state is 'stopped', in which the stacks of a process cannot be read.",
        )
    else:
        assert running.is_at(seen, "time.sleep(60)")
    os.kill(running.pid, signal.SIGCONT)
    running.seen_at("time.sleep(60)")


def test_a_process_that_is_gone_has_no_stacks() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    seen = stacks.stacks_of(ended.pid, "rank 1", "")
    assert (seen.state, seen.threads, seen.remark) == ("gone", [], "It has ended.")


def test_two_readers_at_once_both_see_it_whole(
    program: Callable[[str], Program], without_py_spy: None
) -> None:
    running = program("def stuck():\n    time.sleep(60)\nstuck()")
    running.seen_at("time.sleep(60)")
    seen: list[ProcessStack] = []
    lookers = [threading.Thread(target=lambda: seen.append(running.look())) for _ in range(4)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert [len(found.threads) for found in seen] == [1] * 4
    assert all(running.is_at(found, "time.sleep(60)") for found in seen)


#: Takes tens of milliseconds to write its stacks, so the next reader comes meanwhile.
OF_MANY_FRAMES = """
def wait(depth):
    wait(depth - 1) if depth else time.sleep(60)

for _ in range(60):
    threading.Thread(target=wait, args=(90,), daemon=True).start()
time.sleep(stacks._OLD_ENOUGH)
print("1", flush=True)
time.sleep(60)
"""


def request_stacks(running: Program) -> None:
    """Request stacks and come back as soon as they are being written, like a reader that has stopped waiting."""
    before = os.path.getsize(running.dump)
    assert ctypes.CDLL(None).tgkill(running.pid, running.pid, stacks.SIGNAL) == 0
    eventually(lambda: os.path.getsize(running.dump) > before)


def test_a_late_answer_to_an_earlier_reader_is_not_taken_for_a_part_of_the_next(
    program: Callable[[str], Program], without_py_spy: None
) -> None:
    running = program(OF_MANY_FRAMES)
    running.says()
    for _ in range(3):
        request_stacks(running)
        seen = running.look()
        assert len(seen.threads) == 61
        assert seen.threads[0].main
        assert all(len(thread.frames) > 90 for thread in seen.threads[1:])


def test_a_part_of_a_dump_is_never_shown_as_the_whole(
    program: Callable[[str], Program], without_py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = program(OF_MANY_FRAMES)
    running.says()
    for patience in (0.001, 0.005, 0.02):
        monkeypatch.setattr(stacks, "_ANSWER_WITHIN", patience)
        request_stacks(running)
        seen = running.look()
        assert seen.remark or len(seen.threads) == 61
        assert len(seen.threads) == 61 or not any(thread.main for thread in seen.threads)


# --------------------------------------------------------------------------- processes below a rank


def test_a_child_without_the_handler_is_not_ended_by_being_looked_at(
    program: Callable[[str], Program], without_py_spy: None
) -> None:
    running = program(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        time.sleep(stacks._OLD_ENOUGH)
        print(child.pid, flush=True)
        print(child.wait(), flush=True)
        """
    )
    child = running.says()
    (seen,) = running.children()
    assert (seen.pid, seen.title, seen.threads) == (child, "sleep", [])
    assert seen.remark == "It was not forked from a rank that can dump stacks, so its stacks cannot be read."
    assert processes.state(child) == "sleeping"


LOADERS = """
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return index

def collate(rows):
    time.sleep(60)

def batches(how):
    from torch.utils.data import DataLoader
    return iter(DataLoader(Data(), num_workers=1, collate_fn=collate, multiprocessing_context=how))

if __name__ == "__main__":
    spawned = batches("spawn")
    forked = batches("fork")
    next(forked)
"""


def test_a_loaders_worker_is_named_with_its_line_and_a_spawned_one_survives(
    program: Callable[[str], Program], without_py_spy: None
) -> None:
    running = program(LOADERS)
    seen = eventually(
        lambda: next((child for child in running.children() if running.is_at(child, "time.sleep(60)")), None)
    )
    assert seen.title == "DataLoader worker of rank 1"
    rank = frames.where_of(running.look())
    assert rank is not None
    assert (rank.frame.source, rank.inside, rank.call) == ("next(forked)", "loader", "__next__")

    def spawned() -> psutil.Process | None:
        below = psutil.Process(running.pid).children(recursive=True)
        return next((child for child in below if "spawn_main" in " ".join(child.cmdline())), None)

    worker = eventually(spawned)
    eventually(lambda: processes.age(worker.pid) > stacks._OLD_ENOUGH)
    (looked_at,) = [child for child in running.children() if child.pid == worker.pid]
    assert looked_at.remark.startswith("It was not forked from a rank")
    assert worker.is_running()
    assert worker.status() != psutil.STATUS_ZOMBIE


def test_an_engine_sees_a_process_and_its_children(
    program: Callable[[str], Program], without_py_spy: None
) -> None:
    running = program(
        """
        def in_child():
            time.sleep(60)
        def in_parent():
            os.wait()
        if os.fork() == 0:
            in_child()
        in_parent()
        """
    )
    running.seen_at("os.wait()")
    eventually(lambda: running.is_at(running.children()[0], "time.sleep(60)"))
    plain = process.inspection(running.pid, "rank 1", running.dump, with_stacks=False)
    assert (plain.pid, plain.state, plain.processes, plain.debugged) == (running.pid, "sleeping", (), False)
    whole = process.inspection(running.pid, "rank 1", running.dump, with_stacks=True)
    assert running.is_at(whole.processes[0], "os.wait()")
    assert running.is_at(whole.processes[1], "time.sleep(60)")
    assert process.inspection(0, "rank 1", running.dump, with_stacks=True).state == "gone"


# --------------------------------------------------------------------------- this process


def test_a_process_sees_its_own_threads_with_their_source() -> None:
    asleep, done = threading.Event(), threading.Event()

    def waits() -> None:
        asleep.set()
        done.wait()

    thread = threading.Thread(target=waits, name="a waiting thread")
    thread.start()
    asleep.wait()
    try:
        found = {stack.name: stack for stack in stacks.own_stacks()}
    finally:
        done.set()
        thread.join()
    assert next(iter(found)) == "MainThread"
    assert [stack.main for stack in found.values()].count(True) == 1
    lines = [frame.source for frame in found["a waiting thread"].frames if frame.file == __file__]
    assert lines in (["done.wait()"], ["asleep.set()"])


def test_a_handler_that_other_code_has_set_stays(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(stacks.SIGNAL, lambda number, _: heard.append(number))
    try:
        stacks.arm(str(tmp_path / "dump"))
        assert stacks.dump_path() == ""
        os.kill(os.getpid(), stacks.SIGNAL)
        eventually(lambda: heard)
    finally:
        stacks.disarm()
        signal.signal(stacks.SIGNAL, before)
    assert heard == [stacks.SIGNAL]
    assert not (tmp_path / "dump").exists()


def test_disarming_leaves_no_handler_and_can_be_done_again(tmp_path: Path) -> None:
    stacks.arm(str(tmp_path / "deep" / "dump"))
    assert stacks.dump_path() == str(tmp_path / "deep" / "dump")
    assert processes.catches(os.getpid(), stacks.SIGNAL)
    assert processes.has_open(os.getpid(), stacks.dump_path())
    stacks.disarm()
    stacks.disarm()
    assert stacks.dump_path() == ""
    assert not processes.catches(os.getpid(), stacks.SIGNAL)


def test_a_disk_that_refuses_the_file_does_not_stop_the_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stacks.arm(str(tmp_path / "file" / "dump"))
    assert stacks.dump_path() == ""
    stacks.disarm()


def test_a_crash_leaves_a_traceback_and_keeps_its_signal(program: Callable[[str], Program]) -> None:
    running = program("def crashes():\n    ctypes.string_at(0)\ncrashes()")
    _, errors = running.running.communicate(timeout=PATIENCE)
    assert running.running.returncode == -signal.SIGSEGV
    assert f'File "{running.path}", line 5 in crashes' in errors.decode()


def test_a_waiting_pdb_counts_as_a_debugger(program: Callable[[str], Program]) -> None:
    running = program(
        """
        def watch():
            for debugged in (False, True):
                while stacks.own_debugged(stacks.main_frame()) != debugged:
                    time.sleep(0.01)
                print(f"debugged: {debugged}", file=sys.stderr, flush=True)
        threading.Thread(target=watch, daemon=True).start()
        sys.stdin.readline()
        breakpoint()
        """
    )
    assert running.error_line() == "debugged: False\n"
    running.tell("\n")
    assert running.error_line() == "debugged: True\n"


def test_a_process_that_is_traced_counts_as_debugged(program: Callable[[str], Program]) -> None:
    running = program("time.sleep(60)")
    assert not processes.is_traced(running.pid)
    done, tried = threading.Event(), threading.Event()
    results: list[int] = []

    def trace() -> None:
        """Holds it as long as this thread lives."""
        seize = 0x4206
        results.append(ctypes.CDLL(None).ptrace(seize, running.pid, None, None))
        tried.set()
        done.wait()

    tracer = threading.Thread(target=trace)
    tracer.start()
    try:
        tried.wait()
        if results != [0]:
            pytest.skip("tracing is forbidden on this machine")
        assert processes.is_traced(running.pid)
        assert process.inspection(running.pid, "rank 1", running.dump, with_stacks=False).debugged
    finally:
        done.set()
        tracer.join()
    eventually(lambda: not processes.is_traced(running.pid))


# --------------------------------------------------------------------------- where a rank is

COLLECTIVES = """
import json, msgspec
import torch, torch.distributed as dist

def rank_is_at(case):
    def tell():
        while True:
            where = stacks.own_where(stacks.main_frame())
            if where is not None and where.inside == "collective" and case in where.frame.source:
                print(msgspec.json.encode(where).decode(), flush=True)
                return
            time.sleep(0.01)
    threading.Thread(target=tell, daemon=True).start()

def join(case, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}-{case}", rank=rank, world_size=2)

def averages(rank):
    if rank == 1: time.sleep(60)
    rank_is_at("dist.all_reduce")
    dist.all_reduce(torch.ones(1))

def learns(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    if rank == 1: time.sleep(60)
    rank_is_at("backward")
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()

for case in (averages, learns):
    for rank in range(2):
        if os.fork() == 0:
            join(case.__name__, rank)
            case(rank)
while True: os.wait()
"""


def test_a_rank_inside_a_collective_is_at_the_users_line(program: Callable[[str], Program]) -> None:
    running = program(COLLECTIVES)
    found = sorted(
        (msgspec.convert(running.says(), Where) for _ in range(2)), key=lambda where: where.frame.function
    )
    assert [(where.frame.source, where.frame.function, where.call) for where in found] == [
        ("dist.all_reduce(torch.ones(1))", "averages", "all_reduce"),
        ("loss.backward()", "learns", "backward"),
    ]
    assert {where.frame.file for where in found} == {str(running.path)}


SITE = f"{os.sep}env{os.sep}lib{os.sep}site-packages{os.sep}"
TRAIN = ("/home/me/train.py", 12, "train_func")
LAUNCH = (f"{frames.OURS}worker/main.py", 200, "_train")
SCRIPT = ("/home/me/train.py", 90, "<module>")


@pytest.mark.parametrize(
    ("within", "inside", "call"),
    [
        ([], "", ""),
        ([(f"{SITE}torch/distributed/distributed_c10d.py", 1, "barrier")], "collective", "barrier"),
        (
            [
                (f"{SITE}torch/distributed/distributed_c10d.py", 1, "all_reduce"),
                (f"{SITE}torch/distributed/c10d_logger.py", 2, "wrapper"),
            ],
            "collective",
            "all_reduce",
        ),
        (
            [
                (f"{SITE}torch/autograd/graph.py", 1, "_engine_run_backward"),
                (f"{SITE}torch/_tensor.py", 2, "backward"),
            ],
            "collective",
            "backward",
        ),
        (
            [
                (f"{SITE}torch/utils/data/dataloader.py", 1, "__next__"),
                (f"{frames.OURS}torch/prepare.py", 2, "__iter__"),
            ],
            "loader",
            "__next__",
        ),
        (
            [
                (f"{frames.OURS}worker/service.py", 1, "wait_for_row"),
                (f"{frames.OURS}worker/context.py", 2, "report"),
            ],
            "run",
            "report",
        ),
        (
            [
                (f"{SITE}torch/nn/modules/linear.py", 1, "forward"),
                (f"{SITE}torch/distributed/fsdp/fully_sharded_data_parallel.py", 2, "forward"),
                (f"{SITE}torch/nn/modules/module.py", 3, "_call_impl"),
            ],
            "",
            "forward",
        ),
        (
            [
                (f"{SITE}torch/_inductor/scheduler.py", 1, "codegen"),
                (f"{SITE}torch/_dynamo/convert_frame.py", 2, "_compile"),
                (f"{SITE}torch/_dynamo/eval_frame.py", 3, "_fn"),
            ],
            "compiler",
            "_compile",
        ),
        (
            [
                (f"{SITE}torch/_inductor/compile_fx.py", 1, "run"),
                (f"{SITE}torch/_dynamo/eval_frame.py", 2, "_fn"),
            ],
            "",
            "run",
        ),
        ([(f"{SITE}requests/api.py", 1, "get")], "", "get"),
    ],
)
def test_what_the_users_line_waits_in(within: list[frames.Line], inside: str, call: str) -> None:
    found = frames.where([*within, TRAIN, LAUNCH, SCRIPT], averages_gradients=True)
    assert found is not None
    assert (found.frame.file, found.frame.line, found.inside, found.call) == (TRAIN[0], 12, inside, call)


def test_a_backward_of_one_rank_alone_is_no_collective() -> None:
    line = (f"{SITE}torch/autograd/graph.py", 1, "_engine_run_backward")
    found = frames.where([line, TRAIN], averages_gradients=False)
    assert found is not None
    assert (found.inside, found.call) == ("", "_engine_run_backward")


def test_the_launcher_of_the_rank_is_not_where_it_is() -> None:
    waiting = frames.where([LAUNCH, SCRIPT], averages_gradients=True)
    assert waiting is not None
    assert (waiting.frame.file, waiting.inside) == (LAUNCH[0], "run")
    joining = (f"{SITE}torch/distributed/distributed_c10d.py", 5, "init_process_group")
    setting_up = frames.where(
        [joining, (f"{frames.OURS}torch/backend.py", 7, "on_start"), LAUNCH, SCRIPT], True
    )
    assert setting_up is not None
    assert (setting_up.frame.function, setting_up.inside) == ("init_process_group", "collective")
    assert frames.where([], averages_gradients=True) is None


def test_debuggers_are_known_wherever_they_lie() -> None:
    assert frames.is_debugged([("/opt/editor/helpers/pydev/pydevd.py", 1, "do_wait_suspend"), TRAIN])
    assert not frames.is_debugged([("/home/me/pdb.py", 1, "mine"), TRAIN])
    assert not frames.is_debugged([TRAIN, LAUNCH, ("/opt/debugpy/server/cli.py", 1, "main")])


def test_looking_where_a_rank_is_reads_no_frame_beyond_the_users_own() -> None:
    engine = (f"{SITE}torch/autograd/graph.py", 1, "_engine_run_backward")
    for look in (lambda lines: frames.where(lines, False), frames.is_in_backward):
        lines = iter([engine, TRAIN, LAUNCH])
        assert look(lines)
        assert LAUNCH in lines


def test_a_backward_that_another_thread_compiles_counts_as_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compile("def compile_fx(wait):\n    wait()", f"{SITE}torch/_inductor/compile_fx.py", "exec")
    engine = compile(
        "def _engine_run_backward(look):\n    return look()", f"{SITE}torch/autograd/graph.py", "exec"
    )
    names: dict[str, Any] = {}
    exec(compiler, names)
    exec(engine, names)
    monkeypatch.setattr(stacks, "_rank_thread", threading.get_ident())

    def look() -> Any:
        return stacks.own_where(sys._getframe().f_back)

    started, done = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        done.wait(30)

    thread = threading.Thread(target=names["compile_fx"], args=(wait,))
    thread.start()
    try:
        assert started.wait(30)
        assert names["_engine_run_backward"](look).inside == "compiler"
        assert look().inside == "", "the thread of the loop does not wait for it"
    finally:
        done.set()
        thread.join()
    assert names["_engine_run_backward"](look).inside == ""


@pytest.mark.parametrize("environment", ["/opt/torch/venv", "/home/me/envs/torch", "/srv/venv"])
def test_an_environment_called_torch_is_not_taken_for_the_library(environment: str) -> None:
    packages = f"{environment}/lib/python3.11/site-packages"
    assert frames.kind_of(f"{packages}/torch/distributed/distributed_c10d.py") == "collective"
    assert frames.kind_of(f"{packages}/torch/_inductor/compile_fx.py") == "compiler"
    assert frames.kind_of(f"{packages}/numpy/core/multiarray.py") == "library"


# --------------------------------------------------------------------------- text

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\n\r\\', exclude_categories=("C", "Z")), min_size=1
)
FRAMES = st.builds(Frame, file=NAMES, line=st.integers(1, 99999), function=NAMES)


def _as_faulthandler_writes(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


@given(st.lists(st.lists(FRAMES, max_size=4), min_size=1, max_size=4))
def test_what_faulthandler_writes_is_read_back(threads: list[list[Frame]]) -> None:
    written = "\n".join(
        f"Thread 0x{index + 1:016x} (most recent call first):\n"
        + "".join(
            f'  File "{_as_faulthandler_writes(f.file)}", line {f.line} in {_as_faulthandler_writes(f.function)}\n'
            for f in thread
        )
        for index, thread in enumerate(threads)
    )
    parsed = stacks.parse_dump(written)
    expected = [threads[-1], *threads[:-1]]
    assert [[(f.file, f.line, f.function) for f in stack.frames] for stack in parsed] == [
        [(f.file, f.line, f.function) for f in thread] for thread in expected
    ]
    assert [stack.main for stack in parsed] == [True] + [False] * (len(threads) - 1)


def test_a_list_of_threads_that_was_cut_short_has_no_main_one() -> None:
    text = 'Thread 0x01 [loader] (most recent call first):\n  File "a.py", line ??? in f\n...\n'
    (only,) = stacks.parse_dump(text)
    assert (only.name, only.main, only.frames) == (
        "loader",
        False,
        [Frame(file="a.py", line=0, function="f")],
    )


def test_a_page_of_stacks_reads_from_the_innermost_frame_out() -> None:
    inner = Frame(file="/lib/libc.so.6", line=0, function="poll")
    outer = Frame(file="/home/me/train.py", line=7, function="train_func", source="batch = next(loader)")
    threads = [
        ThreadStack(name="MainThread", main=True, frames=[inner, outer]),
        ThreadStack(name="side", main=False, frames=[]),
    ]
    ended = ProcessStack(pid=6, title="sleep", state="zombie", remark="It has ended.")
    page = stacks.text([ProcessStack(pid=5, title="rank 1", state="sleeping", threads=threads), ended])
    assert page == (
        "rank 1 (process 5, sleeping)\n"
        "  MainThread\n"
        "    poll at /lib/libc.so.6\n"
        "    train_func at /home/me/train.py:7\n"
        "      batch = next(loader)\n"
        "  side\n"
        "    runs no Python\n"
        "\n"
        "sleep (process 6, zombie)\n"
        "  It has ended.\n"
    )
