"""Workers meet in a process group, on loopback only, and leave it again."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from powertrain.backend import Worker, WorkerMetadata
from powertrain.errors import ConfigError, EngineError
from powertrain.frameworks import joining
from powertrain.frameworks.ports import on_one_host, on_one_node
from powertrain.torch import backend as torch_backend
from powertrain.torch import rendezvous
from powertrain.torch.backend import (
    TorchBackend,
    TorchWorkerInfo,
    refuse_shared_gpus,
)
from powertrain.torch.config import TorchConfig
from powertrain.torch.rendezvous import Rendezvous

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
GLOO = TorchConfig(backend="gloo", timeout_s=30)
ALONE = TorchWorkerInfo(
    rank=0,
    world_size=1,
    meeting=Rendezvous("alone"),
    backend="gloo",
    timeout_s=10,
    one_host=True,
    address="",
    gpus=0,
    announce=True,
)


def sum_of_ranks() -> tuple[int, int, float]:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def is_initialized() -> bool:
    return bool(dist.is_initialized())


def listening_addresses(pid: int) -> set[str]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}


def worker(rank: int, gpus: tuple[str, ...] = (), node: str = "a") -> Worker:
    return Worker(rank, WorkerMetadata(node, f"10.0.0.{ord(node)}", node, pid=1, gpu_ids=gpus))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_worker_joins_and_can_reduce(forked: Callable[[int], Any], world_size: int) -> None:
    group = forked(world_size)
    TorchBackend().on_start(group, GLOO)
    total = float(sum(range(world_size)))
    assert group.execute(sum_of_ranks) == [(rank, world_size, total) for rank in range(world_size)]


def test_all_sockets_of_one_host_listen_on_loopback_only(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    for member in group.workers:
        assert listening_addresses(member.pid) <= LOOPBACK
    assert listening_addresses(group.workers[0].pid), "gloo listens for the other rank"


def test_a_tcp_store_of_one_host_listens_on_loopback_only(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    TorchBackend().on_start(group, replace(GLOO, init_method="tcp"))
    assert type_of_store(group) == "TCPStore"
    assert listening_addresses(group.workers[0].pid) <= LOOPBACK


def test_workers_of_one_node_meet_in_a_file_of_their_users_only(
    forked: Callable[[int], Any], tmp_path: Path
) -> None:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    assert type_of_store(group) == "FileStore"
    (file,) = tmp_path.glob("rendezvous-*")
    assert file.stat().st_mode & 0o777 == 0o600
    TorchBackend().on_shutdown(group, GLOO)
    TorchBackend().on_start(group, GLOO)
    assert len(list(tmp_path.glob("rendezvous-*"))) == 2, "the second start found keys of the first"
    assert [total for _, _, total in group.execute(sum_of_ranks)] == [1.0, 1.0]


def test_nothing_listens_at_the_announced_port_and_the_users_code_can(forked: Callable[[int], Any]) -> None:
    def serve_a_store() -> int:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True)
        return int(store.add("served", 1))

    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    host, port = (group.execute_single(1, variable, name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect((host, int(port)))
    assert group.execute_single(0, serve_a_store) == 1


def test_new_groups_can_be_made_and_a_group_be_destroyed_by_the_loop(forked: Callable[[int], Any]) -> None:
    def make_and_destroy() -> tuple[float, bool]:
        pair, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)]
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pair)
        dist.all_reduce(tensor, group=alone[dist.get_rank()])
        dist.destroy_process_group(pair)
        dist.destroy_process_group()
        return tensor.item(), dist.is_initialized()

    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    assert group.execute(make_and_destroy) == [(2.0, False)] * 2
    TorchBackend().on_shutdown(group, GLOO)


def test_the_meeting_is_announced_with_env_and_not_with_tcp(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    ports = group.execute(variable, "MASTER_PORT")
    assert group.execute(variable, "MASTER_ADDR") == ["127.0.0.1"] * 2
    assert ports[0] == ports[1]
    assert int(ports[0]) > 0
    TorchBackend().on_shutdown(group, GLOO)
    TorchBackend().on_start(group, replace(GLOO, init_method="tcp"))
    assert group.execute(variable, "MASTER_PORT") == [None, None]


def test_shutdown_leaves_no_group_and_no_variable_and_a_new_start_works(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    TorchBackend().on_shutdown(group, GLOO)
    assert group.execute(is_initialized) == [False, False]
    assert group.execute(variable, "MASTER_ADDR") == [None, None]
    assert group.execute(variable, "GLOO_SOCKET_IFNAME") == [None, None]
    TorchBackend().on_start(group, GLOO)
    assert [total for _, _, total in group.execute(sum_of_ranks)] == [1.0, 1.0]


def test_a_lone_worker_opens_no_store(forked: Callable[[int], Any]) -> None:
    group = forked(1)
    TorchBackend().on_start(group, GLOO)
    assert type_of_store(group) == "HashStore"
    assert listening_addresses(group.workers[0].pid) <= LOOPBACK


def type_of_store(group: Any) -> str:
    def look() -> str:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return type(store).__name__

    return str(group.execute_single(0, look))


def test_accelerate_gets_the_device_of_the_worker_and_keeps_one_that_the_user_named(
    forked: Callable[[int], Any],
) -> None:
    group = forked(2)
    group.execute_single(1, set_variable, "ACCELERATE_TORCH_DEVICE", "meta")
    TorchBackend().on_start(group, GLOO)
    assert group.execute(variable, "ACCELERATE_TORCH_DEVICE") == ["cpu", "meta"]
    # Without it Accelerate does not look for a process group on CPUs.
    assert group.execute(variable, "ACCELERATE_USE_CPU") == ["true", "true"]
    TorchBackend().on_shutdown(group, GLOO)
    assert group.execute(variable, "ACCELERATE_TORCH_DEVICE") == [None, "meta"]
    assert group.execute(variable, "ACCELERATE_USE_CPU") == [None, None]


def test_the_interface_the_user_named_is_kept(forked: Callable[[int], Any]) -> None:
    group = forked(1)
    group.execute(set_variable, "GLOO_SOCKET_IFNAME", "lo")
    TorchBackend().on_start(group, GLOO)
    TorchBackend().on_shutdown(group, GLOO)
    assert group.execute(variable, "GLOO_SOCKET_IFNAME") == ["lo"], "the user's own setting is kept"


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


def test_a_group_the_script_made_itself_is_kept(forked: Callable[[int], Any]) -> None:
    def make_own() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    group = forked(1)
    group.execute(make_own)
    TorchBackend().on_start(group, GLOO)
    TorchBackend().on_shutdown(group, GLOO)
    assert group.execute(is_initialized) == [True]


def test_one_rank_that_cannot_join_is_named_at_once(forked: Callable[[int], Any]) -> None:
    def make_own() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    group = forked(2)
    group.execute_single(1, make_own)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"rank 0 of 1 was already set up .* rank 1 of 2"):
        TorchBackend().on_start(group, GLOO)
    assert time.monotonic() - began < 25, "not only after rank 0's own timeout"


def test_an_unreachable_meeting_is_named_with_its_address(forked: Callable[[int], Any]) -> None:
    closed = rendezvous.bind("")
    port = closed.getsockname()[1]
    closed.close()
    place = replace(ALONE, rank=1, world_size=2, timeout_s=1, meeting=Rendezvous("tcp", "127.0.0.1", port))
    with pytest.raises(EngineError, match=rf"Rank 1 of 2 could not join the gloo .* at 127\.0\.0\.1:{port}"):
        forked(1).execute_single(0, torch_backend._join, place)


def test_torchruns_store_serves_two_fits_in_a_row(forked: Callable[[int], Any]) -> None:
    agent = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    group = forked(2)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
    }.items():
        group.execute(set_variable, name, value)
    for _ in range(2):
        TorchBackend().on_start(group, GLOO)
        assert [total for _, _, total in group.execute(sum_of_ranks)] == [1.0, 1.0]
        TorchBackend().on_shutdown(group, GLOO)
    assert group.execute(variable, "MASTER_PORT") == [str(agent.port)] * 2


def test_shutdown_is_bounded_when_a_rank_is_gone(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    group.kill(1)
    began = time.monotonic()
    TorchBackend().on_shutdown(group, GLOO)
    assert time.monotonic() - began < joining.LEAVE_TIMEOUT_S + joining._LEAVE_SLACK_S
    assert group.execute_single(0, is_initialized) is False


def test_an_action_that_never_ends_is_given_up() -> None:
    released = threading.Event()
    assert "took longer than 0.05 s" in joining.within(0.05, released.wait)
    released.set()
    assert joining.within(5, lambda: None) == ""
    assert "ZeroDivisionError" in joining.within(5, lambda: 1 / 0)


def test_nccl_without_a_gpu_is_refused_with_the_way_out(forked: Callable[[int], Any]) -> None:
    group = forked(1)
    group.execute(set_variable, "CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"this worker sees none.*backend=\"gloo\""):
        TorchBackend().on_start(group, TorchConfig(backend="nccl"))


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_two_ranks_on_one_gpu_are_refused_under_nccl(backend: str | None) -> None:
    with pytest.raises(ConfigError, match="Ranks 0 and 2 share GPU 0 of a"):
        refuse_shared_gpus(backend, [worker(0, ("0",)), worker(1, ("1",)), worker(2, ("0",))])


def test_gpus_of_several_nodes_and_gloo_are_not_refused() -> None:
    refuse_shared_gpus(None, [worker(0, ("0",)), worker(1, ("0",), node="b")])
    refuse_shared_gpus("gloo", [worker(0, ("0",)), worker(1, ("0",))])
    refuse_shared_gpus(None, [worker(0), worker(1)])


def test_one_host_is_distinguished_from_several() -> None:
    assert on_one_host([worker(0), worker(1)])
    assert not on_one_host([worker(0), worker(1, node="b")])


def test_nodes_of_one_host_may_see_other_files() -> None:
    container = Worker(1, replace(worker(1).metadata, node_id="container"))
    assert on_one_host([worker(0), container])
    assert not on_one_node([worker(0), container])
    assert on_one_node([worker(0), worker(1)])


def test_an_ipv6_meeting_reads_as_an_address() -> None:
    assert str(Rendezvous("tcp", "::1", 5)) == "[::1]:5"
    assert str(Rendezvous("tcp", "10.0.0.1", 5)) == "10.0.0.1:5"
