"""A node's agent, without Ray: a hub of this test in place of the run's, and the agent in a process of its own."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.engine.base import ProcessSpec
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.engine.ray.node import files as node_files
from powertrain.engine.ray.node import storage as node_storage
from powertrain.engine.ray.node.spec import NodeSpec
from powertrain.run.record.directories import own_data_cache
from powertrain.storage import open_storage
from powertrain.testing.engine_contract import program
from powertrain.version import __version__
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_node import NodeReady, ProcessEnded, ProcessOutput, ProcessSeen, ProcessStarted
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, KeyPair, Received
from powertrain.wire.to_node import EndNode, LookAt, SignalProcess, StartProcess
from powertrain.wire.values import Point
from powertrain.worker.checkpoints.newest_reports import NewestReports
from powertrain.worker.service.spill import BATCH

PATIENCE = 20.0
M = TypeVar("M")
#: Archives come in on standard input when the test sends them, as they come through Ray otherwise.
_AGENT = """
import os, pickle, sys, threading
import msgspec
from powertrain.wire.link import Link
from powertrain.engine.ray.node.spec import NodeSpec
from powertrain.engine.ray.node import agent as node

node.FENCE_TIMEOUT_S, Link.REACH_TIMEOUT_S = float(sys.argv[1]), float(sys.argv[2])

def take():
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    return sys.stdin.buffer.read(size)

def bring_what_comes():
    while archives := take():
        agent.bring(pickle.loads(archives))

agent = node.NodeAgent(
    msgspec.msgpack.decode(take(), type=NodeSpec),
    sys.argv[3],
    is_of_job=sys.argv[4] == "True",
    keeps_server=sys.argv[5] == "True",
)
threading.Thread(target=bring_what_comes, daemon=True).start()
unreachable = agent.run()
print("KEPT", agent.kept_server.pid if agent.kept_server else 0)
print("RETURNED", unreachable, flush=True)
os._exit(0)  # an interpreter does not end well while a thread reads its input
"""


class Node:
    """An agent, and all that it has said."""

    def __init__(
        self,
        runtime: Path,
        *,
        fenced_after: float = 30.0,
        reach_within: float = 30.0,
        working_dir: str = "",
        is_of_job: bool = False,
        keeps_server: bool = False,
        **spec: Any,
    ) -> None:
        self.messages: list[FromWorker] = []
        self._changed = threading.Condition()
        self.hub = Hub("127.0.0.1", self._deliver)
        self._connection = spec.pop("connection", None) or self.hub.admit()
        self._told = 0
        usual = {"version": __version__, "token": "the driver's", "runtime_dir": str(runtime)}
        spec = {**usual, **spec}
        told = [str(fenced_after), str(reach_within), working_dir, str(is_of_job), str(keeps_server)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AGENT, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        self._give(msgspec.msgpack.encode(NodeSpec(connection=self._connection, **spec)))

    def bring(self, archives: Mapping[str, bytes]) -> None:
        self._give(pickle.dumps(archives))

    def _give(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(len(data).to_bytes(4, "little") + data)
        self.process.stdin.flush()

    def _deliver(self, received: Received) -> None:
        self.hub.acknowledge(received)
        with self._changed:
            self.messages += received.envelope.messages
            self._changed.notify_all()

    def tell(self, message: FromController) -> None:
        self.hub.send(self._connection.keys.public, message)

    def start(self, id: str, spec: ProcessSpec, **of_a_rank: Any) -> None:
        self.tell(
            StartProcess(
                id=id, entry=spec.entry, payload=spec.payload, env=dict(spec.env), cwd=spec.cwd, **of_a_rank
            )
        )

    def all_of(self, kind: type[M], **fields: Any) -> list[M]:
        return [
            m
            for m in self.messages
            if isinstance(m, kind) and all(getattr(m, name) == value for name, value in fields.items())
        ]

    def wait_until(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), self.messages

    def wait_for(self, kind: type[M], count: int = 1, **fields: Any) -> M:
        self.wait_until(lambda: len(self.all_of(kind, **fields)) >= count)
        return self.all_of(kind, **fields)[count - 1]

    def output_of(self, id: str) -> bytes:
        return b"".join(message.data for message in self.all_of(ProcessOutput, id=id))

    def run(self, id: str, spec: ProcessSpec, **of_a_rank: Any) -> ProcessEnded:
        self.start(id, spec, **of_a_rank)
        return self.wait_for(ProcessEnded, id=id)

    def wait_for_a_process(self, id: str) -> int:
        """Start one that waits for a signal; returns its pid."""
        self.start(id, program("wait"))
        self.wait_until(lambda: b"waiting" in self.output_of(id))
        return self.wait_for(ProcessStarted, id=id).pid

    def ended(self) -> str:
        """What ``run`` returned, once the agent has ended by itself."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, output
        kept, _, returned = output.decode().partition("RETURNED")
        self.kept_server = int(kept.removeprefix("KEPT"))
        return returned.strip()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.hub.close()


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere") / "runtime"


