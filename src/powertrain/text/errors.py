"""An exception as text that can always be made and always be sent.

The ``__str__`` of an exception may be the user's code: it may raise, also a ``SystemExit``, or return half a
character that no encoder takes. None of that may replace the error that is being reported.
"""

from __future__ import annotations

from powertrain.text.redaction import redact


def message_of(error: object) -> str:
    """Return the message of ``error``, or a stand-in where its own ``__str__`` fails."""
    try:
        text = str(error)
    except BaseException as fault:
        text = f"<its message cannot be shown: {type(fault).__name__}>"
    return sendable(text)


def describe_error(error: BaseException) -> str:
    """Return "Type: message" for a sentence about ``error``; the type alone where it has no message."""
    message, name = message_of(error), type(error).__name__
    return f"{name}: {message}" if message else name


def sendable(text: str) -> str:
    """Return ``text`` without secrets of addresses, as UTF-8 can carry it: half characters are written out."""
    return redact(text).encode("utf-8", "backslashreplace").decode()
