"""The return value of rank 0's function, kept in the run for other processes.

It is pickled, and signed (:mod:`powertrain.storage.signed`): only values that this user wrote are unpickled, unless the
caller trusts them.
"""

from __future__ import annotations

from typing import Any

from powertrain.errors import ConfigError, StorageError
from powertrain.storage import Storage, signed
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import data_size
from powertrain.text.errors import describe_error
from powertrain.values import kept_pickles

#: In the run's directory, with its signature beside it.
KEY = "return_value.pickle"
#: A larger value is not kept: the end of the run would wait for it.
LARGEST = 10**9


def store(storage: Storage, data: bytes) -> str:
    """Keep a pickled value in its run; returns "" or why it could not be kept."""
    if not data:
        return ""
    if len(data) > LARGEST:
        return f"it takes {data_size(len(data))}, more than the limit of {data_size(LARGEST)}"
    try:
        signed.put(storage, signed.sign(storage, KEY, data))
    except Exception as error:  # of storage or of the key: the run itself is over, and well
        return describe_error(error)
    return ""


def remove(storage: Storage) -> None:
    """Forget the value of an earlier start."""
    signed.delete(storage, KEY)


def load(storage: Storage, *, trust: bool = False) -> bytes:
    """Return the pickled value of a run.

    Args:
        storage: The run's storage.
        trust: Return it without a look at its signature.

    Raises:
        StorageError: It is not there or cannot be read; or, unless ``trust``, it was not written by this user on this
            machine, or the key that would show this cannot be relied on.
    """
    place = without_secrets(storage.uri)
    try:
        return storage.get(KEY, limit=LARGEST) if trust else signed.get(storage, KEY, limit=LARGEST)
    except FileNotFoundError:
        raise StorageError(
            f"The run at {place!r} returned a value that was not kept in its directory: it was too large, or storage "
            "did not take it, or its process was killed just then; or it is on its way there. Where the run has only "
            "just ended, try again; otherwise only the process that trained had it."
        ) from None
    except OSError as error:
        raise StorageError(
            f"The return value of the run at {place!r} cannot be read: {error.strerror or error}. Make {KEY} and its "
            "signature readable."
        ) from error
    except ConfigError as error:
        raise StorageError(f"The return value of the run at {place!r} cannot be checked: {error}") from error
    except signed.NotOurs:
        raise StorageError(
            f"The return value of the run at {place!r} was not written by you on this machine, and opening it could "
            "run arbitrary code. Open it as the user and on the machine that trained; or, if you trust all who can "
            "write to that directory, call result.open_return_value(trust=True)."
        ) from None


def opened(data: bytes) -> Any:
    """Return the unpickled value; None for no bytes. Executes the pickle."""
    if not data:
        return None
    try:
        return kept_pickles.loads(data)
    except (ImportError, AttributeError) as error:  # its classes are not here
        raise StorageError(
            f"The return value of the run cannot be opened in this process: {error}. Make its types "
            "importable here, or return plain values."
        ) from error