@pytest.fixture(scope="module")
def here(shared_runtime: Path) -> Iterator[Node]:
    """One agent for those tests that leave it as it is. It has none of the driver's directories."""
    made = Node(shared_runtime)
    made.wait_for(NodeReady)
    yield made
    made.tell(EndNode())
    made.ended()
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Agents of this test's own."""
    made: list[Node] = []

    def one(**options: Any) -> Node:
        made.append(Node(options.pop("runtime", tmp_path / "runtime"), **options))
        return made[-1]

    yield one
    for agent in made:
        agent.close()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# --------------------------------------------------------------------------- processes


def test_a_process_is_reported_in_the_order_of_start_output_and_end(here: Node) -> None:
    ended = here.run("writes", program("write", ["one ", "two ", "three"]))
    assert (ended.code, ended.lost, ended.error) == (0, False, "")
    assert here.output_of("writes") == b"one two three"
    about = [m for m in here.messages if getattr(m, "id", "") == "writes"]
    assert isinstance(about[0], ProcessStarted)
    assert about[0].pid == ended.pid
    assert about[-1] is ended


def test_much_output_arrives_whole(here: Node) -> None:
    lines = 50_000
    here.run("writes much", program("write_much", lines))
    assert here.output_of("writes much") == b"".join(b"%d\n" % number for number in range(lines))


def test_a_process_has_its_variables_and_its_directory(here: Node, tmp_path: Path) -> None:
    place = tmp_path / "made" / "for it"
    spec = program("show_surroundings", ["GREETING"], env={"GREETING": "hello"}, cwd=str(place))
    here.run("looks around", spec)
    seen = json.loads(here.output_of("looks around"))
    assert seen["env"] == {"GREETING": "hello"}
    assert seen["cwd"] == str(place)


def test_a_signal_reaches_the_process(here: Node) -> None:
    here.wait_for_a_process("asked to end")
    here.tell(SignalProcess(id="asked to end", number=int(signal.SIGTERM)))
    assert here.wait_for(ProcessEnded, id="asked to end").code == -signal.SIGTERM


def test_sigkill_reaches_all_that_the_process_has_started(here: Node) -> None:
    here.start("parent", program("leave_children", "wait"))
    here.wait_until(lambda: b"waiting" in here.output_of("parent"))
    children = json.loads(here.output_of("parent").splitlines()[0])
    here.tell(SignalProcess(id="parent", number=int(signal.SIGKILL)))
    here.wait_for(ProcessEnded, id="parent")
    assert all(is_gone(pid) for pid in children)


def test_a_signal_for_a_process_that_is_gone_does_nothing(here: Node) -> None:
    here.run("over", program("exit_with", 3))
    here.tell(SignalProcess(id="over", number=int(signal.SIGKILL)))
    assert here.run("after it", program("exit_with", 0)).code == 0


