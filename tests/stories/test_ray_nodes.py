"""Nodes of a Ray cluster that come and go under a run, and where workers come to lie on them.

The nodes are raylets of their own on this machine. Two of them are this file's: they alone have the resource "pair".
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import clustered
import pytest
import story
import zmq
from tests.ray_nodes import RayNodes
from tests.stories.engines import on
from tests.stories.going import all_of, changes_of_size, going, places, sizes

import powertrain.data
from powertrain import CheckpointConfig, FailureConfig, ScalingConfig
from powertrain.engine.base import SlotShape
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.run import controller
from powertrain.run import events as ev
from powertrain.run.scaling import policy
from powertrain.testing.engine_contract import Stage
from powertrain.torch import TorchTrainer
from powertrain.wire.from_worker import Noted
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, KeyPair
from powertrain.wire.link import Link

pytest.importorskip("ray")
pytestmark = on("ray")
NEED = {"CPU": 1, "pair": 1}


class Pair:
    """Two nodes for two workers each, in the zones "a" and "b"."""

    def __init__(self, cluster: RayNodes) -> None:
        self.cluster = cluster
        self.nodes: dict[str, str] = {}
        self.complete()

    def complete(self) -> None:
        """Have both nodes, new ones for those that are gone."""
        for zone in "ab":
            if zone not in self.nodes:
                self.nodes[zone] = self.cluster.add(num_cpus=2, resources={"pair": 2}, labels={"zone": zone})

    def kill(self, zone: str) -> None:
        self.cluster.kill(self.nodes.pop(zone))


@pytest.fixture(scope="module")
def both(ray_cluster: RayNodes) -> Iterator[Pair]:
    made = Pair(ray_cluster)
    yield made
    for zone in list(made.nodes):
        made.kill(zone)


@pytest.fixture
def pair(both: Pair) -> Pair:
    both.complete()
    return both


def trainer_of(fits: Any, loop: Callable[..., Any], workers: Any, **options: Any) -> Any:
    """A trainer whose workers lie on the pair, however the test says."""
    scaling = options.pop("scaling", {})
    trainer = fits.trainer(loop, workers=workers, **options)
    trainer.scaling_config = ScalingConfig(
        num_workers=workers, engine="ray", **{"resources_per_worker": NEED, **scaling}
    )
    return trainer


# --------------------------------------------------------------------------- nodes that go


def test_an_elastic_run_goes_on_with_the_node_that_is_left_and_grows_when_one_joins(
    fits: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "GROW_DELAY_S", 0.5)
    rows = 1200  # at two workers and half a second a step: 150 s in which the cluster can start a new node's workers
    given = powertrain.data.from_items([{"id": number} for number in range(rows)]).random_shuffle()
    trainer = trainer_of(
        fits,
        clustered.reads_until_told,
        (2, 4),
        kind=TorchTrainer,
        name="fed",
        train_loop_config={"epochs": 2, "batch": 4, "kills": []},
        datasets={"train": given},
        failure_config=FailureConfig(max_failures=0),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=5),
    )
    with going(trainer) as run:
        story.await_told("step-7")
        pair.kill("b")
        run.fact(fits, "fed", ev.TrainingStarted, attempt=1)
        pair.complete()
        run.trains_on(fits, "fed", 4, after=1)
    assert run.outcome["raised"] == "", run.outcome
    assert changes_of_size(fits, "fed") == [4, 2, 4]
    [lost] = all_of(fits, "fed", ev.Lost)
    assert set(lost.ranks) in ({0, 1}, {2, 3}), "those of one node"
    assert not all_of(fits, "fed", ev.Failed), "a loss is no failure"
    once = Counter(range(rows))
    assert read_by_epoch(fits) == {0: once, 1: once}


def read_by_epoch(fits: Any) -> dict[int, Counter[int]]:
    """How often each row was read in each epoch, up to the report from which the next attempt went on."""
    firsts = {fact.attempt: fact.first_row for fact in all_of(fits, "fed", ev.AttemptStarted)}
    found: dict[int, Counter[int]] = {}
    for path in fits.directory.glob("fed-*.jsonl"):
        undone = firsts.get(int(path.stem.split("-")[1]) + 1, 10**9)
        for line in map(json.loads, path.read_text().splitlines()):
            if line["row"] < undone:
                found.setdefault(line["epoch"], Counter()).update(line["ids"])
    return found


def test_a_run_of_fixed_size_says_what_is_missing_and_goes_on_with_the_slots_that_are_left(
    fits: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray import placing

    monkeypatch.setattr(placing, "_START_TIMEOUT_S", 1.0)
    trainer = trainer_of(
        fits,
        clustered.reports_until_told,
        4,
        name="fixed",
        train_loop_config={"pace": 0.2},
        failure_config=FailureConfig(max_failures=0),
    )
    with going(trainer) as run:
        story.await_told(*(f"steps-0-{rank}" for rank in range(4)))
        run.fact(fits, "fixed", ev.Committed, attempt=0)
        before = places(fits.directory, 0, 4)
        pair.kill("b")
        waited = run.fact(fits, "fixed", ev.SlotsWaited, attempt=1)
        pair.complete()
        run.fact(fits, "fixed", ev.TrainingStarted, attempt=1)
        after = places(fits.directory, 1, 4)
    assert run.outcome["raised"] == "", run.outcome
    assert sizes(fits, "fixed") == [4, 4]
    assert not all_of(fits, "fixed", ev.Failed)
    assert waited.granted == 2
    assert waited.reason.startswith(
        "waiting for room: none of 2 workers with 1 CPU and 1 pair each fits now; "
    )
    for attempt in (before, after):
        assert [(p["node_rank"], p["local_rank"]) for p in attempt] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [p["local_world_size"] for p in attempt] == [2] * 4
    kept = {p["server"] for p in before} & {p["server"] for p in after}
    assert len(kept) == 1, "on the node that is left, workers are forked from what was there"
    first_row = all_of(fits, "fixed", ev.AttemptStarted)[1].first_row
    assert first_row > 1, "it went on from a checkpoint"


def test_a_node_that_is_drained_is_left_in_time_and_nothing_is_redone(fits: Any, pair: Pair) -> None:
    trainer = trainer_of(
        fits,
        clustered.counts_until_told,
        (1, 2),
        name="drained",
        train_loop_config={"pace": 0.1},
        scaling={"resources_per_worker": {"CPU": 1, "pair": 2}},  # one on each node
    )
    deadline = time.time() + 60.0
    with going(trainer) as run:
        story.await_told("steps-0-0", "steps-0-1")
        drain(pair, "b", deadline)
        notified = run.fact(fits, "drained", ev.Notified)
        smaller = run.fact(fits, "drained", ev.AttemptStarted, attempt=1)
        run.fact(fits, "drained", ev.TrainingStarted, attempt=1)
    pair.kill("b")
    assert run.outcome["raised"] == "", run.outcome
    assert "will be taken away: Ray is draining its node" in notified.reason
    assert notified.deadline == pytest.approx(deadline, abs=1.0)
    assert smaller.world_size == 1
    assert smaller.time < deadline
    saved = [fact.row for fact in all_of(fits, "drained", ev.Committed) if fact.attempt == 0]
    assert smaller.first_row == saved[-1] + 1
    done = [row for rank, _, row in run.outcome["points"] if rank == 0]
    assert sorted(done) == list(range(1, len(done) + 1)), "no row was made twice"


def drain(pair: Pair, zone: str, deadline: float) -> None:
    """Announce that a node will be taken away, as a cluster's autoscaler does."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # made at import

    client = ray._raylet.GcsClient(address=pair.cluster.address)  # type: ignore[attr-defined]  # compiled
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = client.drain_node(pair.nodes[zone], reason, "spot", int(deadline * 1000))
    assert accepted, why_not


