"""What the Ray engine does when Ray, a node or the storage does not do what it should. Real raylets, real processes."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_nodes import RayNodes, idle_agents

from powertrain.engine.base import Capacity, ClaimRefused, Exited, Granted, SlotLost, SlotShape, Waiting
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.storage import open_storage
from powertrain.testing.engine_contract import PATIENCE, Stage, program

pytest.importorskip("ray")
_numbers = itertools.count()
_fault = ""


@pytest.fixture(autouse=True)
def fault() -> str:
    """A custom resource that only the nodes of this test have: nothing that another test left can take it."""
    global _fault
    _fault = f"fault_{next(_numbers)}"
    return _fault


@pytest.fixture
def start() -> Iterator[Callable[..., Stage]]:
    """Engines of this test, each with all that it has said."""
    from powertrain.engine.ray.engine import RayEngine
    from powertrain.engine.ray.options import RayOptions

    runtime = make_runtime_directory("faults")
    made: list[Stage] = []

    def one(storage: Any = None, **options: Any) -> Stage:
        given = RayOptions(run="faults", runtime_dir=str(runtime), **options)
        made.append(Stage(RayEngine(given, storage)))
        return made[-1]

    yield one
    for stage in made:
        stage.engine.close()
    remove_runtime_directory(runtime)


@pytest.fixture
def node(ray_cluster: RayNodes, fault: str) -> Iterator[Callable[[], str]]:
    """Adds nodes with one of the resource :func:`fault`."""
    added: list[str] = []

    def add() -> str:
        added.append(ray_cluster.add(num_cpus=2, resources={fault: 1}))
        return added[-1]

    yield add
    for one in added:
        if one in ray_cluster.nodes:
            ray_cluster.kill(one)


def of_nodes(**options: Any) -> SlotShape:
    return SlotShape(cpus=1.0, custom={_fault: 1.0}, explicit=True, **options)


def groups_in_ray() -> list[str]:
    """Names of the placement groups of this module's engines that Ray still has."""
    from ray.util.placement_group import placement_group_table

    return [
        group["name"]
        for group in placement_group_table().values()
        if group["state"] != "REMOVED" and group["name"].startswith("powertrain-faults-")
    ]


# --------------------------------------------------------------------------- ranks that wait for rows of Ray's


@pytest.fixture
def streams(ray_cluster: RayNodes) -> list[Any]:
    import ray

    from powertrain.engine.ray.streams import RankStream

    return [RankStream("train", ray.data.range(10))]


def fed(rank: int, place: Path) -> Any:
    return program("wait", None, rank=rank, world_size=2, attempt=0, feeds={"train": str(place / str(rank))})


def test_a_rank_that_waits_for_the_others_feeds_can_be_ended(
    start: Callable[..., Stage], streams: list[Any], tmp_path: Path
) -> None:
    stage = start(streams=streams)
    first, second = stage.slots(2)
    stage.engine.fork(first, fed(0, tmp_path))
    stage.engine.signal(first, signal.SIGKILL)
    assert stage.wait_for(Exited, first).code == -signal.SIGKILL
    stage.engine.fork(first, fed(0, tmp_path))
    stage.engine.release([first])
    stage.wait_for(Exited, first, count=2)
    stage.engine.fork(second, fed(1, tmp_path))
    stage.engine.signal(second, signal.SIGKILL)
    stage.wait_for(Exited, second)
    assert not stage.all_of(SlotLost)


