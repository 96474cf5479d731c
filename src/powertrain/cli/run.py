"""``powertrain run``: an existing torchrun script, unchanged, as a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.common.output import print_line, print_message
from powertrain.errors import ConfigError, PreemptedError, WorkerGroupError

if TYPE_CHECKING:
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.torch.launcher import Program

#: Exit codes after Ctrl-C and after SIGTERM.
_INTERRUPTED, _PREEMPTED = 130, 143
_ENGINES = ("auto", "local", "ray")


def run(
    script: Annotated[str, typer.Argument(help="The script to run on every rank; with -m, a module.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Its own arguments: everything after SCRIPT.", show_default=False),
    ] = None,
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc", "--num-workers", "--nproc-per-node", "--nproc_per_node",
            help="Ranks to start: a number, 'gpu', 'cpu', or 'auto' for one per GPU, or per core without any.",
        ),
    ] = "1",
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as in python -m.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run; the script's name and the time when omitted.", show_default=False
        ),
    ] = None,
    storage_path: Annotated[
        str | None,
        typer.Option(
            "--storage-path", "--storage", show_default=False,
            help="Storage path of the run; the default storage path when omitted.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", "--max_restarts", min=-1,
            help="Restarts of all ranks after failures; -1 for no limit.",
        ),
    ] = 0,
    engine: Annotated[str, typer.Option(help="auto, local (this machine) or ray (a cluster).")] = "auto",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; with it the engine is ray.", show_default=False)
    ] = None,
    use_gpu: Annotated[
        bool | None,
        typer.Option(
            "--use-gpu/--no-gpu",
            help="One GPU per rank, or none. When omitted: one, if this machine has enough.",
            show_default=False,
        ),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without progress after which a rank counts as failed.", show_default=False),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="Trace the steps, and print a diagnosis at the end.")
    ] = True,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
) -> None:  # fmt: skip
    """Run a torchrun script unchanged, with restarts, logs, hang detection and a diagnosis. Exits with its exit code.

    Each rank gets the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...) and sets up its process group
    itself. Options for powertrain come before the script; everything after it is passed to the script.
    """
    from powertrain.config.failure import FailureConfig
    from powertrain.config.run import RunConfig
    from powertrain.torch.launcher import Program

    program = Program(script, tuple(args or ()), is_module)
    run_config = RunConfig(
        name=name,
        storage_path=storage_path,
        failure_config=FailureConfig(max_failures=max_restarts, hang_timeout_s=hang_timeout),
        trace=trace,
    )
    scaling = _scaling(nproc, engine, address, use_gpu)
    with program.as_main():
        code = _fit(program, scaling, run_config)
    if code:
        raise typer.Exit(code)


def _fit(program: Program, scaling: ScalingConfig, run_config: RunConfig) -> int:
    """Run the program to its end; returns the exit code."""
    from powertrain.torch.launcher import ScriptTrainer

    try:
        ScriptTrainer(program, scaling, run_config).fit()
    except WorkerGroupError as error:
        print_message(f"Error: {error}", err=True)
        return _exit_code(error)
    except PreemptedError as error:
        print_line(str(error), err=True)
        return _PREEMPTED
    except KeyboardInterrupt as error:
        print_line(str(error) or "interrupted", err=True)
        return _INTERRUPTED
    return 0


def _exit_code(error: WorkerGroupError) -> int:
    """Return the exit code of the rank that failed first and not because of another."""
    failures = [getattr(failed, "failure", None) for failed in error.worker_failures.values()]
    known = [failure for failure in failures if failure is not None]
    first = next((failure for failure in known if not failure.secondary), known[0] if known else None)
    return first.exit_code if first is not None else 1


def _scaling(nproc: str, engine: str, address: str | None, use_gpu: bool | None) -> ScalingConfig:
    from powertrain.config.scaling import ScalingConfig
    from powertrain.engine import resources
    from powertrain.engine.registry import traits_of
    from powertrain.tasks import is_on_ray

    if engine not in _ENGINES:
        raise ConfigError(f"--engine={engine} is not one of {', '.join(_ENGINES)}.")
    if engine == _ENGINES[0]:
        engine = "ray" if address is not None or is_on_ray() else "local"
    is_here = not traits_of(engine).spans_nodes
    if address is not None and is_here:
        raise ConfigError(
            f"--address names a Ray cluster, and --engine={engine} runs on this machine. Leave one out."
        )
    gpus = len(resources.detect({}).gpus) if is_here else 0
    workers = _worker_count(nproc, gpus)
    if use_gpu is None:
        use_gpu = is_here and gpus >= workers
    return ScalingConfig(
        num_workers=workers,
        use_gpu=use_gpu,
        engine=engine,
        engine_options={"address": address} if address is not None else {},
    )


def _worker_count(nproc: str, gpus: int) -> int:
    """Return the number of ranks of ``--nproc``, as torchrun parses it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if nproc in ("gpu", "cpu", "auto"):
        count = {"gpu": gpus, "cpu": cores, "auto": gpus or cores}[nproc]
        if not count:
            raise ConfigError("--nproc=gpu needs a GPU, and this machine has none. Give a number, or 'cpu'.")
        return count
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc={nproc} is not valid: give a number from 1 on, 'gpu', 'cpu' or 'auto'.")
    return int(nproc)
