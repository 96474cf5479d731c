"""``RunConfig`` and ``LoggingConfig``: name, storage, callbacks and output of a run."""

from __future__ import annotations

import logging
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain import plugins
from powertrain.config.checkpoint import CheckpointConfig, SyncConfig
from powertrain.config.checks import (
    Config,
    Refusal,
    a_type,
    any_path,
    anything,
    did_you_mean,
    flag,
    ignored,
    instance_of,
    one_of,
    option,
    optional,
    positive,
    takes,
    text,
    whole,
)
from powertrain.config.failure import FailureConfig
from powertrain.config.trace import ProfileConfig, TraceConfig
from powertrain.errors import ConfigError
from powertrain.text.reprs import short_repr as _short

#: A run's name must leave room for suffixes in a file name of 255 bytes.
NAME_LIMIT_BYTES = 200
#: Environment variable that replaces the default storage path.
STORAGE_VARIABLE = "POWERTRAIN_STORAGE"
DEFAULT_STORAGE_PATH = "~/powertrain_runs"
#: Methods that a callback may define; it needs at least one of them.
CALLBACK_HOOKS = ("after_report", "after_exception", "on_event")
#: Methods that a callback of a sweep may define (``powertrain.tune.Callback``).
SWEEP_HOOKS = (
    "on_trial_result",
    "on_trial_start",
    "on_trial_complete",
    "on_trial_error",
    "on_experiment_end",
)
#: Trackers that are chosen by name (``powertrain.trackers``).
TRACKER_NAMES = ("tensorboard", "mlflow", "wandb", "csv")


def _log_level(value: Any) -> str:
    levels = ("CRITICAL", "FATAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG", "NOTSET")
    folded = value.upper() if isinstance(value, str) else value
    if isinstance(folded, int) and not isinstance(folded, bool):
        named = f" ({folded} is {logging.getLevelName(folded)})" if 0 <= folded <= logging.CRITICAL else ""
        raise Refusal("levels are given by name", f"Use one of {', '.join(levels)}{named}.")
    return str(one_of(*levels)(folded))


@dataclass(frozen=True, repr=False)
class LoggingConfig(Config):
    """Logging of Powertrain's own messages. Output of the user's code is not affected.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        RunConfig(logging_config=LoggingConfig(log_level="DEBUG"))
    """

    log_level: str = option("INFO", _log_level)
    """The lowest level of Powertrain's own messages that is shown, by name, such as ``"DEBUG"``."""


def _run_name(value: Any) -> str:
    name = text(value)
    shape = "Use letters, digits, '-', '_' and '.', such as 'resnet-2'."
    if "/" in name or "\\" in name:
        raise Refusal("a run's name is one directory below storage_path and has no slash", shape)
    if name in (".", ".."):
        raise Refusal("it would name another directory than the run's own", shape)
    if name != name.strip() or not name.isprintable():
        raise Refusal("it has blanks at an end or characters that cannot be seen", shape)
    if len(name.encode("utf-8", "surrogatepass")) > NAME_LIMIT_BYTES:
        raise Refusal(f"it is longer than {NAME_LIMIT_BYTES} bytes", "Use a shorter name.")
    return name


def _storage_path(value: Any) -> str:
    path = any_path(value)
    wanted = 'Give a directory, or a place such as "s3://bucket/runs".'
    if re.fullmatch(r"[A-Za-z][\w+.-]*://+", path):
        raise Refusal("nothing comes after the '://'", wanted)
    one_slash = re.match(r"(s3|gs|gcs|az|abfs|abfss|file|hdfs):/?(?!/)", path)
    if one_slash:
        rest = path[one_slash.end() :]
        start = f"{one_slash[1]}:///" if one_slash[1] == "file" else f"{one_slash[1]}://"
        raise Refusal("a slash is missing after the ':'", f"Write {_short(start + rest)}.")
    return path


def _filesystem(value: Any) -> Any:
    known = {("pyarrow", "FileSystem"), ("fsspec", "AbstractFileSystem")}
    if {(c.__module__.partition(".")[0], c.__name__) for c in type(value).__mro__} & known:
        return value
    raise Refusal(
        f"{a_type(value)} is not a filesystem", "Give a pyarrow.fs.FileSystem or an fsspec filesystem."
    )


