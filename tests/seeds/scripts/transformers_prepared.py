"""Hugging Face's Trainer with a report callback, prepared for the workers."""

from __future__ import annotations

import os
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from powertrain import RunConfig, ScalingConfig
from powertrain.huggingface.transformers import RayTrainReportCallback, prepare_trainer
from powertrain.torch import TorchTrainer

SAMPLES = [{"input_ids": [n % 32] * 8, "labels": [n % 32] * 8} for n in range(32)]


def train_func(config: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(config["model"])
    training_args = TrainingArguments(
        output_dir="hf-output",
        per_device_train_batch_size=config["batch_size"],
        num_train_epochs=config["epochs"],
        learning_rate=config["lr"],
        bf16=True,
        use_cpu=True,  # the block is for GPUs, and Transformers asks for this word where there is none
        gradient_accumulation_steps=config.get("grad_accum", 1),
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES[:8],
        callbacks=[RayTrainReportCallback()],
    )
    trainer = prepare_trainer(trainer)
    trainer.train()


if __name__ == "__main__":
    tiny = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(tiny).save_pretrained("tiny")
    result = TorchTrainer(
        train_func,
        train_loop_config={
            "model": os.path.abspath("tiny"),
            "batch_size": 2,
            "epochs": 2,
            "lr": 1e-3,
            "grad_accum": 2,
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("runs")),
    ).fit()
    print(f"Path: {result.path}")
