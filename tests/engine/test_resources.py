"""What the machine has: checked in words where it was asked for, shared out, and how much of it others leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import SlotShape
from powertrain.engine.resources import (
    BOUNDLESS,
    Holding,
    Machine,
    check,
    counted,
    free,
    free_gpus,
    gpu_of,
    missing,
    share_gpus,
    slots_free,
    visible_gpus,
)
from powertrain.errors import ResourceError

LAPTOP = Machine(cpus=2)
TWO_GPUS = Machine(cpus=8, gpus=("NVIDIA A100-SXM4-80GB",) * 2, visible=("0", "1"), custom={"license": 3.0})


@pytest.mark.parametrize(
    ("machine", "count", "shape"),
    [
        (LAPTOP, 64, SlotShape()),
        (LAPTOP, 2, SlotShape(cpus=1, explicit=True)),
        (TWO_GPUS, 2, SlotShape(gpus=1)),
        (TWO_GPUS, 1, SlotShape(gpus=2)),
        (TWO_GPUS, 8, SlotShape(gpus=0.25)),
        (TWO_GPUS, 6, SlotShape(gpus=1 / 3)),
        (TWO_GPUS, 2, SlotShape(custom={"accelerator_type:A100": 0.001})),
        (TWO_GPUS, 2, SlotShape(custom={"accelerator_type:A100-80G": 0.001})),
        (TWO_GPUS, 3, SlotShape(custom={"license": 1})),
    ],
)
def test_what_fits_is_not_refused(machine: Machine, count: int, shape: SlotShape) -> None:
    check(machine, count, shape)


@pytest.mark.parametrize(
    ("machine", "count", "shape", "words"),
    [
        (LAPTOP, 1, SlotShape(gpus=1), "no NVIDIA GPU.*use_gpu=False"),
        (LAPTOP, 2, SlotShape(cpus=2, explicit=True), r"4 CPU \(2 x 2\), of which it has 2"),
        (TWO_GPUS, 3, SlotShape(gpus=1), r"3 GPU \(3 x 1\), of which it has 2"),
        (TWO_GPUS, 9, SlotShape(gpus=0.25), "GPU"),
        (TWO_GPUS, 3, SlotShape(gpus=0.6), "GPU"),
        (TWO_GPUS, 1, SlotShape(custom={"accelerator_type:T4": 0.001}), "accelerator_type:T4.*has 0"),
        (TWO_GPUS, 1, SlotShape(custom={"accelerator_type:A10": 0.001}), "accelerator_type:A10.*has 0"),
        (TWO_GPUS, 4, SlotShape(custom={"license": 1}), "4 license.*has 3"),
        (TWO_GPUS, 1, SlotShape(cpus=9, gpus=3, explicit=True), "GPU.*and.*CPU"),
    ],
)
def test_what_can_never_fit_is_refused_and_named(
    machine: Machine, count: int, shape: SlotShape, words: str
) -> None:
    with pytest.raises(ResourceError, match=words):
        check(machine, count, shape)


@pytest.mark.parametrize(
    ("per_slot", "count", "shares"),
    [
        (0, 2, [(), ()]),
        (1, 2, [("a",), ("b",)]),
        (2, 2, [("a", "b"), ("c", "d")]),
        (0.5, 3, [("a",), ("a",), ("b",)]),
        (1 / 3, 4, [("a",), ("a",), ("a",), ("b",)]),
    ],
)
def test_gpus_are_shared_out_whole_or_packed(
    per_slot: float, count: int, shares: list[tuple[str, ...]]
) -> None:
    assert share_gpus(("a", "b", "c", "d"), count, per_slot) == shares


@given(st.integers(1, 8), st.integers(1, 16), st.sampled_from([1.0, 2.0, 3.0, 0.5, 0.25, 0.3, 0.1]))
def test_whatever_passes_the_check_can_be_shared_out_without_overcommitting(
    gpus: int, count: int, per_slot: float
) -> None:
    machine = Machine(cpus=1, gpus=("g",) * gpus, visible=tuple(map(str, range(gpus))))
    try:
        check(machine, count, SlotShape(gpus=per_slot))
    except ResourceError:
        return
    load: dict[str, float] = {}
    for share in share_gpus(machine.visible, count, per_slot):
        assert len(share) == max(1, int(per_slot))
        for gpu in share:
            load[gpu] = load.get(gpu, 0.0) + min(1.0, per_slot)
    assert all(amount <= 1.0 + 1e-6 for amount in load.values())


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2, 0", ("2", "0")),
        ("1,-1,2", ("1",)),
        ("7", ()),
        ("NoDevFiles", ()),
        ("GPU-8f0d,1", ("GPU-8f0d", "1")),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen: str | None, visible: tuple[str, ...]) -> None:
    assert visible_gpus(3, chosen) == visible


def test_no_gpu_means_none_is_visible_whatever_the_variable_says() -> None:
    assert visible_gpus(0, "0,GPU-1") == ()


GPUS = (("NVIDIA A100", "GPU-aaaa-1"), ("NVIDIA A100", "GPU-aabb-2"), ("NVIDIA T4", "GPU-cccc-3"))


@pytest.mark.parametrize(
    ("entry", "gpu"),
    [
        ("2", GPUS[2]),
        ("GPU-cccc-3", GPUS[2]),
        ("GPU-AAB", GPUS[1]),
        ("GPU-aa", ("NVIDIA A100", "GPU-aa")),
        ("MIG-1234", ("NVIDIA A100", "MIG-1234")),
    ],
)
def test_a_gpu_is_the_same_by_number_and_by_name(entry: str, gpu: tuple[str, str]) -> None:
    assert gpu_of(entry, GPUS) == gpu


# --------------------------------------------------------------------------- what is counted, and what is left


def holding(gpus: tuple[str, ...] = (), cores: tuple[int, ...] = (), **amounts: float) -> Holding:
    return Holding(run="other", host="here", pid=1, gpus=gpus, amounts=amounts, cores=cores)


@pytest.mark.parametrize(
    ("shape", "count", "amounts"),
    [
        (SlotShape(), 8, {}),
        (SlotShape(cpus=2, explicit=True), 3, {"CPU": 6}),
        (SlotShape(cpus=0, explicit=True), 3, {}),
        (SlotShape(gpus=2), 3, {"GPU": 6}),
        (SlotShape(gpus=0.5), 3, {"GPU": 2}),
        (SlotShape(custom={"license": 0.5, "none": 0}), 3, {"license": 1.5}),
    ],
)
def test_gpus_and_what_was_named_are_counted(shape: SlotShape, count: int, amounts: dict[str, float]) -> None:
    assert counted(shape, count) == amounts


def test_what_others_hold_is_not_free() -> None:
    others = [holding(("0",), license=1.0), holding(CPU=3.0, license=1.5)]
    assert free_gpus(TWO_GPUS, others) == ("1",)
    assert [free(TWO_GPUS, others, name) for name in ("GPU", "CPU", "license")] == [1, 5, 0.5]


def test_only_what_is_missing_is_named_with_how_much_is_free() -> None:
    others = [holding(("0",), license=1.0)]
    assert missing(TWO_GPUS, others, {"GPU": 2, "CPU": 8, "license": 2}) == {"GPU": 1}


def test_a_gpu_that_two_jobs_number_alike_is_distinguished_by_its_identity() -> None:
    mine = Machine(cpus=1, gpus=("g",), visible=("0",), uuids=("GPU-a",))
    assert free_gpus(mine, [holding(("GPU-b",))]) == ("0",)
    assert free_gpus(mine, [holding(("GPU-a",))]) == ()
    assert mine.identity("0") == "GPU-a"


@pytest.mark.parametrize(
    ("cores", "held", "left"),
    [
        ((0, 1, 2, 3), 3.0, 1.0),
        ((4, 5, 6, 7), 4.0, 4.0),
        ((2, 3, 4, 5), 3.0, 3.0),
        ((), 3.0, 1.0),
        (tuple(range(64)), 10.0, 4.0),
    ],
)
def test_cpus_that_may_be_on_cores_of_the_holder_alone_are_not_missed_here(
    cores: tuple[int, ...], held: float, left: float
) -> None:
    mine = Machine(cpus=4, cores=frozenset(range(4)))
    assert free(mine, [holding(cores=cores, CPU=held)], "CPU") == left


def test_a_shape_that_holds_nothing_countable_always_has_room() -> None:
    assert slots_free(LAPTOP, SlotShape(), [holding(CPU=2.0)]) == LAPTOP.cpus, (
        "one per core, whoever else runs"
    )
    assert slots_free(LAPTOP, SlotShape(cpus=0, explicit=True), [holding(CPU=2.0)]) == BOUNDLESS


def test_what_is_set_aside_for_others_is_no_room() -> None:
    assert slots_free(TWO_GPUS, SlotShape(gpus=0.5), [], [{"GPU": 1.0}]) == 2
    assert slots_free(TWO_GPUS, SlotShape(gpus=1), [], [{"GPU": 3.0}]) == 0


shapes = st.builds(
    SlotShape,
    cpus=st.sampled_from([0.5, 1.0, 3.0]),
    gpus=st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0]),
    custom=st.sampled_from([{}, {"license": 1.0}, {"license": 0.1}]),
    explicit=st.booleans(),
)
machines = st.builds(
    lambda cpus, gpus, licenses: Machine(
        cpus, ("g",) * gpus, tuple(map(str, range(gpus))), {"license": licenses}
    ),
    st.integers(1, 8),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
)


def granted(machine: Machine, asked: list[tuple[SlotShape, int]]) -> list[Holding]:
    """What is held when each of these is given where it fits."""
    held: list[Holding] = []
    for shape, count in asked:
        wanted = counted(shape, count)
        if not missing(machine, held, wanted):
            gpus = free_gpus(machine, held)[: int(wanted.pop("GPU", 0))]
            held.append(holding(gpus, (), **wanted))
    return held


@given(machines, st.lists(st.tuples(shapes, st.integers(1, 4)), max_size=6))
def test_claims_that_were_given_never_hold_more_than_there_is(
    machine: Machine, asked: list[tuple[SlotShape, int]]
) -> None:
    held = granted(machine, asked)
    gpus = [gpu for one in held for gpu in one.gpus]
    assert len(gpus) == len(set(gpus)), "a GPU belongs to one claim"
    assert set(gpus) | set(free_gpus(machine, held)) == set(machine.visible)
    for name in ("CPU", "license"):
        assert sum(one.amounts.get(name, 0.0) for one in held) <= machine.total(name) + 1e-6


@given(machines, st.lists(st.tuples(shapes, st.integers(1, 4)), max_size=4), shapes)
def test_as_many_slots_as_are_said_to_be_free_can_be_had_and_not_one_more(
    machine: Machine, asked: list[tuple[SlotShape, int]], shape: SlotShape
) -> None:
    held = granted(machine, asked)
    room = slots_free(machine, shape, held)
    assert not missing(machine, held, counted(shape, room))
    if counted(shape, 1):
        assert missing(machine, held, counted(shape, room + 1))


@given(machines, shapes)
def test_what_an_idle_machine_has_room_for_is_what_it_does_not_refuse(
    machine: Machine, shape: SlotShape
) -> None:
    room = slots_free(machine, shape, [])
    if room:
        check(machine, min(room, 100), shape)
    if not counted(shape, 1):
        check(machine, room + 100, shape)  # a number that was named is never refused
    else:
        with pytest.raises(ResourceError):
            check(machine, room + 1, shape)
