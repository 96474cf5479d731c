"""The class form of a trainable."""

from __future__ import annotations

import copy
import functools
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.tune.trainable.resources import PlacementGroupFactory
from powertrain.values.arguments import shorten
from powertrain.worker import context, session

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint

logger = module_logger(__name__)

#: The file with the dict that ``save_checkpoint`` returned, named as Ray Tune names it.
_DICT_NAME = "_dict_checkpoint.pkl"
#: The entry of a checkpoint's metadata with the counters of a trainable.
_COUNTERS = "powertrain_trainable"


@dataclass(frozen=True)
class TrainingResult:
    """The value of :meth:`Trainable.save`: a checkpoint, and the newest result at that moment."""

    checkpoint: Checkpoint
    metrics: dict[str, Any] = field(default_factory=dict)


class Trainable:
    """The class form of a trial.

    Subclasses define :meth:`setup`, :meth:`step`, :meth:`save_checkpoint` and :meth:`load_checkpoint`.

    Args:
        config: The configuration of the trial.
        storage: Accepted for compatibility; no effect.

    Example::

        class Search(tune.Trainable):
            def setup(self, config):
                self.x = config["x"]

            def step(self):
                return {"loss": self.x**2}

        tune.Tuner(Search, param_space={"x": tune.uniform(-1, 1)}).fit()
    """

    def __init__(self, config: dict[str, Any] | None = None, storage: Any = None) -> None:
        if storage is not None:
            logger.warning(
                "Accepted as in Ray, but without effect here: %s(storage=...) (the run knows its storage).",
                type(self).__name__,
            )
        self.config: dict[str, Any] = config or {}
        self._logdir = ""
        self._is_logdir_own = False
        self._last_result: dict[str, Any] = {}
        self._start_counting()
        self.setup(copy.deepcopy(self.config))

    # -- for subclasses

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare for the first step.

        Args:
            config: A copy of the configuration.
        """

    def step(self) -> dict[str, Any]:
        """Train for one iteration and return its metrics.

        An entry "done" that is true ends the trial; "should_checkpoint" saves a checkpoint with this report.
        """
        raise NotImplementedError

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any] | str | None:
        """Save the state.

        Args:
            checkpoint_dir: The directory to write files to.

        Returns:
            A dict to be kept in place of files; or None or the directory where files were written.
        """
        raise NotImplementedError

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Restore a saved state.

        Args:
            checkpoint: The dict that :meth:`save_checkpoint` returned, or the directory with its files.
        """
        raise NotImplementedError

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switch to another configuration without a new object.

        Args:
            new_config: The configuration.

        Returns:
            Whether the object accepts it. False, the default, creates a new object.
        """
        return False

    def cleanup(self) -> None:
        """Release the resources of :meth:`setup`. Called once, also after an error."""

    def log_result(self, result: dict[str, Any]) -> None:
        """Handle a result, in the process of the trial.

        Args:
            result: The metrics of :meth:`step`, with the entries that :meth:`train` adds.
        """

    def _export_model(self, export_formats: list[str], export_dir: str) -> dict[str, Any]:
        """Write the model in other formats; return the paths by format."""
        return {}

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory | None:
        """Return the resources of a trial with this configuration; None for one CPU.

        Args:
            config: The configuration.
        """
        return None

    @classmethod
    def resource_help(cls, config: dict[str, Any]) -> str:
        """Return instructions for setting the resources of this trainable, for messages."""
        return ""

    # -- facts

    @property
    def iteration(self) -> int:
        """The number of times that :meth:`train` has returned, those before a restart included."""
        return self._iteration

    @property
    def training_iteration(self) -> int:
        """Alias of :attr:`iteration`."""
        return self._iteration

    @property
    def trial_id(self) -> str:
        """The id of the trial; "default" outside a sweep."""
        return context.get_context().get_trial_id() if session.in_worker() else "default"

    @property
    def trial_name(self) -> str:
        """The name of the trial; "default" outside a sweep."""
        return context.get_context().get_trial_name() if session.in_worker() else "default"

    @property
    def trial_resources(self) -> dict[str, float] | None:
        """The resources of the trial, by name; None outside a sweep."""
        return context.get_context().get_trial_resources() if session.in_worker() else None

    @property
    def logdir(self) -> str:
        """A directory for files of the trial.

        That of its run where this is on this machine; otherwise a temporary one, which :meth:`stop` removes.
        """
        if not self._logdir:
            directory = context.get_context().get_trial_dir() if session.in_worker() else ""
            self._is_logdir_own = not directory or "://" in directory
            self._logdir = tempfile.mkdtemp(prefix="powertrain-trial-") if self._is_logdir_own else directory
            os.makedirs(self._logdir, exist_ok=True)
        return self._logdir

    def get_config(self) -> dict[str, Any]:
        """Return the configuration."""
        return self.config

    # -- for trials

    def train(self) -> dict[str, Any]:
        """Train for one iteration.

        Returns:
            The metrics of :meth:`step` with "training_iteration", "time_this_iter_s", "time_total_s", "done",
            "timestamp", "date", "trial_id", "config", "pid" and "hostname".

        Raises:
            ConfigError: :meth:`step` returned no dict.
        """
        began = time.monotonic()
        result = self.step()
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.step() returned {shorten(result)}. Return a dict of metrics, such as "
                "{'loss': loss}."
            )
        result = dict(result)
        own_time = result.get("time_this_iter_s")
        seconds = time.monotonic() - began if own_time is None else float(own_time)
        self._count(result, seconds)
        result.setdefault("done", False)
        result.setdefault("training_iteration", self._iteration)
        result.update(self.get_auto_filled_metrics(time_this_iter=seconds, timestamp=result.get("timestamp")))
        self.log_result(result)
        self._last_result = result
        return result

    def get_auto_filled_metrics(
        self,
        now: datetime | None = None,
        time_this_iter: float | None = None,
        timestamp: int | None = None,
        debug_metrics_only: bool = False,
    ) -> dict[str, Any]:
        """Return the entries that :meth:`train` adds to every result.

        Args:
            now: The time; the current one by default.
            time_this_iter: Seconds of this iteration.
            timestamp: The time in seconds since 1970, in place of ``now``.
            debug_metrics_only: Whether to return only entries that need no iteration.
        """
        now = now or datetime.now()
        filled = {
            "trial_id": self.trial_id,
            "date": now.strftime("%Y-%m-%d_%H-%M-%S"),
            "timestamp": timestamp or int(now.timestamp()),
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": _node_address(),
        }
        if debug_metrics_only:
            return filled
        filled["time_this_iter_s"], filled["time_total_s"] = time_this_iter, self._time_total
        filled["time_since_restore"] = self._time_since_restore
        filled["iterations_since_restore"] = self._iterations_since_restore
        if self._timesteps_since_restore:
            filled["timesteps_since_restore"] = self._timesteps_since_restore
        return {**filled, "config": self.config}

    def save(self, checkpoint_dir: str | None = None) -> TrainingResult:
        """Save a checkpoint.

        Args:
            checkpoint_dir: Its directory; a new temporary one by default, which the caller removes.

        Raises:
            ConfigError: :meth:`save_checkpoint` returned something else than a dict, None or that directory.
        """
        directory = checkpoint_dir or tempfile.mkdtemp(prefix="powertrain-checkpoint-")
        try:
            return self._save_to(directory)
        except BaseException:
            if not checkpoint_dir:  # the caller cannot know its name
                shutil.rmtree(directory, ignore_errors=True)
            raise

    def _save_to(self, directory: str) -> TrainingResult:
        from powertrain.checkpoint.checkpoint import Checkpoint

        os.makedirs(directory, exist_ok=True)
        saved = self.save_checkpoint(directory)
        if isinstance(saved, Mapping):
            with open(os.path.join(directory, _DICT_NAME), "wb") as file:
                cloudpickle.dump(dict(saved), file)
        elif saved is not None and not _is_same_path(saved, directory):
            raise ConfigError(
                f"{type(self).__name__}.save_checkpoint({directory!r}) returned {shorten(saved)}. Return a dict to be "
                "kept, or write files to the directory and return None or the directory itself."
            )
        checkpoint = Checkpoint.from_directory(directory)
        checkpoint.update_metadata({_COUNTERS: self._counters()})
        return TrainingResult(checkpoint, dict(self._last_result))

    def restore(self, checkpoint_path: str | os.PathLike[str] | Checkpoint | TrainingResult) -> None:
        """Continue from a checkpoint.

        Args:
            checkpoint_path: The return value of :meth:`save`, its checkpoint, or the path of that.
        """
        from powertrain.checkpoint.checkpoint import Checkpoint

        source = (
            checkpoint_path.checkpoint if isinstance(checkpoint_path, TrainingResult) else checkpoint_path
        )
        checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
        with checkpoint.as_directory() as directory:
            self._start_counting(checkpoint.get_metadata().get(_COUNTERS))
            file = Path(directory, _DICT_NAME)
            self.load_checkpoint(cloudpickle.loads(file.read_bytes()) if file.exists() else directory)

    def reset(self, new_config: dict[str, Any], storage: Any = None) -> bool:
        """Begin another trial with the same object, if :meth:`reset_config` supports it.

        Args:
            new_config: The configuration.
            storage: Accepted for compatibility; no effect.

        Returns:
            Whether that was possible.
        """
        self._remove_own_logdir()
        self.config = new_config
        if not self.reset_config(new_config):
            return False
        self._last_result = {}
        self._start_counting()
        return True

    def export_model(self, export_formats: list[str] | str, export_dir: str | None = None) -> dict[str, Any]:
        """Write the model in other formats, as a subclass's ``_export_model`` does.

        Args:
            export_formats: The formats.
            export_dir: Where to; :attr:`logdir` by default.
        """
        formats = [export_formats] if isinstance(export_formats, str) else export_formats
        return self._export_model(formats, export_dir or self.logdir)

    def stop(self) -> None:
        """Call :meth:`cleanup`, and remove a temporary :attr:`logdir`."""
        try:
            self.cleanup()
        finally:
            self._remove_own_logdir()

    # -- counters

    def _start_counting(self, counters: Any = None) -> None:
        known = counters if isinstance(counters, Mapping) else {}
        self._iteration = int(known.get("iteration") or 0)
        self._time_total = float(known.get("time_total_s") or 0.0)
        self._timesteps_total: int | None = known.get("timesteps_total")
        self._episodes_total: int | None = known.get("episodes_total")
        self._time_since_restore = 0.0
        self._iterations_since_restore = self._timesteps_since_restore = 0

    def _counters(self) -> dict[str, Any]:
        return {
            "iteration": self._iteration,
            "time_total_s": self._time_total,
            "timesteps_total": self._timesteps_total,
            "episodes_total": self._episodes_total,
        }

    def _count(self, result: dict[str, Any], seconds: float) -> None:
        self._iteration += 1
        self._iterations_since_restore += 1
        self._time_total += seconds
        self._time_since_restore += seconds
        if (timesteps := result.get("timesteps_this_iter")) is not None:
            self._timesteps_total = (self._timesteps_total or 0) + int(timesteps)
            self._timesteps_since_restore += int(timesteps)
        if (episodes := result.get("episodes_this_iter")) is not None:
            self._episodes_total = (self._episodes_total or 0) + int(episodes)
        if self._timesteps_total is not None:
            result.setdefault("timesteps_total", self._timesteps_total)
        if self._episodes_total is not None:
            result.setdefault("episodes_total", self._episodes_total)

    def _remove_own_logdir(self) -> None:
        if self._is_logdir_own:
            shutil.rmtree(self._logdir, ignore_errors=True)
        self._logdir, self._is_logdir_own = "", False


@functools.cache
def _node_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _is_same_path(returned: Any, directory: str) -> bool:
    try:
        return bool(os.path.abspath(os.fspath(returned)) == os.path.abspath(directory))
    except TypeError:
        return False
