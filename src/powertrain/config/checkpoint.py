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
    """Which of the reported checkpoints are kept."""

    num_to_keep: int | None = option(None, optional(whole(at_least=1)))
    """How many checkpoints to keep; None keeps all. The newest is never deleted."""

    checkpoint_score_attribute: str | None = option(None, optional(text))
    """The reported metric that ranks checkpoints (``"eval/loss"`` looks inside nested metrics). None ranks
    them by age."""

    checkpoint_score_order: Literal["max", "min"] = option("max", one_of("max", "min"))
    """Whether the highest or the lowest score is best."""

    checkpoint_frequency: int | None = option(None, _frequency)
    """Save what ``register_state`` was given every so many reports; None or 0 for never. A report that brings a
    checkpoint of its own is left as it is."""

    checkpoint_at_end: bool | None = ignored(
        None,
        lambda value: None if value is None else flag(value) or None,
        "the loop reports its checkpoints itself",
    )
    """Ray Train's, for trainers that own the loop. Without effect: the loop reports its checkpoints itself."""

    staging_dir: str | os.PathLike[str] | None = option(None, optional(local_directory))
    """Where checkpoints wait on each node until they are in storage. None: on the storage itself where that is a
    local disk, else ``/var/tmp``."""

    staging_bytes: int | None = option(None, optional(whole(1, MOST_BYTES)))
    """How many bytes may wait there on one node; None for half of what is free."""

    on_full: Literal["replace", "wait"] = option("replace", one_of("replace", "wait"))
    """What happens when no more may wait: the oldest that is not committed yet gives way to the new one, which is
    told; or ``report`` waits for the storage."""

    on_lost: Literal["raise", "warn"] = option("raise", one_of("raise", "warn"))
    """What ``fit`` does when the checkpoint that was reported last could not be saved: raise
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
    """How ``report`` hands a checkpoint to the storage."""

    ASYNC = "ASYNC"
    """Training goes on while the files travel."""
    SYNC = "SYNC"
    """``report`` returns when the checkpoint is committed."""
    NO_UPLOAD = "NO_UPLOAD"
    """The files are already where they belong; only the commit is made."""


class CheckpointConsistencyMode(Enum):
    """What a reader of reported checkpoints waits for."""

    COMMITTED = "COMMITTED"
    """The newest reported checkpoint is committed."""
    VALIDATED = "VALIDATED"
    """The newest reported checkpoint is committed and its validation has ended."""


@dataclass(frozen=True, repr=False)
class SyncConfig(Config):
    """How files reach a remote storage path."""

    sync_period: float = ignored(300, finite, "files are sent when they are ready")
    """Ray Train's. Without effect: files are sent when they are ready."""

    sync_timeout: float = option(1800, positive)
    """Seconds after which an operation on the storage that keeps failing is given up."""

    sync_artifacts: bool = ignored(False, flag, "files to keep belong into a checkpoint")
    """Ray Tune's. Without effect: a rank's working directory is not sent anywhere. Put files to keep into a checkpoint,
    or write them to the storage."""

    sync_artifacts_on_checkpoint: bool = ignored(True, flag, "artifacts are not sent at all")
    """Ray Tune's. Without effect: artifacts are not sent at all."""

    _moved: ClassVar[Mapping[str, str]] = {
        "upload_dir": "Use RunConfig(storage_path=...).",
        "syncer": "Use RunConfig(storage_path=...), with storage_filesystem for a filesystem of your own.",
    }
