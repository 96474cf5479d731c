"""Datasets under torchrun only: each process makes its own, all read one order, and a second start goes on in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from powertrain import Result

SCRIPT = """
import sys
from pathlib import Path

import powertrain
from powertrain import Checkpoint, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer


def read(config):
    powertrain.get_checkpoint()
    rank = powertrain.get_context().get_world_rank()
    for number, batch in enumerate(powertrain.get_dataset_shard("train").iter_batches(global_batch_size=7), 1):
        with powertrain.checkpoint_dir() as directory:
            Path(directory, f"rank-{rank}").touch()
            powertrain.report({"rows": batch["id"].tolist()}, checkpoint=Checkpoint.from_directory(directory))
        if number == config["batches"]:
            return


TorchTrainer(
    read,
    train_loop_config={"batches": int(sys.argv[1])},
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="shared"),
    datasets={"train": lambda: powertrain.data.range(40).random_shuffle()},
).fit()
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(script: Path, temporary: Path, batches: int) -> None:
    """Two nodes with one rank each, to the end."""
    options = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{_free_port()}")
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, f"--node-rank={node}", str(script), str(batches)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        said = [agent.communicate(timeout=50)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)


def test_every_row_comes_once_over_two_starts_and_no_block_stays(tmp_path: Path) -> None:
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(SCRIPT)
    temporary.mkdir()
    _run(script, temporary, 2)
    result = Result.from_path(Path(os.environ["POWERTRAIN_STORAGE"], "shared"))
    position = result.data_positions["train"]
    assert (position.epoch, position.position, position.rows) == (0, 14, 40)

    _run(script, temporary, 100)
    frame = Result.from_path(result.path).dataframe(ranks="all")
    rows = [row for rows in frame["rows"] for row in rows]
    assert sorted(rows) == list(range(40))
    assert rows != sorted(rows)
    assert list(temporary.glob("powertrain-*")) == []
