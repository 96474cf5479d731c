"""Training functions with the Trainer of Transformers and with Accelerate, which note the rows of each step.

A row is known by its first token. The rows of each step are written to a file of the rank, with the step that they
belong to: what was trained on after the checkpoint that the next attempt starts from does not count.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import story
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset

# By name: the package loads what it has when it is first asked for, and here that is before workers are forked.
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import powertrain
import powertrain.data
from powertrain import Checkpoint, FailureConfig
from powertrain.backend import TORCH_PRELOAD
from powertrain.huggingface import TransformersTrainer
from powertrain.huggingface.transformers import ReportCallback, prepare_trainer
from powertrain.torch import TorchConfig, TorchTrainer, prepare_data_loader

ROWS, EVALUATED, LENGTH = 40, 7, 6


def row(number: int) -> dict[str, list[int]]:
    tokens = [number, *((number * 7 + place) % 64 for place in range(1, LENGTH))]
    return {"input_ids": tokens, "labels": tokens}


class Rows(Dataset[dict[str, Any]]):
    """The rows as a map-style dataset of torch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row(index)


class WithTransformers(TorchConfig):
    """Workers on a node are forked from a process that has this module, and so Transformers, as they are here."""

    preload = (*TORCH_PRELOAD, __name__)


def make_model(dropout: float = 0.1) -> Any:
    """A language model. With dropout its random numbers must be those of an undisturbed run."""
    set_seed(7)
    config = GPT2Config(
        vocab_size=64,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


class Diary:
    """Writes down which rows a step has trained on, and fails at the given step."""

    def __init__(self, config: dict[str, Any], model: Any) -> None:
        context = powertrain.get_context()
        self.config, self.rank, self.attempt = config, context.get_world_rank(), context.get_attempt()
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        if model.training:
            self.rows += named["input_ids"][:, 0].tolist()

    def step(self, step: int) -> None:
        """``step`` optimizer steps are made."""
        with open(story.directory() / f"rows-{self.config['name']}-{self.attempt}-{self.rank}", "a") as file:
            file.write(json.dumps([step, self.rows]) + "\n")
        self.rows = []
        if self.attempt == 0 and step == self.config.get("fails_at"):
            if powertrain.get_context().get_world_size() == 1:
                raise RuntimeError("the step that fails")
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class Watched(TrainerCallback):
    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.diary.step(state.global_step)


def arguments(config: dict[str, Any], **more: Any) -> Any:
    return TrainingArguments(
        output_dir=str(story.directory() / f"output-{config['name']}"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=config.get("accumulated", 1),
        num_train_epochs=2,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )


def fine_tune(config: dict[str, Any]) -> None:
    """As the guides of both sides have it; what is read is one of three forms."""
    model = make_model()
    train: Any = Rows(ROWS)
    evaluated: Any = Rows(EVALUATED)
    if config["form"] != "map":
        train, evaluated = (powertrain.get_dataset_shard(name) for name in ("train", "evaluation"))
    if config["form"] == "batches":
        train, evaluated = (shard.iter_torch_batches(batch_size=2) for shard in (train, evaluated))
    trainer = Trainer(
        model=model,
        args=arguments(
            config,
            eval_strategy="steps",
            eval_steps=3,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        ),
        train_dataset=train,
        eval_dataset=evaluated,
        callbacks=[ReportCallback(), Watched(Diary(config, model))],
    )
    trainer = prepare_trainer(trainer)
    trainer.train(resume_from_checkpoint=config["resume"])
    best = trainer.state.best_metric
    found = trainer.evaluate()["eval_loss"]  # of the best model, which was loaded at the end
    logged: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        logged.update(entry)
    powertrain.report({**logged, "best": best, "found": found, "exact": exact_loss(model)})


def exact_loss(model: Any) -> float:
    """The mean over the rows of the evaluation, by the number of labels as the Trainer counts them."""
    tokens = torch.tensor([row(number)["input_ids"] for number in range(EVALUATED)])
    with torch.no_grad():
        found = model.eval()(input_ids=tokens, labels=tokens, num_items_in_batch=torch.tensor(tokens.numel()))
    return float(found.loss)


def trains_unprepared(config: dict[str, Any]) -> None:
    """Knows nothing of the run: no callback, nothing prepared, nothing resumed."""
    model = make_model()
    trainer = Trainer(
        model=model,
        args=arguments(config),
        train_dataset=Rows(ROWS),
        callbacks=[Watched(Diary(config, model))],
    )
    trainer.train()


def makes_a_trainer(train_dataset: Any, eval_dataset: Any = None, **config: Any) -> Any:
    """Returns a Trainer of the datasets that it is given."""
    model = make_model()
    return Trainer(
        model=model,
        args=arguments(config, eval_strategy="epoch"),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        callbacks=[Watched(Diary(config, model))],
    )


def accelerated(config: dict[str, Any]) -> None:
    """A loop as the guide of Accelerate has it, with its own skipping or with a loader that is prepared here."""
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=order)
    model = make_model(dropout=0.0)  # each iterator over a loader draws a random number, also one that skips
    diary = Diary(config, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(
        Rows(ROWS),
        batch_size=2,
        shuffle=True,
        collate_fn=default_data_collator,
    )
    if config["form"] == "prepared":
        loader = prepare_data_loader(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches, steps = 0, 0
    checkpoint = powertrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
            batches, steps = json.loads(Path(directory, "progress.json").read_text())
    for epoch in range(batches // len(loader), 2):
        active = loader
        if config["form"] == "own":
            loader.set_epoch(epoch)
            active = accelerator.skip_first_batches(loader, batches % len(loader))
        for batch in active:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            batches += 1
            if accelerator.sync_gradients:
                steps += 1
                diary.step(steps)
                metrics = {"loss": accelerator.gather(loss.detach()).mean().item(), "step": steps}
                powertrain.report(metrics, save(accelerator, batches, steps) if steps % 3 == 0 else None)


def save(accelerator: Any, batches: int, steps: int) -> Checkpoint:
    directory = powertrain.checkpoint_dir()
    accelerator.save_state(directory)
    if accelerator.is_main_process:
        Path(directory, "progress.json").write_text(json.dumps([batches, steps]))
    return Checkpoint.from_directory(directory)


def fit(
    kind: Callable[..., Any], loop: Callable[..., Any], name: str, engine: str, **config: Any
) -> dict[str, Any]:
    """Train to the end; where the rank is this process, which cannot be started again, in two runs of the driver."""
    datasets: dict[str, Any] = {}
    if config.get("form") in ("shard", "batches"):
        datasets = {
            "train": powertrain.data.from_items([row(number) for number in range(ROWS)]),
            "evaluation": powertrain.data.from_items([row(number) for number in range(EVALUATED)]),
        }
    if config.get("form") == "hugging_face":
        import datasets as hugging_face

        datasets = {
            "train": hugging_face.Dataset.from_list([row(number) for number in range(ROWS)]),
            "evaluation": hugging_face.Dataset.from_list([row(number) for number in range(EVALUATED)]),
        }
    trackers = config.pop("trackers", ())
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{story.directory()}/mlflow.db"
    made = kind(
        loop,
        train_loop_config={"name": name, **config},
        torch_config=WithTransformers() if engine == "ray" else None,
        scaling_config=story.scaling(engine),
        run_config=story.run_config(
            name,
            failure_config=FailureConfig(max_failures=1),
            trackers=trackers,
            tracker_timeout_s=300.0,
        ),
        datasets=datasets,
    )
    outcome = story.outcome_of(made.fit)
    if engine == "inline" and outcome["raised"] and "fails_at" in config:
        outcome = story.outcome_of(made.fit)
    return outcome


def pair(
    kind: Callable[..., Any], loop: Callable[..., Any], name: str, engine: str, fails_at: int, **config: Any
) -> dict[str, Any]:
    """One run that is not disturbed, and one that loses a rank at a step and has the trackers."""
    trackers = config.pop("trackers", ())
    return {
        "undisturbed": fit(kind, loop, name, engine, **config),
        "disturbed": fit(
            kind, loop, f"{name}-disturbed", engine, fails_at=fails_at, trackers=trackers, **config
        ),
    }


def trainer_pair(
    engine: str,
    form: str,
    accumulated: int = 1,
    resume: bool | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    # One rank makes twice as many steps as two. Each is killed in the second epoch.
    steps = ROWS // (2 * accumulated) // (1 if engine == "inline" else 2)
    return pair(
        TorchTrainer,
        fine_tune,
        form,
        engine,
        fails_at=steps + 4,
        form=form,
        accumulated=accumulated,
        resume=resume,
        trackers=trackers,
    )


def unprepared_pair(engine: str) -> dict[str, Any]:
    return pair(TransformersTrainer, trains_unprepared, "unprepared", engine, fails_at=14, form="map")


def made_pair(engine: str) -> dict[str, Any]:
    return pair(TransformersTrainer, makes_a_trainer, "made", engine, fails_at=14, form="hugging_face")


def accelerated_pair(engine: str, form: str) -> dict[str, Any]:
    return pair(TorchTrainer, accelerated, form, engine, fails_at=8, form=form)
