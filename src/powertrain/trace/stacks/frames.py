"""Classification of frames, to locate a rank in the user's own code.

:mod:`powertrain.text.tracebacks` determines which files belong to this package or to installed ones.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FrameType

from powertrain.text.tracebacks import OURS as OURS
from powertrain.text.tracebacks import is_installed
from powertrain.wire.values import Frame, ProcessStack, Where

#: (file, line, function) of one frame.
Line = tuple[str, int, str]

#: The function that calls the user's function. Outer frames belong to the launcher of the rank.
_LAUNCHER = f"worker{os.sep}main.py"
#: Parts of torch.distributed that enclose whole computations; where they communicate, they call the other parts.
_ENCLOSING = ("fsdp", "checkpoint", "elastic", "pipelining", "optim", "tensor", "algorithms", "launcher")
#: Directories of editors' debuggers; other debuggers are installed packages.
_DEBUGGERS = frozenset({"debugpy", "_pydevd_bundle", "pydevd.py"})
_INSTALLED_DEBUGGERS = frozenset({"pdb.py", "bdb.py", "ipdb", "pudb"})
#: Functions that only forward a call, and are not meaningful as its name.
_PASS_ON = frozenset(
    {"wrapper", "wrapped", "inner", "_fn", "decorate_context", "_wrapped_call_impl", "_call_impl", "<lambda>"}
)


@lru_cache(maxsize=8192)
def kind_of(file: str) -> str:
    """Return the owner of a file: "user"; "launcher", "run" or "ours" within this package; "debugger", "collective",
    "loader", "compiler", "autograd" or "library" within installed ones."""
    if file.startswith(OURS):
        inner = file[len(OURS) :]
        if inner == _LAUNCHER:
            return "launcher"
        return "run" if inner.startswith(f"worker{os.sep}") or inner == "collective.py" else "ours"
    parts = file.split(os.sep)
    if not _DEBUGGERS.isdisjoint(parts):
        return "debugger"
    if not is_installed(file):
        return "user"
    if not _INSTALLED_DEBUGGERS.isdisjoint(parts):
        return "debugger"
    below = _within_packages(parts)
    return _part_of_torch(below[1:]) if below[:1] == ["torch"] else "library"


def _within_packages(parts: list[str]) -> list[str]:
    """Return the path below the directory of installed packages: an environment may be called "torch" too."""
    ends = [place for place, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    if ends:
        return parts[ends[-1] + 1 :]
    # Installed from a copy of its sources.
    return parts[parts.index("torch") :] if "torch" in parts else parts


def _part_of_torch(inner: list[str]) -> str:
    if inner[:1] == ["distributed"]:
        encloses = inner[1:2] and inner[1] in _ENCLOSING and inner[1:3] != ["fsdp", "_fully_shard"]
        return "library" if encloses else "collective"
    if inner[:2] == ["utils", "data"]:
        return "loader"
    if inner[:2] in (["_dynamo", "convert_frame.py"], ["_inductor", "compile_fx.py"]):
        return "compiler"
    return "autograd" if inner[:1] in (["autograd"], ["_tensor.py"]) else "library"


def is_users(file: str) -> bool:
    """Return whether a file is outside this package and installed packages."""
    return kind_of(file) == "user"


def lines_of(innermost: FrameType | None) -> Iterator[Line]:
    """Return the frames of a thread, innermost first."""
    frame = innermost
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back


def source(file: str, line: int) -> str:
    """Return the source text of a line; "" if it is not known."""
    return linecache.getline(file, line).strip() if line > 0 else ""


def as_frame(line: Line) -> Frame:
    """Return a frame with its source text; characters that cannot be encoded are escaped."""
    file, number, function = line
    return Frame(
        file=_sendable(file),
        line=number,
        function=_sendable(function),
        source=_sendable(source(file, number)),
    )


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def where(lines: Iterable[Line], averages_gradients: bool) -> Where | None:
    """Return the location of a thread: the user's innermost frame and its wait. ``lines`` has the innermost first.

    Without a user's frame, the outermost library frame is used. ``averages_gradients`` tells that a backward pass waits
    for other ranks. ``None`` for no frames.
    """
    within: list[Line] = []
    for line in lines:
        kind = kind_of(line[0])
        if kind == "user":
            inside = _inside(within, averages_gradients)
            return Where(frame=as_frame(line), inside=inside, call=_call(within, inside))
        within.append(line)
        if kind == "launcher":
            break
    return _where_without_user(within, averages_gradients) if within else None


def _where_without_user(within: list[Line], averages_gradients: bool) -> Where:
    """Return the location of a rank without a user's frame: it is starting, or waits for a command."""
    foreign = [line for line in within if not line[0].startswith(OURS)]
    telling = [line for line in foreign if line[2] not in _PASS_ON] or foreign or within
    outermost = telling[-1]
    inside = _inside(within, averages_gradients) or ("" if foreign else "run")
    return Where(frame=as_frame(outermost), inside=inside, call=_name(outermost))


def _inside(within: list[Line], averages_gradients: bool) -> str:
    """Return the kind of the innermost meaningful frame."""
    for file, _, function in within:
        kind = kind_of(file)
        if kind in ("collective", "loader", "run"):
            return kind
        if kind == "compiler" and function.rpartition(".")[2] not in _COMPILED_CALLS:
            return "compiler"
        if kind == "autograd" and averages_gradients and function.rpartition(".")[2] in _BACKWARD:
            return "collective"
    return ""


def is_in_backward(lines: Iterable[Line]) -> bool:
    """Return whether the user's innermost frame waits for a backward pass."""
    within = itertools.takewhile(lambda line: kind_of(line[0]) != "user", lines)
    return any(name == "_engine_run_backward" for _, _, name in within)


def is_in_compiler(lines: Iterable[Line]) -> bool:
    """Return whether a thread compiles."""
    return _inside(list(lines), False) == "compiler"


_BACKWARD = frozenset({"_engine_run_backward", "backward"})
#: Functions in the compiler's files that call what was compiled before.
_COMPILED_CALLS = frozenset({"run", "deferred_cudagraphify", "cudagraphify"})


def _call(within: list[Line], inside: str) -> str:
    """Return the function called by the user's frame, skipping functions that only forward a call."""
    for line in reversed(within):
        if _name(line) not in _PASS_ON and (inside == "run" or not line[0].startswith(OURS)):
            return _name(line)
    return _name(within[-1]) if within else ""


def _name(line: Line) -> str:
    return line[2].rpartition(".")[2]


def where_of(process: ProcessStack, averages_gradients: bool = True) -> Where | None:
    """Return the location of a process read from outside: by its main thread, without C frames."""
    for thread in process.threads:
        if thread.main:
            lines = ((frame.file, frame.line, frame.function) for frame in thread.frames if frame.line > 0)
            return where(lines, averages_gradients)
    return None


def is_debugged(lines: Iterable[Line]) -> bool:
    """Return whether a debugger is on the stack of a rank's thread, as while it waits for a command."""
    for file, _, _ in lines:
        kind = kind_of(file)
        if kind == "debugger":
            return True
        if kind == "launcher":
            return False
    return False


def averages_gradients() -> bool:
    """Return whether this process is one of several in a torch process group. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    try:
        return (
            distributed is not None and distributed.is_initialized() and int(distributed.get_world_size()) > 1
        )
    except Exception:  # torch is being imported, set up or shut down in another thread
        return False
