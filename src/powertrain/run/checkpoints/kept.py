"""The committed checkpoints of one run: which are kept, how they were validated, which retention deletes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from powertrain.checkpoint import cleanup, committed, retention
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.checkpoint import ReportedCheckpointStatus
from powertrain.checkpoint.manifest import Manifest
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.run.checkpoints.committer import Committer
from powertrain.storage import Storage

#: Seconds for which a deletion is tried.
_DISCARD_TIMEOUT_S = 30.0


class KeptCheckpoints:
    """Committed checkpoints that were not deleted. The controller's thread only."""

    def __init__(
        self,
        storage: Storage,
        chain: Chain,
        config: CheckpointConfig,
        committer: Committer,
        warn: Callable[[str], None],
    ) -> None:
        self._storage, self._chain, self._config = storage, chain, config
        self._committer, self._warn = committer, warn
        self._manifests = committed.committed(storage)
        self._validations = committed.validations(storage)
        self._scores_checked = False

    def __iter__(self) -> Iterator[Manifest]:
        """The manifests, oldest first, without results of validations."""
        return iter(self._manifests)

    def with_validations(self) -> list[Manifest]:
        """Return the manifests, oldest first, with the results of validations."""
        return committed.with_validations(self._manifests, self._validations)

    def add(self, manifest: Manifest) -> None:
        """Keep a checkpoint that was just committed."""
        self._manifests.append(manifest)

    # -- validations

    def validated(self, name: str, validation: Any) -> None:
        """Keep the result of a validation beside its checkpoint."""
        self._validations[name] = validation

        def record() -> None:
            self._chain.check_held(self._storage)
            committed.record_validation(self._storage, name, validation)

        self._committer.submit(record, self._on_recorded)

    def _on_recorded(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._warn(f"The result of a validation could not be kept: {error}")

    def status(self, manifest: Manifest) -> str:
        """Return the validation status of a reported checkpoint."""
        found = self._validations.get(manifest.name)
        return found.status if found is not None else "COMMITTED"

    # -- deleting

    def discard_old(self, pinned: Collection[str]) -> None:
        """Delete checkpoints beyond retention, except pinned ones."""
        self.check_scores(pinned, least=2)
        for name in retention.to_delete(
            self.with_validations(),
            num_to_keep=self._config.num_to_keep,
            score_attribute=self._config.checkpoint_score_attribute,
            score_order=self._config.checkpoint_score_order,
            pinned=frozenset(pinned),
        ):
            self._manifests = [m for m in self._manifests if m.name != name]
            self._committer.submit(self.discarding(name), self._on_discarded(name), persist=False)

    def check_scores(self, pinned: Collection[str] = (), *, least: int = 1) -> None:
        """Warn once where at least ``least`` checkpoints have no score, although one was named."""
        attribute = self._config.checkpoint_score_attribute
        if attribute is None or self._scores_checked:
            return
        pending = ReportedCheckpointStatus.PENDING_VALIDATION.value  # its validation may find the score
        manifests = [m for m in self.with_validations() if m.name not in pinned and self.status(m) != pending]
        if len(manifests) < least:
            return
        if warning := retention.missing_score(manifests, attribute):
            self._warn(warning)
        self._scores_checked = True

    def discarding(self, name: str) -> Callable[[], None]:
        """Return a function that deletes a checkpoint, for the thread of the committer."""
        # Deletions must not hold up commits.
        storage = self._storage.within(_DISCARD_TIMEOUT_S)

        def discard() -> None:
            self._chain.check_held(storage)
            cleanup.discard(storage, name)

        return discard

    def _on_discarded(self, name: str) -> Callable[[Any, BaseException | None], None]:
        def then(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self._warn(f"The checkpoint {name} is no longer needed but could not be deleted: {error}")

        return then
