"""Fine-tune a small transformer with FSDP2, streaming data, checkpoints, and the recovery of a killed rank.

The model is built from its configuration and the texts come from Python's standard library, so nothing is downloaded. A
first run pre-trains on code; a second run loads the weights of its checkpoint and fine-tunes them on prose (the
docstrings). Both texts are written once as Parquet files, and each rank reads its rows from them while it trains. With
``--kill-at`` the last rank is killed at that step of the fine-tuning: the run resumes from its newest checkpoint, and
each row of an epoch is still seen once::

    python examples/language_model.py
    python examples/language_model.py --workers 4 --kill-at 60
    python examples/language_model.py --pretrained ~/runs/language-model-pretrained --name other
    python examples/language_model.py --smoke         # half a minute on two cores
"""

from __future__ import annotations

import argparse
import ast
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
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
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
    """A decoder that predicts the next byte; called with tokens, it returns the mean loss of all predictions."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(given.shape[1], device=tokens.device)
        scores = self.head(self.norm(self.blocks(self.tokens(given) + self.places(places))))
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def read_standard_library(size: int) -> tuple[bytes, bytes]:
    """Return ``size`` bytes of the standard library's code, and as many of its prose."""
    code, prose = bytearray(), bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if docstring := ast.get_docstring(node):
                prose += f"{docstring}\n\n".encode()
                node.body = node.body[1:] or [ast.Pass()]
        if len(code) < size:
            code += ast.unparse(tree).encode()
        if min(len(code), len(prose)) >= size:
            break
    return bytes(code[:size]), bytes(prose[:size])


def write_texts(directory: Path, length: int, rows: int, held_out: int) -> None:
    """Write rows of ``length + 1`` bytes as Parquet files, unless they exist: code, prose, and held-out prose."""
    if directory.exists():
        return
    texts = read_standard_library((rows + held_out) * (length + 1))
    code, prose = (np.frombuffer(text, np.uint8).astype(np.int64).reshape(-1, length + 1) for text in texts)
    parts = {"code": code[:rows], "prose": prose[:rows], "held_out": prose[rows:]}
    for name, tokens in parts.items():
        dataset = powertrain.data.from_numpy({"tokens": tokens})
        dataset.write_parquet(str(directory / name), max_rows_per_file=max(rows // 8, 1))


def evaluate(model: nn.Module, batch_size: int) -> float:
    """Return the mean loss on the held-out prose, which every rank reads as a whole."""
    with torch.no_grad():
        batches = train.get_dataset_shard("held_out").iter_torch_batches(batch_size=batch_size)
        return float(torch.stack([model(batch["tokens"]) for batch in batches]).mean())


def train_model(config: dict[str, Any]) -> None:
    """Train on every worker, for the pre-training and the fine-tuning alike."""
    torch.manual_seed(0)
    model = prepare_model(Transformer(**config["model"]), parallel_strategy="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    # After a restart: each rank reads its own part of the newest checkpoint, at any world size.
    saved = train.load_state(model=model, optimizer=optimizer)
    step = saved["step"] if saved else 0
    if not saved:
        if config["pretrained"]:  # only the weights: the optimizer starts fresh
            train.load_state(config["pretrained"], model=model)
        train.report({"step": 0, "held_out_loss": evaluate(model, config["batch_size"])})
    shard = train.get_dataset_shard("text")
    for epoch in shard.epochs(config["epochs"]):  # after a restart: from the exact row of the checkpoint
        for batch in shard.iter_torch_batches(global_batch_size=config["batch_size"]):
            loss = model(batch["tokens"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == config["kill_at"] and not saved:
                kill_last_rank()
            metrics, state = {"step": step, "epoch": epoch, "loss": loss.item()}, None
            if step % config["save_every"] == 0:
                metrics["held_out_loss"] = evaluate(model, config["batch_size"])
                state = train.save_state(model=model, optimizer=optimizer, step=step)
            train.report(metrics, checkpoint=state)


def kill_last_rank() -> None:
    """Kill this process, as in a machine failure, if it is the last rank."""
    context = train.get_context()
    if context.get_world_rank() == context.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fit(name: str, text: str, config: dict[str, Any], options: argparse.Namespace, **settings: Any) -> Result:
    """Run the training called ``name`` on ``text``: "code" or "prose"."""
    texts = Path(options.text)
    return TorchTrainer(
        train_model,
        train_loop_config={**config, "pretrained": None, "kill_at": 0, **settings},
        datasets={
            "text": powertrain.data.read_parquet(str(texts / text)).random_shuffle(seed=0),
            "held_out": powertrain.data.read_parquet(str(texts / "held_out")),
        },
        dataset_config=DataConfig(datasets_to_split=["text"]),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=name,
            storage_path=options.storage_path,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    arguments = argparse.ArgumentParser(description="Fine-tune a small transformer with FSDP2.")
    arguments.add_argument(
        "--name", default="language-model", help="the run; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument(
        "--text", default="text", help="directory for the Parquet files; made when it is missing"
    )
    arguments.add_argument(
        "--pretrained", help="directory of an earlier run to begin from; without it one is pre-trained first"
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
    return arguments.parse_args()


def main() -> None:
    options = parse_arguments()
    config: dict[str, Any] = {
        "model": {"width": 128, "layers": 4, "heads": 4, "length": 128},
        "batch_size": 32,
        "lr": 3e-3,
        "save_every": 50,
    }
    rows, held_out = 4000, 256
    if options.smoke:
        config |= {"model": {"width": 32, "layers": 2, "heads": 4, "length": 32}, "batch_size": 16}
        config["save_every"] = 5
        rows, held_out, options.epochs, options.kill_at = 320, 32, 1, 12
    config["epochs"] = options.epochs
    write_texts(Path(options.text), config["model"]["length"], rows, held_out)

    if options.pretrained:
        pretraining = Result.from_path(options.pretrained)
    else:
        pretraining = fit(f"{options.name}-pretrained", "code", config, options)
    pretrained: Checkpoint | None = pretraining.checkpoint
    assert pretrained is not None, "the earlier run has saved no checkpoint"
    config["lr"] /= 3  # the weights are already trained
    result = fit(options.name, "prose", config, options, pretrained=pretrained, kill_at=options.kill_at)
    table = result.metrics_dataframe
    assert table is not None
    assert result.metrics is not None
    losses = table["held_out_loss"].dropna()
    print(
        f"loss on held-out prose: {losses.iloc[0]:.3f} as pre-trained, {losses.iloc[-1]:.3f} after "
        f"{result.metrics['step']} steps of fine-tuning; {result.path}"
    )


if __name__ == "__main__":
    main()
