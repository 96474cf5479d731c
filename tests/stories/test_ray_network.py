"""A Ray cluster whose nodes have their own network, host name and directories: cables that are cut, storage that is
not shared, ports that are closed, files that are not there.

"near" shares the files of this machine. "far" has its own runtime directory and shared memory, and does not have the
launch directory; so it is another machine as far as a run can tell.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import clustered
import psutil
import pytest
import story
from tests.ray_network import NetworkNode, NotAllowed, RayNetwork, free_port
from tests.stories.going import Going, all_of, going, places, sizes

import powertrain.data
from powertrain import FailureConfig, ScalingConfig
from powertrain.data.loading.scratch import scratch_root
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer

pytest.importorskip("ray")
#: Seconds that Ray may take to end actors, after a cut also to hear that it should.
GONE_WITHIN = 40.0


@dataclass(frozen=True)
class Nodes:
    """Two nodes for one worker each, and directories that are not the same on both."""

    network: RayNetwork
    near: NetworkNode
    far: NetworkNode
    storage: Path
    launch: Path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    import ray

    try:
        network = RayNetwork()
    except NotAllowed as reason:
        pytest.skip(str(reason))
    storage, launch = tmp_path_factory.mktemp("storage"), tmp_path_factory.mktemp("launch")
    lasting = scratch_root().parent
    lasting.mkdir(mode=0o700, parents=True, exist_ok=True)
    hidden = ["/dev/shm", os.environ["XDG_RUNTIME_DIR"], str(storage), str(launch), str(lasting)]
    try:
        network.connect()
        yield Nodes(network, network.add(cpus=1), network.add(cpus=1, hidden=hidden), storage, launch)
    finally:
        ray.shutdown()
        network.close()


@pytest.fixture(autouse=True)
def _nothing_left_on_nodes(nodes: Nodes) -> Iterator[None]:
    yield
    await_nothing_left(nodes, GONE_WITHIN)


def await_nothing_left(nodes: Nodes, within: float) -> None:
    deadline = time.monotonic() + within
    while left := [*nodes.network.ours(), *directories_on(nodes)]:
        assert time.monotonic() < deadline, "there is still on the nodes:\n" + "\n".join(left)
        time.sleep(0.1)


def directories_on(nodes: Nodes) -> list[str]:
    """What runs have on the node that has its own places for it."""
    bases = [nodes.network.seen_by(nodes.far, base) for base in (os.environ["XDG_RUNTIME_DIR"], "/dev/shm")]
    return [str(path) for base in bases if base.is_dir() for path in base.glob("powertrain-*-run-*")]


def test_ranks_on_two_machines_meet_and_find_the_modules_of_the_launch_directory(
    fits: Any, nodes: Nodes
) -> None:
    (nodes.launch / "users_module.py").write_text("GREETING = 'hello'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(nodes.launch)
        outcome = fits.outcome(
            clustered.imports_a_module_of_the_launch_directory,
            "ray",
            kind=TorchTrainer,
            name="meets",
            train_loop_config={},
        )
    assert outcome["raised"] == "", outcome
    told = {p["host"]: (rank, p["node_rank"]) for rank, p in enumerate(places(fits.directory, 0, 2))}
    assert set(told) == {nodes.near.name, nodes.far.name}
    assert sorted(told.values()) == [(0, 0), (1, 1)]
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    assert frame["ranks"].tolist() == [2, 2]
    modules = dict(zip(frame["rank"], frame["module"], strict=True))
    assert modules[told[nodes.near.name][0]] == str(nodes.launch / "users_module.py")
    assert modules[told[nodes.far.name][0]].startswith(os.environ["XDG_RUNTIME_DIR"])
    assert frame["cwd"].tolist() == [os.path.dirname(module) for module in frame["module"]]
    saved = {path.name: path.read_text() for path in Path(outcome["checkpoint"]).glob("rank-*")}
    assert saved == {"rank-0": "hello", "rank-1": "hello"}, "both machines brought their shares"


def test_ranks_on_two_machines_read_the_result_of_a_sort_each_row_once(fits: Any, nodes: Nodes) -> None:
    given = (
        powertrain.data.range(44).map(lambda row: {"id": row["id"], "key": row["id"] % 5}).sort(["key", "id"])
    )
    outcome = fits.outcome(
        clustered.reads_its_rows,
        "ray",
        kind=TorchTrainer,
        name="sorted",
        train_loop_config={},
        datasets={"train": given},
    )
    assert outcome["raised"] == "", outcome
    hosts = {place["host"] for place in places(fits.directory, 0, 2)}
    assert hosts == {nodes.near.name, nodes.far.name}, "the far one has not the files of this machine"
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    for epoch in (0, 1):
        read = [int(one) for ids in frame.loc[frame["epoch"] == epoch, "ids"] for one in ids.split(",")]
        assert sorted(read) == list(range(44))


def test_a_node_with_another_storage_is_refused_by_its_name_before_training(fits: Any, nodes: Nodes) -> None:
    trainer = fits.trainer(
        clustered.counts_until_told, "ray", name="not-shared", train_loop_config={"pace": 0.1}
    )
    trainer.run_config = replace(trainer.run_config, storage_path=str(nodes.storage))
    outcome = story.outcome_of(trainer.fit)
    assert outcome["raised"] == "ResourceError", outcome
    assert outcome["message"].startswith(
        f"The node {nodes.far.name} cannot take part in the run: it does not see the file that the driver has "
        "just written to the storage "
    )
    assert "set RunConfig(storage_path=...) to a shared file system or an object store" in outcome["message"]
    assert not (nodes.storage / "not-shared" / "probe").exists()
    assert not (fits.directory / "place-0-0").exists(), "no rank was started"


def test_a_node_that_cannot_reach_the_run_is_refused_with_the_address_it_tried(
    fits: Any, nodes: Nodes, tmp_path: Path
) -> None:
    hurried = tmp_path / "hurried"
    hurried.mkdir()
    (hurried / "sitecustomize.py").write_text(
        "from powertrain.wire.link import Link\nLink.REACH_TIMEOUT_S = 6.0\n"
    )
    port = free_port()
    trainer = fits.trainer(
        clustered.counts_until_told, "ray", name="blocked", port=port, train_loop_config={"pace": 0.1}
    )
    environment = {"runtime_env": {"env_vars": {"PYTHONPATH": str(hurried)}}}
    trainer.scaling_config = ScalingConfig(num_workers=2, engine="ray", engine_options=environment)
    nodes.network.block(nodes.far, port)
    try:
        outcome = story.outcome_of(trainer.fit)
    finally:
        nodes.network.unblock(nodes.far, port)
    assert outcome["raised"] == "ResourceError", outcome
    host = nodes.network.address.partition(":")[0]
    assert outcome["message"].startswith(
        f"The node {nodes.far.name} cannot take part in the run: it cannot reach the run at tcp://{host}:{port}: "
        "Network is unreachable. A firewall may be in between: open the port that RunConfig(port=...) names"
    )
    assert not sizes(fits, "blocked")


_DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import clustered, story, powertrain
powertrain.init(address=sys.argv[2], _node_ip_address=sys.argv[2].partition(":")[0])
powertrain.DataParallelTrainer(
    clustered.reports_until_told,
    train_loop_config={"pace": 0.1},
    scaling_config=story.scaling("ray", 2),
    run_config=story.run_config("killed"),
).fit()
"""


