"""The checkpoints of one run: pending ones, committed ones, the one to resume from, those to delete.

::

    row complete ─▶ pending ─▶ uploaded by every node ─▶ committed ─▶ kept ─▶ deleted by retention
                       └────────────┴───▶ failed: warned of, and all its files are removed
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from powertrain.checkpoint import cleanup, commit, committed, contents
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.commit import Merged
from powertrain.checkpoint.listing import PlaceListings
from powertrain.checkpoint.manifest import Manifest
from powertrain.checkpoint.staging import give_back, remove_share
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.errors import CheckpointError, FencedError
from powertrain.run.checkpoints import pending as pd
from powertrain.run.checkpoints.committer import Committer
from powertrain.run.checkpoints.kept import KeptCheckpoints
from powertrain.run.checkpoints.pending import PendingCheckpoint
from powertrain.run.checkpoints.uploads import Uploaders
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.rows import Row
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.full_disk import describe_write_error, full_place
from powertrain.text.errors import message_of
from powertrain.wire.from_controller import CheckpointReply, Drop, UploadShare
from powertrain.wire.from_worker import ShareUploaded, UploadTrouble
from powertrain.wire.values import CheckpointPart
from powertrain.worker.data.shards import gaps_in, positions_in

#: Called on the controller's thread with a pending checkpoint and its manifest, or None and the reason of its failure.
Settled = Callable[[PendingCheckpoint, "Manifest | None", "BaseException | str"], None]


class CheckpointManager:
    """All checkpoints of a run. The controller's thread only. Errors of storage are warned of, never raised."""

    def __init__(
        self,
        storage: Storage,
        chain: Chain,
        config: CheckpointConfig,
        newest: Manifest | None,
        *,
        tag: str,
        committer: Committer,
        before_commit: Callable[[], object],
        settled: Settled,
        unstaged: Callable[[PendingCheckpoint, int], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``before_commit`` is called on the committer's thread; ``settled`` once for each reported checkpoint,
        ``unstaged`` for each share that has left the staging area."""
        self._storage, self._chain, self._tag = storage, chain, tag
        self._committer, self._before_commit = committer, before_commit
        self._settled, self._unstaged, self._warn, self._clock = settled, unstaged, warn, clock
        self._uploaders: Uploaders | None = None
        #: The newest committed and verified checkpoint.
        self.newest = newest
        self._kept = KeptCheckpoints(storage, chain, config, committer, warn)
        self._pending: dict[pd.Key, PendingCheckpoint] = {}
        #: Names of abandoned checkpoints whose files may still be on their way: they are not used again.
        self._spent: set[str] = set(cleanup.void_names(storage))
        #: The members whose shares make up each pending checkpoint.
        self._members: dict[pd.Key, dict[int, Member]] = {}
        #: Rows whose checkpoint has been begun in this attempt or an earlier one.
        self._begun: set[pd.Key] = set()
        #: Shares that a rank had uploaded itself before the row was complete.
        self._early: dict[pd.Key, list[ShareUploaded]] = {}
        self._has_warned_of_clash = self._has_warned_of_empty = False
        #: True while the run is ending: shares that storage refuses now stay where they are, in ``left``.
        self.last_chance = False
        self.left: list[str] = []
        #: The row that waits for room while no checkpoint can yield yet; 0 for none.
        self._wants_room = 0
        #: How often each (row, rank) has requested room, and how many have yielded to each row.
        self._calls: Counter[tuple[int, int]] = Counter()
        self._dropped: Counter[int] = Counter()
        #: The name of the checkpoint committed last, which the next refers to. The committer's thread only.
        self._parent = newest.name if newest is not None else ""
        #: The committer's thread only, too.
        self._listings = PlaceListings(storage)

    def use_uploaders(self, uploaders: Uploaders) -> None:
        """Set the uploaders. Once, before the first row closes."""
        self._uploaders = uploaders

    # -- state

    @property
    def kept(self) -> list[Manifest]:
        """Return the committed checkpoints that were not deleted, oldest first, with results of validations."""
        return self._kept.with_validations()

    @property
    def pending(self) -> list[PendingCheckpoint]:
        """Return the pending checkpoints, oldest first."""
        return sorted(self._pending.values(), key=lambda p: p.key)

    @property
    def newest_row(self) -> int:
        """Return the row of the newest checkpoint, also one that is still on its way; 0 for none."""
        on_the_way = max((pending.row for pending in self.pending), default=0)
        return max(on_the_way, self.newest.row if self.newest is not None else 0)

    def newest_path(self) -> str:
        """Return the path of the newest one; "" for none."""
        return self.value(self.newest).address if self.newest is not None else ""

    def data_positions(self) -> dict[str, dict[str, Any]]:
        """Return by dataset its position in the newest one; empty where there is none, or it was saved without data."""
        return positions_in(self.newest.extras) if self.newest is not None else {}

    def data_gaps(self) -> dict[str, int]:
        """Return by dataset how many batches were drawn without an optimizer step before the newest one, at most."""
        return gaps_in(self.newest.extras) if self.newest is not None else {}

    def value(self, manifest: Manifest) -> Checkpoint:
        return committed.checkpoint_of(self._storage, manifest)

    @property
    def _local_place(self) -> str:
        """Return the directory of all checkpoints; "" where storage has no real files."""
        return str(self._storage.local_path("checkpoints") or "")

    def place_of(self, pending: PendingCheckpoint) -> str:
        """Return the place that refused a checkpoint: a full file system, or its path in the run's storage."""
        return pending.place or without_secrets(f"{self._storage.uri}/checkpoints/{pending.name}")

    def given_names(self) -> list[str]:
        """Return the names of committed checkpoints that the user chose."""
        return [m.name for m in self._kept if m.name != contents.name_of_row(m.row, self._tag)]

    # -- pending

    def begin(self, attempt: Attempt, row: Row) -> None:
        """Begin the checkpoint of a row that is complete on all ranks."""
        parts = dict(row.parts)
        reported = [*row.metrics, *(metrics for _, metrics in sorted(row.late.items()))]
        metrics = next((m for m in reported if m is not None), {})
        if (attempt.number, row.number) in self._begun:
            self._leave_out(attempt, row)
            return
        name = self._name_of(parts, row.number)
        pending = PendingCheckpoint(
            attempt.number, row.number, name, dict(metrics), attempt.world_size, parts, self._clock()
        )
        self._pending[pending.key] = pending
        self._members[pending.key] = {rank: attempt.members[rank] for rank in parts}
        self._begun.add(pending.key)
        merged = pending.merged()
        if merged.errors:
            pending.place = next((part.error_place for part in parts.values() if part.error), "")
            self.fail(pending, "; ".join(merged.errors.values()))
            return
        if self._is_taken(pending):
            self.fail(pending, f"the run has a checkpoint named {name!r} already")
            return
        self._warn_of_clashes(merged.clashes)
        is_awaited = any(part.pending for part in parts.values())
        if merged.is_empty and not is_awaited and not self._has_warned_of_empty:
            self._has_warned_of_empty = True
            self._warn(
                f"The checkpoint {name!r} is empty: the directories that ranks reported for row {row.number} hold no "
                "file. It is committed as it is. Write files into the directory on at least one rank before report()."
            )
        pending.awaited = {rank for rank, part in parts.items() if part.pending}
        for uploaded in self._early.pop(pending.key, []):
            self.on_share_uploaded(uploaded)
        self._advance()
        self._dropped.pop(pending.row, None)  # all ranks have had room for it
        for call in [call for call in self._calls if call[0] <= pending.row]:
            del self._calls[call]
        if self._wants_room > pending.row:
            self._drop_oldest_pending(self._wants_room)

    def _leave_out(self, attempt: Attempt, row: Row) -> None:
        """Drop shares of ranks that had been declared absent: the checkpoint of their row was made without them."""
        late = PendingCheckpoint(
            attempt.number, row.number, "", {}, attempt.world_size, dict(row.parts), self._clock()
        )
        back = []
        for rank, part in sorted(late.parts.items()):
            if part.staged and part.taken:
                back.append(self._given_back(late, rank, {rank: attempt.members[rank]}))
            elif part.staged:
                remove_share(part.staged)
        reason = (
            f"ranks {sorted(late.parts)} made this report after the row had been closed without them, so their files "
            "are not in its checkpoint"
        )
        self._settled(late, None, _with_places(reason, back))

    def _order(self, pending: PendingCheckpoint) -> None:
        assert self._uploaders is not None
        pending.ordered = True
        members = self._members[pending.key]
        for rank, names in pd.shares_to_upload(pending.parts).items():
            if members[rank].exited and not self._uploaders.outlives(members[rank]):
                self.fail(pending, f"rank {rank} ended before it could upload its share of the checkpoint")
                return
            pending.awaited.add(rank)
            self._uploaders.upload(
                members[rank],
                UploadShare(
                    attempt=pending.attempt,
                    row=pending.row,
                    rank=rank,
                    checkpoint=pending.name,
                    staged=pending.parts[rank].staged,
                    names=names,
                    keeps=bool(pending.parts[rank].taken),
                ),
            )

    def _name_of(self, parts: dict[int, CheckpointPart], row: int) -> str:
        """Return the name that the lowest rank gave; the usual one where none did."""
        given = [part.checkpoint for _, part in sorted(parts.items()) if part.checkpoint]
        if len(set(given)) > 1:
            self._warn(
                f"The ranks gave the checkpoint of row {row} different names ({', '.join(sorted(set(given)))}); the "
                f"name of the lowest rank, {given[0]!r}, is used."
            )
        name = wanted = contents.final_name(row, given[0] if given else "", self._tag)
        number = 1
        while name in self._spent:
            name, number = f"{wanted}.{number}", number + 1
        if given and name != given[0]:
            self._warn(
                f"The checkpoint {given[0]!r} is stored as {name!r}: the upload of an earlier checkpoint with that "
                "name was given up, and files of it may still arrive."
            )
        return name

    def _is_taken(self, pending: PendingCheckpoint) -> bool:
        """Return True when another checkpoint, committed or pending, has this one's name."""
        others = [p.name for p in self._pending.values() if p is not pending]
        return pending.name in others or any(m.name == pending.name for m in self._kept)

    def on_share_uploaded(self, message: ShareUploaded) -> None:
        """Handle the result of an upload."""
        assert self._uploaders is not None
        self._uploaders.done((message.attempt, message.row, message.rank))
        pending = self._pending.get((message.attempt, message.row))
        if pending is None:
            if message.elsewhere or message.error:
                self._early.setdefault((message.attempt, message.row), []).append(message)
            return
        if message.rank not in pending.awaited:
            return
        if message.error:
            pending.place = message.error_place
        if message.error and self.last_chance:
            self.leave(pending, message.error)
            self._advance()
            return
        if message.error:
            self.fail(pending, message.error)
            return
        pending.arrived(message)
        if not pending.parts[message.rank].taken:  # which stays until it is committed
            self._unstaged(pending, message.rank)
        self._advance()

    def trouble(self, message: UploadTrouble) -> None:
        """Note that storage refuses a share; the upload is retried."""
        pending = self._pending.get((message.attempt, message.row))
        if pending is not None:
            pending.trouble, pending.place = message.reason, message.place

    def fail_lost_shares(self, shares: Iterable[UploadShare], why: str) -> None:
        """Fail the checkpoints of shares that are lost with their uploader."""
        for share in list(shares):
            pending = self._pending.get((share.attempt, share.row))
            if pending is not None and share.rank in pending.awaited:
                self.fail(pending, why)

    def rank_ended(self, attempt: int, rank: int) -> None:
        """Fail checkpoints whose user's upload function had not finished in a rank that is gone."""
        self._calls.clear()  # of an attempt that is over; ranks that still wait call again
        self._dropped.clear()
        for pending in self.pending:
            part = pending.parts.get(rank)
            if pending.attempt == attempt and part is not None and part.pending and rank in pending.awaited:
                self.fail(pending, f"rank {rank} ended before its checkpoint_upload_fn had returned")

    def make_staging_room(self, row: int, rank: int = 0) -> None:
        """Drop the oldest checkpoint that is not being committed, so that ``rank`` can stage the checkpoint of ``row``.

        Ranks are full at about the same time, and a dropped checkpoint makes room on all: a rank's second call for a
        row is answered by the second checkpoint dropped for that row, whichever rank called first.
        """
        self._calls[row, rank] += 1
        if self._calls[row, rank] > self._dropped[row]:
            self._drop_oldest_pending(row)

    def _drop_oldest_pending(self, row: int) -> None:
        """Drop the oldest. A rank's call for room can overtake its reports: then the first to become pending is
        dropped."""
        pending = pd.next_to_drop(self._pending, row)
        self._wants_room = row if pending is None else 0
        if pending is not None:
            self._dropped[row] += 1
            waited = self._clock() - pending.since
            why = f" ({pending.trouble})" if pending.trouble else ""
            self.fail(
                pending,
                f"it waited {waited:.0f} s for the storage{why}, the staging area is full, and the newer one of row "
                f"{row} takes its place",
            )

    def fail(self, pending: PendingCheckpoint, reason: BaseException | str) -> None:
        """Give a checkpoint up: its shares are removed, also from storage. The user's directories that were moved go
        back, and the reason names them."""
        assert self._uploaders is not None
        self._wants_room = 0
        members = self._members.get(pending.key, {})
        self._give_up(pending)
        back = []
        for rank, part in sorted(pending.parts.items()):
            if part.staged and part.taken:
                back.append(self._given_back(pending, rank, members))
            elif part.staged:
                self._uploaders.drop((pending.attempt, pending.row, rank), part.staged)
                remove_share(part.staged)
        if not self._is_taken(pending):
            self._committer.submit(self._kept.discarding(pending.name), _ignored, persist=False)
        self._settled(pending, None, _with_places(reason, back))
        self._advance()

    def _given_back(self, pending: PendingCheckpoint, rank: int, members: Mapping[int, Member]) -> str:
        """Give a share back to the user; return where its files are."""
        assert self._uploaders is not None
        part = pending.parts[rank]
        if os.path.isdir(part.staged):
            place = give_back(part.staged, part.taken)  # first: an uploader removes the rest
            self._uploaders.drop((pending.attempt, pending.row, rank), part.staged)
            self.left.append(place)
            return place
        drop = Drop(attempt=pending.attempt, row=pending.row, rank=rank, staged=part.staged, back=part.taken)
        self._uploaders.clear(members[rank], drop)
        return f"{part.taken} on {members[rank].placement.slot.host}"

    def _remove_taken(self, pending: PendingCheckpoint, members: Mapping[int, Member]) -> None:
        """Remove the directories taken from the user, now that the checkpoint is committed."""
        assert self._uploaders is not None
        for rank, part in sorted(pending.parts.items()):
            if not (part.staged and part.taken):
                continue
            if os.path.isdir(part.staged):
                remove_share(part.staged)
            else:
                drop = Drop(attempt=pending.attempt, row=pending.row, rank=rank, staged=part.staged)
                self._uploaders.clear(members[rank], drop)
            self._unstaged(pending, rank)

    def _forget(self, pending: PendingCheckpoint) -> None:
        self._pending.pop(pending.key, None)
        self._members.pop(pending.key, None)

    def _give_up(self, pending: PendingCheckpoint) -> None:
        pending.given_up = True
        self._forget(pending)
        if pending.ordered and not self._is_taken(pending):
            self._spent.add(pending.name)

    def leave(self, pending: PendingCheckpoint, reason: str) -> None:
        """Stop waiting for a checkpoint; its shares stay, or go back to the user, and the reason names the place."""
        members = self._members.get(pending.key, {})
        self._give_up(pending)
        places = []
        for rank, part in sorted(pending.parts.items()):
            if part.staged and part.taken:
                places.append(self._given_back(pending, rank, members))
            elif os.path.isdir(part.staged):
                places.append(part.staged)
        self.left += places
        self._settled(pending, None, _with_places(reason, places))

    # -- committing

    def _advance(self) -> None:
        """Upload the oldest, then commit it."""
        if (oldest := pd.next_to_upload(self._pending)) is not None:
            self._order(oldest)
        if (ready := pd.ready_to_commit(self._pending)) is not None:
            ready.committing = True
            self._submit(ready)

    def _submit(self, pending: PendingCheckpoint) -> None:
        #: The same for each try of the commit: the chain knows an earlier try by its files.
        merged: Merged | None = None

        def do() -> Manifest:
            nonlocal merged
            if pending.given_up:
                raise CheckpointError("no rank waits for it any longer")
            self._before_commit()
            if merged is None:
                merged = commit.merge_when_complete(pending.parts, self._listings)
            manifest = commit.commit(
                self._storage,
                self._chain,
                name=pending.name,
                row=pending.row,
                attempt=pending.attempt,
                files=merged.files,
                metrics=pending.metrics,
                world_size=pending.world_size,
                parent=self._parent,
                metadata=merged.metadata,
                extras={**merged.extras, **pending.own_extras},
                elsewhere=merged.elsewhere,
            )
            self._parent = manifest.name
            return manifest

        def then(manifest: Any, error: BaseException | None) -> None:
            self._warn_of_clashes(merged.clashes if merged is not None else ())
            self._committed(pending, manifest, error)

        def trouble(reason: str, place: str) -> None:
            pending.trouble, pending.place = reason, place

        self._committer.submit(do, then, trouble, place=self._local_place)

    def _warn_of_clashes(self, clashes: Sequence[str]) -> None:
        """Warn once in a run that files of ranks clash."""
        if clashes and not self._has_warned_of_clash:
            self._has_warned_of_clash = True
            self._warn(clashes[0])

    def _committed(
        self, pending: PendingCheckpoint, manifest: Manifest | None, error: BaseException | None
    ) -> None:
        if pending.given_up:
            return  # it was given up: its remains were named, and are removed or stay where they are
        if manifest is None:
            pending.place = full_place(error, self._local_place)
            text = describe_write_error(error, self._local_place) if pending.place else ""
            self.fail(pending, text or error or "unknown reason")
            return
        self._remove_taken(pending, self._members.get(pending.key, {}))
        self._forget(pending)
        self._wants_room = 0  # ranks that still lack room call again
        self.newest = manifest
        self._kept.add(manifest)
        self._settled(pending, manifest, "")
        self._advance()

    # -- validations

    def validated(self, name: str, validation: Any) -> None:
        """Store the result of a validation beside its checkpoint."""
        self._kept.validated(name, validation)

    def status(self, manifest: Manifest) -> str:
        """Return the validation status of a reported checkpoint."""
        return self._kept.status(manifest)

    # -- deleting

    def discard_old(self, pinned: Collection[str]) -> None:
        """Delete checkpoints beyond retention, except pinned ones."""
        self._kept.discard_old(pinned)

    def check_scores(self, pinned: Collection[str] = (), *, least: int = 1) -> None:
        """Warn once where at least ``least`` checkpoints have no score, although one was named."""
        self._kept.check_scores(pinned, least=least)


def described(manifest: Manifest, value: Checkpoint, status: str) -> CheckpointReply:
    """Return a committed checkpoint as a reply to workers."""
    return CheckpointReply(path=value.address, metrics=dict(manifest.metrics), status=status)


def _with_places(reason: BaseException | str, back: Sequence[str]) -> BaseException | str:
    """``reason``, and where the user's files are."""
    places = [place for place in back if place]
    if not places:
        return reason
    text = f"{message_of(reason).removesuffix('.')}. Its files are in {', '.join(places)}."
    return FencedError(text) if isinstance(reason, FencedError) else text  # which ends the run


def _ignored(_: Any, __: BaseException | None) -> None:
    """Ignore an error: remaining files are swept at the next start."""
