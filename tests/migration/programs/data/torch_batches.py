"""``get_dataset_shard`` and ``iter_torch_batches``: each worker trains on its part, epoch after epoch."""

import os
import tempfile

import ray.data
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(2):
        rows, total = 0, 0
        for batch in shard.iter_torch_batches(batch_size=8, dtypes=torch.float32):
            loss = (model(batch["id"].unsqueeze(1) / 64) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(batch["id"])
            total += batch["id"].sum().item()
        counts = torch.tensor([rows, total])
        torch.distributed.all_reduce(counts)
        with tempfile.TemporaryDirectory() as directory:
            open(os.path.join(directory, "model.pt"), "w").close()
            ray.train.report(
                {"epoch": epoch, "rows": int(counts[0]), "sum": int(counts[1])},
                checkpoint=Checkpoint.from_directory(directory),
            )


result = TorchTrainer(
    train_func,
    train_loop_config={},
    datasets={"train": ray.data.range(64)},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert [metrics["rows"] for _, metrics in result.best_checkpoints] == [64, 64]
assert result.metrics["sum"] == sum(range(64))
