"""Whole scripts on every rank, started as torchrun starts them: the script sets up its process group itself.

torchrun hosts the store at ``MASTER_ADDR:MASTER_PORT`` and announces it with ``TORCHELASTIC_USE_AGENT_STORE``. Here the
process of rank 0 hosts it, apart from the script that runs in it, on a socket that is open before any rank gets its
address: on the loopback interface where all ranks are on one host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.backend import Backend, BackendConfig, WorkerGroup
from powertrain.driver.engines import pick_engine
from powertrain.engine.registry import traits_of
from powertrain.errors import ConfigError
from powertrain.frameworks.ports import on_one_host
from powertrain.torch.backend import gloo_variables
from powertrain.torch.rendezvous import Rendezvous, ReservedPort, open_tcp_store
from powertrain.trainer import DataParallelTrainer
from powertrain.worker.scripts import main_script

if TYPE_CHECKING:
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.run.spec import RunSpec

#: torchrun's name of a group of workers without another role.
_ROLE = "default"
_STORE_TIMEOUT_S = 300.0


class ScriptBackend(Backend):
    """Sets the variables that torchrun sets, and serves the store of the script's process group."""

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Set every worker's variables, and make rank 0 listen."""
        workers = worker_group.workers
        one_host = on_one_host(workers)
        address = "" if one_host else workers[0].metadata.node_ip
        nodes = len({worker.metadata.node_id for worker in workers})
        host, port = worker_group.execute_single(0, _serve_store, address, len(workers))
        waiting = [
            worker_group.execute_single_async(
                worker.rank,
                _set_variables,
                {"MASTER_ADDR": host, "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": str(nodes)},
                one_host,
                worker.metadata.node_ip,
            )
            for worker in workers
        ]
        for future in waiting:
            future.result()


class ScriptConfig(BackendConfig):
    """Ranks get torchrun's variables, and set up torch themselves."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The :class:`ScriptBackend`."""
        return ScriptBackend


# --------------------------------------------------------------------------- in each worker

_port = ReservedPort()
#: The store that rank 0 serves until its process exits.
_store: Any = None


def _serve_store(address: str, world_size: int) -> tuple[str, int]:
    """Serve a store on ``address`` (loopback when it is ""), on rank 0; return its location."""
    global _store
    import torch.distributed as dist

    host, port = _port.open(address, listens=True)
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    _store = open_tcp_store(dist, Rendezvous("tcp", host, port), world_size, _port, timeout)
    return host, port


def _set_variables(of_group: Mapping[str, str], one_host: bool, address: str) -> None:
    """Set what torchrun sets beyond the variables that each rank of a run has; count optimizer steps."""
    from powertrain.torch import prepare
    from powertrain.worker import session

    place = session.current("powertrain run").place
    variables = {
        **of_group,
        "ROLE_NAME": _ROLE,
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "TORCHELASTIC_RUN_ID": place.run.name,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.update(variables)
    for name, value in {**gloo_variables(one_host, address), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}.items():
        os.environ.setdefault(name, value)
    prepare.watch_optimizer_steps()


# --------------------------------------------------------------------------- the driver's part


@dataclass(frozen=True)
class Program:
    """A script or a module, and its arguments."""

    #: As it was named: the path of a script, or with ``is_module`` the name of a module.
    target: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        if self.is_module or os.path.isfile(self.target):
            return
        if os.path.isdir(self.target):
            raise ConfigError(f"{self.target!r} is a directory, not a script. Name the file to run.")
        remedy = "Check the path."
        if not self.target.endswith(".py"):
            remedy += " A module is run with -m."
        raise ConfigError(f"The script {self.target!r} does not exist in {os.getcwd()!r}. {remedy}")

    @property
    def path(self) -> str:
        """The absolute path of the script; "" for a module."""
        return "" if self.is_module else os.path.abspath(self.target)

    @property
    def name(self) -> str:
        """A name for runs of it."""
        plain = self.target if self.is_module else Path(self.target).stem
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", plain).strip(".-") or "script"

    @contextmanager
    def as_main(self) -> Iterator[None]:
        """Make this process look as if it ran the program: its import path begins with the program's, and it is the
        file of ``__main__``, so that a cluster is sent the program's own directory."""
        main = sys.modules["__main__"]
        path, file = list(sys.path), main.__dict__.get("__file__")
        directory = os.path.dirname(os.path.realpath(self.path)) if self.path else os.getcwd()
        rest = path if sys.flags.safe_path else path[1:]
        sys.path[:] = [directory, *rest]
        if self.path:
            main.__file__ = self.path
        try:
            yield
        finally:
            sys.path[:] = path
            if file is not None:
                main.__file__ = file
            else:
                main.__dict__.pop("__file__", None)

    def for_ranks(self, *, on_this_machine: bool = True) -> dict[str, Any]:
        """Return the arguments of :func:`powertrain.worker.scripts.main_script.run`. Call it inside :meth:`as_main`.

        Nodes of a cluster keep an import path of their own: their Python may be installed elsewhere.
        """
        return {
            "path": self.path,
            "module": self.target if self.is_module else "",
            "name": self.target,
            "argv": list(self.arguments),
            "import_path": list(sys.path) if on_this_machine else [],
        }


class ScriptTrainer(DataParallelTrainer):
    """Runs one script on every worker, unchanged, as torchrun would. Made inside :meth:`Program.as_main`.

    Args:
        program: The script, or module, and its arguments.
        scaling_config: How many workers, and where.
        run_config: Name, storage, restarts, tracing.

    Example::

        program = Program("train.py", ["--epochs", "3"])
        with program.as_main():
            ScriptTrainer(program, ScalingConfig(num_workers=2), RunConfig(name="digits")).fit()
    """

    def __init__(self, program: Program, scaling_config: ScalingConfig, run_config: RunConfig) -> None:
        self._program = program
        is_here = not traits_of(pick_engine(scaling_config)).spans_nodes
        super().__init__(
            main_script.run,
            train_loop_config=program.for_ranks(on_this_machine=is_here),
            backend_config=ScriptConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
        )

        self._request.name_stem = program.name
        self._request.adjust_spec = self._adjust_spec

    def _adjust_spec(self, spec: RunSpec) -> RunSpec:
        env = {"TORCHELASTIC_MAX_RESTARTS": str(self.run_config.failure_config.max_failures)}
        is_here = self._request.starts_processes and not self._request.traits.spans_nodes
        if spec.max_workers == 1 and "OMP_NUM_THREADS" not in os.environ and is_here:
            # torchrun leaves the threads of a single process alone.
            env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        return replace(spec, runs_scripts=True, env={**env, **spec.env})
