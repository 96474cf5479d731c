"""Train a text classifier with the Trainer of Hugging Face Transformers: is a line of Python a comment, or code?

The lines are those of Python's standard library and the model is built from its configuration, so nothing is
downloaded. Everything that the Trainer saves is a checkpoint of the run, and after a restart it resumes in mid-epoch.
With ``--kill-at`` the last rank is killed at that step::

    python examples/transformers_trainer.py
    python examples/transformers_trainer.py --workers 4 --kill-at 100
    python examples/transformers_trainer.py --smoke       # half a minute on two cores

Needs ``pip install 'powertrain[huggingface]'``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn import functional

# By name: the package loads a class when it is first asked for, here before the workers are forked.
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import powertrain as train
from powertrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.huggingface.transformers import ReportCallback, prepare_trainer
from powertrain.torch import TorchTrainer

#: Tokens are bytes, after two for padding and beginning a line.
PADDING, BEGIN, VOCABULARY = 0, 1, 258
LENGTH = 48


def tokens(line: str) -> dict[str, list[int]]:
    """Return the tokens of a line."""
    found = [BEGIN, *(byte + 2 for byte in line.encode()[: LENGTH - 1])]
    missing = LENGTH - len(found)
    return {
        "input_ids": found + [PADDING] * missing,
        "attention_mask": [1] * len(found) + [0] * missing,
    }


def lines_of_python(count: int) -> datasets.DatasetDict:
    """Return ``count`` lines, half of them comments without their ``#``, divided into "train" and "test"."""
    comments: list[str] = []
    code: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for line in map(str.strip, path.read_text("utf-8", errors="replace").splitlines()):
            if len(line) > 12:
                (comments if line.startswith("# ") else code).append(line.removeprefix("# "))
    draw = random.Random(0)
    chosen = [(line, 1) for line in draw.sample(comments, min(count // 2, len(comments)))]
    chosen += [(line, 0) for line in draw.sample(code, len(chosen))]
    rows = [{**tokens(line), "labels": label} for line, label in chosen]
    return datasets.Dataset.from_list(rows).train_test_split(test_size=0.2, seed=0)


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the accuracy of the model on the lines."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a batch's part of the mean over all lines of a step, on all workers and in all accumulated batches."""
    return functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


class KillLastRank(TrainerCallback):
    """Kill the last rank at a step of the first attempt, as in a machine failure."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        context = train.get_context()
        is_last = context.get_world_rank() == context.get_world_size() - 1
        if state.global_step == self.step and is_last and not context.get_attempt():
            os.kill(os.getpid(), signal.SIGKILL)


def train_classifier(config: dict[str, Any]) -> None:
    """Training function of every worker."""
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=config["width"],
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=4 * config["width"],
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            num_labels=2,
        )
    )
    arguments = TrainingArguments(
        output_dir=config["output_dir"],
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=config["lr"],
        eval_strategy="steps",
        eval_steps=config["save_every"],
        save_steps=config["save_every"],
        save_total_limit=2,
        logging_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",  # RunConfig(trackers=["tensorboard"]) sends what the run reports
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train.get_dataset_shard("train"),
        eval_dataset=train.get_dataset_shard("evaluation"),
        compute_loss_func=mean_loss,
        compute_metrics=accuracy,
        callbacks=[ReportCallback(), KillLastRank(config["kill_at"])],
    )
    prepare_trainer(trainer).train()


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train a text classifier with Transformers.")
    arguments.add_argument(
        "--name", default="transformers-trainer", help="the run; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--output-dir", default="output", help="where the Trainer keeps its own files")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument(
        "--kill-at", type=int, default=0, help="kill the last rank at this step of the first attempt"
    )
    arguments.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments.add_argument("--smoke", action="store_true", help="a small model, few steps, a rank that dies")
    options = arguments.parse_args()

    config = {"width": 128, "lr": 1e-3, "save_every": 50, "output_dir": options.output_dir}
    lines = 10_000
    if options.smoke:
        config |= {"width": 32, "lr": 3e-3, "save_every": 5}
        lines, options.epochs, options.kill_at = 1280, 2, 22
    rows = lines_of_python(lines)

    result = TorchTrainer(
        train_classifier,
        train_loop_config={**config, "epochs": options.epochs, "kill_at": options.kill_at},
        datasets={"train": rows["train"], "evaluation": rows["test"]},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="eval_accuracy"),
        ),
    ).fit()
    assert result.metrics is not None
    print(
        f"accuracy {result.metrics['eval_accuracy']:.2%} after {result.metrics['step']} steps; {result.path}"
    )

    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        model = BertForSequenceClassification.from_pretrained(
            os.path.join(directory, ReportCallback.CHECKPOINT_NAME)
        )
    for line in ("Return the sum of the numbers that were given.", "return sum(numbers)"):
        inputs = {name: torch.tensor([values]) for name, values in tokens(line).items()}
        print(f"{line!r} is {('code', 'a comment')[int(model(**inputs).logits.argmax())]}")


if __name__ == "__main__":
    main()
