"""The commit chain: what keeps a controller that was taken over from committing.

Every commit first claims the next link, ``commits/{n:08d}``, with put-if-absent; a link names the lease of its
controller and the checkpoint. Then the manifest is put, if absent too. A controller commits one checkpoint after
the other, so of all its links only the last can still lack its manifest.

Taking over works on the same chain, in two steps that can fall anywhere between those of the other:

1. If the last link names a checkpoint without a manifest, a void manifest is put there. Either it wins, and the
   manifest of the one who claimed the link can never be put; or it loses, and that checkpoint is committed.
2. The next link is claimed for the new lease, naming no checkpoint. If the other claimed it first, back to 1.

After that the other's next claim fails, for its next number is taken: it is fenced, however long it was frozen
and wherever. Links are never removed, because a number that became free again could be claimed again.
"""

from __future__ import annotations

import msgspec

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from powertrain.errors import CheckpointError, FencedError
from powertrain.storage import Storage

_TOP = "commits"
#: The lease of a link that cannot be read; real ones begin at 1.
_UNREADABLE = 0


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One link: which lease claimed it and for which checkpoint; "" when the lease took the run over."""

    lease: int
    checkpoint: str
    #: Name of the checkpoint committed before it.
    parent: str = ""


class Chain:
    """The chain as the holder of one lease extends it. Made by :meth:`take_over`; for one thread."""

    def __init__(self, storage: Storage, lease: int, head: int) -> None:
        self._storage = storage
        self.lease = lease
        #: Number of the last link known here, which this lease claimed.
        self.head = head
        #: The checkpoint of the last link while its manifest is not known to be there.
        self.unfinished = ""

    @classmethod
    def take_over(cls, storage: Storage, lease: int) -> Chain:
        """Make ``lease`` the only one that can commit. Raises :class:`FencedError` when a later one can already."""
        while True:
            numbers = [_number(entry.key) for entry in storage.list(_TOP)]
            head = max(numbers, default=0)
            last = _read(storage, head) if head else None
            if last is not None:
                if last.lease > lease:
                    raise _fenced(storage, lease, last.lease)
                if last.lease == lease and not last.checkpoint:
                    return cls(storage, lease, head)
                _void(storage, last.checkpoint, lease)
            if _claim(storage, head + 1, Link(lease=lease, checkpoint="")):
                if last is not None and last.lease == _UNREADABLE:
                    # It may have been in the middle of being written. If so it was whole before its writer could
                    # have missed our link, and so it is whole now.
                    _void(storage, _read(storage, head).checkpoint, lease)
                return cls(storage, lease, head + 1)

    def commit(self, manifest: Manifest) -> Manifest:
        """Claim a link for ``manifest`` and put it; returns it as it was put. Its files are all durable before.

        Raises :class:`FencedError` after a takeover and :class:`CheckpointError` where the name is taken. After an
        ``OSError`` it is unknown whether it was committed; committing the same name again, or another, finds out.
        """
        if self.unfinished and self.unfinished != manifest.name:
            _void(self._storage, self.unfinished, self.lease)
            self.unfinished = ""
        if not self.unfinished:
            self._claim_for(manifest.name, manifest.parent)
        self._refuse_if_taken_over()
        return self._put_manifest(msgspec.structs.replace(manifest, lease=self.lease, link=self.head))

    def _claim_for(self, checkpoint: str, parent: str) -> None:
        """Claim the next link. One that lies there and is nobody else's is a claim of ours whose answer was lost."""
        link = Link(lease=self.lease, checkpoint=checkpoint, parent=parent)
        while not _claim(self._storage, self.head + 1, link):
            taken = _read(self._storage, self.head + 1)
            if taken.lease > self.lease:
                raise _fenced(self._storage, self.lease, taken.lease)
            if taken.checkpoint == checkpoint:
                break
            _void(self._storage, taken.checkpoint, self.lease)
            self.head += 1
        self.head += 1
        self.unfinished = checkpoint

    def _refuse_if_taken_over(self) -> None:
        """Who has the next link has seen to it that the manifest of ours cannot be put; say so before trying."""
        try:
            later = _read(self._storage, self.head + 1)
        except FileNotFoundError:
            return
        if later.lease > self.lease:
            raise _fenced(self._storage, self.lease, later.lease)

    def _put_manifest(self, manifest: Manifest) -> Manifest:
        key = manifest_key(manifest.name)
        if not self._storage.put_if_absent(key, mf.encode(manifest)):
            found = self._storage.get(key)
            if mf.is_void(found):
                self._refuse_if_taken_over()
                raise CheckpointError(
                    f"The checkpoint {manifest.name!r} cannot be committed: it was given up before, by this or by "
                    "another controller, and its name stays taken. Commit it under another name."
                )
            manifest = self._same_commit(found, manifest)
        self.unfinished = ""
        return manifest

    def _same_commit(self, found: bytes, manifest: Manifest) -> Manifest:
        """What was found in place of ``manifest`` if it is an earlier try of the same commit."""
        try:
            existing = mf.decode(found, f"The manifest of {manifest.name!r}")
        except CheckpointError as error:
            raise already_committed(self._storage, manifest.name) from error
        if (existing.lease, existing.link) != (manifest.lease, manifest.link):
            raise already_committed(self._storage, manifest.name)
        return existing


