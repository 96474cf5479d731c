"""A tiny GPT that learns a text letter by letter, trained by a class that saves and loads snapshots of itself.

In the manner of minGPT among PyTorch's examples of distributed training::

    python mingpt.py --storage /tmp/runs --name mingpt
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from weights import hash_of

import powertrain
from powertrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model

TEXT = """
A worker asked the worker on its right: what have you learned? The gradient of my part, it said, and what have you?
The gradient of mine. Then let us add them up and take half of it, said both, and so they made one step together.
One day the one on the right was gone in the middle of a word. The other waited at the place where they used to meet,
and a third one, who keeps the books, called both of them back to the last page that had been written in full.
They read it from the beginning, made the same steps as before, and nobody could tell that anything had happened.
"""


@dataclass
class GPTConfig:
    block_size: int = 16
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.1
    vocab_size: int = 0


@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-3
    weight_decay: float = 0.1


@dataclass
class TrainerConfig:
    max_epochs: int
    seed: int
    batch_size: int = 32
    save_every: int = 2
    grad_norm_clip: float = 1.0
    snapshot_file: str = "gpt_snapshot.pt"


@dataclass
class Snapshot:
    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text as numbers of letters, each with the piece that begins one letter later."""

    def __init__(self, text: str, block_size: int) -> None:
        letters = sorted(set(text))
        self.vocab_size, self.block_size = len(letters), block_size
        number = {letter: index for index, letter in enumerate(letters)}
        self.data = torch.tensor([number[letter] for letter in text])

    def __len__(self) -> int:
        return len(self.data) - self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.data[index : index + self.block_size + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to the letters so far, then a small network; each is added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = nn.MultiheadAttention(
            config.n_embd, config.n_head, dropout=config.dropout, batch_first=True
        )
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        size = x.size(1)
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        normed = self.ln1(x)
        x = x + self.attn(normed, normed, normed, attn_mask=later, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss of guessing each letter of ``targets`` from those of ``idx`` up to its place."""
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)]
        logits: Tensor = self.head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> optim.AdamW:
    """AdamW that lets only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


class Trainer:
    """Trains a model from the snapshot it finds on, and saves one every few epochs."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module,
        optimizer: optim.Optimizer,
        train_dataset: Dataset[Any],
        test_dataset: Dataset[Any],
    ) -> None:
        self.config, self.device = config, get_device()
        self.rank = powertrain.get_context().get_world_rank()
        self.model, self.optimizer = model, optimizer
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset)
        self.epochs_run = 0
        self._load_snapshot()

    def _prepare_dataloader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset)
        return prepare_data_loader(DataLoader(dataset, self.config.batch_size, sampler=sampler))

    def _load_snapshot(self) -> None:
        checkpoint = powertrain.get_checkpoint()
        if checkpoint is None:
            print(f"[RANK{self.rank}] Snapshot not found. Training model from scratch", flush=True)
            return
        with checkpoint.as_directory() as directory:
            path = os.path.join(directory, self.config.snapshot_file)
            snapshot = Snapshot(**torch.load(path, map_location=self.device))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"[RANK{self.rank}] Resuming training from snapshot at Epoch {self.epochs_run}", flush=True)

    def _save_snapshot(self, epoch: int, metrics: dict[str, float]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if self.rank == 0:
                snapshot = Snapshot(self.model.state_dict(), self.optimizer.state_dict(), epoch)
                torch.save(asdict(snapshot), os.path.join(directory, self.config.snapshot_file))
                checkpoint = Checkpoint.from_directory(directory)
            powertrain.report({"epoch": epoch, **metrics}, checkpoint=checkpoint)

    def _run_batch(self, source: Tensor, targets: Tensor, train: bool) -> float:
        with torch.set_grad_enabled(train):
            loss: Tensor = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int, loader: DataLoader[Any], train: bool) -> float:
        self.model.train(train)
        losses = [self._run_batch(source, targets, train) for source, targets in self._on_device(loader)]
        mean = sum(losses) / len(losses)
        kind = "Train" if train else "Eval"
        print(f"[RANK{self.rank}] Epoch {epoch} | Steps {len(losses)} | {kind} Loss {mean:.5f}", flush=True)
        return mean

    def _on_device(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for source, targets in loader:
            yield source.to(self.device), targets.to(self.device)

    def train(self) -> None:
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            torch.manual_seed(self.config.seed + epoch)  # so that dropout is the same after a restart
            metrics = {
                "train_loss": self._run_epoch(epoch, self.train_loader, train=True),
                "test_loss": self._run_epoch(epoch, self.test_loader, train=False),
            }
            if epoch % self.config.save_every == 0 or epoch == self.config.max_epochs:
                self._save_snapshot(epoch, metrics)


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    gpt_config = GPTConfig()
    dataset = CharDataset(TEXT, gpt_config.block_size)
    gpt_config.vocab_size = dataset.vocab_size
    train_size = int(0.9 * len(dataset))
    train_dataset = Subset(dataset, range(train_size))
    test_dataset = Subset(dataset, range(train_size, len(dataset)))
    model = prepare_model(GPT(gpt_config))
    optimizer = create_optimizer(model, OptimizerConfig())
    trainer_config = TrainerConfig(max_epochs=config["epochs"], seed=config["seed"])
    Trainer(trainer_config, model, optimizer, train_dataset, test_dataset).train()


def main() -> None:
    parser = argparse.ArgumentParser(description="minGPT with DistributedDataParallel")
    parser.add_argument("--storage", required=True, help="directory that the run is kept in")
    parser.add_argument("--name", required=True, help="name of the run; the same again goes on with it")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    result = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=args.name, storage_path=args.storage, failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        snapshot = Snapshot(**torch.load(os.path.join(directory, TrainerConfig.snapshot_file)))
    found = {"weights": hash_of(snapshot.model_state), "epochs": snapshot.finished_epoch}
    print(json.dumps({**found, **(result.metrics or {})}))


if __name__ == "__main__":
    main()
