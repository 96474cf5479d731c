"""An exception in a rank, as text that another process can show: type, message, the user's own line."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType

from powertrain.storage.full_disk import hint_about_room
from powertrain.text.errors import describe_error, message_of, sendable
from powertrain.trace.stacks.frames import OURS as _OURS
from powertrain.trace.stacks.frames import is_users
from powertrain.values.exceptions import cause_of, data_of
from powertrain.wire.values import ErrorReport

#: Messages of collectives after another rank has died.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "connection refused",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "heartbeat monitor timed out",
)
#: Messages of libraries with their own collectives after another rank has died, by exception class.
_ECHOES_OF_LIBRARIES = {
    "XGBoostError": ("/src/collective/", "allreduce failed"),
    "LightGBMError": ("socket recv error", "socket send error"),
    "OpError": ("collective ops is aborted by: error reported from",),  # TensorFlow's base class
}
#: Parts of messages about a collective, in errors of various classes: gloo's source files in JAX, TensorFlow's words.
_COLLECTIVE_WORDS = ("/gloo/transport/", "collective ops is aborted by")
#: Exceptions of a chain of causes that are named.
_MOST_CAUSES = 8
_ECHO_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


def describe(error: BaseException, hint: str = "") -> ErrorReport:
    """``error`` as text. The user's frame is the innermost one outside Powertrain and installed libraries.

    ``hint`` is a sentence about the cause that the error itself does not have; it follows the message.
    """
    frame = _users_frame(error.__traceback__)
    return ErrorReport(
        type=_type_name(error),
        message="\n".join(filter(None, (message_of(error) + hint_about_room(error), sendable(hint)))),
        traceback=sendable(
            "".join(traceback.format_exception(type(error), error, without_ours(error.__traceback__)))
        ),
        file=sendable(frame.filename) if frame else "",
        line=(frame.lineno or 0) if frame else 0,
        function=frame.name if frame else "",
        source=sendable(_source(frame)) if frame else "",
        secondary=is_echo(error),
        causes=_causes(error),
        exception=data_of(error),
    )


def _causes(error: BaseException) -> list[str]:
    """Return a line for each exception that ``error`` was raised from, with the user's line where it was raised."""
    lines: list[str] = []
    cause, is_implicit = cause_of(error)
    while cause is not None and len(lines) < _MOST_CAUSES:
        frame = _users_frame(cause.__traceback__)
        where = f" ({frame.filename}:{frame.lineno})" if frame else ""
        first = (describe_error(cause).splitlines() or [""])[0]
        lines.append(sendable(f"{'while handling' if is_implicit else 'caused by'} {first}{where}"))
        cause, is_implicit = cause_of(cause)
    return lines


def is_echo(error: BaseException) -> bool:
    """Return True when the error, or the one it was raised from, reads like the consequence of another rank's end."""
    if error.__cause__ is not None and is_echo(error.__cause__):
        return True
    if any(kind.__name__ in _ECHO_TYPES for kind in type(error).__mro__):
        return True
    text = message_of(error).lower()
    for kind in type(error).__mro__:
        if any(echo in text for echo in _ECHOES_OF_LIBRARIES.get(kind.__name__, ())):
            return True
    may_be_of_network = isinstance(error, (RuntimeError, ConnectionError)) or any(
        words in text for words in _COLLECTIVE_WORDS
    )
    return may_be_of_network and any(echo in text for echo in _ECHOES)


def remember_sources(sources: dict[str, str]) -> None:
    """Make the text of files that exist only in the driver (notebook cells) known to tracebacks here."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def without_ours(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not Powertrain's own."""
    first = tb
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or tb


def _users_frame(tb: TracebackType | None) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(tb)
    for frame in reversed(frames):
        if is_users(frame.filename):
            return frame
    return frames[-1] if frames else None


def _source(frame: traceback.FrameSummary) -> str:
    return (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
