"""Lightning's Trainer in a worker, with what its documentation shows: loaders, limits, loops and ckpt_path."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.lightning.trainers import ROWS, Model, loader, make, positions, rows_as_dataset, run
from torch.utils.data import DataLoader, WeightedRandomSampler

import powertrain
from powertrain.lightning import LightningEnvironment, ReportCallback, prepare_trainer
from powertrain.torch import prepare_data_loader

ALL = list(range(ROWS))


@pytest.fixture(autouse=True)
def _environment_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning sets it while it runs."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    model = Model()

    def train() -> None:
        make([ReportCallback()], max_epochs=3).fit(model, loader())

    result = run(train, tmp_path)
    assert [sorted(model.rows(epoch)) for epoch in range(3)] == [ALL] * 3
    assert len({tuple(model.rows(epoch)) for epoch in range(3)}) == 3
    assert result.metrics == {"loss": result.metrics["loss"], "epoch": 2, "step": 15}
    assert len(result.best_checkpoints) == 3


def test_the_ranks_are_those_of_the_run_also_within_a_job_of_slurm(tmp_path: Path) -> None:
    """The variables of a Slurm job that this process was not started by."""
    job = {"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "1", "SLURM_PROCID": "5"}
    found: list[Any] = []

    def train() -> None:
        trainer = make(max_epochs=1, plugins=[LightningEnvironment()])
        found.extend([trainer.world_size, trainer.global_rank, trainer.strategy.cluster_environment])
        trainer.fit(Model(), loader())
        found.append(signal.getsignal(signal.SIGTERM))

    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        for name, value in job.items():
            patch.setenv(name, value)
        run(train, tmp_path)
    assert found[:2] == [1, 0]
    assert isinstance(found[2], LightningEnvironment)


@pytest.mark.parametrize("form", ["prepared", "shard", "datamodule", "module", "several"])
def test_data_in_any_form_that_lightning_takes_come_once_per_epoch(tmp_path: Path, form: str) -> None:
    class Module(lightning.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    class WithData(Model):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch = batch["id"] if isinstance(batch, dict) and "id" in batch else batch
            return super().training_step(batch, batch_idx)

    model = WithData()

    def train() -> None:
        trainer = make([ReportCallback()], max_epochs=2)
        if form == "prepared":
            trainer.fit(model, prepare_data_loader(loader()))
        elif form == "shard":
            trainer.fit(model, powertrain.get_dataset_shard("train").iter_torch_batches(batch_size=4))
        elif form == "datamodule":
            trainer.fit(model, datamodule=Module())
        elif form == "several":
            trainer.fit(model, {"first": loader(), "second": loader(8)})
        else:
            trainer.fit(model)

    run(train, tmp_path, datasets={"train": rows_as_dataset()})
    assert [sorted(model.rows(epoch)) for epoch in range(2)] == [ALL] * 2


def test_loaders_that_are_made_anew_for_each_epoch_count_on(tmp_path: Path) -> None:
    class Anew(Model):
        made = 0

        def train_dataloader(self) -> DataLoader[Any]:
            Anew.made += 1
            return loader()

    model, kept = Anew(), {}

    def train() -> None:
        make([ReportCallback()], max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
        kept.update(positions())

    run(train, tmp_path)
    assert Anew.made == 3
    assert len({tuple(model.rows(epoch)) for epoch in range(3)}) == 3
    assert {name: (state["epoch"], state["position"]) for name, state in kept.items()} == {"loader": (3, 0)}


def test_an_epoch_that_lightning_cuts_short_is_followed_by_the_next(tmp_path: Path) -> None:
    model, kept = Model(), {}

    def train() -> None:
        make([ReportCallback()], max_epochs=2, limit_train_batches=3).fit(model, loader())
        kept.update(positions())

    run(train, tmp_path)
    assert [len(model.seen[epoch]) for epoch in range(2)] == [3, 3]
    assert (kept["loader"]["epoch"], kept["loader"]["position"]) == (2, 0)


def test_a_sampler_of_the_users_own_stays(tmp_path: Path) -> None:
    model = Model()

    def train() -> None:
        only_seven = WeightedRandomSampler([float(row == 7) for row in range(ROWS)], ROWS)
        data: Any = DataLoader(torch.arange(ROWS), batch_size=4, sampler=only_seven)  # type: ignore[arg-type]
        make(max_epochs=1).fit(model, data)

    run(train, tmp_path)
    assert model.rows(0) == [7] * ROWS


def test_a_shard_that_validates_is_read_whole_each_time_also_after_a_restart(tmp_path: Path) -> None:
    """Lightning leaves its last batch without asking for another, so the shard stands at its end then."""
    seen: list[list[int]] = []

    class Validated(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3 and not powertrain.get_context().get_attempt():
                raise RuntimeError("after a validation")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                if batch_idx == 0:
                    seen.append([])
                seen[-1] += batch["id"].tolist()

    def train() -> None:
        validation = powertrain.get_dataset_shard("valid").iter_torch_batches(batch_size=6)
        trainer = make([ReportCallback(every_n_steps=1)], max_epochs=2, val_check_interval=2)
        trainer.fit(Validated(), loader(), validation, ckpt_path="last")

    with pytest.raises(powertrain.TrainingFailedError, match="after a validation"):
        run(train, tmp_path, datasets={"valid": rows_as_dataset()})
    run(train, tmp_path, datasets={"valid": rows_as_dataset()})
    assert [sorted(rows) for rows in seen] == [ALL] * 4


# --------------------------------------------------------------------------- ckpt_path


class Failing(Model):
    """Raises at a batch of the first attempt."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = sum(map(len, self.seen.values()))
        if made == 7 and not powertrain.get_context().get_attempt():
            raise RuntimeError("at batch 7")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("every", [None, 1, 2])
