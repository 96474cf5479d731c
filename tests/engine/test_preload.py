"""What the warm server imports is what the backend of the run lists."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.backend import STATE_PRELOAD, TORCH_PRELOAD, BackendConfig, preload_of
from powertrain.engine.local import warm_server
from powertrain.engine.local.warm_server import WarmServer, warm_up
from powertrain.errors import ConfigError
from powertrain.lightgbm.config import LightGBMConfig
from powertrain.tensorflow.config import TensorflowConfig
from powertrain.torch.config import TorchConfig
from powertrain.xgboost.config import XGBoostConfig

FRAMEWORK = """
import os

PID = os.getpid()
CALLED = []

def call():
    CALLED.append(os.getpid())
"""


@pytest.fixture
def _framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework of its own, with a module and a function to be called."""
    (tmp_path / "framework_of_a_test.py").write_text(FRAMEWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "framework_of_a_test", raising=False)


class FrameworkConfig(BackendConfig):
    uses_torch: ClassVar[bool] = False
    preload: ClassVar[Sequence[str] | None] = (
        "no_such_module_here",
        "framework_of_a_test:call",
        "framework_of_a_test:no_such_function",
    )


def train() -> None:
    import os

    loaded = sys.modules.get("framework_of_a_test")
    powertrain.report(
        {
            "was_loaded": loaded is not None,
            "by_another": loaded is not None and os.getpid() != loaded.PID,
            "called": loaded is not None and loaded.CALLED == [loaded.PID],
            "parent": os.getppid(),
        }
    )


@pytest.mark.usefixtures("_framework")
def test_workers_find_loaded_what_their_backend_lists(tmp_path: Path) -> None:
    result = DataParallelTrainer(
        train,
        backend_config=FrameworkConfig(),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="first", storage_path=str(tmp_path / "runs")),
    ).fit()
    assert result.metrics is not None
    assert (result.metrics["was_loaded"], result.metrics["by_another"], result.metrics["called"]) == (
        True,
    ) * 3


@pytest.mark.usefixtures("_framework")
def test_servers_with_different_lists_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_server, "_shared", [])
    monkeypatch.setattr(warm_server, "why_fork_is_unsafe", lambda: "it is started clean here")
    found: list[Any] = []
    for config in (FrameworkConfig(), _Bare(), FrameworkConfig(), _Bare()):
        result = DataParallelTrainer(
            train,
            backend_config=config,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(storage_path=str(tmp_path / "runs")),
        ).fit()
        assert result.metrics is not None
        found.append((result.metrics["was_loaded"], result.metrics["parent"]))
    servers = list(warm_server._shared)
    try:
        assert [loaded for loaded, _ in found] == [True, False, True, False]
        assert found[:2] == found[2:], "each list has one server, which later runs use again"
        assert len(servers) == 2
    finally:
        for server in servers:
            server.close()
            server.wait_for_end(30)


class _Bare(BackendConfig):
    preload: ClassVar[Sequence[str] | None] = ()


@dataclass(frozen=True)
class _Undeclared(BackendConfig):
    """A backend of a user who says nothing."""


@pytest.mark.parametrize(
    ("config", "entries"),
    [
        (_Undeclared(), TORCH_PRELOAD),
        (TorchConfig(), TORCH_PRELOAD),
        (TensorflowConfig(), ()),
        (_Bare(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_list_of_a_backend(config: BackendConfig, entries: tuple[str, ...]) -> None:
    assert preload_of(config) == entries


def saves(config: dict[str, Any]) -> None:
    powertrain.report({}, checkpoint=powertrain.save_state(step=1))


def reports(config: dict[str, Any]) -> None:
    powertrain.report({})


@pytest.mark.parametrize(
    ("function", "config", "entries"),
    [
        (saves, TorchConfig(), (*TORCH_PRELOAD, *STATE_PRELOAD)),
        (reports, TorchConfig(), TORCH_PRELOAD),
        (saves, _Bare(), ()),
    ],
    ids=["saves", "reports", "without torch"],
)
def test_what_saves_a_state_is_loaded_before_workers_are_forked(
    function: Any, config: BackendConfig, entries: tuple[str, ...]
) -> None:
    trainer = DataParallelTrainer(
        function, backend_config=config, scaling_config=ScalingConfig(num_workers=1)
    )
    assert trainer._request.preload == entries


def test_a_backend_that_does_not_say_gets_what_is_loaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert preload_of(BackendConfig()) == TORCH_PRELOAD
    monkeypatch.delitem(sys.modules, "torch")
    assert preload_of(BackendConfig()) == ()


def test_a_list_that_is_not_one_of_names_is_refused() -> None:
    class Odd(BackendConfig):
        preload: ClassVar[Any] = (sys,)

    with pytest.raises(ConfigError, match=r"Odd\.preload.*module names"):
        preload_of(Odd())


@pytest.mark.parametrize(
    "entries",
    [
        (*preload_of(TorchConfig()), *STATE_PRELOAD),
        preload_of(XGBoostConfig()),
        preload_of(LightGBMConfig()),
    ],
    ids=["torch", "xgboost", "lightgbm"],
)
def test_a_server_is_safe_to_fork_once_it_has_imported_the_list_of_a_framework(
    entries: Sequence[str],
) -> None:
    script = (
        "import sys, json; from powertrain.engine.local import server; "
        f"entries = {entries!r}; server._preload(entries); from powertrain.engine.forking import why_fork_is_unsafe; "
        "missing = [e for e in entries if e.partition(':')[0] not in sys.modules]; "
        "print(json.dumps([why_fork_is_unsafe(), missing]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ["", []]


def test_the_shared_server_with_the_same_list_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_server, "_shared", [])
    first = warm_up(clean=True, preload=["json"])
    other: WarmServer | None = None
    try:
        assert warm_up(clean=True, preload=("json",)) is first
        assert warm_up(clean=True, preload=("json", *STATE_PRELOAD)) is first, (
            "workers import modules of ours"
        )
        other = warm_up(clean=True)
        assert other is not first
    finally:
        for server in (first, other):
            if server is not None:
                server.close()
                server.wait_for_end(30)