# --------------------------------------------------------------------------- where workers lie


@pytest.fixture
def start(ray_cluster: RayNodes) -> Iterator[Callable[..., Stage]]:
    """Engines of this test, each with all that it has said."""
    from powertrain.engine.ray.engine import RayEngine
    from powertrain.engine.ray.options import RayOptions

    runtime = make_runtime_directory("placed")
    made: list[Stage] = []

    def one(**options: Any) -> Stage:
        made.append(Stage(RayEngine(RayOptions(run="placed", runtime_dir=str(runtime), **options))))
        return made[-1]

    yield one
    for stage in made:
        stage.engine.close()
    remove_runtime_directory(runtime)


def shape(**options: Any) -> SlotShape:
    return SlotShape(cpus=1.0, custom={"pair": 1.0}, explicit=True, **options)


def nodes_of(stage: Stage, count: int, **options: Any) -> set[str]:
    """The nodes on which so many workers come to lie, once all that was given back is free again."""
    await_free_pairs(4)
    slots = stage.slots(count, shape(**options))
    stage.engine.release(slots)
    return {slot.node for slot in slots}


def test_workers_that_come_together_lie_as_strategy_and_labels_say(
    start: Callable[..., Stage], pair: Pair
) -> None:
    stage, a, b = start(), pair.nodes["a"], pair.nodes["b"]
    assert nodes_of(stage, 2, placement="SPREAD") == {a, b}
    assert nodes_of(stage, 2, placement="STRICT_SPREAD") == {a, b}
    assert len(nodes_of(stage, 2, placement="PACK")) == 1
    assert nodes_of(stage, 2, labels=({"zone": "b"},)) == {b}
    assert nodes_of(stage, 2, labels=({"zone": "!b"},), placement="STRICT_PACK") == {a}
    assert nodes_of(stage, 2, labels=({"zone": "in(a)"}, {"zone": "b"})) == {a, b}