def test_last_is_what_the_run_has_committed(tmp_path: Path, every: int | None) -> None:
    models: list[Failing] = []

    def train() -> None:
        models.append(Failing())
        make([ReportCallback(every_n_steps=every)], max_epochs=3).fit(models[-1], loader(), ckpt_path="last")

    with pytest.raises(powertrain.TrainingFailedError, match="at batch 7"):
        run(train, tmp_path)
    run(train, tmp_path)
    before = {None: 5, 1: 7, 2: 6}[every]
    counted = [row for epoch in (0, 1) for row in models[0].rows(epoch)][: before * 4]
    assert sorted(counted + models[1].rows(0) + models[1].rows(1)) == sorted(ALL * 2)
    assert sorted(models[1].rows(2)) == ALL


def test_without_a_checkpoint_of_the_run_last_is_lightnings_own(tmp_path: Path) -> None:
    """As in its documentation: ModelCheckpoint(save_last=True), then fit(ckpt_path="last")."""
    models: list[Model] = []

    def train() -> None:
        for epochs in (1, 2):
            keeping = ModelCheckpoint(dirpath=tmp_path / "own", save_last=True)
            trainer = make([keeping], max_epochs=epochs, enable_checkpointing=True)
            models.append(Model())
            trainer.fit(models[-1], loader(), ckpt_path="last")

    run(train, tmp_path)
    assert [sorted(model.seen) for model in models] == [[0], [1]]
    assert sorted(models[1].rows(1)) == ALL
    assert models[1].rows(1) != models[0].rows(0)


def test_the_file_of_a_model_checkpoint_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    models = [Model(), Model()]

    def train() -> None:
        keeping = ModelCheckpoint(
            dirpath=tmp_path / "own", every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        make([keeping], max_epochs=1, enable_checkpointing=True).fit(models[0], loader())
        make(max_epochs=1).fit(models[1], loader(), ckpt_path=str(tmp_path / "own" / "step=3.ckpt"))

    run(train, tmp_path)
    assert models[0].seen[0][3:] == models[1].seen[0]


def test_the_best_model_is_tested_afterwards(tmp_path: Path) -> None:
    class Tested(Model):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("tested", batch.sum().float())

    found: list[Any] = []

    def train() -> None:
        keeping = ModelCheckpoint(dirpath=tmp_path / "own", monitor="loss")
        trainer = make([keeping, ReportCallback()], max_epochs=2, enable_checkpointing=True)
        trainer.fit(Tested(), loader())
        found.extend(trainer.test(ckpt_path="best", dataloaders=loader(8), verbose=False))

    run(train, tmp_path)
    assert found == [{"tested": pytest.approx(14.0)}]


def test_a_checkpoint_loads_into_the_model_outside_of_a_run(tmp_path: Path) -> None:
    model = Model()

    def train() -> None:
        make([ReportCallback()], max_epochs=1).fit(model, loader())

    result = run(train, tmp_path)
    loaded = Model.load_from_checkpoint(Path(result.checkpoint.path, "checkpoint.ckpt"))
    assert torch.equal(loaded.layer.weight, model.layer.weight.detach())


def test_what_is_not_last_is_handed_to_lightning_as_it_is(tmp_path: Path) -> None:
    def train() -> None:
        trainer = make(max_epochs=1)
        prepare_trainer(trainer)
        with pytest.raises(FileNotFoundError):
            trainer.fit(Model(), loader(), ckpt_path=str(tmp_path / "absent.ckpt"))

    run(train, tmp_path)
