"""The commit chain, which fences a controller that was taken over from committing.

Every commit first claims the next link, ``commits/{n:08d}``, with put-if-absent; a link names the lease of its
controller and the checkpoint. Then the manifest is put, if absent too. A controller commits one checkpoint after
the other, so of all its links only the last can still lack its manifest.

Taking over works on the same chain, in two steps that can fall anywhere between those of the other:

1. If the last link names a checkpoint without a manifest, a void manifest is put there. Either it wins, and the
manifest of the link's owner can never be put; or it loses, and that checkpoint is committed. 2. The next link is
claimed for the new lease, naming no checkpoint. If the other claimed it first, back to 1.

After that the other's next claim fails, for its next number is taken: it is fenced, however long it was frozen
and wherever. Links are never removed, because a number that became free again could be claimed again.

All of that relies on numbers that only grow. Where the whole directory was removed under a live controller, a second
start begins with lease 1 again. So each link also carries the random token of its lease, and a controller whose last
link is no longer there, or that finds a link of its own lease with another token, reads ``lease/NNNN``: only the owner
of the token there continues. Links of older versions carry no token, and are identified by their lease.
"""

from __future__ import annotations

import errno
import re

import msgspec
import xxhash

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.manifest import MANIFEST_NAME, OLD_MANIFEST_NAME, Manifest
from powertrain.errors import CheckpointError, FencedError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT, RECORD_BYTES_LIMIT

_TOP = "commits"
#: The largest number of a link. Manifests can hold it, and no run comes near it.
_LARGEST = 10**15
#: The lease of a link that cannot be read; real ones begin at 1.
_UNREADABLE = 0
_LARGEST_LEASE = (1 << 63) - 1


class ChainLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link: which lease claimed it and for which checkpoint; "" when the lease took the run over."""

    lease: int
    checkpoint: str
    #: Name of the checkpoint committed before it.
    parent: str = ""
    #: The random token of the lease; "" in links of versions that wrote none.
    token: str = ""
    #: Hash of the other fields; "" in links of earlier versions.
    check: str = ""


class Chain:
    """The chain as the holder of one lease extends it. Made by :meth:`take_over`; for one thread."""

    def __init__(self, storage: Storage, lease: int, head: int, token: str = "") -> None:
        self._storage = storage
        self.lease, self.token = lease, token
        #: Number of the last link known here, which this lease claimed.
        self.head = head
        #: The checkpoint of the last link while its manifest is not known to be there.
        self.unfinished = ""
        #: Why this controller was fenced, which is for good; None while it was not.
        self._fenced: FencedError | None = None

    @classmethod
    def take_over(cls, storage: Storage, lease: int, token: str = "") -> Chain:
        """Make ``lease`` the only one that can commit.

        Args:
            storage: The run's own.
            lease: The number of the lease.
            token: Its random token, which distinguishes it from a lease of the same number in a removed directory.

        Raises:
            FencedError: A later lease can commit already, or this one is no longer in the storage.
        """
        while True:
            numbers = [_number(entry.key) for entry in storage.list(_TOP)]
            head = max(numbers, default=0)
            last = _read(storage, head) if head else None
            if last is not None:
                if last.lease > lease:
                    raise _fenced(storage, lease, last.lease)
                if _is_foreign(last, lease, token):
                    refuse_if_removed(storage, lease, token)
                elif last.lease == lease and not last.checkpoint:
                    return cls(storage, lease, head, token)
                else:
                    _void(storage, last.checkpoint, lease)
            if _claim(storage, head + 1, ChainLink(lease=lease, checkpoint="", token=token)):
                if last is not None and last.lease == _UNREADABLE:
                    # It may have been in the middle of being written. If so it was whole before its writer could
                    # have missed our link, and so it is whole now.
                    _void(storage, _read(storage, head).checkpoint, lease)
                return cls(storage, lease, head + 1, token)
            _read_taken(storage, head + 1)

    def commit(self, manifest: Manifest) -> Manifest:
        """Claim a link for ``manifest`` and put it; returns it as it was put. Its files are all durable before.

        Raises :class:`FencedError` after a takeover and :class:`CheckpointError` where the name is taken. After an
        ``OSError`` it is unknown whether it was committed; the next commit, of any name, resolves that.
        """
        if self._fenced is not None:
            raise self._fenced
        try:
            return self._commit(manifest)
        except FencedError as error:
            self._fenced = error
            raise

    def check_held(self, storage: Storage) -> None:
        """Raise :class:`FencedError` where the run's directory was removed, and may be another start's by now.

        Before anything is deleted in it: names of checkpoints are the same there. ``storage`` is the run's, as patient
        as the caller is.
        """
        if self.token:
            refuse_if_removed(storage, self.lease, self.token)

    def _commit(self, manifest: Manifest) -> Manifest:
        if self.unfinished and self.unfinished != manifest.name:
            _void(self._storage, self.unfinished, self.lease)
            self.unfinished = ""
        if not self.unfinished:
            self._claim_for(manifest.name, manifest.parent)
        self._refuse_if_taken_over()
        return self._put_manifest(msgspec.structs.replace(manifest, lease=self.lease, link=self.head))

    def _claim_for(self, checkpoint: str, parent: str) -> None:
        """Claim the next link. An existing one of no other lease is a claim of ours whose reply was lost."""
        link = ChainLink(lease=self.lease, checkpoint=checkpoint, parent=parent, token=self.token)
        while not _claim(self._storage, self.head + 1, link):
            taken = _read_taken(self._storage, self.head + 1)
            if taken.lease > self.lease:
                raise _fenced(self._storage, self.lease, taken.lease)
            if _is_foreign(taken, self.lease, self.token):
                # Of a controller that is fenced because its directory was removed. Its name is not voided: our own
                # checkpoints have the same names.
                refuse_if_removed(self._storage, self.lease, self.token)
            elif taken.checkpoint == checkpoint:
                break
            else:
                _void(self._storage, taken.checkpoint, self.lease)
            self.head += 1
        self._check_last_link()  # after the claim: a directory that is removed from here on has no claim of ours in it
        self.head += 1
        self.unfinished = checkpoint

    def _check_last_link(self) -> None:
        """Raise :class:`FencedError` where the last link is gone, or not ours, and the lease with it."""
        if not self.token:
            return
        try:
            last = _read(self._storage, self.head)
        except FileNotFoundError:
            last = ChainLink(lease=self.lease, checkpoint="", token="removed")
        if _is_foreign(last, self.lease, self.token):
            refuse_if_removed(self._storage, self.lease, self.token)

    def _refuse_if_taken_over(self) -> None:
        """Raise before trying to put a manifest that the owner of the next link has blocked."""
        try:
            later = _read(self._storage, self.head + 1)
        except FileNotFoundError:
            return
        if later.lease > self.lease:
            raise _fenced(self._storage, self.lease, later.lease)
        if _is_foreign(later, self.lease, self.token):
            refuse_if_removed(self._storage, self.lease, self.token)

    def _put_manifest(self, manifest: Manifest) -> Manifest:
        key = manifest_key(manifest.name)
        if not self._storage.put_if_absent(key, mf.encode(manifest)):
            found = self._storage.get(key, limit=LARGE_RECORD_BYTES_LIMIT)
            if mf.is_void(found):
                self._refuse_if_taken_over()
                raise CheckpointError(
                    f"The checkpoint {manifest.name!r} cannot be committed: it was given up before, by this or by "
                    "another controller, and its name stays taken. Commit it under another name."
                )
            manifest = self._same_commit(found, manifest)
        else:
            self._take_back_if_removed(key)
        self.unfinished = ""
        return manifest

    def _take_back_if_removed(self, key: str) -> None:
        """Remove a manifest that was put into the directory of another start, made after ours was removed."""
        try:
            self._check_last_link()
        except FencedError:
            self._storage.delete(key)
            raise

    def _same_commit(self, found: bytes, manifest: Manifest) -> Manifest:
        """Return the manifest found in place of ``manifest`` if it is an earlier try of the same commit."""
        try:
            existing = mf.decode(found, f"The manifest of {manifest.name!r}")
        except CheckpointError as error:
            raise already_committed(self._storage, manifest.name) from error
        # The files too: in a directory that was removed and made again the numbers are those of another controller.
        same = (existing.lease, existing.link) == (manifest.lease, manifest.link)
        if not same or existing.files != manifest.files:
            raise already_committed(self._storage, manifest.name)
        return existing


def manifest_key(checkpoint: str) -> str:
    """Return the key of a checkpoint's manifest."""
    return f"checkpoints/{checkpoint}/{MANIFEST_NAME}"


def old_manifest_key(checkpoint: str) -> str:
    """Return the key of the manifest of a checkpoint of version 0.1."""
    return f"checkpoints/{checkpoint}/{OLD_MANIFEST_NAME}"


def already_committed(storage: Storage, name: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {name!r} of {without_secrets(storage.uri)!r} is committed already and stays as it is. Set "
        "it aside or "
        "discard it before committing another under that name."
    )


def tag_for(storage: Storage, lease: int) -> str:
    """Return the suffix for the names of this lease's checkpoints: "" when every earlier holder released its lease.

    A holder that did not may only be frozen. When it wakes, its uploader continues to write files under its names, so
    those names are not used again.
    """
    names = {entry.key.removeprefix("lease/") for entry in storage.list("lease")}
    earlier = [name for name in names if re.fullmatch(r"[0-9]{4,9}", name) and int(name) < lease]
    return "" if all(f"{name}.released" in names for name in earlier) else str(lease)


