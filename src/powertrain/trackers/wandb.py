"""Points as history of a W&B run, sent by W&B's own process or kept in its files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.config.checks import Config, one_of, option, optional, replace, text
from powertrain.errors import ConfigError
from powertrain.trackers.base import RunEnding, TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.settings import file_path, require, tracker_name

#: W&B's file: a head, then records in blocks, as LevelDB writes its log.
_FILE_HEAD_BYTES, _BLOCK_BYTES = 7, 32 << 10
_RECORD_HEAD = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
#: Exit codes that W&B shows as "finished" and "failed".
_EXIT_CODES = {"finished": 0, "stopped": 0}


@dataclass(frozen=True, repr=False)
class WandB(Config, Tracker):
    """Sends the numbers of rank 0's reports to a W&B run, with ``train_loop_config`` as its config.

    The account is that of ``wandb login`` or WANDB_API_KEY. W&B's own process keeps points in a file of this machine
    and sends them; what it could not send is there for ``wandb sync``.

    Args:
        project: The project. None: the variable WANDB_PROJECT, else W&B's default.
        entity: The user or team. None: the variable WANDB_ENTITY, else the account's default.
        mode: "online", "offline" (files only) or "shared". None: the variable WANDB_MODE, else "online".
        directory: Where W&B keeps its files. None: the run's directory, which then has a ``wandb``.
        group: Groups runs on W&B's pages, such as the trials of a sweep.
        name: Names the tracker where a run has several of its kind.

    Raises:
        ConfigError: A value cannot be used.

    Example::

        RunConfig(trackers=[powertrain.trackers.WandB(project="digits", mode="offline")])
    """

    project: str | None = option(None, optional(text))
    entity: str | None = option(None, optional(text))
    mode: str | None = option(None, optional(one_of("online", "offline", "shared")))
    directory: str | os.PathLike[str] | None = option(None, optional(file_path))
    group: str | None = option(None, optional(text))
    name: str = option("wandb", tracker_name)

    def settled(self, directory: str) -> WandB:
        """Return the tracker with its settings from the environment filled in."""
        require(self.name, "wandb", "wandb")
        kept = self.directory or directory
        if not kept:
            raise ConfigError(
                "The tracker 'wandb' keeps its files in the run's directory, which is in an object store here. Give a "
                "directory of this machine: WandB(directory=...)."
            )
        return replace(
            self,
            directory=kept,
            project=self.project or os.environ.get("WANDB_PROJECT") or None,
            entity=self.entity or os.environ.get("WANDB_ENTITY") or None,
        )

    def open(self, run: TrackedRun) -> TrackerSession:
        """Open the run whose id is the run's key: W&B makes it where it is missing."""
        return _WandBSession(self, run)


class _WandBSession(TrackerSession):
    def __init__(self, settings: WandB, run: TrackedRun) -> None:
        import wandb

        directory = os.fspath(settings.directory or run.directory)
        os.makedirs(directory, exist_ok=True)
        self.id = run.id or run.key
        # W&B's process writes its file a little later than log() returns, so the file shows which points have arrived.
        in_files = newest_step(Path(directory, "wandb"), self.id)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            name=run.name,
            id=self.id,
            resume="allow",
            mode=settings.mode,  # type: ignore[arg-type]
            dir=directory,
            config={**run.params, **{f"powertrain/{name}": tag for name, tag in run.tags.items()}},
            notes=run.path,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )
        self.last_step = run.last_step if in_files is None else in_files

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Hand points to W&B's process."""
        for point in points:
            self._run.log({**point.numbers, "_timestamp": point.time}, step=point.step, commit=True)

    def finish(self, ending: RunEnding) -> None:
        """Record the end in the summary; W&B's process writes and sends its points."""
        summary = {
            "powertrain/state": ending.state,
            "powertrain/reason": ending.reason,
            "powertrain/findings": ", ".join(ending.findings),
        }
        self._run.summary.update(summary)
        self._run.finish(exit_code=_EXIT_CODES.get(ending.state, 1))

    def close(self) -> None:
        """Make W&B's process flush its points. Idempotent."""
        self._run.finish()


def newest_step(directory: Path, run_id: str) -> int | None:
    """The newest step in W&B's files of a run below ``directory``; None where there is no file, or of another form."""
    from wandb.proto import wandb_internal_pb2

    make: Any = getattr(wandb_internal_pb2, "Record", None)  # its module says nothing of types
    if make is None:
        return None

    newest = None
    for path in sorted(directory.glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        newest = newest or 0
        for data in _records(path.read_bytes()):
            record = make()
            try:
                record.ParseFromString(data)
            except Exception:  # of a version that writes another form: the run's own cursor counts
                return None
            if record.WhichOneof("record_type") == "history":
                newest = max(newest, _step_of(record.history))
    return newest


def _step_of(history: Any) -> int:
    if history.HasField("step"):
        return int(history.step.num)
    steps = [item.value_json for item in history.item if [item.key, *item.nested_key][-1] == "_step"]
    return int(steps[0]) if steps else 0


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file, up to one that its writer has not finished."""
    place = _FILE_HEAD_BYTES
    parts: list[bytes] = []
    while place + _RECORD_HEAD.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _RECORD_HEAD.size:  # the rest of a block is filled with zeros
            place += left
            continue
        _, length, kind = _RECORD_HEAD.unpack_from(data, place)
        start = place + _RECORD_HEAD.size
        piece = data[start : start + length]
        if len(piece) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        parts = [piece] if kind in (_FULL, _FIRST) else [*parts, piece]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
        place = start + length
