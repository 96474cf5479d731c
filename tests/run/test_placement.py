"""Which slot becomes which rank, and what its process gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import Slot
from powertrain.run.workers.placement import arrange, environment


def slot(name: str, host: str = "a", gpus: tuple[str, ...] = ()) -> Slot:
    return Slot(id=name, host=host, address="127.0.0.1", gpus=gpus)


def test_ranks_are_grouped_by_node_in_the_order_nodes_appear() -> None:
    placed = arrange([slot("1", "b"), slot("2", "a"), slot("3", "b")])
    assert [(p.slot.id, p.rank, p.node_rank, p.local_rank, p.local_world_size) for p in placed] == [
        ("1", 0, 0, 0, 2),
        ("3", 1, 0, 1, 2),
        ("2", 2, 1, 0, 1),
    ]


def test_every_rank_of_a_node_sees_all_its_gpus_with_its_own_at_its_local_rank() -> None:
    placed = arrange([slot("x", gpus=("10",)), slot("y", gpus=("2",))])
    assert [(p.slot.id, p.visible_gpus, p.device) for p in placed] == [
        ("y", ("2", "10"), 0),
        ("x", ("2", "10"), 1),
    ]


def test_groups_of_a_launcher_on_one_host_keep_their_ranks_and_their_order() -> None:
    slots = [
        replace(slot(str(rank), gpus=(gpu,)), group=group)
        for rank, (group, gpu) in enumerate((("0", "3"), ("0", "2"), ("1", "0")))
    ]
    placed = arrange(slots)
    assert [(p.slot.id, p.node_rank, p.local_rank, p.local_world_size, p.device) for p in placed] == [
        ("0", 0, 0, 2, 0),
        ("1", 0, 1, 2, 1),
        ("2", 1, 0, 1, 0),
    ]


def test_a_shared_gpu_is_seen_once() -> None:
    placed = arrange([slot("x", gpus=("0",)), slot("y", gpus=("0",)), slot("z", gpus=("1",))])
    assert [(p.visible_gpus, p.device) for p in placed] == [(("0", "1"), 0), (("0", "1"), 0), (("0", "1"), 1)]


def test_without_gpus_there_is_no_device() -> None:
    (placed,) = arrange([slot("x")])
    assert (placed.device, placed.visible_gpus) == (-1, ())


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_ranks_are_a_permutation_and_local_ranks_count_up_on_each_node(hosts: list[str]) -> None:
    placed = arrange([slot(str(number), host) for number, host in enumerate(hosts)])
    assert [p.rank for p in placed] == list(range(len(hosts)))
    assert sorted(int(p.slot.id) for p in placed) == list(range(len(hosts)))
    for host in set(hosts):
        on_host = [p for p in placed if p.slot.host == host]
        assert [p.local_rank for p in on_host] == list(range(len(on_host)))
        assert {p.local_world_size for p in on_host} == {len(on_host)}
        assert len({p.node_rank for p in on_host}) == 1


def test_the_environment_is_what_torchrun_would_set() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        env = environment(arrange([slot("x", gpus=("3",)), slot("y", "b")])[0], 2)
    assert {name: value for name, value in env.items() if value is not None} == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
    }


def test_variables_of_a_launcher_around_the_driver_are_removed_and_a_rank_without_a_gpu_sees_none() -> None:
    env = environment(arrange([slot("x")])[0], 1)
    assert env["MASTER_ADDR"] is None
    assert env["TORCHELASTIC_RESTART_COUNT"] is None
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_what_the_user_set_is_kept() -> None:
    placed = arrange([slot("x")])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "6")
        assert environment(placed, 1)["OMP_NUM_THREADS"] == "6"
        assert environment(placed, 1, {"OMP_NUM_THREADS": "2", "MINE": "x"})["OMP_NUM_THREADS"] == "2"
