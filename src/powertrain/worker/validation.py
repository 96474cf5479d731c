"""A validation's process: it calls the user's function on one committed checkpoint and sends the result to the run."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.errors import ReportError
from powertrain.storage import boundaries
from powertrain.wire.from_worker import Validated
from powertrain.wire.keys import ConnectionInfo
from powertrain.wire.link import Link
from powertrain.wire.values import ErrorReport
from powertrain.worker import failure
from powertrain.worker.scripts import script
from powertrain.worker.scripts.working_directory import (
    enter_launch_dir,
    explain_missing_path,
    launch_dir_here,
)
from powertrain.worker.values import Drop, DroppedValues, normalise, resolve

#: "package.module:function" for :class:`powertrain.engine.base.ProcessSpec`.
ENTRY = "powertrain.worker.validation:run"
#: Seconds for the run to receive the result. It may be busy, but never for so long.
_SEND_TIMEOUT_S = 60.0


class ValidationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one validation needs, as one payload."""

    connection: ConnectionInfo
    #: The checkpoint's name, where it lies, and the pickled filesystem it is on, if the user gave one.
    checkpoint: str
    path: str
    filesystem: bytes = b""
    #: The pickled (function, its keyword arguments), and those that go over them.
    function: bytes
    arguments: dict[str, Any] = {}
    #: Text of source files that exist only in the driver, by file name.
    sources: dict[str, str] = {}
    #: The launch directory, and the working directory; "" for the launch directory.
    launch_dir: str = ""
    working_dir: str = ""


def run(payload: bytes) -> int:
    """Validate in this process; returns the exit code, which is 0 when the run has received metrics."""
    boundaries.role = "validation"
    spec = msgspec.msgpack.decode(payload, type=ValidationSpec)
    _prepare(spec)
    result = validate(spec)
    is_received = _send_result(spec.connection, result)
    return 0 if is_received and result.error is None else 1


def validate(spec: ValidationSpec) -> Validated:
    """Call the user's function. Never raises for an error of the function, not even where it exits."""
    began = time.monotonic()
    metrics: dict[str, Any] = {}
    error: ErrorReport | None = None
    warnings: list[str] = []
    try:
        function, usual = script.load(spec.function)
        script.bring_to_children()
        filesystem = pickle.loads(spec.filesystem) if spec.filesystem else None
        returned = function(Checkpoint(spec.path, filesystem), **{**usual, **spec.arguments})
    except BaseException as raised:
        traceback.print_exception(type(raised), raised, raised.__traceback__)
        hint = explain_missing_path(raised, launch_dir_here(spec.launch_dir))
        error = failure.describe(raised, hint)
    else:
        try:
            metrics = _metrics_of(returned, DroppedValues(warnings.append))
        except ReportError as unfit:
            print(unfit, file=sys.stderr)
            # Nothing was raised in the user's code, so there is no line of it to show.
            error = ErrorReport(type="ReportError", message=str(unfit), traceback="")
    seconds = round(time.monotonic() - began, 3)
    return Validated(
        checkpoint=spec.checkpoint, metrics=metrics, error=error, seconds=seconds, warnings=warnings
    )


def _metrics_of(returned: Any, drop: Drop) -> dict[str, Any]:
    """Return the function's result as plain values; raises :class:`ReportError` for anything but a dict."""
    if not isinstance(returned, Mapping):
        raise ReportError(
            f"the validation function returned a {type(returned).__name__}, not a dict of metrics; return something "
            "like {'accuracy': 0.9}"
        )
    return resolve(normalise(dict(returned), drop))


def _prepare(spec: ValidationSpec) -> None:
    """Set up the import path, sources for tracebacks and the number of threads."""
    failure.remember_sources(spec.sources)
    launch_dir = launch_dir_here(spec.launch_dir)
    if launch_dir and not spec.working_dir:
        enter_launch_dir(launch_dir)
    if launch_dir and launch_dir not in sys.path:
        sys.path.insert(0, launch_dir)
    torch = sys.modules.get("torch")
    if torch is not None:  # loaded before this process was forked, so it has not read the variable
        with contextlib.suppress(ValueError):
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _send_result(connection: ConnectionInfo, result: Validated) -> bool:
    """Send the result; return True once the run has acknowledged it."""
    link = Link(connection, -1, 0)
    try:
        link.send([result], 0, 0)
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        while not link.is_acknowledged and time.monotonic() < deadline:
            link.poll(1.0)
        return link.is_acknowledged
    finally:
        link.close()
