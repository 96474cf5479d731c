"""Checks of a trainer's arguments before anything is started."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.config.data import DataConfig
from powertrain.config.run import RunConfig
from powertrain.errors import ConfigError, StorageError
from powertrain.values.arguments import has_attribute

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.data.dataset import Dataset
    from powertrain.engine.registry import EngineTraits


def refuse_second_run_of_script() -> None:
    """Raise :class:`ConfigError` in a child of multiprocessing's that runs the script again to import its classes."""
    from powertrain.engine.local.warm_server import is_loading_main

    if is_loading_main():
        raise ConfigError(
            "fit() was called while a child process (a DataLoader worker or another process started with 'spawn' or "
            "'forkserver') runs the script again to import its classes. Put the lines that train below "
            "`if __name__ == '__main__':`, so that only the script itself trains."
        )


def refuse_unwritable(root: str) -> None:
    """Raise :class:`StorageError` when ``root`` can be seen not to be writable, without touching anything."""
    from powertrain.storage import open_storage

    path = open_storage(root).local_path("x")
    if path is None:
        return
    directory = path.parent
    while not os.path.lexists(directory):
        directory = directory.parent
    if not directory.is_dir():
        problem = f"{str(directory)!r} is a file, not a directory"
    elif not os.access(directory, os.W_OK | os.X_OK):
        problem = f"{str(directory)!r} is not writable for {user()}"
    else:
        return
    raise StorageError(
        f"The storage path {root!r} cannot be used: {problem}. Set RunConfig(storage_path=...) or the environment "
        "variable POWERTRAIN_STORAGE to a directory you can write to."
    )


def checked_datasets(datasets: Any) -> dict[str, Dataset | Callable[[], Dataset]]:
    """Return the datasets by name; raises :class:`ConfigError` for a value that is clearly not a dataset."""
    if datasets is None:
        return {}
    if not isinstance(datasets, Mapping) or not all(isinstance(name, str) and name for name in datasets):
        raise ConfigError(
            f"datasets must be a dict from names to datasets, such as {{'train': powertrain.data.read_parquet(path)}}, "
            f"and not a {type(datasets).__name__} like this one."
        )
    found = {name: _from_hugging_face(value) for name, value in datasets.items()}
    for name, value in found.items():
        _refuse_non_datasets(name, value)
    return found


def _from_hugging_face(value: Any) -> Any:
    """Return a ``datasets.Dataset`` of Hugging Face as a dataset of ours, and anything else as it is."""
    if type(value).__module__.partition(".")[0] != "datasets":
        return value
    from powertrain.data.reading import from_huggingface

    return from_huggingface(value)


def _refuse_non_datasets(name: str, value: Any) -> None:
    kind = type(value)
    origin = f"{kind.__module__}.{kind.__qualname__}"
    accepted = "a powertrain.data.Dataset, or a function without arguments that returns one"
    if is_of_ray(value):
        return
    if kind.__module__.partition(".")[0] == "ray":
        raise ConfigError(
            f"datasets[{name!r}] is a {origin}, which is of Ray but not a ray.data.Dataset. Give the dataset that it "
            f"was made from, or {accepted}: for example powertrain.data.read_parquet(path)."
        )
    if callable(value):
        return
    from powertrain.data.dataset import Dataset

    if not isinstance(value, Dataset):
        raise ConfigError(
            f"datasets[{name!r}] is a {origin}. Give {accepted}: powertrain.data has read_parquet, read_csv and others "
            "for files, and from_torch, from_huggingface, from_pandas, from_numpy, from_arrow and from_items for what "
            "is in memory."
        )


def refuse_unreachable_data(datasets: Mapping[str, Any], config: DataConfig, engine: EngineTraits) -> None:
    """Raise :class:`ConfigError` for datasets of Ray's that workers of this engine cannot be given."""
    of_ray = [name for name, value in datasets.items() if is_of_ray(value)]
    if not of_ray or engine.streams_ray_datasets:
        return
    if engine.has_launcher:
        raise ConfigError(
            f"The dataset {', '.join(map(repr, of_ray))} is Ray's, and under torchrun every process would compute one "
            "of its own. Write it to files once, with its write_parquet(path), and give "
            "powertrain.data.read_parquet(path)."
        )
    if not config.snapshot:
        raise ConfigError(
            f"The dataset {', '.join(map(repr, of_ray))} is Ray's, and the workers of engine={engine.name!r} are not "
            "on a Ray cluster that could stream it to them. Use ScalingConfig(engine='ray'), or "
            "DataConfig(snapshot=True), which writes it once into the run's storage and works on any engine, or "
            "powertrain.data.read_parquet(path) in place of ray.data.read_parquet(path)."
        )


def refuse_unknown_split(config: DataConfig, datasets: Mapping[str, Any]) -> None:
    if config.datasets_to_split == "all":
        return
    unknown = [name for name in config.datasets_to_split if name not in datasets]
    if unknown:
        there = ", ".join(map(repr, datasets)) or "none"
        raise ConfigError(
            f"DataConfig(datasets_to_split=...) names {', '.join(map(repr, unknown))}, which is not among the datasets "
            f"of the trainer ({there}). Correct the name, or add the dataset to datasets=."
        )


def refuse_missing_sources(run: RunConfig) -> None:
    """Raise a clear error for options that this version accepts by name but cannot do yet."""
    if run.log_to_file not in (True, False):
        raise ConfigError(
            "RunConfig(log_to_file=<name>) is not supported yet by this version of Powertrain. Use log_to_file=True: "
            "each rank's output goes to its own file under the run's logs/."
        )


def refuse_process_options(run: RunConfig, engine: EngineTraits) -> None:
    """Refuse options about a rank's output and directory on engines that do not start its process."""
    options = [
        name
        for name, value in (("log_to_file=True", run.log_to_file), ("working_dir=...", run.working_dir))
        if value
    ]
    if options:
        instead = f"{engine.name} owns the output and the directory of its processes. Leave it out"
        if engine.shares_driver_process:
            instead = (
                f"The output of {engine.name} ranks is this process's own, and so is its directory. Leave it out, or "
                "use num_workers=1"
            )
        elif engine.has_launcher:
            instead += ", and see torchrun's --log-dir and --redirects"
        raise ConfigError(
            f"RunConfig({', '.join(options)}) does nothing on the {engine.name} engine. {instead}."
        )


def checkpoint_to_begin_from(checkpoint: Checkpoint | None) -> Checkpoint | None:
    if checkpoint is None:
        return None
    path = checkpoint.path if has_attribute(checkpoint, "path") else None
    if not isinstance(path, str) or not has_attribute(checkpoint, "given_filesystem"):
        raise ConfigError(
            f"resume_from_checkpoint must be a Checkpoint, not {type(checkpoint).__name__}. Write "
            "Checkpoint.from_directory(path)."
        )
    local = "://" not in path and checkpoint.given_filesystem is None
    if local and not os.path.isdir(path):
        raise ConfigError(f"resume_from_checkpoint names {path!r}, which is not a directory. Check the path.")
    return checkpoint


def json_mapping(value: Mapping[str, Any] | None, argument: str) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps({} if value is None else dict(value))))
    except Exception as error:  # inspecting the value may raise anything
        raise ConfigError(f"{argument} must be a dict of JSON values: {error}.") from error


def is_of_ray(dataset: Any) -> bool:
    """Return True for a ``ray.data.Dataset``, without importing Ray."""
    return type(dataset).__module__.partition(".")[0] == "ray" and hasattr(dataset, "streaming_split")


def user() -> str:
    """Return the name of the user who runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