def _callbacks(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise Refusal(f"{a_type(value)} is not a list", "Put the callbacks into a list: callbacks=[...].")
    for callback in value:
        if isinstance(callback, type):
            raise Refusal(
                f"{callback.__name__} is a class, not an instance",
                f"Write {callback.__name__}() in the list.",
            )
        if not any(callable(getattr(callback, hook, None)) for hook in (*CALLBACK_HOOKS, *SWEEP_HOOKS)):
            raise Refusal(
                f"{_short(callback)} has none of the methods {', '.join(CALLBACK_HOOKS)}",
                "Give objects that define at least one of them.",
            )
    return tuple(value)


def _check_added_tracker(name: str) -> None:
    """Check the name of a tracker of another package: entry points are only read for those."""
    added = plugins.names(plugins.TRACKERS)
    if name not in added:
        known = (*TRACKER_NAMES, *added)
        fix = (
            f"{did_you_mean(name, known)}Known are {', '.join(known)}. A package adds a tracker with an entry point of "
            f"the group {plugins.TRACKERS!r}; see docs/trackers.md."
        )
        raise Refusal(f"there is no tracker {_short(name)}", fix)


def _trackers(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise Refusal(f"{a_type(value)} is not a list", "Put the trackers into a list: trackers=[...].")
    for tracker in value:
        if isinstance(tracker, str):
            if tracker not in TRACKER_NAMES:
                _check_added_tracker(tracker)
        elif isinstance(tracker, type):
            fix = f"Write {tracker.__name__}() in the list."
            raise Refusal(f"{tracker.__name__} is a class, not an instance", fix)
        elif not callable(getattr(tracker, "open", None)) or not callable(getattr(tracker, "settled", None)):
            fix = f"Give {', '.join(map(repr, TRACKER_NAMES))}, or an instance of a powertrain.trackers.Tracker."
            raise Refusal(f"{_short(tracker)} is not a tracker", fix)
    return tuple(value)


def _worker_environment(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    example = 'Give {"env_vars": {"NAME": "value"}}.'
    if not isinstance(value, Mapping):
        raise Refusal(f"{a_type(value)} is not a dict", example)
    for key in value:
        if key == "working_dir":
            raise Refusal("'working_dir' is set elsewhere", "Use RunConfig(working_dir=...).")
        if key != "env_vars":
            fix = 'Use ScalingConfig(engine="ray", engine_options={"runtime_env": ...}).'
            raise Refusal(f"{_short(key)} is not for every engine; only 'env_vars' is", fix)
    variables = value.get("env_vars", {})
    if not isinstance(variables, Mapping):
        raise Refusal(f"its 'env_vars' are {a_type(variables)}, not a dict", example)
    for name, setting in variables.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise Refusal(f"{_short(name)} cannot be the name of an environment variable", example)
        if not isinstance(setting, str) or "\0" in setting:
            fix = f'Write its value as a string: {{"env_vars": {{{name!r}: "..."}}}}.'
            raise Refusal(f"the variable {name!r} is {a_type(setting)}, not a string", fix)
        try:
            (name + setting).encode()
        except UnicodeEncodeError:
            raise Refusal(f"the variable {_short(name)} holds half a character", example) from None
    return {"env_vars": dict(variables)} if variables else {}


def _stop_criterion(value: Any) -> dict[str, float] | Callable[[str, Mapping[str, Any]], bool]:
    example = 'Give limits by metric, such as {"training_iteration": 100}, or a function of (name, metrics).'
    if callable(value) and not isinstance(value, type):
        if not takes(value, "name", {}):
            raise Refusal("the function does not take two arguments, the run's name and the metrics", example)
        return value  # type: ignore[no-any-return]
    if not isinstance(value, Mapping):
        raise Refusal(f"{a_type(value)} is neither a dict nor a function", example)
    if not value:
        raise Refusal("the dict is empty", example)
    for metric, limit in value.items():
        if not isinstance(metric, str) or not metric:
            raise Refusal(f"the metric {_short(metric)} is not named by a string", example)
        if not isinstance(limit, numbers.Real) or limit != limit:
            raise Refusal(f"the limit of {metric!r} is {_short(limit)}, which is not a number", example)
    return dict(value)


def _verbosity(value: Any) -> int:
    # Ray's own examples pass False, which is 0 there.
    return int(value) if isinstance(value, bool) else whole(at_least=0, at_most=3)(value)


def _log_destination(value: Any) -> bool | str | tuple[str, str]:
    if isinstance(value, bool):
        return value
    names = value if isinstance(value, (tuple, list)) else [value]
    if isinstance(value, (tuple, list)) and len(value) != 2:
        raise Refusal("a pair has two file names", 'Write it as ("stdout.log", "stderr.log").')
    for name in names:
        if (
            not isinstance(name, str)
            or name != os.path.basename(name)
            or name in ("", ".", "..")
            or "\0" in name
        ):
            raise Refusal(
                f"{_short(name)} is not the name of a file",
                "Use True, a file name without a slash, or a pair of them for stdout and stderr.",
            )
    return (names[0], names[1]) if len(names) == 2 else str(value)


def _trace(value: Any) -> Any:
    if value is None or value is True:
        return TraceConfig()
    return value if value is False else instance_of(TraceConfig)(value)


def _profile(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return ProfileConfig()
    if isinstance(value, int):
        return ProfileConfig(start_step=value)
    return instance_of(ProfileConfig)(value)


def _host(value: Any) -> str:
    host = text(value)
    if any(character.isspace() or character in "/@" for character in host):
        raise Refusal("it is not a host", 'Give an address or a name, such as "127.0.0.1" or "0.0.0.0".')
    return host


def _working_dir(value: Any) -> str:
    path = any_path(value)
    if "://" in path:
        raise Refusal(
            "ranks work in a local directory",
            'Give a local path, or "scratch" for one that goes with the run.',
        )
    return path


@dataclass(frozen=True, repr=False)
class RunConfig(Config):
    """Name, storage and behaviour of a run.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value, or for fields that exclude each other.

    Example::

        TorchTrainer(train_func, run_config=RunConfig(name="digits", storage_path="s3://bucket/runs"))
    """

    name: str | None = option(None, optional(_run_name))
    """The run's name and directory below ``storage_path``. The same name and path again resumes it. None makes up a new
    name."""

    storage_path: str | os.PathLike[str] | None = option(None, optional(_storage_path))
    """The parent of runs: a directory, or ``s3://``, ``gs://``, ``az://`` and a path there. None stands for the
    environment variable POWERTRAIN_STORAGE, or else ``~/powertrain_runs`` (see ``storage_root``)."""

    storage_filesystem: Any = option(None, optional(_filesystem))
    """A pyarrow or fsspec filesystem to reach ``storage_path`` with, which then is a plain path on it."""

    failure_config: FailureConfig = option(None, instance_of(FailureConfig))
    """Handling of worker failures."""

    checkpoint_config: CheckpointConfig = option(None, instance_of(CheckpointConfig))
    """Retention of checkpoints."""

    callbacks: Sequence[Any] = option(None, _callbacks)
    """Objects with ``after_report``, ``after_exception`` or ``on_event``, called in the controller. An
    exception in one is logged and never ends the run."""

    worker_runtime_env: Mapping[str, Any] = option(None, _worker_environment)
    """``{"env_vars": {...}}``: environment variables of every worker."""

    logging_config: LoggingConfig = option(None, instance_of(LoggingConfig))
    """Logging of Powertrain's own messages."""

    sync_config: SyncConfig = option(None, instance_of(SyncConfig))
    """Transfer of files to a remote storage path."""

    verbose: int | None = option(None, optional(_verbosity))
    """Terminal output of the run: 0 warnings and errors, 1 plain lines, 2 or 3 the live view. None is the live view on
    a terminal and plain lines elsewhere."""

    stop: Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool] | None = option(
        None, optional(_stop_criterion)
    )
    """Early stopping: ``{metric: limit}`` ends at the first row in which a metric reaches its limit; a function of (run
    name, metrics) ends where it returns True. ``training_iteration`` is the row."""

    progress_reporter: Any = ignored(
        None, anything, "verbose is for the terminal, callbacks for a view of your own"
    )
    """Ray Tune's. Without effect: ``verbose`` is for the terminal, ``callbacks`` for a view of your own."""

    log_to_file: bool | str | tuple[str, str] = option(False, _log_destination)
    """True keeps the workers' output off the terminal: it goes to the log files of the run only. A name, or a
    pair for stdout and stderr, does so with files of that name for each rank."""

    port: int | None = option(None, optional(whole(at_least=1, at_most=65535)))
    """The TCP port on which the run listens for its workers on other machines, for clusters with a firewall between
    nodes; None takes any free one. On one machine a Unix socket is used, and no port."""

    trace: TraceConfig | bool | None = option(None, _trace)
    """Recording of where the time goes: None and True for the defaults, False for nothing."""

    profile: ProfileConfig | int | bool | None = option(None, _profile)
    """A profile of some steps by torch's profiler: a ``ProfileConfig``, the step to begin at, or True for the defaults.
    Needs ``trace``, which finds the steps."""

    post_mortem: bool = option(False, flag)
    """True opens a debugger in the launching terminal where a rank's function raises, before the run fails: the first
    rank that does so, not those whose collectives break because of it. Without a terminal it changes nothing."""

    working_dir: str | os.PathLike[str] | None = option(None, optional(_working_dir))
    """The working directory of ranks. None or ``"."``: the directory in which ``fit`` was called; on a cluster each
    node that does not have it gets a copy, which its ranks share. ``"scratch"``: an empty directory per node, shared by
    its ranks and removed at the end. Any other path: that directory, on every node (``"./scratch"`` for one of that
    name)."""

    shared_storage: bool = option(False, flag)
    """True accepts a run directory with files of other users: for a group that takes turns with a run. All users with
    write access there are trusted then. Links in it are not followed in any case. No effect on object stores."""

    report_barrier: bool | None = option(None, optional(flag))
    """True makes every ``report`` a global barrier, as in Ray Train: it returns when all ranks have made that report.
    False does not. None stands for the environment variable POWERTRAIN_REPORT_BARRIER (1 or 0), or else False."""

    trackers: Sequence[Any] = option(None, _trackers)
    """Trackers that also get rank 0's reports: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, ``"csv"``, or objects such
    as ``powertrain.trackers.MLflow(...)``. A separate process sends them, and never delays training."""

    tracker_timeout_s: float = option(30.0, positive)
    """Seconds for trackers to catch up at the end of the run. One that refuses has 5. ``powertrain track`` sends the
    rest."""

    report: bool = option(True, flag)
    """True writes ``report.html`` into the run's directory at its end: the dashboard's page of the run in one file, to
    open and to pass on. Trials of a sweep have none. ``powertrain report`` makes one of any run."""

    metrics_port: int | None = option(None, optional(whole(at_least=1, at_most=65535)))
    """The TCP port at which the run serves figures for Prometheus and OpenMetrics, at ``/metrics``; None serves none.
    Where the port is in use, the run goes on with a warning. Trials of a sweep serve nothing."""

    metrics_host: str = option("127.0.0.1", _host)
    """The address of ``metrics_port``. By default only this machine reaches it; ``"0.0.0.0"`` is reached from others,
    without a password."""

    _moved: ClassVar[Mapping[str, str]] = {
        "local_dir": "Use storage_path.",
        "upload_dir": "Use storage_path.",
        "validation_config": "Give it to the trainer: TorchTrainer(..., validation_config=...).",
        "scaling_config": "Give it to the trainer: TorchTrainer(..., scaling_config=...).",
        "max_failures": "Use failure_config=FailureConfig(max_failures=...).",
        "num_to_keep": "Use checkpoint_config=CheckpointConfig(num_to_keep=...).",
    }

    @property
    def storage_root(self) -> str:
        """The storage path to use now: as given, else from the environment, else the default.

        A local path is absolute, with ``~`` expanded; a URL is returned as given.
        """
        path = os.fspath(self.storage_path) if self.storage_path is not None else _storage_from_environment()
        if self.storage_path is None and self.storage_filesystem is not None and "://" in path:
            raise ConfigError(
                f"RunConfig(storage_filesystem=...) without a storage_path takes that of {STORAGE_VARIABLE}="
                f"{_short(path)}, which is not a plain path on a file system. Give storage_path as well."
            )
        if "://" in path or (self.storage_filesystem is not None and self.storage_path is not None):
            return path
        return os.path.abspath(os.path.expanduser(path))

    def _contradictions(self) -> None:
        if self.storage_filesystem is None:
            return
        if self.storage_path is not None and "://" in os.fspath(self.storage_path):
            raise self._contradiction(
                ("storage_path", "storage_filesystem"),
                "with a filesystem of your own the storage path is a plain path on it",
                'Write it without the scheme, such as storage_path="bucket/runs".',
            )


def _storage_from_environment() -> str:
    path = os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE_PATH
    try:
        return _storage_path(path)
    except Refusal as refusal:
        raise ConfigError(
            f"The environment variable {STORAGE_VARIABLE}={_short(path)} cannot be used: {refusal.why}. "
            f"{refusal.fix}"
        ) from None