# --------------------------------------------------------------------------- links


def _key(number: int) -> str:
    return f"{_TOP}/{number:08d}"


def _number(key: str) -> int:
    """Return the number of a link; 0 for a file whose name no link has."""
    name = key.removeprefix(f"{_TOP}/")
    number = int(name) if re.fullmatch(r"[0-9]{8,18}", name) else 0
    return number if number <= _LARGEST else 0


def _claim(storage: Storage, number: int, link: ChainLink) -> bool:
    if number > _LARGEST:
        raise CheckpointError(
            f"{_key(number - 1)!r} in {without_secrets(storage.uri)!r} has a number that no run reaches, so it was not "
            "written by one. Remove that file."
        )
    fields = {"lease": link.lease, "checkpoint": link.checkpoint, "parent": link.parent}
    data = {**fields, "token": link.token} if link.token else fields
    return storage.put_if_absent(_key(number), msgspec.json.encode({**data, "check": _hash_of(link)}))


def _hash_of(link: ChainLink) -> str:
    fields = (link.lease, link.checkpoint, link.parent, link.token)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fields))


def _read(storage: Storage, number: int) -> ChainLink:
    """Return a link; one of the lease :data:`_UNREADABLE` where its content is damaged."""
    try:
        link = msgspec.json.decode(storage.get(_key(number), limit=RECORD_BYTES_LIMIT), type=ChainLink)
        if link.check in ("", _hash_of(link)) and 0 <= link.lease <= _LARGEST_LEASE:
            _check_name(link.checkpoint)
            return link
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, CheckpointError):
        # On a file system without hard links a link appears before its content, and a crash can cut it short.
        pass
    return ChainLink(lease=_UNREADABLE, checkpoint="")


def _read_taken(storage: Storage, number: int) -> ChainLink:
    """Return the link of a number that could not be claimed; raises :class:`CheckpointError` for an invalid link."""
    try:
        return _read(storage, number)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"The commit link {_key(number)!r} of {without_secrets(storage.uri)!r} cannot be written: something that "
            "is not a file is in its place. Move it away, or choose another run name."
        ) from error


def _check_name(checkpoint: str) -> None:
    if checkpoint:
        mf.check_file_name(checkpoint, "The commit link")


def _is_foreign(link: ChainLink, lease: int, token: str) -> bool:
    """Return True for a link of the same lease number that another controller has claimed."""
    return link.lease == lease and bool(link.token) and bool(token) and link.token != token


def refuse_if_removed(storage: Storage, lease: int, token: str) -> None:
    """Raise :class:`FencedError` where ``lease/NNNN`` is not the lease of this token any more."""
    try:
        held = msgspec.json.decode(storage.get(f"lease/{lease:04d}", limit=RECORD_BYTES_LIMIT))["token"]
    except (FileNotFoundError, NotADirectoryError):
        raise FencedError(
            f"The directory of the run, {without_secrets(storage.uri)!r}, was removed while the run was going on, so "
            f"this controller (lease {lease}) cannot commit any more. Start the run again."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return  # truncated by a crash of the machine: it does not identify the holder
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return  # damaged as well
    if held != token:
        raise _fenced(storage, lease, lease)


def _has_old_manifest(storage: Storage, checkpoint: str) -> bool:
    """Return True for a checkpoint with a manifest of version 0.1: a void manifest beside it would undo the
    commit."""
    key = old_manifest_key(checkpoint)
    return any(entry.key == key for entry in storage.list(key.rpartition("/")[0]))


def _void(storage: Storage, checkpoint: str, lease: int) -> None:
    """Close a link: from now on its checkpoint has a manifest, a true one or a void one, and that is final."""
    if checkpoint and not _has_old_manifest(storage, checkpoint):
        storage.put_if_absent(manifest_key(checkpoint), mf.void(lease))


def _fenced(storage: Storage, lease: int, by: int) -> FencedError:
    return FencedError(
        f"The run at {without_secrets(storage.uri)!r} was taken over by {_holder(storage, by)}, so this controller "
        f"(lease {lease}) "
        "cannot commit any more. Checkpoints it committed before are kept, and the other goes on from the newest "
        "of them. Stop this process; if the other one should not be running, stop it and start the run again."
    )


def _holder(storage: Storage, lease: int) -> str:
    """Return the holder of a lease as its file describes it."""
    try:
        holder = msgspec.json.decode(storage.get(f"lease/{lease:04d}", limit=RECORD_BYTES_LIMIT))
        return f"process {holder['pid']} on host {holder['host']!r} (lease {lease})"
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return f"another controller (lease {lease})"
