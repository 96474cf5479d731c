"""Run a script or a module as ``__main__`` of a rank's process, like ``python script.py``, in a warm fork.

Such a script does not use Powertrain. It has no boundaries, so a stop request is delivered as a signal: SIGTERM if it
has a handler for that and the machine is preempted, otherwise SIGINT, which Python turns into KeyboardInterrupt. Any
exit after that counts as the requested one.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

from powertrain.wire.from_controller import Goto
from powertrain.worker import session, signals
from powertrain.worker.progress import StopProcess
from powertrain.worker.scripts import script
from powertrain.worker.scripts.working_directory import LAUNCH_DIR_VARIABLE


def run(program: Mapping[str, Any]) -> None:
    """Run a script or a module as the main program of this process.

    Args:
        program: ``path``, the absolute path of a script, or ``module``; ``argv``, which is ``sys.argv`` from its second
            entry on; ``name``, ``sys.argv[0]`` of a script; ``import_path``, which is ``sys.path``, [] to keep it.

    Raises:
        StopProcess: The script has ended after a stop request.
    """
    request = _StopRequest()
    session.current("powertrain run").deliver_stop(request.deliver)
    _become_new_process()
    try:
        code, main = _load(program)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = (
            main  # the second is its name in spawned processes
        )
        exec(code, main.__dict__)
        _join_threads()
    except SystemExit as error:
        if request.is_made:
            raise StopProcess(request.reason) from error
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # as the interpreter does
        raise
    except BaseException as error:
        if (
            request.is_made
        ):  # its own KeyboardInterrupt, or a collective that failed because another rank has exited
            raise StopProcess(request.reason) from error
        raise
    if request.is_made:
        raise StopProcess(request.reason)


class _StopRequest:
    """The controller's stop request, delivered as a signal."""

    def __init__(self) -> None:
        self.is_made, self.reason = False, ""

    def deliver(self, goto: Goto) -> None:
        """Signal this process. Service thread."""
        self.is_made, self.reason = True, goto.reason
        handles_sigterm = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        number = signal.SIGTERM if goto.preemption is not None and handles_sigterm else signal.SIGINT
        os.kill(os.getpid(), number)


def _become_new_process() -> None:
    """Reset the state in which a fork of the warm server differs from a new interpreter."""
    signals.leave_to_users_code()
    script.let_children_run_script()
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()


def _load(program: Mapping[str, Any]) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code of the program, and the module to execute it in; set ``sys.path`` and ``sys.argv``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if program["import_path"]:
        sys.path[:] = program["import_path"]
    if program["module"]:
        code = _load_module(program["module"], main)
        sys.argv[:] = [str(main.__file__), *program["argv"]]
        return code, main
    path = _find(program["path"])
    if os.path.dirname(path) != sys.path[0] and not program["import_path"]:
        sys.path.insert(0, os.path.dirname(path))
    sys.argv[:] = [program["name"], *program["argv"]]
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    return code, main


def _load_module(name: str, main: types.ModuleType) -> types.CodeType:
    """Return the code of a module, or of ``__main__`` in a package, as ``python -m`` finds it."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ImportError(
            f"There is no module {name!r} to run, or it has no code. Check its name and sys.path."
        )
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    main.__file__ = spec.origin
    main.__dict__["__cached__"] = spec.cached
    return code  # type: ignore[no-any-return]


def _find(path: str) -> str:
    """Return the script's path on this machine: its own path, or among the files shipped to this node."""
    if not os.environ.get(LAUNCH_DIR_VARIABLE):
        return path
    place = session.current("powertrain run").place
    name = os.path.basename(path)
    for directory in (place.run.launch_dir, *sys.path):
        if os.path.isfile(found := os.path.join(directory, name)):
            return found
    raise FileNotFoundError(
        f"The script {path!r} was not brought to {os.uname().nodename}. Start 'powertrain run' in the directory of the "
        "script."
    )


def _join_threads() -> None:
    """Join threads, as the interpreter does at exit."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
