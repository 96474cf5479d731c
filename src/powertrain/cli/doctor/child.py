"""Processes of the doctor's own, so that a library that hangs or crashes cannot take the doctor with it.

``python -m powertrain.cli.doctor.child torch`` prints facts about torch as one line of JSON; ``collective BACKEND RANK
WORLD_SIZE FILE`` is one rank of an all_reduce whose ranks meet at a file.
"""

from __future__ import annotations

import datetime
import json
import os
import sys

#: Seconds for which a rank waits for the others, which may still be importing torch.
_MEETING_TIMEOUT_S = 150.0


def print_torch_facts() -> None:
    """Print torch's CUDA version, the GPUs that it can use, and whether this process could be forked."""
    import torch

    from powertrain.engine.forking import why_fork_is_unsafe

    unsafe = why_fork_is_unsafe()  # before the GPUs are opened
    error = ""
    count = 0
    try:
        count = torch.cuda.device_count()
        for index in range(count):
            torch.cuda.get_device_properties(index)
    except Exception as raised:
        error, count = f"{type(raised).__name__}: {raised}".splitlines()[0], 0
    has_nccl = bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())
    facts = {"cuda": torch.version.cuda, "count": count, "error": error, "unsafe": unsafe, "nccl": has_nccl}
    os.write(1, json.dumps(facts).encode() + b"\n")


def join_collective(backend: str, rank: int, world_size: int, meeting: str) -> None:
    """Form a process group, reduce one tensor, and raise ``RuntimeError`` where the sum is wrong."""
    import torch

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=_MEETING_TIMEOUT_S),
    )
    tensor = torch.full((1024,), float(rank + 1), device=device)
    torch.distributed.all_reduce(tensor)
    total, expected = float(tensor[0]), world_size * (world_size + 1) / 2
    torch.distributed.destroy_process_group()
    if total != expected:
        raise RuntimeError(f"the sum is {total}, not {expected}")


def main(arguments: list[str]) -> None:
    """Run one of the two programs."""
    if arguments[0] == "torch":
        print_torch_facts()
    else:
        backend, rank, world_size, meeting = arguments[1:]
        join_collective(backend, int(rank), int(world_size), meeting)


if __name__ == "__main__":
    main(sys.argv[1:])