def test_ranks_whose_feeds_cannot_begin_end_with_the_reason(
    start: Callable[..., Stage], streams: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray import streams as ray_streams

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such block")

    monkeypatch.setattr(ray_streams, "iterators_of", breaks)
    stage = start(streams=streams)
    slots = stage.slots(2)
    for rank, slot in enumerate(slots):
        stage.engine.fork(slot, fed(rank, tmp_path))
    for slot in slots:
        ended = stage.wait_for(Exited, slot)
        assert "RuntimeError: no such block" in ended.error


# --------------------------------------------------------------------------- room


def test_a_bundle_on_a_node_that_is_drained_is_not_used_again(
    start: Callable[..., Stage], node: Callable[[], str], ray_cluster: RayNodes
) -> None:
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # made at import

    nodes = {node(), node()}
    stage = start()
    slots = stage.slots(2, of_nodes())
    assert {slot.node for slot in slots} == nodes
    leaving, spare = slots[0], node()
    client = ray._raylet.GcsClient(address=ray_cluster.address)  # type: ignore[attr-defined]  # compiled
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    assert client.drain_node(leaving.node, reason, "spot", int((time.time() + 600) * 1000))[0]
    stage.engine.release([leaving])
    [other] = stage.slots(1, of_nodes())
    assert other.node == spare


def test_a_group_that_is_removed_while_it_is_waited_for_is_a_refusal(
    start: Callable[..., Stage], ray_cluster: RayNodes
) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    stage = start()
    claim = stage.engine.request(2, of_nodes())
    stage.wait_for(Waiting)
    [name] = groups_in_ray()
    remove_placement_group(get_placement_group(name))
    refused = stage.wait_for(ClaimRefused)
    assert refused.claim == claim.id
    assert "removed" in refused.reason


def test_workers_are_placed_after_the_trainer_itself(
    start: Callable[..., Stage], node: Callable[[], str], fault: str
) -> None:
    node()
    stage = start(trainer_resources={fault: 2.0})
    stage.engine.request(1, SlotShape())
    assert f"trainer_resources={{'{fault}': 2.0}}" in stage.wait_for(Waiting).reason
    assert not stage.all_of(Granted)


def test_a_node_that_was_refused_is_not_asked_for_again(
    start: Callable[..., Stage], node: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray.agents import Agents

    bad = node()

    def missing(_: Agents, found: Any) -> str:
        return "it sees another storage" if found.node == bad else ""

    monkeypatch.setattr(Agents, "_missing_answer", missing)
    stage = start()
    claim = stage.engine.request(1, of_nodes(gang=False))
    assert "it sees another storage" in stage.wait_for(ClaimRefused).reason
    stage.engine.withdraw(claim)
    good = node()
    for shape in (of_nodes(gang=False), of_nodes(gang=True)):
        [slot] = stage.slots(1, shape)
        assert slot.node == good
        stage.engine.release([slot])


# --------------------------------------------------------------------------- storage


class Hiccups:
    """A storage of which one operation fails the first so many times."""

    def __init__(self, storage: Any, operation: str, times: int) -> None:
        self.storage, self.operation, self.times = storage, operation, times

    def __reduce__(self) -> Any:
        return open_storage, (self.storage.uri,)

    def within(self, _: float) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == self.operation and self.times > 0:
            self.times -= 1
            raise OSError(5, "the disk hiccups")
        return getattr(self.storage, name)


def test_a_storage_that_hiccups_before_the_proof_is_asked_again(
    start: Callable[..., Stage], ray_cluster: RayNodes, tmp_path: Path
) -> None:
    stage = start(Hiccups(open_storage(tmp_path), "put", 1))
    stage.slots(1)
    assert not stage.all_of(ClaimRefused)


def test_a_proof_that_cannot_be_swept_fails_no_run(
    start: Callable[..., Stage],
    ray_cluster: RayNodes,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = start(Hiccups(open_storage(tmp_path), "delete_tree", 9))
    stage.slots(1)
    stage.engine.close()
    assert "'probe' stays in" in caplog.text


# --------------------------------------------------------------------------- agents of earlier runs


@pytest.fixture
def ended_idle_agents(
    start: Callable[..., Stage], ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle agents whose processes have ended, of which this process does not know."""
    from powertrain.engine.ray import agents
    from powertrain.engine.ray import idle_agents as module

    class Forgetless(module.IdleAgents):
        def forget(self, gone: module.IdleAgent) -> None:
            """Ray's message has not come yet."""

    kept = Forgetless()
    monkeypatch.setattr(module, "idle_agents", kept)
    monkeypatch.setattr(agents, "idle_agents", kept)
    stage = start()
    stage.engine.fork(stage.slots(1)[0], program("exit_with", 0))
    stage.wait_for(Exited)
    stage.engine.close()
    pids = idle_agents().values()
    assert pids
    for pid in pids:
        psutil.Process(pid).kill()


@pytest.mark.usefixtures("ended_idle_agents")
def test_an_idle_agent_that_has_ended_is_replaced(start: Callable[..., Stage]) -> None:
    stage = start()
    stage.slots(1)
    assert not stage.all_of(SlotLost)


@pytest.mark.usefixtures("ended_idle_agents")
def test_a_node_that_is_gone_when_its_idle_agent_is_to_be_replaced_is_lost(
    start: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray import agents, client

    replaced = []
    replace = agents.Agents._replace

    def without_nodes(self: agents.Agents, gone: agents.Agent) -> None:
        replaced.append(gone.node)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "alive", list)
            replace(self, gone)

    monkeypatch.setattr(agents.Agents, "_replace", without_nodes)
    monkeypatch.setattr(agents, "_RETRY_NODE_DELAY_S", 0.0)
    stage = start()
    stage.slots(1)  # where it is placed again
    assert len(replaced) == 1


# --------------------------------------------------------------------------- the cluster itself


def test_a_process_that_leaves_the_cluster_loses_its_slots_and_joins_no_other(
    start: Callable[..., Stage], ray_cluster: RayNodes
) -> None:
    import ray

    from powertrain.engine.ray.client import connect

    stage = start()
    [slot] = stage.slots(1)
    stage.engine.fork(slot, program("wait"))
    claim = stage.engine.request(1, of_nodes())
    ray.shutdown()
    try:
        assert "has left the Ray cluster" in stage.wait_for(SlotLost, slot).reason
        refused = stage.wait_for(ClaimRefused)
        assert refused.claim == claim.id
        stage.engine.close()
        assert not ray.is_initialized(), (
            "asking Ray for anything would have joined whichever cluster there is"
        )
    finally:
        connect(ray_cluster.address)
    # The one request that is left must not take a node that joins later: Ray withdraws it with its driver.
    deadline = time.monotonic() + PATIENCE
    while left := groups_in_ray():
        assert time.monotonic() < deadline, f"Ray keeps placement groups of a driver that left: {left}"
        time.sleep(0.1)
    # A call that Ray was answering when the process left may block for some time.
    while any(thread.name == "powertrain-ray" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread that asks Ray does not end"
        time.sleep(0.1)


def test_a_process_that_leaves_the_cluster_while_ray_answers_loses_its_slots(
    start: Callable[..., Stage], ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from powertrain.engine.ray import client as ray_client
    from powertrain.engine.ray import engine as ray_module

    monkeypatch.setattr(ray_client, "_STOP_TIMEOUT_S", 0.5)
    stage = start()
    [slot] = stage.slots(1)
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        answered.wait()

    assert isinstance(stage.engine, ray_module.RayEngine)
    stage.engine._ray.soon(ask)
    assert asked.wait(PATIENCE)
    ray.shutdown()
    try:
        assert "has left the Ray cluster" in stage.wait_for(SlotLost, slot).reason
        stage.engine.close()
    finally:
        answered.set()
        ray_client.connect(ray_cluster.address)


def test_a_head_that_does_not_answer_keeps_no_loss_and_no_end_waiting(
    start: Callable[..., Stage],
    ray_cluster: RayNodes,
    node: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from powertrain.engine.ray import agents
    from powertrain.engine.ray import client as ray_client

    monkeypatch.setattr(agents, "LOST_TIMEOUT_S", 3.0)
    monkeypatch.setattr(ray_client, "_STOP_TIMEOUT_S", 0.5)
    lost = node()
    stage = start()
    [slot] = stage.slots(1, of_nodes())
    stage.engine.watch_capacity(of_nodes(), 1)
    stage.wait_for(Capacity)
    head = next(
        process
        for process in psutil.Process(ray_cluster.pid).children(recursive=True)
        if "gcs_server" in process.name()
    )
    head.suspend()
    try:
        ray_cluster.kill(lost)
        assert stage.wait_for(SlotLost, slot)
        began = time.monotonic()
        stage.engine.close()
        assert time.monotonic() - began < 30.0, "a call to Ray's head would wait for a minute"
    finally:
        head.resume()
