"""The torchrun blocks of seeds/001, written anew: one machine, and two nodes that meet at an endpoint."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from powertrain import Result

SCRIPT = Path(__file__).parent / "scripts" / "under_torchrun.py"


def _torchrun(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _outputs(agents: list[subprocess.Popen[str]]) -> str:
    try:
        said = [agent.communicate(timeout=50)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text
    return "".join(said)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _check(said: str) -> None:
    # Under torchrun two ranks may write into one line: their output is not buffered.
    assert sorted(re.findall(r"Rank \d of \d", said)) == ["Rank 0 of 2", "Rank 1 of 2"], said
    paths = {path.rstrip() for path in re.findall(r"Path: (\S+?)(?=Path: |\s|$)", said)}
    assert len(paths) == 1, "every rank's result names the one run"
    result = Result.from_path(paths.pop())
    assert result.state == "finished"
    frame = result.dataframe(ranks="all")
    assert sorted(zip(frame["rank"], frame["epoch"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert frame["rows"].tolist() == [50] * 4, "100 rows shared by two ranks"


def test_torchrun_on_one_machine_gives_the_ranks() -> None:
    _check(_outputs([_torchrun("--nproc-per-node=2", f"--master-port={_free_port()}")]))


def test_torchrun_on_two_nodes_gives_the_ranks() -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{_free_port()}"
    nodes = ("--nnodes=2", "--nproc-per-node=1", endpoint)
    _check(_outputs([_torchrun(*nodes, f"--node-rank={node}") for node in range(2)]))