def test_a_look_reports_the_state_and_what_the_process_is_doing(here: Node) -> None:
    pid = here.wait_for_a_process("looked at")
    here.tell(LookAt(ask=7, id="looked at"))
    here.tell(LookAt(ask=8, id="nobody"))
    seen = here.wait_for(ProcessSeen, ask=7)
    assert (seen.pid, seen.state) == (pid, "sleeping")
    assert here.wait_for(ProcessSeen, ask=8).state == "gone"
    here.tell(SignalProcess(id="looked at", number=int(signal.SIGKILL)))
    here.wait_for(ProcessEnded, id="looked at")


def test_what_a_dead_rank_had_reported_comes_from_the_node_that_has_it(here: Node, tmp_path: Path) -> None:
    reported = [Point(row=row, at=1.5, metrics={"loss": 0.5}) for row in range(1, 2 * BATCH + 1)]
    newest = NewestReports(str(tmp_path / "marks" / "0-3"))
    for point in reported:
        newest.add(point)
    newest.close()
    old = tmp_path / "staging" / "attempt-1" / "rank-00003"
    old.mkdir(parents=True)
    ended = here.run(
        "rank 3",
        program("exit_with", 1),
        rank=3,
        attempt=2,
        mark=str(tmp_path / "marks" / "0-3"),
        staging=str(tmp_path / "staging"),
    )
    assert (ended.row, ended.reports) == (2 * BATCH, reported), "also those that had gathered"
    assert not old.exists(), "what an earlier attempt had staged there is nobody's any more"


def test_processes_whose_server_was_killed_are_lost_and_others_can_be_started(
    start: Callable[..., Node],
) -> None:
    agent = start()
    agent.wait_for(NodeReady)
    pid = agent.wait_for_a_process("lost")
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    assert agent.wait_for(ProcessEnded, id="lost").lost
    assert is_gone(pid)
    assert agent.run("again", program("exit_with", 0)).code == 0


# --------------------------------------------------------------------------- the end


