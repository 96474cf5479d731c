"""Scripts as people write them: sweeps over fit(), settings in modules, classes of the script, no __main__ guard."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
import io, os, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
import settings
from powertrain import RunConfig, ScalingConfig, report
from powertrain.torch import TorchTrainer

class Net(torch.nn.Linear):
    def forward(self, x):
        return helper(super().forward(x))

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return Item(float(index))

class Item:
    def __init__(self, value):
        self.value = value

class Batch:
    def __init__(self, items):
        self.values = [item.value for item in items]

def helper(x):
    return x

def collate(items):
    return Batch(items)

def fit(loop, config=None, workers=1):
    trainer = TorchTrainer(
        loop,
        train_loop_config=config or {},
        scaling_config=ScalingConfig(num_workers=workers, engine=os.environ.get("ENGINE", "local")),
        run_config=RunConfig(storage_path=os.environ["STORAGE"]),
    )
    return trainer.fit()
"""
THREAD = """
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
SAVES_ITS_MODEL = """
def loop():
    buffer = io.BytesIO()
    torch.save(Net(1, 1), buffer)
    buffer.seek(0)
    model = torch.load(buffer, weights_only=False)
    report({"same": type(model) is Net})

for _ in range(2):
    print("SAVED", fit(loop).metrics["same"])
"""
LOADS_WITH_CHILDREN = """
def loop(config):
    rows = 0
    for batch in DataLoader(
        Rows(), 4, num_workers=1, collate_fn=collate, multiprocessing_context=config["context"]
    ):
        assert type(batch) is Batch, type(batch)
        rows += len(batch.values)
    report({"rows": rows})

print("RUNS")
for context in ("spawn", "forkserver"):
    print(context, fit(loop, {"context": context}).metrics["rows"])
"""


def run_script(
    place: Path, text: str, *arguments: str, by_name: bool = True, **variables: str
) -> tuple[int, str]:
    """Run a script in a process of its own; returns the exit code and all that it printed."""
    (place / "settings.py").write_text("VALUE = 0\nTABLE = {'value': 0}\n")
    script = place / "train.py"
    script.write_text(text)
    given = dict(os.environ) | {"STORAGE": str(place / "runs"), "PYTHONPATH": str(place)} | variables
    done = subprocess.run(
        [sys.executable, str(script) if by_name else "-", *arguments],
        input=None if by_name else text,
        stdin=subprocess.DEVNULL if by_name else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=place,
        env=given,
        timeout=110,
    )
    return done.returncode, done.stdout


SWEEP = HEAD + textwrap.dedent(
    """
    def loop():
        report({
            "module": settings.VALUE,
            "inside": settings.TABLE["value"],
            "dtype": str(torch.get_default_dtype()),
            "patch": torch.nn.Linear.__name__,
        })

    for value in (1, 2, 3):
        settings.VALUE = settings.TABLE["value"] = value
        torch.set_default_dtype(torch.float64 if value > 1 else torch.float32)
        torch.nn.Linear.__name__ = f"Linear{value}"
        print("SEEN", value, fit(loop).metrics)
    """
)


def test_each_fit_of_a_sweep_trains_with_what_the_script_has_set_by_then(tmp_path: Path) -> None:
    code, output = run_script(tmp_path, SWEEP)
    seen = [line for line in output.splitlines() if line.startswith("SEEN")]
    assert code == 0, output
    assert seen == [
        "SEEN 1 {'module': 1, 'inside': 1, 'dtype': 'torch.float32', 'patch': 'Linear1'}",
        "SEEN 2 {'module': 2, 'inside': 2, 'dtype': 'torch.float64', 'patch': 'Linear2'}",
        "SEEN 3 {'module': 3, 'inside': 3, 'dtype': 'torch.float64', 'patch': 'Linear3'}",
    ]
    assert "anew" not in output


WITHOUT_TORCH = """
import os, sys
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, report

def loop():
    report({"has_torch": "torch" in sys.modules})

for _ in range(2):
    trainer = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=1, engine="local"),
        run_config=RunConfig(storage_path=os.environ["STORAGE"]),
    )
    print("WORKER", trainer.fit().metrics["has_torch"], "DRIVER", "torch" in sys.modules)
