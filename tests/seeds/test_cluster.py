"""The cluster blocks of seeds/000 to 004, written anew: several nodes, placement, queueing, elastic sizes, one GPU job.

The nodes are those of a real Ray on this machine. Their GPUs are made up: Ray counts and assigns them as it would real
ones, and what asks for them here does not touch CUDA.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.ray_nodes import RayNodes

import powertrain
import powertrain.data
import powertrain.torch
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.driver.engines import shape as slot_shape
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.run.events import AttemptStarted, Fact, SlotsWaited
from powertrain.run.workers import placement
from powertrain.testing.engine_contract import Stage
from powertrain.torch import TorchTrainer


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_nodes: RayNodes) -> Iterator[RayNodes]:
    """As on a node of the cluster: the environment says which it is, and the script says "auto"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_nodes.address)
        powertrain.init(address="auto")
        yield ray_nodes
        powertrain.shutdown()


@pytest.fixture(scope="module")
def gpu_node(cluster: RayNodes) -> Iterator[str]:
    kinds = {"accelerator_type:T4": 1, "accelerator_type:A100": 1}
    node = cluster.add(num_cpus=4, num_gpus=2, resources=kinds)
    yield node
    cluster.remove(node)


class Facts:
    """Keeps what happens to a run, and acts when it has to wait for room."""

    def __init__(self) -> None:
        self.seen: list[Fact] = []
        self.waits = threading.Event()

    def on_event(self, run_context: Any, event: Fact) -> None:
        self.seen.append(event)
        if isinstance(event, SlotsWaited):
            self.waits.set()


# --------------------------------------------------------------------------- several nodes


def train_func(config: dict[str, Any]) -> None:
    """The loop of seeds/000, without what traces it."""
    model = powertrain.torch.prepare_model(torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    criterion = torch.nn.CrossEntropyLoss()
    context = powertrain.get_context()
    rows = 0
    for batch in powertrain.get_dataset_shard("train").iter_torch_batches(batch_size=16):
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(batch["x"]), batch["y"].long())
        loss.backward()
        optimizer.step()
        rows += len(batch["x"])
    powertrain.report(
        {"rows": rows, "node_rank": context.get_node_rank(), "local_rank": context.get_local_rank()}
    )


def test_a_run_over_several_nodes_waits_for_room_and_spreads(cluster: RayNodes) -> None:
    """Of the two nodes that it needs one joins later: seeds/002 says that it is queued until then."""
    facts, added = Facts(), []

    def join() -> None:
        if facts.waits.wait(60):
            added.append(cluster.add(num_cpus=8))

    joining = threading.Thread(target=join)
    joining.start()
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=False,
            resources_per_worker={"CPU": 6},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(callbacks=[facts]),
        datasets={"train": powertrain.data.from_items([{"x": [0.0] * 32, "y": 0} for _ in range(128)])},
    )
    try:
        frame = trainer.fit().dataframe(ranks="all").sort_values("rank")
    finally:
        joining.join()
        for node in added:
            cluster.remove(node)
    waits = [fact.reason for fact in facts.seen if isinstance(fact, SlotsWaited)]
    assert "1 of 2 workers with 6 CPU each fit now" in waits[0]
    assert frame["node_rank"].tolist() == [0, 1]
    assert frame["local_rank"].tolist() == [0, 0]
    assert frame["rows"].sum() == 128


# --------------------------------------------------------------------------- placement


@pytest.fixture
def stage(cluster: RayNodes) -> Iterator[Stage]:
    from powertrain.engine.ray.engine import RayEngine
    from powertrain.engine.ray.options import RayOptions

    runtime = make_runtime_directory("seeds")
    engine = RayEngine(RayOptions(run="seeds", runtime_dir=str(runtime)))
    yield Stage(engine)
    engine.close()
    remove_runtime_directory(runtime)


@pytest.mark.parametrize(
    "options",
    [
        {
            "resources_per_worker": {"CPU": 2, "GPU": 1},
            "placement_strategy": "PACK",
            "accelerator_type": "A100",
        },
        {"resources_per_worker": {"accelerator_type:T4": 0.0001}},
    ],
    ids=["packed on A100", "with a part of a T4"],
)
def test_workers_with_gpus_lie_where_such_gpus_are(
    stage: Stage, gpu_node: str, options: dict[str, Any]
) -> None:
    """The slots of the run; a rank on one of them would choose its GPU, and there is none."""
    scaling_config = ScalingConfig(num_workers=2, use_gpu=True, **options)
    placed = placement.arrange(stage.slots(2, slot_shape(scaling_config)))
    assert [place.slot.node for place in placed] == [gpu_node, gpu_node]
    assert [(place.node_rank, place.local_rank) for place in placed] == [(0, 0), (0, 1)]
    seen_by_each = [(place.visible_gpus, place.device) for place in placed]
    assert seen_by_each == [(("0", "1"), 0), (("0", "1"), 1)]


# --------------------------------------------------------------------------- elastic


def test_an_elastic_run_begins_with_what_is_there() -> None:
    """As many as fit of at most eight; each takes two of the four that the cluster has, in place of a GPU."""
    facts = Facts()
    elastic_scaling_config = ScalingConfig(
        use_gpu=False,
        num_workers=(2, 8),  # (min_workers, max_workers)
        resources_per_worker={"custom": 2},
    )
    result = DataParallelTrainer(
        lambda: powertrain.report({"world_size": powertrain.get_context().get_world_size()}),
        scaling_config=elastic_scaling_config,
        run_config=RunConfig(callbacks=[facts]),
    ).fit()
    assert result.metrics == {"world_size": 2}
    assert [fact.world_size for fact in facts.seen if isinstance(fact, AttemptStarted)] == [2]


# --------------------------------------------------------------------------- one job on one GPU


@pytest.mark.usefixtures("gpu_node")
def test_a_single_job_gets_its_gpu() -> None:
    @powertrain.remote(num_gpus=1, resources={"accelerator_type:T4": 0.0001})
    def run_single_gpu_job() -> tuple[int, str]:
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]

    powertrain.init(ignore_reinit_error=True)
    pid, gpus = powertrain.get(run_single_gpu_job.remote())
    assert pid != os.getpid()
    assert gpus in ("0", "1")
