"""``CheckpointConfig`` and ``SyncConfig``: which checkpoints are kept, and how they are uploaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from powertrain.config.checks import (
    MOST_BYTES,
    Config,
    finite,
    flag,
    ignored,
    local_directory,
    one_of,
    option,
    optional,
    positive,
    text,
    whole,
)

if TYPE_CHECKING:
    pass


_OWN_LOOP = "the training loop is yours, so no one else can save in it"


def _frequency(value: Any) -> int | None:
    return optional(whole(at_least=0))(value) or None


@dataclass(frozen=True, repr=False)
class CheckpointConfig(Config):
    """Retention of the reported checkpoints.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="eval/loss", checkpoint_score_order="min")
    """

    num_to_keep: int | None = option(None, optional(whole(at_least=1)))
    """Number of checkpoints to keep; None keeps all. The newest is never deleted."""

    checkpoint_score_attribute: str | None = option(None, optional(text))
    """The reported metric that ranks checkpoints (``"eval/loss"`` selects a nested metric). None ranks them by age."""

    checkpoint_score_order: Literal["max", "min"] = option("max", one_of("max", "min"))
    """``"max"`` if the highest score is best, ``"min"`` if the lowest is."""

    checkpoint_frequency: int | None = option(None, _frequency)
    """Save the state given to ``register_state`` every so many reports; None or 0 for never. A report with a checkpoint
    of its own is left as it is."""

    checkpoint_at_end: bool | None = ignored(
        None,
        lambda value: None if value is None else flag(value) or None,
        "the loop reports its checkpoints itself",
    )
    """Ray Train's, for trainers that own the loop. Without effect: the loop reports its checkpoints itself."""

    staging_dir: str | os.PathLike[str] | None = option(None, optional(local_directory))
    """Staging directory of checkpoints on each node until they are in storage. None: on the storage itself where that
    is a local disk, else ``/var/tmp``."""

    staging_bytes: int | None = option(None, optional(whole(1, MOST_BYTES)))
    """Bytes that may wait there on one node; None for half of the free disk."""

    on_full: Literal["replace", "wait"] = option("replace", one_of("replace", "wait"))
    """The action when the staging directory is full: the oldest uncommitted checkpoint is dropped for the new one, with
    a warning; or ``report`` waits for the storage."""

    on_lost: Literal["raise", "warn"] = option("raise", one_of("raise", "warn"))
    """The action of ``fit`` when the last reported checkpoint could not be saved: raise
    :class:`~powertrain.errors.CheckpointError`, whose ``result`` is the run's; or return the result. Each loss is
    printed, and all are in ``Result.unsaved_checkpoints``, either way."""

    _moved: ClassVar[Mapping[str, str]] = {
        "_checkpoint_keep_all_ranks": "Report a checkpoint on every rank whose files are to be kept.",
        "_checkpoint_upload_from_workers": "Leave it out: files always go from their node to the storage.",
    }

    def _contradictions(self) -> None:
        if self.checkpoint_score_order == "min" and self.checkpoint_score_attribute is None:
            raise self._contradiction(
                ("checkpoint_score_attribute", "checkpoint_score_order"),
                "there is an order, but no score to put in order",
                "Name the metric in checkpoint_score_attribute, or leave checkpoint_score_order out.",
            )


class CheckpointUploadMode(Enum):
    """The way in which ``report`` passes a checkpoint to the storage.

    Example::

        report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
    """

    ASYNC = "ASYNC"
    """Training continues while the files are uploaded."""
    SYNC = "SYNC"
    """``report`` returns when the checkpoint is committed."""
    NO_UPLOAD = "NO_UPLOAD"
    """The files are already in storage; only the commit is made."""


class CheckpointConsistencyMode(Enum):
    """The state that a reader of reported checkpoints waits for.

    Example::

        get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    """

    COMMITTED = "COMMITTED"
    """The newest reported checkpoint is committed."""
    VALIDATED = "VALIDATED"
    """The newest reported checkpoint is committed and its validation has ended."""


@dataclass(frozen=True, repr=False)
class SyncConfig(Config):
    """Transfer of files to a remote storage path.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        RunConfig(sync_config=SyncConfig(sync_timeout=600))
    """

    sync_period: float = ignored(300, finite, "files are sent when they are ready")
    """Ray Train's. Without effect: files are sent when they are ready."""

    sync_timeout: float = option(1800, positive)
    """Seconds after which retries of a failing storage operation end."""

    sync_artifacts: bool = ignored(False, flag, "files to keep belong into a checkpoint")
    """Ray Tune's. Without effect: a rank's working directory is not uploaded. Put files to keep into a checkpoint, or
    write them to the storage."""

    sync_artifacts_on_checkpoint: bool = ignored(True, flag, "artifacts are not sent at all")
    """Ray Tune's. Without effect: artifacts are not uploaded at all."""

    _moved: ClassVar[Mapping[str, str]] = {
        "upload_dir": "Use RunConfig(storage_path=...).",
        "syncer": "Use RunConfig(storage_path=...), with storage_filesystem for a filesystem of your own.",
    }
