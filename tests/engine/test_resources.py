"""What the machine has: checked in words where it was asked for, shared out, queued for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import SlotShape
from powertrain.engine.resources import Ledger, Machine, check, share_gpus, visible_gpus
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


def test_the_ledger_serves_those_who_wait_in_order() -> None:
    ledger = Ledger()
    got: dict[str, tuple[str, ...]] = {}
    assert ledger.claim("a", 2, TWO_GPUS, lambda gpus: got.update(a=gpus)) == ""
    assert "2 GPU(s), 0 free" in ledger.claim("b", 2, TWO_GPUS, lambda gpus: got.update(b=gpus))
    assert ledger.claim("c", 1, TWO_GPUS, lambda gpus: got.update(c=gpus)) != ""
    assert got == {"a": ("0", "1")}
    ledger.give_back("a", TWO_GPUS)
    assert got == {"a": ("0", "1"), "b": ("0", "1")}
    ledger.give_back("b", TWO_GPUS)
    assert got["c"] == ("0",)


def test_one_who_gives_up_waiting_no_longer_stands_in_the_way() -> None:
    ledger = Ledger()
    got: dict[str, tuple[str, ...]] = {}
    ledger.claim("a", 1, TWO_GPUS, lambda gpus: got.update(a=gpus))
    ledger.claim("b", 2, TWO_GPUS, lambda gpus: got.update(b=gpus))
    ledger.claim("c", 1, TWO_GPUS, lambda gpus: got.update(c=gpus))
    ledger.give_back("b", TWO_GPUS)
    assert got == {"a": ("0",), "c": ("1",)}


def test_a_claim_without_gpus_is_not_kept_waiting_by_those_who_want_some() -> None:
    ledger = Ledger()
    got: dict[str, tuple[str, ...]] = {}
    ledger.claim("a", 2, TWO_GPUS, lambda gpus: got.update(a=gpus))
    ledger.claim("b", 2, TWO_GPUS, lambda gpus: got.update(b=gpus))
    assert ledger.claim("cpu only", 0, TWO_GPUS, lambda gpus: got.update(cpu=gpus)) == ""
    assert got["cpu"] == ()
