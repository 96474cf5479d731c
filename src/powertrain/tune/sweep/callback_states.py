"""Storage of callback states (``get_state``), for the driver that restores the sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.storage import signed
from powertrain.text.errors import describe_error
from powertrain.tune.sweep.journal import record
from powertrain.values import kept_pickles

if TYPE_CHECKING:
    from collections.abc import Callable

    from powertrain.storage import Storage
    from powertrain.tune.callback import CallbackList

_KEY = "callbacks.pickle"


class CallbackStates:
    """The states of a sweep's callbacks in its directory.

    Args:
        storage: The storage of the sweep.
        callbacks: The callbacks.
        warn: Prints one sentence for the user.
    """

    def __init__(self, storage: Storage, callbacks: CallbackList, warn: Callable[[str], None]) -> None:
        self._storage, self._callbacks, self._warn = storage, callbacks, warn
        self._stored = b""

    def restore(self) -> None:
        """Restore the states of the callbacks that an earlier driver has stored."""
        try:
            self._callbacks.set_state(kept_pickles.loads(record.open_signed(self._storage, _KEY)))
        except FileNotFoundError:
            return
        except Exception as error:  # by another user, damaged, or of a class that no longer exists
            self._warn(
                f"The callbacks begin without their earlier states, which cannot be opened ({describe_error(error)})."
            )

    def store(self) -> None:
        """Store the states that have changed."""
        import cloudpickle

        try:
            states = self._callbacks.get_state()
            data = cloudpickle.dumps(states) if states is not None else b""
            if data == self._stored:
                return
            signed.put(self._storage, signed.sign(self._storage, _KEY, data))
            self._stored = data
        except Exception as error:  # an object that cannot be pickled, or a full disk: the sweep continues
            self._warn(
                f"The states of the callbacks are not kept for a restart of the sweep: {describe_error(error)}."
            )
