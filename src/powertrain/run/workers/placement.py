"""The assignment of slots to ranks, and the environment of their processes. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from powertrain.engine.base import Slot

_LAUNCHER_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@dataclass(frozen=True)
class Placement:
    """The placement of one rank."""

    slot: Slot
    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    #: All GPUs of the run on this rank's node, in the order of local ranks.
    visible_gpus: tuple[str, ...]
    #: Index of this rank's own GPU in ``visible_gpus``; -1 for none.
    device: int


def arrange(slots: Sequence[Slot]) -> list[Placement]:
    """Return ranks grouped by node, in the order in which nodes appear; on a node by GPU, then by slot order.

    Slots of a launcher are grouped as the launcher did, and keep its order.
    """
    nodes: dict[tuple[str, str], list[Slot]] = {}
    for slot in slots:
        nodes.setdefault((slot.node_id, slot.group), []).append(slot)
    placements: list[Placement] = []
    for node_rank, members in enumerate(nodes.values()):
        if not members[0].group:
            members.sort(key=lambda slot: [_number(gpu) for gpu in slot.gpus])
        visible = tuple(dict.fromkeys(gpu for slot in members for gpu in slot.gpus))
        for local_rank, slot in enumerate(members):
            placements.append(
                Placement(
                    slot=slot,
                    rank=len(placements),
                    local_rank=local_rank,
                    node_rank=node_rank,
                    local_world_size=len(members),
                    visible_gpus=visible,
                    device=visible.index(slot.gpus[0]) if slot.gpus else -1,
                )
            )
    return placements


def environment(
    placement: Placement, world_size: int, given: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Return the variables torchrun would set, the GPUs of the node, and one thread per worker unless the user set
    more."""
    env: dict[str, str | None] = {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(placement.node_rank),
        "GROUP_RANK": str(placement.node_rank),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A worker that was given no GPU sees none, so that nothing lands on one by accident.
        "CUDA_VISIBLE_DEVICES": ",".join(placement.visible_gpus),
        # Of a launcher around the driver, which has nothing to do with this group of workers.
        **dict.fromkeys(_LAUNCHER_VARIABLES),
    }
    return {**env, **(given or {})}


def _number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (1 << 30, gpu)
