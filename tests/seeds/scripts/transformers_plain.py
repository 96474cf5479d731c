"""Hugging Face's Trainer as it is, under a TransformersTrainer."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from powertrain import RunConfig, ScalingConfig
from powertrain.huggingface import TransformersTrainer

train_dataset = [{"input_ids": [n % 32] * 8, "labels": [n % 32] * 8} for n in range(32)]


def train_func(config: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny")

    training_args = TrainingArguments(
        output_dir="./output",
        num_train_epochs=3,
        per_device_train_batch_size=8,
    )

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
    )
    trainer.train()


if __name__ == "__main__":
    tiny = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(tiny).save_pretrained("tiny")
    trainer = TransformersTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("runs")),
    )
    result = trainer.fit()
    print(f"Path: {result.path}")
