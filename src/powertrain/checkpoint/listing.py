"""The files at places to which ranks have uploaded a checkpoint themselves, listed within a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from powertrain.checkpoint.elsewhere import checkpoint_at, files_at, require_server
from powertrain.storage import Storage, open_storage
from powertrain.text.errors import describe_error
from powertrain.wire.values import FilePart

#: Seconds for listing a place, and where an earlier place of the run did not answer.
_LIST_TIMEOUT_S, _QUICK_LIST_TIMEOUT_S = 10.0, 2.0
_RETRY_DELAY_S = 0.5
#: Seconds beyond the timeout, in which operations of object storage end by themselves.
_GRACE_S = 1.0
#: Errors of a place that this process cannot reach, now or later.
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError)


class PlaceListings:
    """Lists the places of a run's checkpoints. For one thread.

    A listing never fails a commit, and delays it for a bounded time: without one, the ranks' own listings count.
    """

    def __init__(self, storage: Storage, pause: Callable[[float], None] = time.sleep) -> None:
        self._storage, self._pause = storage, pause
        self._has_failed = False

    def files(self, elsewhere: str) -> tuple[list[FilePart], str]:
        """Return the files at a place, with their sizes now; for none, the reason as a clause.

        A place that does not answer is tried twice, and places of later checkpoints only once and briefly.
        """
        found, error = self._try(elsewhere)
        if _is_temporary(error) and not self._has_failed:
            self._pause(_RETRY_DELAY_S)
            found, error = self._try(elsewhere)
            self._has_failed = _is_temporary(error)
        return found, describe_error(error) if error is not None else "it is empty for this process"

    def _try(self, elsewhere: str) -> tuple[list[FilePart], BaseException | None]:
        """List on a thread of its own, because a mounted file system may never answer."""
        outcome: list[tuple[list[FilePart], BaseException | None]] = []
        limit = _QUICK_LIST_TIMEOUT_S if self._has_failed else _LIST_TIMEOUT_S

        def work() -> None:
            try:
                require_server(self._storage, elsewhere, "The checkpoint")
                there = checkpoint_at(self._storage, elsewhere)
                place = open_storage(there.address, filesystem=there.given_filesystem)
                outcome.append((files_at(place.within(limit)), None))
            except Exception as error:  # also of a file system of the user's
                outcome.append(([], error))

        thread = threading.Thread(target=work, name="powertrain-listing", daemon=True)
        thread.start()
        thread.join(limit + _GRACE_S)
        if not outcome:
            outcome.append(([], TimeoutError(f"no answer within {limit:g} s")))
        return outcome[0]


def _is_temporary(error: BaseException | None) -> bool:
    """Return True for an error that may not come again."""
    return isinstance(error, OSError) and not isinstance(error, _LASTING)