def manifest_key(checkpoint: str) -> str:
    """Where the manifest of a checkpoint lies."""
    return f"checkpoints/{checkpoint}/{MANIFEST_NAME}"


def already_committed(storage: Storage, name: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {name!r} of {storage.uri!r} is committed already and stays as it is. Set it aside or "
        "discard it before committing another under that name."
    )


def tag_for(storage: Storage, lease: int) -> str:
    """What sets the names of this lease's checkpoints apart: "" when every earlier holder gave its lease back.

    One that did not may only be frozen. When it wakes, its uploader goes on writing files under the names it
    knows, so those names are not used again.
    """
    names = {entry.key.removeprefix("lease/") for entry in storage.list("lease")}
    earlier = [name for name in names if name.isdecimal() and int(name) < lease]
    return "" if all(f"{name}.released" in names for name in earlier) else str(lease)


# --------------------------------------------------------------------------- links


def _key(number: int) -> str:
    return f"{_TOP}/{number:08d}"


def _number(key: str) -> int:
    name = key.removeprefix(f"{_TOP}/")
    return int(name) if name.isdecimal() else 0


def _claim(storage: Storage, number: int, link: Link) -> bool:
    return storage.put_if_absent(_key(number), msgspec.json.encode(link))


def _read(storage: Storage, number: int) -> Link:
    try:
        return msgspec.json.decode(storage.get(_key(number)), type=Link)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # On a file system without hard links a link appears before its content, and a crash can cut it short.
        return Link(lease=_UNREADABLE, checkpoint="")


def _void(storage: Storage, checkpoint: str, lease: int) -> None:
    """Settle a link: from now on its checkpoint has a manifest, a true one or a void one, and that is final."""
    if checkpoint:
        storage.put_if_absent(manifest_key(checkpoint), mf.void(lease))


def _fenced(storage: Storage, lease: int, by: int) -> FencedError:
    return FencedError(
        f"The run at {storage.uri!r} was taken over by {_holder(storage, by)}, so this controller (lease {lease}) "
        "cannot commit any more. Checkpoints it committed before are kept, and the other goes on from the newest "
        "of them. Stop this process; if the other one should not be running, stop it and start the run again."
    )


def _holder(storage: Storage, lease: int) -> str:
    """The holder of a lease as its file describes it."""
    try:
        holder = msgspec.json.decode(storage.get(f"lease/{lease:04d}"))
        return f"process {holder['pid']} on host {holder['host']!r} (lease {lease})"
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return f"another controller (lease {lease})"
