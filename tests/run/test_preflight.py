from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powertrain import CheckpointConfig, DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.engine.local import warm_server
from powertrain.errors import ConfigError, ResourceError


@pytest.fixture(autouse=True)
def _no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before that."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(warm_server, "warm_up", start)
    monkeypatch.setattr(warm_server, "_start_forked", start)


def trainer(workers: Any = 2, data: DataConfig | None = None, **options: Any) -> Any:
    return DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=workers, engine="local"),
        run_config=RunConfig(**options),
        dataset_config=data,
    )


@pytest.mark.parametrize("below", ["file", "file/x/y"])
@pytest.mark.parametrize("option", ["staging_dir", "working_dir", "cache_dir"])
def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path, option: str, below: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    path, data = str(tmp_path / below), None
    options: dict[str, Any] = {"storage_path": str(tmp_path)}
    if option == "staging_dir":
        options["checkpoint_config"] = CheckpointConfig(staging_dir=path)
    elif option == "working_dir":
        options["working_dir"] = path
    else:
        data = DataConfig(cache_dir=path)
    with pytest.raises(ConfigError) as refusal:
        trainer(data=data, **options)
    text = str(refusal.value)
    assert f"({option}=...) cannot be used: {str(tmp_path / 'file')!r} is a file, not a directory." in text


def test_a_directory_that_is_not_there_yet_will_be_made(tmp_path: Path) -> None:
    from powertrain.run.record.preflight import why_unusable

    assert why_unusable(str(tmp_path / "a" / "b"), is_written=True) == ""
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    assert "a link that leads nowhere" in why_unusable(str(tmp_path / "link"), is_written=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_to_is_refused_where_it_must_be(tmp_path: Path) -> None:
    from powertrain.run.record.preflight import why_unusable

    tmp_path.chmod(0o555)
    assert "not writable" in why_unusable(str(tmp_path), is_written=True)
    assert "not writable" in why_unusable(str(tmp_path / "new"), is_written=False)
    assert why_unusable(str(tmp_path), is_written=False) == ""


@pytest.mark.parametrize("workers", [100_000, (100_000, 200_000)])
def test_a_number_of_workers_that_no_machine_holds_is_refused(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(ResourceError) as refusal:
        trainer(workers, storage_path=str(tmp_path))
    text = str(refusal.value)
    assert text.startswith(f"ScalingConfig(num_workers={workers}) needs at least ")
    assert " allows " in text
    assert "ask for at most" in text


_UNDER_A_LIMIT = """
import resource, sys
import psutil
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
from powertrain.errors import ResourceError
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
try:
    DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=100, engine="local"),
        run_config=RunConfig(storage_path=sys.argv[1]),
    )
except ResourceError as error:
    print(error)
print(psutil.Process().children())
"""


def test_a_limit_for_open_files_is_an_error_before_any_process_starts(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _UNDER_A_LIMIT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, children = told.stdout.splitlines()
    assert message == (
        "ScalingConfig(num_workers=100) needs at least 332 open files in this process, and the hard limit for open "
        "files (RLIMIT_NOFILE, 'ulimit -Hn') allows 128. Raise it in /etc/security/limits.conf (nofile), with 'docker "
        "run --ulimit nofile=...' or LimitNOFILE=, or ask for at most 32 worker(s)."
    )
    assert children == "[]"


@pytest.mark.parametrize("code", [0, 0xD800, 0xDC80, 0xDFFF])
@pytest.mark.parametrize(
    "option", ["name", "storage_path", "working_dir", "staging_dir", "cache_dir", "variable"]
)
def test_names_and_paths_with_odd_characters_are_refused(code: int, option: str) -> None:
    odd = f"a{chr(code)}b"
    with pytest.raises(ConfigError) as refusal:
        if option == "staging_dir":
            CheckpointConfig(staging_dir=f"/tmp/{odd}")
        elif option == "cache_dir":
            DataConfig(cache_dir=f"/tmp/{odd}")
        elif option == "variable":
            RunConfig(worker_runtime_env={"env_vars": {"NAME": odd}})
        else:
            value: Any = odd if option == "name" else f"/tmp/{odd}"
            RunConfig(**{option: value})
    str(refusal.value).encode()  # the message itself is whole