def test_workers_that_come_one_by_one_lie_as_strategy_and_labels_say(
    start: Callable[..., Stage], pair: Pair
) -> None:
    stage, a, b = start(), pair.nodes["a"], pair.nodes["b"]
    assert nodes_of(stage, 2, gang=False, placement="SPREAD") == {a, b}
    assert nodes_of(stage, 2, gang=False, labels=({"zone": "b"},)) == {b}
    assert nodes_of(stage, 2, gang=False, labels=({"zone": "a"}, {"zone": "b"})) == {a, b}


def free_pairs() -> float:
    from powertrain.engine.ray.client import nodes

    return sum(found.free.get("pair", 0.0) for found in nodes())


def await_free_pairs(amount: float) -> None:
    deadline = time.monotonic() + story.PATIENCE
    while free_pairs() != amount:
        assert time.monotonic() < deadline, f"{free_pairs()} are free, and not {amount}"
        time.sleep(0.05)


def test_resources_of_the_trainer_itself_are_held_beside_the_workers_and_given_back(
    start: Callable[..., Stage], pair: Pair
) -> None:
    await_free_pairs(4)
    stage = start(trainer_resources={"pair": 2})
    stage.slots(1, shape())
    await_free_pairs(1)
    stage.engine.close()
    await_free_pairs(4)


@pytest.mark.parametrize(
    ("strategy", "workers", "reason"),
    [
        ("STRICT_PACK", 3, "no node is large enough, even empty"),
        ("STRICT_SPREAD", 3, "only 2 nodes of the cluster could hold one, even empty"),
    ],
)
def test_a_strict_strategy_that_can_never_be_met_is_refused_at_once(
    fits: Any, pair: Pair, strategy: str, workers: int, reason: str
) -> None:
    trainer = trainer_of(
        fits,
        clustered.counts_until_told,
        workers,
        name="strict",
        train_loop_config={"pace": 0.1},
        scaling={"placement_strategy": strategy},
    )
    outcome = story.outcome_of(trainer.fit)
    assert outcome["raised"] == "ResourceError"
    assert reason in outcome["message"]
    assert outcome["seconds"] < 30.0, "a run that waits for room does so until it is stopped"
    assert not sizes(fits, "strict")