"""


def test_a_script_without_torch_does_not_wait_for_its_import(tmp_path: Path) -> None:
    code, output = run_script(tmp_path, WITHOUT_TORCH)
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("WORKER")] == [
        "WORKER False DRIVER False"
    ] * 2


def test_tasks_actors_and_workers_each_see_what_the_script_has_set_when_they_are_started(
    tmp_path: Path,
) -> None:
    code, output = run_script(
        tmp_path,
        HEAD
        + textwrap.dedent(
            """
            import powertrain

            @powertrain.remote
            def see(before=0):
                return settings.VALUE

            @powertrain.remote
            class Keeper:
                def see(self):
                    return settings.VALUE

            def loop(config):
                report({"value": settings.VALUE, "actor": powertrain.get(config["keeper"].see.remote())})

            settings.VALUE = 1
            early = see.remote()
            settings.VALUE = 2
            later = see.remote(early)
            settings.VALUE = 3
            keeper = Keeper.remote()
            settings.VALUE = 4
            print("RUN", fit(loop, {"keeper": keeper}).metrics)
            settings.VALUE = 5
            print("CALLS", powertrain.get([early, later, see.remote(), keeper.see.remote()]))
            """
        ),
    )
    assert code == 0, output
    assert "RUN {'value': 4, 'actor': 3}" in output
    assert "CALLS [1, 2, 5, 3]" in output
    assert "anew" not in output


def test_what_is_set_between_making_the_trainer_and_fit_is_seen(tmp_path: Path) -> None:
    code, output = run_script(
        tmp_path,
        HEAD
        + textwrap.dedent(
            """
            def loop():
                report({"value": settings.VALUE})

            trainer = TorchTrainer(loop, run_config=RunConfig(storage_path=os.environ["STORAGE"]))
            settings.VALUE = 7
            print("SEEN", trainer.fit().metrics["value"])
            """
        ),
    )
    assert code == 0, output
    assert "SEEN 7" in output


def test_a_script_with_threads_is_warned_once_that_workers_import_modules_from_their_files(
    tmp_path: Path,
) -> None:
    code, output = run_script(tmp_path, SWEEP.replace("for value in", THREAD + "for value in"))
    assert code == 0, output
    assert output.count("Workers import the script's modules anew from their files") == 1
    assert "because more than one Python thread is running" in output
    assert output.count("'module': 0, 'inside': 0, 'dtype': 'torch.float32', 'patch': 'Linear'") == 3


@pytest.mark.parametrize("kind", ["forked", "typed in"])
def test_a_model_whose_class_is_in_the_script_can_be_saved_whole_in_every_fit(
    tmp_path: Path, kind: str
) -> None:
    text = HEAD + (THREAD if kind != "forked" else "") + SAVES_ITS_MODEL
    code, output = run_script(tmp_path, text, by_name=kind != "typed in")
    assert code == 0, output
    assert output.count("SAVED True") == 2


@pytest.mark.parametrize("kind", ["forked", "typed in"])
def test_an_unguarded_script_whose_loader_spawns_its_workers_trains_once(tmp_path: Path, kind: str) -> None:
    text = HEAD + (THREAD if kind != "forked" else "") + LOADS_WITH_CHILDREN
    code, output = run_script(tmp_path, text, by_name=kind != "typed in")
    assert code == 0, output
    assert "spawn 8" in output
    assert "forkserver 8" in output
    assert output.count("RUNS") == 1, "a loader's worker ran the script again"
    assert len(os.listdir(tmp_path / "runs")) == 2


def test_fit_in_a_child_that_imports_an_unguarded_script_is_refused_in_one_sentence(tmp_path: Path) -> None:
    code, output = run_script(
        tmp_path,
        HEAD
        + textwrap.dedent(
            """
            import multiprocessing

            def loop():
                report({"value": 1})

            fit(loop)
            child = multiprocessing.get_context("spawn").Process(target=helper, args=(1,))
            child.start()
            child.join()
            print("CHILD", child.exitcode)
            """
        ),
    )
    assert code == 0, output
    assert "CHILD 1" in output
    assert output.count("if __name__ == '__main__':") == 1, output
    assert len(os.listdir(tmp_path / "runs")) == 1
