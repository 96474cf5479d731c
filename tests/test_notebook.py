"""Notebooks: a real Jupyter kernel runs cells, as a person would."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

#: Seconds for one cell on a busy machine.
_PATIENCE = 60.0

IMPORTS = """
import torch
import powertrain as train
from powertrain import ScalingConfig, TrainingFailedError
from powertrain.torch import TorchTrainer

def fit(function):
    return TorchTrainer(function, scaling_config=ScalingConfig(num_workers=2)).fit()

TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2))  # its warm server lasts for the kernel's life
"""

TRAIN = """
def train_func(config):
    model = train.torch.prepare_model(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        model(torch.randn(32, 10)).sum().backward()
        optimizer.step()
        train.report({"epoch": epoch, "version": VERSION})
    print("worker", train.get_context().get_world_rank(), "is through")
"""

ENDLESS = """
import time
def endless():
    for step in range(100_000):
        train.report({"step": step})
        if step == 3:
            print("under way", flush=True)
        time.sleep(0.01)
fit(endless)
"""


@dataclass
class Cell:
    """What one cell gave."""

    output: str = ""
    #: What the last expression is shown as, by mime type.
    shown: dict[str, Any] = field(default_factory=dict, repr=False)
    #: The exception's name and its text, without colours; "" when there was none.
    error: str = ""
    #: The states of what was displayed while it ran, the first and all updates.
    displayed: list[str] = field(default_factory=list, repr=False)
    traceback: str = field(default="", repr=False)


class Notebook:
    """A kernel, and the cells it is given."""

    def __init__(self, directory: Path) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(directory))
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_PATIENCE)
        (self.process,) = (p for p in psutil.Process().children() if "ipykernel" in " ".join(p.cmdline()))

    def run(self, code: str, interrupt_at: tuple[str, ...] = ()) -> Cell:
        """Run a cell to its end; presses the stop button when each text of ``interrupt_at`` is in the output."""
        request = self._client.execute(code)
        cell = Cell()
        deadline = time.monotonic() + _PATIENCE
        while True:
            message = self._next_message(deadline, cell)
            content = message["content"]
            if message["msg_type"] in ("display_data", "update_display_data"):  # updates come from a thread
                cell.displayed.append(content["data"].get("text/html", ""))
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                self._client.get_shell_msg(timeout=_PATIENCE)
                return cell
            if message["msg_type"] == "stream":
                cell.output += content["text"]
            elif message["msg_type"] == "execute_result":
                cell.output += content["data"]["text/plain"]
                cell.shown = content["data"]
            elif message["msg_type"] == "error":
                cell.error = f"{content['ename']}: {content['evalue']}"
                cell.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            if interrupt_at and interrupt_at[0] in cell.output:
                interrupt_at = interrupt_at[1:]
                self._manager.interrupt_kernel()

    def _next_message(self, deadline: float, cell: Cell) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._client.get_iopub_msg(
                timeout=max(0.0, deadline - time.monotonic())
            )
        except queue.Empty:
            pytest.fail(f"the cell did not end within {_PATIENCE:g} s; so far: {cell}")
        return message

    def workers(self) -> list[psutil.Process]:
        """Processes below the kernel, the warm server left out."""
        servers = self.process.children()
        return [worker for server in servers for worker in server.children(recursive=True)]

    def close(self) -> list[psutil.Process]:
        """Shut the kernel down; returns what was alive below it just before."""
        alive = self.process.children(recursive=True)
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.cleanup_resources()
        return alive


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One kernel for all cells of this file, because starting one costs seconds."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("notebook")
        patch.setenv("POWERTRAIN_STORAGE", str(directory / "runs"))
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(directory / "jupyter"))
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        notebook = Notebook(directory)
    imported = notebook.run(IMPORTS)
    assert not imported.error, imported
    yield notebook
    alive = notebook.close()
    _, left = psutil.wait_procs(alive, timeout=5)
    assert not left, f"processes outlived the kernel: {left}"
    assert list((directory / "powertrain").iterdir()) == []


def test_a_function_of_a_cell_trains_twice_and_a_changed_one_is_used(notebook: Notebook) -> None:
    for version in ("one", "two"):
        cell = notebook.run(TRAIN + f"\nVERSION = {version!r}\nfit(train_func).metrics")
        assert not cell.error, cell
        assert cell.output.endswith(f"{{'epoch': 2, 'version': '{version}'}}"), cell
    cell = notebook.run(TRAIN.replace("range(3)", "range(5)") + "\nfit(train_func).metrics")
    assert cell.output.endswith("{'epoch': 4, 'version': 'two'}"), cell
    assert notebook.workers() == []


def test_a_result_and_its_plot_are_shown(notebook: Notebook) -> None:
    cell = notebook.run(TRAIN + "\nVERSION = 0\nresult = fit(train_func)\nresult")
    assert not cell.error, cell
    assert "metrics of rank 0" in cell.shown["text/html"]
    assert cell.shown["text/html"].count("<svg") == 2
    plot = notebook.run("result.plot('epoch')")
    assert not plot.error, plot
    assert plot.shown["image/png"].startswith("iVBORw0KGgo"), "a PNG in base64"
    # With pyplot in the kernel, as most notebooks have it, it is still one picture.
    plot = notebook.run("import matplotlib.pyplot\nresult.plot('epoch')")
    assert plot.shown["image/png"].startswith("iVBORw0KGgo")


WATCHED = """
def watched():
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(120):
        loss = model(torch.randn(32, 10)).sum()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        train.report({"<b>loss": loss.item()})
import time
_ = fit(watched)
"""


def test_a_run_is_shown_while_it_trains_and_its_card_stays(notebook: Notebook) -> None:
    cell = notebook.run(WATCHED)
    assert not cell.error, cell
    assert len(cell.displayed) >= 3, "once at the begin, at least once while it trained, and at the end"
    training = [shown for shown in cell.displayed if ">training<" in shown]
    assert any("&lt;b&gt;loss" in shown and "<svg" in shown for shown in training), (
        "its curve while it trains"
    )
    last = cell.displayed[-1]
    assert ">finished<" in last
    assert "time of a step" in last
    assert "goodput" in last
    assert "diagnosis" in last
    assert "<b>loss" not in last
    assert "<script" not in last


def test_a_quiet_run_and_a_failed_one(notebook: Notebook) -> None:
    quiet = "from powertrain import RunConfig\n_ = TorchTrainer(lambda: None, run_config=RunConfig(verbose=0)).fit()"
    assert notebook.run(quiet).displayed == []
    cell = notebook.run("def broken():\n    raise ValueError('bad')\nfit(broken)")
    assert cell.error.startswith("WorkerGroupError"), cell
    assert ">failed<" in cell.displayed[-1]


def test_plain_lines_appear_in_the_cell(notebook: Notebook) -> None:
    cell = notebook.run(TRAIN + "\nVERSION = 1\n_ = fit(train_func)")
    lines = cell.output.splitlines()
    assert "[rank 0] worker 0 is through" in lines
    assert "[rank 1] worker 1 is through" in lines
    assert any("training started on 2 workers" in line for line in lines)
    assert any(line.startswith("Run ") and line.endswith("finished") for line in lines)
    assert "\x1b" not in cell.output, "no terminal, so no colours and no moving cursor"


def test_the_error_names_the_line_of_the_cell_that_has_the_helper(notebook: Notebook) -> None:
    """The function and what it calls come from two cells; neither is a file that a worker could read."""
    notebook.run("def helper():\n    return {}['absent']  # the line to blame\n")
    cell = notebook.run("def broken():\n    helper()\n\nfit(broken)")
    assert cell.error.startswith("WorkerGroupError:"), cell
    assert "raised KeyError: 'absent'" in cell.error
    assert "return {}['absent']  # the line to blame" in cell.error
    assert re.search(r":2 in helper$", cell.error, re.MULTILINE), cell.error


def test_the_error_names_the_line_of_the_functions_own_cell(notebook: Notebook) -> None:
    cell = notebook.run("def broken():\n    count = 0\n    return 1 / count\n\nfit(broken)")
    assert "raised ZeroDivisionError: division by zero" in cell.error, cell
    assert re.search(r":3 in broken\n\s+return 1 / count$", cell.error, re.MULTILINE), cell.error


def test_an_interrupt_leaves_the_kernel_clean(notebook: Notebook) -> None:
    begun = time.monotonic()
    cell = notebook.run(ENDLESS, interrupt_at=("under way",))
    assert cell.error.startswith("KeyboardInterrupt"), cell
    assert "can be resumed with RunConfig(name='TorchTrainer_" in cell.error, (
        "the name was not the user's own"
    )
    assert time.monotonic() - begun < 60
    assert notebook.workers() == []
    assert notebook.run("6 * 7").output == "42"
    cell = notebook.run(TRAIN + "\nVERSION = 3\nfit(train_func).metrics")
    assert cell.output.endswith("{'epoch': 2, 'version': 3}"), cell


def test_a_second_interrupt_ends_a_function_that_never_reports(notebook: Notebook) -> None:
    silent = (
        'import time\ndef silent():\n    print("under way", flush=True)\n    time.sleep(600)\nfit(silent)'
    )
    begun = time.monotonic()
    cell = notebook.run(silent, interrupt_at=("under way", "second Ctrl-C"))
    assert cell.error.startswith("KeyboardInterrupt"), cell
    assert time.monotonic() - begun < 60
    assert notebook.workers() == []


def test_an_ordinary_interrupt_still_works_after_a_fit(notebook: Notebook) -> None:
    notebook.run(TRAIN + "\nVERSION = 4\n_ = fit(train_func)")
    # Short sleeps: Python misses a signal that comes just before a system call until that call returns.
    waits = "import time\nprint('waiting', flush=True)\nwhile True:\n    time.sleep(0.01)"
    cell = notebook.run(waits, interrupt_at=("waiting",))
    assert cell.error.startswith("KeyboardInterrupt"), cell


def test_ipython_without_a_kernel(tmp_path: Path) -> None:
    code = f"{IMPORTS}\n{TRAIN}\nVERSION = 5\nprint(fit(train_func).metrics)"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", code],
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "{'epoch': 2, 'version': 5}" in done.stdout, done.stdout