def test_a_request_that_must_wait_says_what_is_missing_until_its_time_is_over(fits: Any, pair: Pair) -> None:
    trainer = trainer_of(
        fits,
        clustered.counts_until_told,
        1,
        name="waits",
        train_loop_config={"pace": 0.1},
        scaling={"resources_per_worker": {"pair": 3}, "queue_timeout_s": 3.0},
    )
    outcome = story.outcome_of(trainer.fit)
    waited = all_of(fits, "waits", ev.SlotsWaited)[0]
    assert "1 worker with 3 pair does not fit now" in waited.reason
    assert outcome["raised"] == "ResourceError"
    assert outcome["message"].startswith("There was no room for the run within 3 s: ")
    missing, _, until = waited.reason.partition("; it waits until ")
    assert missing in outcome["message"]
    assert until.endswith(" (queue_timeout_s)")
    assert outcome["seconds"] >= 3.0


# --------------------------------------------------------------------------- runs beside each other


def test_a_port_that_is_taken_is_one_clear_error_before_anything_is_started(fits: Any) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        trainer = fits.trainer(
            clustered.counts_until_told, name="taken", port=port, train_loop_config={"pace": 0.1}
        )
        outcome = story.outcome_of(trainer.fit)
    assert outcome["raised"] == "WireError"
    assert f":{port} for its workers: Address already in use" in outcome["message"]
    assert "RunConfig(port=...)" in outcome["message"]
    assert not sizes(fits, "taken")


class OpenHub(Hub):
    """A run's hub that remembers whom it let in, and who got as far as having a message looked at."""

    made: list[OpenHub] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.admitted: set[bytes] = set()
        self.senders: set[bytes] = set()
        super().__init__(*arguments, **options)
        self.made.append(self)

    def admit(self, *arguments: Any, **options: Any) -> ConnectionInfo:
        connection = super().admit(*arguments, **options)
        self.admitted.add(connection.keys.public)
        return connection

    def _receive(self, route: bytes, frame: Any) -> None:
        self.senders.add(str(frame.get("User-Id")).encode())
        super()._receive(route, frame)


def test_two_runs_share_a_cluster_and_neither_gets_messages_of_the_other(
    fits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "Hub", OpenHub)
    monkeypatch.setattr(OpenHub, "made", [])
    config = {"pace": 0.1}
    trainers = [
        fits.trainer(clustered.reports_until_told, workers=1, name=name, train_loop_config=config)
        for name in ("one", "other")
    ]
    with going(trainers[0]) as one, going(trainers[1]) as other:
        one.fact(fits, "one", ev.Committed)
        other.fact(fits, "other", ev.Committed)
        first, second = OpenHub.made
        intrude(first, second)
    for run in (one, other):
        assert run.outcome["raised"] == "", run.outcome
        assert run.outcome["metrics"]["step"] >= 1
    for hub in (first, second):
        assert hub.senders, "its own were heard"
        assert hub.senders <= hub.admitted, "nobody else came so far as to have a message looked at"


def intrude(first: OpenHub, second: OpenHub) -> None:
    """Try to talk to a run without keys, with keys of one's own, and with those that another run gave out."""
    message = [Noted(message="let me in")]
    strange = ConnectionInfo(endpoint=first.endpoint, hub_key=first.keys.public, keys=KeyPair.new())
    of_another = ConnectionInfo(endpoint=first.endpoint, hub_key=first.keys.public, keys=second.admit().keys)
    wrong_hub = ConnectionInfo(endpoint=first.endpoint, hub_key=second.keys.public, keys=KeyPair.new())
    for connection in (strange, of_another, wrong_hub):
        link = Link(connection, 0, 0)
        link.send(message, 0, 0)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert link.poll(0.05) == ([], set())
        assert not link.is_acknowledged
        link.close()
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(first.endpoint)
    with contextlib.suppress(zmq.Again):  # the hub may have hung up already, and a send would wait for ever
        plain.send(b"let me in", zmq.NOBLOCK)
    assert plain.poll(200) == 0
    plain.close()
    context.term()
