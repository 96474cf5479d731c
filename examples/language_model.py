"""Train a small transformer on text with FSDP2, streaming data, checkpoints, and a rank that dies on the way.

The text is the source of Python's standard library, so nothing is downloaded. It is written once as Parquet files, and
each rank reads its rows from them while it trains. With ``--kill-at`` the last rank is killed at that step: the run
goes on from its newest checkpoint, and each row of an epoch is still seen once::

    python examples/language_model.py
    python examples/language_model.py --workers 4 --kill-at 150
    python examples/language_model.py --smoke         # a minute on two cores
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powertrain as train
import powertrain.data
from powertrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, prepare_model

#: Bytes are the tokens.
VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """A decoder that predicts the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def write_text(directory: Path, length: int, rows: int) -> None:
    """Write ``rows`` windows of ``length + 1`` bytes as Parquet files, unless they are there."""
    if directory.exists():
        return
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: rows * (length + 1)]
    windows = np.frombuffer(text, np.uint8)[: len(text) // (length + 1) * (length + 1)]
    dataset = powertrain.data.from_numpy({"tokens": windows.reshape(-1, length + 1).astype(np.int64)})
    dataset.write_parquet(str(directory), max_rows_per_file=max(rows // 8, 1))


def train_model(config: dict[str, Any]) -> None:
    """What every worker runs."""
    torch.manual_seed(0)
    context = train.get_context()
    model = prepare_model(
        Transformer(config["width"], config["layers"], config["length"]), parallel_strategy="fsdp"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    saved = train.load_state(
        model=model, optimizer=optimizer
    )  # each rank reads its own part, at any world size
    step = saved["step"] if saved else 0
    shard = train.get_dataset_shard("text")
    for epoch in shard.epochs(config["epochs"]):  # after a restart: from the very row of the checkpoint
        for batch in shard.iter_torch_batches(global_batch_size=config["batch_size"]):
            tokens = batch["tokens"]
            scores = model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if (
                step == config["kill_at"]
                and not saved
                and context.get_world_rank() == context.get_world_size() - 1
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            state = None
            if step % config["save_every"] == 0:
                state = train.save_state(model=model, optimizer=optimizer, step=step)
            train.report({"step": step, "epoch": epoch, "loss": loss.item()}, checkpoint=state)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train a small transformer on text with FSDP2.")
    arguments.add_argument(
        "--name", default="language-model", help="the run; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument(
        "--text", default="text", help="directory for the Parquet files; made when it is missing"
    )
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--epochs", type=int, default=2)
    arguments.add_argument(
        "--kill-at", type=int, default=0, help="kill the last rank at this step of the first start"
    )
    arguments.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments.add_argument(
        "--smoke", action="store_true", help="a small model, few steps, and a rank that dies"
    )
    options = arguments.parse_args()

    config = {"width": 128, "layers": 4, "length": 128, "batch_size": 32, "lr": 3e-3, "save_every": 50}
    rows = 8000
    if options.smoke:
        config |= {"width": 32, "layers": 2, "length": 32, "batch_size": 16, "save_every": 5}
        rows, options.epochs, options.kill_at = 320, 1, 12
    config |= {"epochs": options.epochs, "kill_at": options.kill_at}
    write_text(Path(options.text), int(config["length"]), rows)

    result = TorchTrainer(
        train_model,
        train_loop_config=config,
        datasets={"text": powertrain.data.read_parquet(options.text).random_shuffle(seed=0)},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.metrics is not None
    print(f"loss {result.metrics['loss']:.3f} after {result.metrics['step']} steps; {result.path}")


if __name__ == "__main__":
    main()
