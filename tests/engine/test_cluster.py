"""How many workers fit on a cluster: never more than could be placed one by one, and in words where they do not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.engine.base import SlotShape
from powertrain.engine.ray.capacity import Node, capacity, demand, fitting, selector, why_never, why_waiting
from powertrain.engine.resources import BOUNDLESS

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
GPU_NODE = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:T4": 1.0}
ONE_GPU = SlotShape(cpus=1, gpus=1)


def node(
    name: str,
    total: Mapping[str, float],
    free: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    draining: bool = False,
) -> Node:
    """A node whose resources are all free unless said otherwise."""
    return Node(name, name, total, {**total, **(free or {})}, labels or {}, draining)


# --------------------------------------------------------------------------- against trying out every placement


@dataclass
class Bench:
    """One node with its GPUs apart, in tenths of each; placing a worker here is what a cluster really does."""

    name: str
    cpus: int
    gpus: list[int]
    labels: Mapping[str, str]
    draining: bool
    total: Mapping[str, float]

    def seen(self) -> Node:
        free = {"CPU": float(self.cpus), "GPU": sum(self.gpus) / 10}
        return Node(self.name, self.name, self.total, free, self.labels, self.draining)

    def places(self, cpus: int, gpus: int) -> list[list[int]]:
        """Every way of taking ``gpus`` tenths: which of the GPUs lose how much."""
        if self.cpus < cpus:
            return []
        if gpus < 10:
            return [[at] for at, left in enumerate(self.gpus) if left >= gpus] if gpus else [[]]
        whole = [at for at, left in enumerate(self.gpus) if left == 10]
        return [whole[: gpus // 10]] if len(whole) >= gpus // 10 else []

    def take(self, place: Sequence[int], cpus: int, gpus: int, sign: int = 1) -> None:
        self.cpus -= sign * cpus
        for at in place:
            self.gpus[at] -= sign * min(gpus, 10)


@dataclass
class Scene:
    """Nodes, a shape, and the slots that are held of it."""

    benches: list[Bench]
    shape: SlotShape
    held: dict[str, int]

    @property
    def nodes(self) -> list[Node]:
        return [bench.seen() for bench in self.benches]

    @property
    def size(self) -> tuple[int, int]:
        return int(self.shape.cpus), round(self.shape.gpus * 10)


def allowed(labels: Mapping[str, str], worker: int, shape: SlotShape) -> bool:
    """The selectors of these tests, one by one, apart from the code under test."""
    condition = selector(shape, worker).get("zone")
    zone = labels.get("zone")
    return {
        None: True,
        "a": zone == "a",
        "!a": zone != "a",
        "in(a,b)": zone in ("a", "b"),
        "!in(a,b)": zone not in ("a", "b"),
    }[condition]


def may_go(scene: Scene, bench: Bench, used: Mapping[str, int]) -> bool:
    if bench.draining:
        return False
    if scene.shape.placement == "STRICT_PACK":
        return not used or set(used) == {bench.name}
    return scene.shape.placement != "STRICT_SPREAD" or bench.name not in used


def most_placed(scene: Scene, workers: int, used: dict[str, int]) -> int:
    """The most of the first ``workers`` that can be placed beside ``used``, by trying everything."""
    if workers == 0:
        return 0
    best = most_placed(scene, workers - 1, used)
    for bench in scene.benches:
        if not (allowed(bench.labels, workers - 1, scene.shape) and may_go(scene, bench, used)):
            continue
        for place in bench.places(*scene.size):
            if best == workers:
                return best
            bench.take(place, *scene.size)
            now = {**used, bench.name: used.get(bench.name, 0) + 1}
            best = max(best, 1 + most_placed(scene, workers - 1, now))
            bench.take(place, *scene.size, sign=-1)
    return best


ZONES = st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}, {"zone": "c"}])
SELECTORS = st.sampled_from(
    [{}, {}, {"zone": "a"}, {"zone": "!a"}, {"zone": "in(a, b)"}, {"zone": "!in(a,b)"}]
)


@st.composite
def benches(draw: st.DrawFn) -> list[Bench]:
    """Up to three nodes. What others use of GPUs is packed, as Ray packs it: at most one GPU is used in part."""
    made = []
    for at in range(draw(st.integers(0, 3))):
        cpus, gpus = draw(st.integers(1, 6)), draw(st.integers(0, 3))
        free, part = draw(st.integers(0, gpus)), draw(st.integers(0, 10))
        left = [10] * free + [part] * (gpus > free) + [0] * (gpus - free - 1)
        total = {"CPU": float(cpus), "GPU": float(gpus)}
        used = draw(st.integers(0, 1))
        made.append(Bench(f"n{at}", cpus - used, left, draw(ZONES), draw(st.integers(0, 4)) == 4, total))
    return made


@st.composite
def scenes(draw: st.DrawFn, selectors: int = 1, holding: bool = True) -> Scene:
    """Nodes and a shape; slots that are held lie where strategy and labels allow, and are not free."""
    shape = SlotShape(
        cpus=draw(st.integers(0, 2)),
        gpus=draw(st.sampled_from([0, 0.2, 0.3, 0.5, 0.6, 1, 2])),
        placement=draw(st.sampled_from(STRATEGIES)),
        labels=tuple(draw(st.lists(SELECTORS, min_size=selectors, max_size=selectors))),
    )
    scene = Scene(draw(benches()), shape, {})
    for bench in scene.benches if holding else ():
        bench.draining, drains = False, bench.draining
        for _ in range(draw(st.integers(0, 2))):
            places = bench.places(*scene.size)
            if places and allowed(bench.labels, 0, shape) and may_go(scene, bench, scene.held):
                bench.take(places[0], *scene.size)
                scene.held[bench.name] = scene.held.get(bench.name, 0) + 1
        bench.draining = drains
    return scene


@given(scenes(holding=False), st.integers(0, 4))
@settings(max_examples=scaled(200))
def test_as_many_new_workers_fit_as_can_be_placed_one_by_one(scene: Scene, count: int) -> None:
    assert fitting(scene.nodes, scene.shape, count) == most_placed(scene, count, {})


@given(scenes(selectors=3, holding=False), st.integers(0, 3))
def test_as_many_fit_when_each_worker_has_labels_of_its_own(scene: Scene, count: int) -> None:
    assert fitting(scene.nodes, scene.shape, count) == most_placed(scene, count, {})


@given(scenes())
@settings(max_examples=scaled(200))
def test_capacity_is_what_is_held_and_what_can_be_placed_beside_it(scene: Scene) -> None:
    held = sum(scene.held.values())
    found = capacity(scene.nodes, scene.shape, scene.held)
    assert min(found, held + 4) == held + most_placed(scene, 4, scene.held)


# --------------------------------------------------------------------------- what holds for any numbers

AMOUNTS = st.dictionaries(
    st.sampled_from(["CPU", "GPU", "memory", "license"]), st.floats(-1, 5) | st.integers(0, 5), max_size=4
)
NODES = st.lists(
    st.builds(Node, st.uuids().map(str), st.just("n"), AMOUNTS, AMOUNTS, ZONES, st.booleans()), max_size=4
)
SHAPES = st.builds(
    SlotShape,
    cpus=st.floats(0, 3),
    gpus=st.sampled_from([0, 0.001, 1 / 3, 0.5, 1, 2]),
    custom=st.dictionaries(st.sampled_from(["memory", "license"]), st.floats(0, 2), max_size=2),
    placement=st.sampled_from(STRATEGIES),
    labels=st.lists(SELECTORS, max_size=4).map(tuple),
)


@given(NODES, SHAPES, st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2))
def test_held_slots_always_count_even_on_nodes_that_are_gone(
    nodes: list[Node], shape: SlotShape, slots: list[int], lost: int
) -> None:
    held = {node.id: count for node, count in zip(nodes, slots, strict=False)} | {"gone": lost}
    assert sum(held.values()) <= capacity(nodes, shape, held)


@given(NODES, SHAPES, st.integers(-1, 6))
def test_no_more_fit_than_were_asked_for_and_never_less_than_none(
    nodes: list[Node], shape: SlotShape, count: int
) -> None:
    assert 0 <= fitting(nodes, shape, count) <= max(0, count)


@given(NODES, SHAPES, st.data())
def test_more_free_resources_never_mean_fewer_workers(
    nodes: list[Node], shape: SlotShape, data: st.DataObject
) -> None:
    held = {node.id: data.draw(st.integers(0, 2)) for node in nodes}
    more = [
        replace(node, free={name: amount + data.draw(st.floats(0, 2)) for name, amount in node.free.items()})
        for node in nodes
    ]
    assert capacity(nodes, shape, held) <= capacity(more, shape, held)


@given(NODES, SHAPES, st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(nodes: list[Node], shape: SlotShape, random: Random) -> None:
    shuffled = random.sample(nodes, len(nodes))
    assert capacity(nodes, shape, {}) == capacity(shuffled, shape, {})


@given(NODES, SHAPES, st.integers(1, 5))
def test_there_are_words_for_every_wait(nodes: list[Node], shape: SlotShape, count: int) -> None:
    words = why_waiting(nodes, shape, count)
    fit = fitting(nodes, shape, count)
    assert (";" in words) == (fit < count)
    assert "  " not in words
    assert not words.endswith(".")


@given(NODES, SHAPES, st.integers(1, 5))
def test_what_fits_now_is_never_called_impossible(nodes: list[Node], shape: SlotShape, count: int) -> None:
    if fitting(nodes, shape, count) == count or not shape.placement.startswith("STRICT"):
        assert why_never(nodes, shape, count) == ""


# --------------------------------------------------------------------------- amounts


def test_the_demand_names_only_what_is_needed() -> None:
    assert demand(SlotShape(cpus=0, gpus=0)) == {}
    assert demand(SlotShape(cpus=2, gpus=0, custom={"license": 1, "nothing": 0})) == {"CPU": 2, "license": 1}
    assert demand(SlotShape(cpus=0.57, gpus=1 / 3)) == {"CPU": 0.57, "GPU": 0.3333}
    assert demand(SlotShape(cpus=0, custom={"tiny": 0.00001})) == {"tiny": 0.0001}


@pytest.mark.parametrize(
    ("gpus", "total", "expected"),
    [
        (0.1, 1, 10),
        (1 / 3, 1, 3),
        (1 / 6, 1, 6),
        (0.3, 0.9, 3),
        (0.6, 2, 2),
        (0.5, 3, 6),
        (2, 5, 2),
        (1, 0, 0),
    ],
)
def test_parts_of_gpus_add_up_without_drift_and_never_cross_a_gpu(
    gpus: float, total: float, expected: int
) -> None:
    assert fitting([node("a", {"GPU": total})], SlotShape(cpus=0, gpus=gpus), 100) == expected


def test_what_is_left_over_on_shared_gpus_holds_no_worker() -> None:
    half_used = node("a", {"GPU": 4.0}, {"GPU": 0.8})  # two GPUs are others', ours have 0.4 left each
    assert capacity([half_used], SlotShape(cpus=0, gpus=0.6), {"a": 2}) == 2


def test_slots_on_a_node_that_is_gone_do_not_use_up_the_room_of_others() -> None:
    assert capacity([node("a", {"CPU": 4.0})], SlotShape(cpus=1), {"gone": 2}) == 6


def test_free_resources_that_do_not_yet_show_what_is_held_are_not_counted_twice() -> None:
    stale = node("a", {"CPU": 4.0})
    assert capacity([stale], SlotShape(cpus=1), {"a": 3}) == 4


def test_a_shape_that_needs_nothing_fits_as_often_as_one_likes() -> None:
    assert capacity([node("a", {}), node("b", {})], SlotShape(cpus=0), {}) == BOUNDLESS
    assert capacity([], SlotShape(cpus=0), {}) == 0


def test_a_kind_of_accelerator_is_where_the_total_has_it() -> None:
    t4 = SlotShape(cpus=0, gpus=1, custom={"accelerator_type:T4": 0.001})
    assert fitting([node("a", GPU_NODE), node("b", {"GPU": 4.0})], t4, 8) == 4


# --------------------------------------------------------------------------- strategies, labels, nodes that leave


@pytest.mark.parametrize(
    ("strategy", "fit"), [("PACK", 6), ("SPREAD", 6), ("STRICT_PACK", 4), ("STRICT_SPREAD", 2)]
)
def test_the_strategy_decides_how_many_fit(strategy: str, fit: int) -> None:
    nodes = [node("a", {"CPU": 2.0}), node("b", {"CPU": 4.0})]
    assert fitting(nodes, SlotShape(placement=strategy), 9) == fit


@pytest.mark.parametrize(
    ("strategy", "expected"), [("PACK", 6), ("SPREAD", 6), ("STRICT_PACK", 2), ("STRICT_SPREAD", 2)]
)
def test_held_slots_bind_what_may_come_to_them(strategy: str, expected: int) -> None:
    nodes = [node("a", {"CPU": 2.0}, {"CPU": 1.0}), node("b", {"CPU": 4.0})]
    assert capacity(nodes, SlotShape(placement=strategy), {"a": 1}) == expected


def test_nothing_new_goes_to_a_draining_node_but_what_is_held_there_counts() -> None:
    nodes = [node("a", {"CPU": 4.0}, {"CPU": 2.0}, draining=True), node("b", {"CPU": 1.0})]
    assert fitting(nodes, SlotShape(), 9) == 1
    assert capacity(nodes, SlotShape(), {"a": 2}) == 3


@pytest.mark.parametrize(
    ("labels", "condition", "matches"),
    [
        ({"z": "a"}, "a", True),
        ({"z": "b"}, "a", False),
        ({}, "a", False),
        ({"z": "a"}, "!a", False),
        ({"z": "b"}, "!a", True),
        ({}, "!a", True),
        ({"z": "b"}, "in(a,b)", True),
        ({"z": "b"}, "in(a, b)", True),
        ({"z": "c"}, "in(a,b)", False),
        ({}, "in(a,b)", False),
        ({"z": "b"}, "!in(a, b)", False),
        ({"z": "c"}, "!in(a,b)", True),
        ({}, "!in(a,b)", True),
        ({"z": ""}, "", True),
        ({}, "", False),
        ({"z": "in"}, "in", True),
    ],
)
def test_labels_mean_what_they_mean_to_ray(labels: dict[str, str], condition: str, matches: bool) -> None:
    shape = SlotShape(labels=({"z": condition},))
    assert fitting([node("a", {"CPU": 1.0}, labels=labels)], shape, 1) == int(matches)


def test_all_labels_of_a_selector_must_match() -> None:
    shape = SlotShape(labels=({"zone": "a", "disk": "!hdd"},))
    nodes = [
        node("a", {"CPU": 2.0}, labels={"zone": "a", "disk": "hdd"}),
        node("b", {"CPU": 1.0}, labels={"zone": "a"}),
    ]
    assert fitting(nodes, shape, 9) == 1


def test_the_selector_of_a_worker_is_its_own_or_that_of_all_and_has_no_spaces() -> None:
    assert selector(SlotShape(), 3) == {}
    assert selector(SlotShape(labels=({"z": "in(a, b)"},)), 3) == {"z": "in(a,b)"}
    assert selector(SlotShape(labels=({"z": "a"}, {"z": "b"})), 1) == {"z": "b"}


def test_a_worker_makes_room_for_one_that_can_go_nowhere_else() -> None:
    shape = SlotShape(labels=({}, {"zone": "a"}))
    nodes = [node("a", {"CPU": 1.0}, labels={"zone": "a"}), node("b", {"CPU": 1.0})]
    assert fitting(nodes, shape, 2) == 2


def test_with_a_selector_for_each_worker_there_is_no_room_beyond_them() -> None:
    shape = SlotShape(labels=({"zone": "a"}, {"zone": "b"}))
    a = node("a", {"CPU": 4.0}, {"CPU": 3.0}, labels={"zone": "a"})
    b = node("b", {"CPU": 4.0}, labels={"zone": "b"})
    assert capacity([a], shape, {"a": 1}) == 1
    assert capacity([a, b], shape, {"a": 1}) == 2


# --------------------------------------------------------------------------- words


def test_a_shortage_is_reported_with_total_and_free_resources() -> None:
    assert why_waiting([node("a", {"GPU": 4.0}, {"GPU": 2.0})], SlotShape(cpus=0, gpus=1), 4) == (
        "2 of 4 workers with 1 GPU each fit now; the cluster has 4 GPU in all, 2 of them free"
    )


BUSY = node("a", GPU_NODE, {"GPU": 3.0})
FULL = node("b", GPU_NODE, {"GPU": 0.0})
IN_A = SlotShape(cpus=1, gpus=1, labels=({"zone": "a"},))
T4 = {"accelerator_type:T4": 0.001}
GIB = 2.0**30


@pytest.mark.parametrize(
    ("nodes", "shape", "count", "words"),
    [
        ([BUSY], ONE_GPU, 2, "2 workers with 1 CPU and 1 GPU each fit now and wait to be placed"),
        ([BUSY], ONE_GPU, 1, "1 worker with 1 CPU and 1 GPU fits now and waits to be placed"),
        ([], ONE_GPU, 2, "none of 2 workers .* fits now; the cluster has no node for new workers"),
        ([node("a", {"CPU": 1})], ONE_GPU, 1, "1 worker .* does not fit now; no node has any GPU"),
        ([BUSY], SlotShape(cpus=1, gpus=8), 2, "no node is large enough for one: a has the most, 4 GPU"),
        ([BUSY], ONE_GPU, 8, r"; the cluster has 4 GPU in all \(needed: 8\), 3 of them free"),
        ([BUSY, FULL], ONE_GPU, 8, "3 of 8 .*; the cluster has 8 GPU in all, 3 of them free"),
        (
            [FULL, node("c", {"CPU": 4.0})],
            ONE_GPU,
            2,
            "; b, the only node that could hold one, has 4 GPU in all, none of them free",
        ),
        (
            [BUSY, FULL, node("c", {"CPU": 4.0})],
            ONE_GPU,
            8,
            "; the group of 2 nodes that could hold one has 8 GPU in all",
        ),
        ([BUSY], SlotShape(cpus=0, gpus=1, custom=T4), 4, "with 1 GPU and an accelerator of type T4 each"),
        (
            [BUSY],
            SlotShape(cpus=0, gpus=1, custom={"accelerator_type:A100": 0.001}),
            1,
            "no node has any accelerator of type A100",
        ),
        (
            [BUSY, FULL],
            replace(ONE_GPU, placement="STRICT_PACK"),
            4,
            "3 of 4 .* fit on one node now; a, which has most room, has 4 GPU in all, 3 of them free",
        ),
        (
            [BUSY, FULL],
            replace(ONE_GPU, placement="STRICT_SPREAD"),
            2,
            "1 of 2 .* fit on nodes of their own now; 2 of 2 nodes could hold one, with room now on 1$",
        ),
        (
            [FULL],
            replace(ONE_GPU, placement="STRICT_SPREAD"),
            1,
            "; 1 of 1 node could hold one, with room now on none$",
        ),
        (
            [node("a", GPU_NODE, {"GPU": 1}), node("b", GPU_NODE, {"GPU": 1})],
            SlotShape(cpus=0, gpus=2),
            1,
            r"; the free resources are fragmented: a \(1 GPU\) and b \(1 GPU\)$",
        ),
        ([BUSY], IN_A, 1, "; no node has the labels zone=a$"),
        (
            [BUSY, node("c", GPU_NODE, labels={"zone": "a"})],
            IN_A,
            5,
            "; c, the only node with the labels zone=a that could hold one, has 4 GPU in all .*, all of them free",
        ),
        (
            [BUSY, node("c", {"CPU": 1.0}, labels={"zone": "a"})],
            IN_A,
            5,
            "; no node with the labels zone=a has any GPU",
        ),
        (
            [node("c", {"CPU": 8.0}, labels={"zone": "a"})],
            SlotShape(labels=({"zone": "a"}, {"zone": "b"})),
            2,
            "1 of 2 .*; there is room for 0 of 1 with the labels zone=b$",
        ),
        (
            [node("a", {"CPU": 8, "memory": 16 * GIB}, {"memory": GIB})],
            SlotShape(cpus=1, custom={"memory": 4 * GIB}),
            1,
            "with 1 CPU and 4 GiB of memory does not fit now; "
            "the cluster has 16 GiB of memory in all, 1 GiB of it free",
        ),
        (
            [FULL, node("d", GPU_NODE, draining=True)],
            ONE_GPU,
            1,
            "; b, the only .* none of them free; nothing new goes to d, soon to be taken away$",
        ),
        (
            [node(name, {"CPU": 1}, draining=True) for name in "abcdef"],
            SlotShape(),
            1,
            "; nothing new goes to a, b, c and 3 more, soon",
        ),
    ],
)
def test_a_wait_says_what_is_missing(nodes: list[Node], shape: SlotShape, count: int, words: str) -> None:
    assert re.search(words, why_waiting(nodes, shape, count))


@pytest.mark.parametrize(
    ("nodes", "shape", "count", "words"),
    [
        (
            [BUSY, FULL],
            replace(ONE_GPU, placement="STRICT_PACK"),
            6,
            r'^ScalingConfig\(placement_strategy="STRICT_PACK"\) wants 6 workers .* on one node, '
            "but no node is large enough, even empty: "
            "a holds the most, 4 of them. "
            'Ask for at most 4 workers, use placement_strategy="PACK", or add a node that is large enough.',
        ),
        (
            [BUSY],
            SlotShape(gpus=8, placement="STRICT_PACK"),
            1,
            "wants 1 worker .*none holds even one of them. Ask for less per worker, or add a node",
        ),
        (
            [BUSY, FULL],
            replace(ONE_GPU, placement="STRICT_SPREAD"),
            3,
            "on nodes of their own, but only 2 nodes of the cluster could hold one, even empty. "
            'Ask for at most 2 workers, use placement_strategy="SPREAD", or add nodes.',
        ),
        (
            [BUSY],
            replace(IN_A, placement="STRICT_SPREAD"),
            2,
            r"no node of the cluster .* \(nodes must have the labels zone=a\). "
            "Ask for less per worker or for other labels, or add nodes.",
        ),
    ],
)
def test_a_strict_strategy_that_can_never_be_met_says_why_and_what_to_do(
    nodes: list[Node], shape: SlotShape, count: int, words: str
) -> None:
    assert re.search(words, why_never(nodes, shape, count))


def test_nodes_that_are_busy_or_leaving_do_not_make_it_impossible() -> None:
    leaving = node("d", GPU_NODE, draining=True)
    assert why_never([FULL], replace(ONE_GPU, placement="STRICT_PACK"), 4) == ""
    assert why_never([FULL, leaving], replace(ONE_GPU, placement="STRICT_SPREAD"), 2) == ""
    assert why_never([], ONE_GPU, 4) == ""
