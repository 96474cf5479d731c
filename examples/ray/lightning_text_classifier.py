"""Lightning in traced workers: a small text classifier, with delays to see their diagnosis on the card at the end.

Needs Lightning (``pip install lightning``). It runs on this machine, or on the Ray cluster that ``--ray-address``
names::

    python examples/ray/lightning_text_classifier.py
    python examples/ray/lightning_text_classifier.py --input-delay-rank=0 --input-delay-ms=200
    python examples/ray/lightning_text_classifier.py --delay-rank=0 --delay-ms=200
    python examples/ray/lightning_text_classifier.py --ray-address=auto --num-workers=2 --max-steps=100 --use-gpu
    python examples/ray/lightning_text_classifier.py --smoke
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn

import powertrain
import powertrain.trace as traceml
from powertrain import RunConfig, ScalingConfig
from powertrain.lightning import DDPStrategy, ReportCallback, TraceMLCallback, prepare_trainer
from powertrain.trace.integrations.ray import TraceMLRayConfig, TraceMLTorchTrainer

BATCH_SIZE, WORDS = 32, 24
TOPICS = {
    "cooking": "oven butter salt flour simmer onion knife broth taste garlic whisk plate",
    "sailing": "wind mast harbour tide anchor rope hull compass wave deck keel captain",
    "astronomy": "orbit comet telescope nebula planet dust eclipse lens crater signal dark star",
}
COMMON = ("the", "of", "and", "with", "from", "over", "under", "after", "before", "every")
VOCABULARY = {word: number for number, word in enumerate([*COMMON, *" ".join(TOPICS.values()).split()])}


def sentences(count: int) -> powertrain.data.Dataset:
    """Return rows of words as numbers, with the topic of a third of the words."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, len(TOPICS), count)
    words = generator.integers(0, len(COMMON), (count, WORDS))
    for label, topic in enumerate(TOPICS.values()):
        own = np.array([VOCABULARY[word] for word in topic.split()])
        of_topic = (labels == label)[:, None] & (generator.random((count, WORDS)) < 1 / 3)
        words[of_topic] = generator.choice(own, int(of_topic.sum()))
    return powertrain.data.from_numpy({"words": words, "label": labels})


class Batches:
    """This worker's share of the rows, epoch by epoch, as slow and as large as the options say."""

    def __init__(self, delay: float, transfer_dim: int) -> None:
        self._rows = powertrain.get_dataset_shard("train")
        self._delay = delay
        # One tensor for all batches: only the time of the copy to the device matters.
        self._ballast = torch.zeros(BATCH_SIZE, transfer_dim)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._rows.iter_torch_batches(batch_size=BATCH_SIZE, device="cpu"):
            time.sleep(self._delay)
            yield {**batch, "ballast": self._ballast}


class TextClassifier(nn.Module):
    """Classifier of words by topic, slowed by ``delay`` seconds."""

    def __init__(self, delay: float, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.topic = nn.Linear(width, len(TOPICS))
        self._delay = delay

    def forward(self, words: Tensor) -> Tensor:
        time.sleep(self._delay)
        read, _ = self.reader(self.words(words))
        topic: Tensor = self.topic(read.mean(dim=1))
        return topic


class LearnTopics(lightning.LightningModule):
    def __init__(self, delay: float) -> None:
        super().__init__()
        self.model = TextClassifier(delay)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        guess = self.model(batch["words"])
        self.log("accuracy", (guess.argmax(1) == batch["label"]).float().mean())
        return nn.functional.cross_entropy(guess, batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Training function of every worker: Lightning's Trainer, in the existing process group."""
    rank = powertrain.get_context().get_world_rank()

    def delay(kind: str) -> float:
        return config[kind] / 1000 if config[f"{kind[:-3]}_rank"] in (None, rank) else 0.0

    trainer = lightning.Trainer(
        max_steps=config["max_steps"],
        max_epochs=-1,
        accelerator="gpu" if config["use_gpu"] else "cpu",
        devices="auto",
        strategy=DDPStrategy(),
        callbacks=[TraceMLCallback(), ReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = traceml.wrap_dataloader_fetch(Batches(delay("input_delay_ms"), config["transfer_dim"]))
    # The same name and storage path resume from the newest checkpoint, in mid-epoch.
    prepare_trainer(trainer).fit(LearnTopics(delay("delay_ms")), batches, ckpt_path="last")


def parsed() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description="Train a text classifier with Lightning, traced.")
    arguments.add_argument("--ray-address", help='a Ray cluster, or "auto"; this machine when left out')
    arguments.add_argument(
        "--name", help="the run, which the same name continues; one of its own when left out"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--num-workers", type=int, default=2)
    arguments.add_argument("--max-steps", type=int, default=100)
    arguments.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    arguments.add_argument(
        "--input-delay-ms", type=float, default=0.0, help="how much later each batch comes"
    )
    arguments.add_argument("--input-delay-rank", type=int, help="only on this rank; on all when left out")
    arguments.add_argument("--delay-ms", type=float, default=0.0, help="how much longer the model takes")
    arguments.add_argument("--delay-rank", type=int, help="only on this rank; on all when left out")
    arguments.add_argument(
        "--transfer-dim", type=int, default=0, help="numbers beside each sentence that are copied to the GPU"
    )
    arguments.add_argument("--smoke", action="store_true", help="few steps")
    options = arguments.parse_args()
    if options.smoke:
        options.max_steps = 60
    return options


def main() -> None:
    options = vars(parsed())
    address, num_workers = options.pop("ray_address"), options.pop("num_workers")
    run_config = RunConfig(name=options.pop("name"), storage_path=options.pop("storage_path"))
    if address and importlib.util.find_spec("ray") is None:
        print("Ray is not installed, so this trains on this machine.")
    elif address:
        powertrain.init(address=address)

    trainer = TraceMLTorchTrainer(
        train_loop_per_worker,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=options["use_gpu"]),
        run_config=run_config,
        datasets={"train": sentences(max(num_workers, 1) * BATCH_SIZE * 50)},
        traceml_config=TraceMLRayConfig(
            mode="summary", init_mode="selective", patch_dataloader=True, patch_h2d=True
        ),
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()
