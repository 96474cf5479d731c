"""The working directory of a rank, and an explanation for relative paths that do not exist there."""

from __future__ import annotations

import os

from powertrain.errors import EngineError

#: Path of the launch directory's files on a machine that does not have that directory.
LAUNCH_DIR_VARIABLE = "POWERTRAIN_LAUNCH_DIR"


def launch_dir_here(launch_dir: str) -> str:
    """Return the launch directory on this machine: the directory itself, or its shipped copy."""
    return os.environ.get(LAUNCH_DIR_VARIABLE) or launch_dir


def enter_launch_dir(launch_dir: str) -> None:
    """Make the launch directory the working directory of this process.

    Raises:
        EngineError: The directory was removed, or cannot be entered.
    """
    try:
        os.chdir(launch_dir)
    except OSError as error:
        raise EngineError(
            f"A rank cannot start in the directory {launch_dir!r} that the script was started in: {error.strerror}. "
            "Start the script in a directory that stays, or set RunConfig(working_dir=...)."
        ) from error


def explain_missing_path(error: BaseException | None, launch_dir: str, scratch: str = "") -> str:
    """Explain where ranks run, if ``error`` is about a relative path that does not exist; "" for any other error.

    Args:
        error: The exception of the user's function. Its causes are inspected too.
        launch_dir: The launch directory on this machine.
        scratch: The scratch directory of the node, if ranks work in one.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, FileNotFoundError) and (path := _relative_path(error)):
            return _explanation(path, launch_dir, scratch)
        error = error.__cause__ or error.__context__
    return ""


def _relative_path(error: FileNotFoundError) -> str:
    """Return the first path that the error names, if it is relative. Descriptors and URLs are not paths."""
    for name in (error.filename, error.filename2):
        if isinstance(name, (str, bytes)) and name:
            path = os.fsdecode(name)
            return "" if os.path.isabs(path) or "://" in path else path
    return ""


def _explanation(path: str, launch_dir: str, scratch: str) -> str:
    here = os.getcwd()
    is_copy = bool(os.environ.get(LAUNCH_DIR_VARIABLE))
    if scratch and os.path.realpath(here) == os.path.realpath(scratch):
        which = "the scratch directory of this node (RunConfig(working_dir='scratch'))"
    elif os.path.realpath(here) != os.path.realpath(launch_dir):
        which = ""
    elif is_copy:
        which = "the files that were brought to this node"
    else:
        which = "the directory that the script was started in"
    text = f"{path!r} is a relative path, and this rank runs in {here!r}" + (
        f", {which}. " if which else ". "
    )
    if os.path.exists(os.path.join(launch_dir, path)):
        return text + f"The path exists in {launch_dir!r}: join it to powertrain.get_context().launch_dir."
    if is_copy:
        return text + (
            "Large files, hidden files and virtual environments are not brought. Use an absolute path that every "
            "node has, or Ray's runtime_env with a working_dir."
        )
    return text + "Use an absolute path, or start the script in the directory that holds the path."
