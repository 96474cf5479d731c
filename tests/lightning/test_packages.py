"""Importing costs nothing, absence is one sentence, and both packages of Lightning are served."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest

import powertrain.lightning as ours
from powertrain.errors import ConfigError
from powertrain.lightning import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningEnvironment,
    ReportCallback,
    TraceCallback,
    prepare_trainer,
)


def said_by(script: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=cwd
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_importing_powertrain_or_its_classes_for_lightning_imports_no_lightning() -> None:
    script = (
        "import sys, powertrain\n"
        "from powertrain.lightning import RayDDPStrategy, RayTrainReportCallback, prepare_trainer, TraceCallback\n"
        "print([name for name in ('lightning', 'pytorch_lightning', 'torch') if name in sys.modules])"
    )
    assert said_by(script).strip() == "[]"


def test_without_lightning_one_sentence_says_what_to_install() -> None:
    script = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "try:\n"
        "    import powertrain.lightning\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert (
        said_by(script)
        == "powertrain.lightning needs Lightning, which is not installed: pip install lightning\n"
    )


def test_without_deepspeed_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"^DeepSpeedStrategy needs DeepSpeed, .*: pip install deepspeed$"):
        DeepSpeedStrategy(stage=3)


def test_the_names_of_ray_are_ours_with_the_arguments_of_lightning() -> None:
    assert ours.RayDDPStrategy is DDPStrategy
    assert ours.RayFSDPStrategy is FSDPStrategy
    assert ours.RayDeepSpeedStrategy is DeepSpeedStrategy
    assert ours.RayLightningEnvironment is LightningEnvironment
    assert ours.RayTrainReportCallback is ReportCallback
    assert ours.TraceMLCallback is TraceCallback
    assert list(inspect.signature(ReportCallback).parameters)[:2] == ["checkpoint_upload_mode", "validation"]
    theirs = inspect.signature(lightning.pytorch.strategies.DDPStrategy)
    assert inspect.signature(DDPStrategy).parameters == theirs.parameters
    assert ReportCallback.CHECKPOINT_NAME == "checkpoint.ckpt"


def test_objects_and_subclasses_are_of_the_classes_that_they_are_made_of() -> None:
    class Mine(ReportCallback):
        CHECKPOINT_NAME = "mine.ckpt"

        def __init__(self) -> None:
            super().__init__(every_n_steps=7)  # type: ignore[call-arg]

    strategy, callback = DDPStrategy(find_unused_parameters=True), Mine()
    assert isinstance(strategy, DDPStrategy)
    assert isinstance(strategy, lightning.pytorch.strategies.DDPStrategy)
    assert not isinstance(strategy, FSDPStrategy)
    assert isinstance(callback, ReportCallback)
    assert isinstance(callback, lightning.pytorch.Callback)
    assert issubclass(Mine, ReportCallback)
    assert not issubclass(Mine, DDPStrategy)


WITH_THE_OTHER_PACKAGE = """
from powertrain import RunConfig, ScalingConfig
from powertrain.lightning import (
    RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, TraceMLCallback, prepare_trainer
)
from powertrain.torch import TorchTrainer
import pytorch_lightning as pl
import sys, torch
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch.float()[:, None]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_func():
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices="auto", strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), TraceMLCallback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(Model(), DataLoader(torch.arange(8), batch_size=4))


if __name__ == "__main__":
    result = TorchTrainer(
        train_func, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(name="a", storage_path="runs")
    ).fit()
    assert result.metrics["epoch"] == 1 and result.metrics["step"] == 4, result.metrics
    assert result.checkpoint is not None
    assert "lightning.pytorch" not in sys.modules
"""


def test_a_program_with_pytorch_lightning_gets_classes_for_that(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITH_THE_OTHER_PACKAGE)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


# --------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every_n_steps": 0}, r"every_n_steps"),
        ({"every_n_steps": "often"}, r"every_n_steps"),
        ({"on_epoch_end": "yes"}, r"on_epoch_end"),
        ({"on_epoch_end": False}, r"would never report"),
    ],
)
def test_arguments_with_which_nothing_could_be_reported_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReportCallback(**options)


def test_a_trainer_that_would_start_processes_itself_is_refused() -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
    with pytest.raises(ConfigError, match=r"the strategy SingleDeviceStrategy, .* strategy=DDPStrategy\(\)"):
        prepare_trainer(trainer)
