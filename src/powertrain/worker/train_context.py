"""``TrainContext``: facts about a rank and its run, returned by ``get_context``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from powertrain.text.redaction import strip_secrets
from powertrain.worker.checkpoints.storage_context import StorageContext

if TYPE_CHECKING:
    from powertrain.worker.data.batch_plan import BatchPlan
    from powertrain.worker.place import Place
    from powertrain.worker.progress import Boundaries


class TrainContext:
    """Facts about this rank and its run. Every getter of Ray Train's context is here."""

    def __init__(self, place: Place, boundaries: Boundaries) -> None:
        self._place, self._boundaries = place, boundaries

    def __repr__(self) -> str:
        p = self._place
        return (
            f"TrainContext(rank={p.rank}, world_size={p.world_size}, run={p.run.name!r}, attempt={p.attempt})"
        )

    @property
    def launch_dir(self) -> str:
        """Return the directory the driver was started in; it is on ``sys.path`` of every worker."""
        return self._place.run.launch_dir

    def get_world_rank(self) -> int:
        """Return this rank, from 0, over all nodes."""
        return self._place.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self._place.world_size

    def get_local_rank(self) -> int:
        """Return this rank among those of its node; also the index of its GPU."""
        return self._place.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return self._place.local_world_size

    def get_node_rank(self) -> int:
        """Return the number of this node, from 0."""
        return self._place.node_rank

    def get_experiment_name(self) -> str:
        """Return the run's name; in a trial of a sweep, that of the sweep."""
        return self._place.run.sweep or self._place.run.name

    def get_trial_name(self) -> str:
        """Return the run's name: a trial of a sweep is an ordinary run."""
        return self._place.run.name

    def get_trial_id(self) -> str:
        """Return the run's name, which identifies it; in a trial of a sweep, the id of the trial."""
        return self._place.run.trial_id or self._place.run.name

    def get_trial_resources(self) -> dict[str, float]:
        """Return the resources of this worker, by name."""
        return dict(self._place.run.resources)

    def get_trial_dir(self) -> str:
        """Return the run's directory in storage, without credentials."""
        return strip_secrets(self._place.run.path)

    def get_storage(self) -> StorageContext:
        """Return the storage path under which runs lie, with its file system and the places of this run.

        It is the path as text. For a loop that uploads checkpoints by itself::

            path = get_context().get_storage().build_checkpoint_path_from_name(f"epoch-{epoch}")
            torch.distributed.checkpoint.save(state, checkpoint_id=path)
            report(metrics, Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        """
        place = self._place
        return StorageContext(place.run.storage_path, place.run.name, place.run.filesystem)

    def get_metadata(self) -> dict[str, Any]:
        """Return the ``metadata=`` of the trainer."""
        return dict(self._place.run.metadata)

    def get_attempt(self) -> int:
        """Return how many times this run was started before, failures and resumes counted."""
        return self._place.attempt

    def resize_pending(self) -> bool:
        """Return True when the run will continue with another number of workers after its next checkpoint.

        The same on every rank at the same place of its loop. A loop that saves rarely can save and report now; one
        whose state is registered, or that asks :func:`should_checkpoint`, need not care.
        """
        return self._boundaries.resize_to > 0

    def batch_plan(self, global_batch_size: int, max_micro_batch: int | None = None) -> BatchPlan:
        """Return this rank's part of each optimizer step, for one global batch size at any world size.

        A model from ``prepare_model`` weighs this rank's gradient accordingly, by the plan that was made or iterated
        last: see :class:`BatchPlan`.

        Args:
            global_batch_size: Samples of one optimizer step, over all ranks.
            max_micro_batch: The most samples that fit on the device at once; None for no limit.

        Returns:
            The plan: the micro-batches of this rank, and the weight of its gradient.

        Example::

            plan = powertrain.get_context().batch_plan(global_batch_size=256, max_micro_batch=32)
        """
        from powertrain.worker.data import batch_plan

        place = self._place
        found = batch_plan.plan(global_batch_size, place.rank, place.world_size, max_micro_batch)
        batch_plan.gradient_weight.set(found.weight)
        return replace(found, begin=batch_plan.gradient_weight.set)