def test_a_killed_driver_leaves_nothing_on_other_machines(fits: Any, nodes: Nodes) -> None:
    drivers = str(Path(clustered.__file__).parent)
    with (fits.directory / "output").open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, drivers, nodes.network.address],
            cwd=fits.directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        story.await_told("steps-0-0", "steps-0-1")
        assert directories_on(nodes), "the node has places of its own for the run"
    finally:
        driver.kill()
        driver.wait()
    await_nothing_left(nodes, GONE_WITHIN)


def rank_on(node: NetworkNode, fits: Any) -> tuple[int, dict[str, Any]]:
    """The rank of the first attempt that lies on a node, and what it recorded of itself."""
    return next((rank, p) for rank, p in enumerate(places(fits.directory, 0, 2)) if p["host"] == node.name)


def steps_of(fits: Any, rank: int) -> int:
    return int((fits.directory / f"steps-0-{rank}").read_text())


def await_commit(run: Going, fits: Any, name: str, row: int) -> None:
    """Wait until a checkpoint of at least this row is committed."""
    deadline = time.monotonic() + story.PATIENCE
    while max((fact.row for fact in all_of(fits, name, ev.Committed)), default=0) < row:
        assert run.thread.is_alive(), run.outcome
        assert time.monotonic() < deadline, fits.facts(name)
        time.sleep(0.05)