def test_an_agent_that_is_asked_to_end_ends_what_it_started_and_removes_its_directories(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    others = tmp_path / "staging of the run"
    agent = start(directories=[str(others)])
    agent.wait_for(NodeReady)
    pid = agent.wait_for_a_process("still there")
    assert (tmp_path / "runtime").is_dir()
    agent.tell(EndNode())
    assert agent.ended() == ""
    ended = agent.wait_for(ProcessEnded, id="still there")
    assert (ended.code, ended.lost) == (-signal.SIGKILL, False)
    assert is_gone(pid)
    assert not (tmp_path / "runtime").exists()
    assert not others.exists()


def test_an_agent_ends_everything_when_its_driver_is_silent(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    agent = start(fenced_after=4.0)
    agent.wait_for(NodeReady)
    pid = agent.wait_for_a_process("fenced")
    server = psutil.Process(pid).ppid()
    agent.hub.close()
    silent_since = time.monotonic()
    assert agent.ended() == ""
    assert time.monotonic() - silent_since >= 3.9
    assert is_gone(pid)
    assert is_gone(server)
    assert not (tmp_path / "runtime").exists()


def test_an_agent_whose_run_is_over_keeps_its_server_for_the_next(start: Callable[..., Node]) -> None:
    agent = start(keeps_server=True)
    agent.wait_for(NodeReady)
    server = psutil.Process(agent.wait_for_a_process("still there")).ppid()
    agent.tell(EndNode())
    assert agent.ended() == ""
    assert agent.kept_server == server


def test_an_agent_whose_driver_is_silent_keeps_no_server(start: Callable[..., Node]) -> None:
    agent = start(fenced_after=4.0, keeps_server=True)
    agent.wait_for(NodeReady)
    server = psutil.Process(agent.wait_for_a_process("fenced")).ppid()
    agent.hub.close()
    assert agent.ended() == ""
    assert agent.kept_server == 0
    assert is_gone(server)


def test_a_server_that_was_started_within_the_run_is_not_kept(start: Callable[..., Node]) -> None:
    agent = start(keeps_server=True)
    agent.wait_for(NodeReady)
    os.kill(psutil.Process(agent.wait_for_a_process("lost")).ppid(), signal.SIGKILL)
    agent.wait_for(ProcessEnded, id="lost")
    assert agent.run("again", program("exit_with", 0)).code == 0
    agent.tell(EndNode())
    assert agent.ended() == ""
    assert agent.kept_server == 0


@pytest.mark.parametrize("loaded", ["preload", "storage"])
def test_a_server_is_not_kept_where_code_of_the_users_is_loaded(
    start: Callable[..., Node], tmp_path: Path, loaded: str
) -> None:
    (tmp_path / "users_backend.py").write_text(
        "def of(path):\n    import powertrain.storage\n    return powertrain.storage.open_storage(path)\n"
    )
    spec: dict[str, Any] = {"import_path": [str(tmp_path)]}
    if loaded == "preload":
        spec["preload"] = ["users_backend"]
    else:
        spec |= stored(tmp_path, "users_backend")
    agent = start(keeps_server=True, **spec)
    assert agent.wait_for(NodeReady).problem == ""
    agent.wait_for_a_process("still there")
    agent.tell(EndNode())
    assert agent.ended() == ""
    assert agent.kept_server == 0


def stored(place: Path, module: str) -> dict[str, Any]:
    """What the driver sends of a storage that is made by a function of the user's, with the proof that is in it."""

    class Made:
        def __reduce__(self) -> Any:
            return sys.modules[module].of, (str(place / "storage"),)

    open_storage(place / "storage").put(node_storage.proof_key("proof"), b"proof")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        importlib.import_module(module)
        try:
            return {"storage": pickle.dumps(Made()), "proof": "proof", "answer": "answer"}
        finally:
            del sys.modules[module]


def test_an_agent_that_is_killed_leaves_nothing(start: Callable[..., Node], tmp_path: Path) -> None:
    agent = start()
    agent.wait_for(NodeReady)
    pid = agent.wait_for_a_process("orphan")
    server = psutil.Process(pid).ppid()
    agent.process.kill()
    assert is_gone(pid)
    assert is_gone(server)
    assert not (tmp_path / "runtime").exists(), "the server has swept what was the agent's"


def test_an_agent_that_cannot_reach_its_driver_ends_with_the_address_it_tried(
    start: Callable[..., Node],
) -> None:
    closed = Hub("127.0.0.1", lambda _: None)
    connection = closed.admit()
    closed.close()
    agent = start(connection=connection, reach_within=0.5)
    assert agent.ended() == f"it cannot reach the run at {connection.endpoint}: Connection refused"


# --------------------------------------------------------------------------- what is wrong with a node


def test_another_version_of_the_library_is_reported_and_nothing_is_made(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    agent = start(version="0.0.1")
    problem = agent.wait_for(NodeReady).problem
    assert problem == f"it has Powertrain {__version__}, and the driver 0.0.1: install the same everywhere"
    assert not (tmp_path / "runtime").exists()


def test_directories_that_cannot_be_made_are_reported(start: Callable[..., Node], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    agent = start(runtime=tmp_path / "file" / "runtime")
    problem = agent.wait_for(NodeReady).problem
    assert problem.startswith("the run's directories cannot be made there: ")


def test_an_agent_on_the_drivers_machine_uses_the_drivers_directories_and_keeps_them(
    start: Callable[..., Node],
) -> None:
    runtime = make_runtime_directory("driver")
    try:
        agent = start(runtime=runtime, token=node_files.write_token(str(runtime)))
        assert not agent.wait_for(NodeReady).wants_files
        agent.tell(EndNode())
        agent.ended()
        assert runtime.is_dir()
    finally:
        remove_runtime_directory(runtime)


# --------------------------------------------------------------------------- directories that are shared with others


def end(agent: Node) -> None:
    agent.tell(EndNode())
    assert agent.ended() == ""


@pytest.fixture
def drivers_runtime() -> Iterator[Path]:
    runtime = make_runtime_directory("driver")
    yield runtime
    remove_runtime_directory(runtime)


@pytest.fixture
def drivers_memory(tmp_path: Path) -> Iterator[Path]:
    """What a driver holds in shared memory."""
    memory = make_runtime_directory("driver", tmp_path / "shm")
    yield memory
    remove_runtime_directory(memory)


def test_a_node_that_shares_only_the_drivers_memory_uses_it_and_leaves_it(
    start: Callable[..., Node], tmp_path: Path, drivers_memory: Path
) -> None:
    staging = tmp_path / "staging of the run"
    agent = start(directories=[str(staging), str(drivers_memory)])
    assert agent.wait_for(NodeReady).problem == "", "it waits for no lock"
    end(agent)
    assert drivers_memory.is_dir()
    assert not staging.exists()
    assert not (tmp_path / "runtime").exists()


def test_a_node_that_shares_only_the_drivers_runtime_directory_has_its_own_memory(
    start: Callable[..., Node], tmp_path: Path, drivers_runtime: Path
) -> None:
    staging, memory = tmp_path / "staging of the run", tmp_path / "shm" / "of the run"
    token = node_files.write_token(str(drivers_runtime))
    agent = start(runtime=drivers_runtime, token=token, directories=[str(staging), str(memory)])
    assert agent.wait_for(NodeReady).wants_files, "datasets that were made in memory, if any"
    assert memory.is_dir()
    end(agent)
    assert not memory.exists()
    assert staging.is_dir(), "checkpoints that could not be stored may be in it, which the driver knows"
    assert drivers_runtime.is_dir()


def test_a_node_that_shares_the_drivers_blocks_of_data_leaves_them_as_they_are(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    blocks, sent = tmp_path / "data" / "powertrain-1" / "blocks", tmp_path / "sent"
    lock = own_data_cache(str(blocks))
    try:
        write_all(blocks, ["rows/block"])
        write_all(sent, ["block", "another"])
        agent = start(directories=[str(tmp_path / "staging of the run"), str(blocks)])
        agent.wait_for(NodeReady)
        agent.bring({str(blocks / "rows"): node_files.pack(str(sent))})
        assert agent.wait_for(NodeReady, count=2).problem == ""
        end(agent)
        assert [path.read_text() for path in (blocks / "rows").iterdir()] == ["rows/block"]
    finally:
        os.close(lock)


@pytest.mark.parametrize("is_killed", [False, True], ids=["told to end", "killed"])
def test_what_waits_in_the_storage_is_left_by_an_agent_that_goes(
    start: Callable[..., Node], tmp_path: Path, is_killed: bool
) -> None:
    spec, _ = proof(tmp_path, b"note")
    staging, memory = tmp_path / "run" / ".staging" / "of this start", tmp_path / "shm"
    agent = start(
        directories=[str(staging), str(memory)],
        storage=spec.storage,
        storage_name="shared",
        proof=spec.proof,
        answer=spec.answer,
    )
    assert agent.wait_for(NodeReady).problem == ""
    write_all(staging, ["attempt-1/rank-00001/of another node"])
    if is_killed:
        agent.wait_for_a_process("forked")  # so its server has heard what it is to sweep
        agent.process.kill()
    else:
        end(agent)
    deadline = time.monotonic() + PATIENCE
    while memory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (staging / "attempt-1" / "rank-00001" / "of another node").exists()


def test_a_directory_that_two_agents_have_goes_with_the_last(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    memory = tmp_path / "shm"
    agents = [
        start(runtime=tmp_path / name, directories=[str(tmp_path / f"staging {name}"), str(memory)])
        for name in ("a", "b")
    ]
    for agent in agents:
        agent.wait_for(NodeReady)
    end(agents[0])
    assert memory.is_dir()
    end(agents[1])
    assert not memory.exists()


def test_an_agent_with_another_storage_has_nothing_left_when_it_says_so(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    spec, _ = proof(tmp_path, None)
    agent = start(
        directories=[str(tmp_path / "run" / ".staging" / "of this start")],
        storage=spec.storage,
        storage_name="elsewhere",
        proof=spec.proof,
        answer=spec.answer,
    )
    assert agent.wait_for(NodeReady).problem
    assert not (tmp_path / "runtime").exists()
    assert not (tmp_path / "run" / ".staging" / "of this start").exists()
    end(agent)


def proof(tmp_path: Path, content: bytes | None) -> tuple[NodeSpec, Any]:
    """A node's side of the proof, where the driver's note reads ``content`` there; None where it is not there."""
    storage = open_storage(tmp_path / "run")
    if content is not None:
        storage.put(node_storage.proof_key("note"), content)
    spec = NodeSpec(
        connection=ConnectionInfo(endpoint="", hub_key=b"", keys=KeyPair(b"", b"")),
        version="",
        token="",
        runtime_dir="",
        storage=pickle.dumps(storage),
        storage_name=storage.uri,
        proof="note",
        answer="note-7",
    )
    return spec, storage


def test_a_node_that_sees_the_drivers_note_answers_beside_it(tmp_path: Path) -> None:
    spec, storage = proof(tmp_path, b"note")
    assert node_storage.prove_storage(spec) == ""
    assert storage.get(node_storage.proof_key("note-7")) == b"note-7"


def test_a_node_with_another_storage_says_so(tmp_path: Path) -> None:
    spec, storage = proof(tmp_path, None)
    assert (
        node_storage.prove_storage(spec)
        == f"it does not see the file that the driver has just written to the storage {storage.uri}"
    )
    spec, storage = proof(tmp_path, b"the note of another run")
    assert "differs from the one that the driver has just written" in node_storage.prove_storage(spec)


def test_a_node_that_cannot_write_to_the_storage_says_why(tmp_path: Path) -> None:
    spec, _ = proof(tmp_path, b"note")
    (tmp_path / "run" / "probe" / "note-7").mkdir()
    assert "it cannot use the storage" in node_storage.prove_storage(spec)


# --------------------------------------------------------------------------- the run's files


MODULE = """
import os
def main(payload):
    print("imported from", os.path.dirname(__file__), os.environ["POWERTRAIN_LAUNCH_DIR"])
    return 0
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Path]:
    """A launch directory, which this process, the driver, is in."""
    made = tmp_path / "launch directory"
    made.mkdir()
    (made / "users_module.py").write_text(textwrap.dedent(MODULE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made


def test_a_node_that_shares_the_runtime_directory_and_not_the_launch_directory_is_brought_it(
    start: Callable[..., Node], launch: Path, drivers_runtime: Path
) -> None:
    token, archive = node_files.write_token(str(drivers_runtime)), node_files.pack_modules(str(launch))
    launch.rename(launch.with_name("elsewhere"))
    launch.mkdir()  # of the same name, but another
    agents = [start(runtime=drivers_runtime, token=token) for _ in range(2)]
    brought = set()
    for agent in agents:
        assert agent.wait_for(NodeReady).wants_files
        agent.bring({node_files.LAUNCH: archive})
        assert agent.wait_for(NodeReady, count=2).problem == ""
        agent.run("imports", ProcessSpec(entry="users_module:main", payload=b"", env={}))
        module, launch_dir = agent.output_of("imports").decode().split()[2:]
        assert module == launch_dir
        brought.add(Path(launch_dir))
    assert len(brought) == 2, "neither writes over what the other's ranks read"
    assert {path.parent for path in brought} == {drivers_runtime}


def test_a_node_that_has_the_very_launch_directory_is_not_brought_it(
    start: Callable[..., Node], launch: Path, drivers_runtime: Path, tmp_path: Path
) -> None:
    token = node_files.write_token(str(drivers_runtime))
    agent = start(token=token, import_path=[str(launch)])  # with a runtime directory of its own
    assert not agent.wait_for(NodeReady).wants_files
    agent.run("looks", program("show_surroundings", ["POWERTRAIN_LAUNCH_DIR"]))
    assert json.loads(agent.output_of("looks"))["env"] == {"POWERTRAIN_LAUNCH_DIR": None}
    agent.bring({node_files.LAUNCH: node_files.pack_modules(str(launch))})  # another node wanted it
    agent.wait_for(NodeReady, count=2)
    assert not (tmp_path / "runtime" / node_files.LAUNCH).exists()


@pytest.mark.parametrize("is_of_job", [False, True], ids=["of the run", "of the job"])
def test_a_working_directory_of_rays_is_the_launch_directory_of_ranks_unless_they_have_the_jobs(
    start: Callable[..., Node], launch: Path, drivers_runtime: Path, is_of_job: bool
) -> None:
    token = node_files.write_token(str(drivers_runtime))
    agent = start(runtime=drivers_runtime, token=token, working_dir="/rays", is_of_job=is_of_job)
    assert not agent.wait_for(NodeReady).wants_files
    agent.run("looks", program("show_surroundings", ["POWERTRAIN_LAUNCH_DIR"]))
    seen = json.loads(agent.output_of("looks"))["env"]["POWERTRAIN_LAUNCH_DIR"]
    assert seen == (None if is_of_job else "/rays")


def test_a_working_directory_of_the_job_serves_where_the_launch_directory_is_not(
    start: Callable[..., Node],
) -> None:
    agent = start(working_dir="/rays", is_of_job=True)
    assert agent.wait_for(NodeReady).wants_files
    agent.bring({})
    agent.run("looks", program("show_surroundings", ["POWERTRAIN_LAUNCH_DIR"]))
    assert json.loads(agent.output_of("looks"))["env"] == {"POWERTRAIN_LAUNCH_DIR": "/rays"}


def test_a_module_of_the_launch_directory_imports_on_a_node_without_that_directory(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    launch, rows = tmp_path / "launch directory", tmp_path / "rows"
    launch.mkdir()
    rows.mkdir()
    (launch / "users_module.py").write_text(textwrap.dedent(MODULE))
    (rows / "block").write_bytes(b"rows")
    archives = {
        node_files.LAUNCH: node_files.pack_modules(str(launch)),
        str(tmp_path / "cache" / "rows"): node_files.pack(str(rows)),
    }
    agent = start()
    assert agent.wait_for(NodeReady).wants_files
    (launch / "users_module.py").unlink()  # from here on there is only the copy
    agent.bring(archives)
    ready = agent.wait_for(NodeReady, count=2)
    assert (ready.wants_files, ready.problem) == (False, "")
    ended = agent.run("imports", ProcessSpec(entry="users_module:main", payload=b"", env={}))
    brought = str(tmp_path / "runtime" / node_files.LAUNCH)
    assert agent.output_of("imports").decode() == f"imported from {brought} {brought}\n"
    assert ended.code == 0
    assert (tmp_path / "cache" / "rows" / "block").read_bytes() == b"rows"


def test_files_that_cannot_be_unpacked_are_reported(start: Callable[..., Node]) -> None:
    agent = start()
    agent.wait_for(NodeReady)
    agent.bring({node_files.LAUNCH: b"no archive"})
    problem = agent.wait_for(NodeReady, count=2).problem
    assert problem.startswith("the run's files cannot be unpacked there: ")


def names_in(archive: bytes) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(archive)) as content:
        return set(content.namelist())


def write_all(directory: Path, names: list[str]) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_of_a_launch_directory_only_what_modules_may_need_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_LARGEST_FILE", 1000)
    shipped = ["train.py", "package/module.py", "package/table.csv"]
    write_all(tmp_path, [*shipped, ".git/config", ".env", "package/__pycache__/module.pyc"])
    write_all(tmp_path, ["environment/pyvenv.cfg", "environment/lib/site.py"])
    (tmp_path / "weights.bin").write_bytes(bytes(1001))
    assert names_in(node_files.pack_modules(str(tmp_path))) == set(shipped)


def test_of_a_directory_with_too_much_in_it_only_its_own_modules_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_files, "_MOST_FILES", 3)
    write_all(tmp_path, ["train.py", "model.py", "data/0", "data/1", "data/2"])
    assert names_in(node_files.pack_modules(str(tmp_path))) == {"train.py", "model.py"}


@settings(max_examples=scaled(20))
@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?\.py", fullmatch=True), st.binary(max_size=50))
)
def test_what_is_packed_is_unpacked_as_it_was(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        with zipfile.ZipFile(io.BytesIO(node_files.pack(directory))) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == files
