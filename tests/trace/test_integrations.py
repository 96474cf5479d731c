"""TraceML's faces: its trainer for Ray, and callbacks for Lightning and Hugging Face.

The real frameworks take part where they are installed; what is ours is tested without them, too.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trace.records import clock, phases_longer_than, sleep, steps
from torch.utils.data import DataLoader, Dataset

from powertrain import RunConfig, ScalingConfig, trace
from powertrain.config.trace import TraceConfig
from powertrain.errors import ConfigError
from powertrain.torch import TorchTrainer
from powertrain.trace.integrations.attaching import Attachment
from powertrain.trace.integrations.ray import TraceMLRayConfig, TraceMLTorchTrainer, with_trace
from powertrain.trace.recording import current, patch_choice, patches, phases, ring
from powertrain.trace.recording.phases import StepRecord
from powertrain.trace.recording.recorder import Recorder

LONG = 0.01
AUTO = patch_choice.choose("auto")


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(bytearray(ring.ring_size(500)), clock=clock)
    current.use(recorder)
    yield recorder
    patches.uninstall()
    current.use(None)


def long_phases(record: StepRecord) -> set[str]:
    """The names of calls that took as long as the test made them take."""
    return phases_longer_than(record, LONG * 0.9)


# --------------------------------------------------------------------------- Ray


def test_the_config_of_traceml_is_ours() -> None:
    assert TraceMLRayConfig is TraceConfig


def test_the_trainer_of_traceml_is_ours_with_one_more_argument() -> None:
    config = TraceMLRayConfig(session_id="a")
    trainer = TraceMLTorchTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="traced"),
        traceml_config=config,
    )
    assert isinstance(trainer, TorchTrainer)
    assert (trainer.run_config.name, trainer.run_config.trace) == ("traced", config)
    assert pickle.loads(pickle.dumps(TraceMLTorchTrainer)) is TraceMLTorchTrainer


def test_a_traced_trainer_can_be_restored() -> None:
    made: dict[str, Any] = {"scaling_config": ScalingConfig(num_workers=1)}
    made["traceml_config"] = TraceMLRayConfig(session_id="kept")
    result = TraceMLTorchTrainer(lambda: None, **made).fit()
    assert TraceMLTorchTrainer.restore(result.path).run_config.trace == made["traceml_config"]


def test_the_two_ways_to_say_how_to_trace_must_agree() -> None:
    config = TraceMLRayConfig(session_id="a")
    assert with_trace(None, None) == RunConfig()
    assert with_trace(RunConfig(trace=config), None).trace == config
    assert with_trace(RunConfig(trace=config), TraceMLRayConfig(session_id="a")).trace == config
    for other in (TraceMLRayConfig(session_id="b"), False):
        with pytest.raises(ConfigError, match="contradict each other"):
            with_trace(RunConfig(trace=other), config)
    with pytest.raises(ConfigError, match="traceml_config got 'summary'"):
        with_trace(None, "summary")  # type: ignore[arg-type]


def test_other_names_are_not_there() -> None:
    with pytest.raises(ImportError, match="TraceMLTorchTrainers"):
        from powertrain.trace.integrations.ray import TraceMLTorchTrainers  # noqa: F401


# --------------------------------------------------------------------------- what callbacks have in common


def test_an_attachment_adds_what_is_missing_and_puts_back_what_was_there() -> None:
    trace.init(mode="selective", patch_dataloader=True)
    chosen = patches.installed().choice  # type: ignore[union-attr]
    attachment = Attachment()
    attachment.begin()
    during = patches.installed().choice  # type: ignore[union-attr]
    assert (during.dataloader, during.forward, during.backward, during.rest) == (True, True, True, True)
    assert not during.h2d, "nobody asked for it"
    attachment.end()
    attachment.end()
    assert patches.installed().choice == chosen  # type: ignore[union-attr]


def test_an_attachment_to_what_is_traced_whole_changes_nothing() -> None:
    trace.init()
    before = patches.installed()
    attachment = Attachment()
    attachment.begin()
    attachment.end()
    assert patches.installed() is before


def test_an_attachment_where_nothing_is_traced_begins_it_and_leaves_it(recorder: Recorder) -> None:
    attachment = Attachment()
    attachment.begin()
    attachment.end()
    installed = patches.installed()
    assert installed is not None
    assert (installed.recorder, installed.choice) == (recorder, AUTO)


def test_an_attachment_leaves_alone_what_was_patched_meanwhile() -> None:
    trace.init(mode="manual")
    attachment = Attachment()
    attachment.begin()
    trace.init()
    attachment.end()
    assert patches.installed().choice == AUTO  # type: ignore[union-attr]


# --------------------------------------------------------------------------- the callbacks, without their frameworks


OURS = ("powertrain.trace.integrations.lightning", "powertrain.trace.integrations.huggingface")


@pytest.fixture
def without_frameworks() -> Iterator[pytest.MonkeyPatch]:
    """As if none were installed; and our modules are loaded anew."""
    before = {name: sys.modules.pop(name) for name in OURS if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
            patch.setitem(sys.modules, name, None)
        yield patch
    for name in OURS:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lightning", "Neither lightning nor pytorch_lightning can be imported"),
        ("huggingface", "transformers cannot be imported"),
    ],
)
def test_without_its_framework_a_callback_says_what_to_install(
    without_frameworks: pytest.MonkeyPatch, name: str, said: str
) -> None:
    with pytest.raises(ImportError, match=said):
        importlib.import_module(f"powertrain.trace.integrations.{name}")


def stand_in(patch: pytest.MonkeyPatch, module: str, name: str) -> type[Any]:
    """A framework of nothing but the class that its callbacks derive from."""
    base = type(name, (), {})
    framework: Any = ModuleType(module)
    setattr(framework, name, base)
    patch.setitem(sys.modules, module, framework)
    return base


class Strategy:
    def training_step(self) -> None:
        sleep(LONG)


@pytest.mark.parametrize("ends", ["teardown", "on_exception"])
def test_lightnings_training_step_is_inside_the_step_and_not_its_optimizer(
    without_frameworks: pytest.MonkeyPatch, recorder: Recorder, ends: str
) -> None:
    base = stand_in(without_frameworks, "pytorch_lightning", "Callback")
    found = importlib.import_module("powertrain.trace.integrations.lightning")
    callback = found.TraceMLCallback()
    assert isinstance(callback, base)
    trace.init(mode="manual")
    strategy = Strategy()
    trainer = SimpleNamespace(strategy=strategy)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    callback.setup(trainer, None, "validate")
    assert "training_step" not in vars(strategy), "only a training is traced"
    callback.setup(trainer, None, "fit")
    for _ in range(2):
        optimizer.step(lambda: trainer.strategy.training_step())
    getattr(callback, ends)(trainer, None, "fit")
    assert [long_phases(step) - {"outside"} for step in steps(recorder)] == [{"inside"}] * 2
    assert "training_step" not in vars(strategy)
    assert patches.installed().choice == patch_choice.choose("manual")  # type: ignore[union-attr]


def test_hugging_faces_training_is_traced_from_its_beginning_to_its_end(
    without_frameworks: pytest.MonkeyPatch,
) -> None:
    base = stand_in(without_frameworks, "transformers", "TrainerCallback")
    found = importlib.import_module("powertrain.trace.integrations.huggingface")
    callback = found.TraceMLTrainerCallback()
    assert isinstance(callback, base)
    trace.init(mode="manual")
    for _ in range(2):  # the first one raises, and is never ended
        callback.on_train_begin(None, None, None, model=None)
        assert patches.installed().choice.rest  # type: ignore[union-attr]
    callback.on_train_end(None, None, None)
    assert patches.installed().choice == patch_choice.choose("manual")  # type: ignore[union-attr]


# --------------------------------------------------------------------------- the callbacks in their frameworks


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Eight of them; the first of each four takes a while."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        sleep(0 if number % 4 else LONG)
        return {"x": torch.ones(3), "labels": torch.zeros(())}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        sleep(LONG)
        return {"loss": (self.inner(x).squeeze(1) - labels).square().mean()}


@pytest.fixture
def _lightnings_variable() -> Iterator[None]:
    """Lightning sets it when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        yield