def test_a_network_that_is_cut_for_four_seconds_changes_nothing(fits: Any, nodes: Nodes) -> None:
    trainer = fits.trainer(
        clustered.reports_until_told,
        "ray",
        name="healed",
        train_loop_config={"pace": 0.2},
        failure_config=FailureConfig(max_failures=0),
    )
    with going(trainer) as run:
        story.await_told("steps-0-0", "steps-0-1")
        far, _ = rank_on(nodes.far, fits)
        nodes.network.cut(nodes.far)
        time.sleep(4.0)
        before = steps_of(fits, far)
        nodes.network.heal(nodes.far)
        await_commit(run, fits, "healed", before + 3)
    assert run.outcome["raised"] == "", run.outcome
    assert sizes(fits, "healed") == [2]
    acted = (ev.Lost, ev.Failed, ev.Notified, ev.CheckpointFailed, ev.Resized)
    assert not [fact for fact in fits.facts("healed") if isinstance(fact, acted)]
    rows = [row for rank, _, row in run.outcome["points"] if rank == far]
    assert sorted(rows) == list(range(1, len(rows) + 1)), "every report of the cut-off rank arrived, once"


def test_a_network_that_stays_cut_ends_that_node_before_the_run_goes_on_without_it(
    fits: Any, nodes: Nodes
) -> None:
    from powertrain.engine.ray.agents import LOST_TIMEOUT_S

    trainer = fits.trainer(
        clustered.reports_until_told,
        "ray",
        name="cut",
        workers=(1, 2),
        train_loop_config={"pace": 0.2},
        failure_config=FailureConfig(max_failures=0),
    )
    with going(trainer) as run:
        story.await_told("steps-0-0", "steps-0-1")
        far, place = rank_on(nodes.far, fits)
        await_commit(run, fits, "cut", 3)
        cut = time.time()
        nodes.network.cut(nodes.far)
        again = run.fact(fits, "cut", ev.AttemptStarted, attempt=1)
        assert again.time - cut < LOST_TIMEOUT_S + 15.0
        assert not psutil.pid_exists(place["pid"]), "nobody works on for a run that goes on elsewhere"
        assert not psutil.pid_exists(place["server"])
        nodes.network.heal(nodes.far)
        await_commit(run, fits, "cut", again.first_row + 2)
    assert run.outcome["raised"] == "", run.outcome
    assert sizes(fits, "cut") == [2, 1]
    [lost] = all_of(fits, "cut", ev.Lost)
    assert lost.ranks == (far,)
    assert nodes.far.name in lost.reason
    assert not all_of(fits, "cut", ev.Failed)
    commits = all_of(fits, "cut", ev.Committed)
    rows = [fact.row for fact in commits]
    assert rows == sorted(set(rows)), "no row was committed twice"
    assert all(fact.time < again.time for fact in commits if fact.attempt == 0)
    points = [(rank, row) for rank, attempt, row in run.outcome["points"] if attempt == 0]
    assert max(row for _, row in points) < again.first_row, "what it reported in vain does not count"