@pytest.mark.usefixtures("_lightnings_variable")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_is_seen_phase_by_phase(recorder: Recorder, accumulate: int) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from powertrain.trace.integrations.lightning import TraceMLCallback

    class Learn(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Any:
            sleep(LONG)
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trace.init(mode="selective", patch_dataloader=True, patch_h2d=True)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        callbacks=[TraceMLCallback()],
        **quiet,
    )
    trainer.fit(Learn(), DataLoader(Rows(), batch_size=4), DataLoader(Rows(), batch_size=4))
    found = steps(recorder)
    assert len(found) == 4 // accumulate
    assert [long_phases(step) - {"outside"} for step in found] == [{"input", "forward", "inside"}] * len(
        found
    )
    first_of_second_epoch = found[2 // accumulate]
    assert first_of_second_epoch.phases[phases.OUTSIDE] > 2 * LONG, "the validation lies between steps"
    assert first_of_second_epoch.phases[phases.FORWARD] < (accumulate + 1) * LONG


def test_hugging_faces_trainer_is_seen_phase_by_phase(recorder: Recorder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from powertrain.trace.integrations.huggingface import TraceMLTrainerCallback

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model=Model(),
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[TraceMLTrainerCallback()],
    )
    trainer.train()
    found = steps(recorder)
    assert ["forward" in long_phases(step) for step in found] == [True] * 4
    # It asks for two batches before it gives the first one of an epoch.
    assert ["input" in long_phases(step) for step in found] == [True, False] * 2
    assert found[2].phases[phases.OUTSIDE] > LONG, "the evaluation lies between steps"
