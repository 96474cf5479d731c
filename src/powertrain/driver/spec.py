"""Values that the driver writes into the spec and the record of a run."""

from __future__ import annotations

import getpass
import os
import pickle
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

from powertrain.config.run import RunConfig
from powertrain.config.trace import TraceConfig
from powertrain.errors import ConfigError
from powertrain.values.arguments import flag_from_environment

if TYPE_CHECKING:
    from powertrain.worker.tracing import TraceSettings

#: Some readers of JSON and msgpack know no larger whole numbers.
DATA_SEED_BITS = 53


def working_dir(run: RunConfig, runtime: str) -> str:
    """The working directory of ranks as a path; "" for the launch directory, which nodes may have elsewhere."""
    from powertrain.run.workers.launch import scratch_directory

    if run.working_dir in (None, "."):
        return ""
    if run.working_dir == "scratch":
        return scratch_directory(runtime)
    return os.path.abspath(os.path.expanduser(str(run.working_dir)))


def has_report_barrier(run: RunConfig) -> bool:
    given = run.report_barrier
    return flag_from_environment("POWERTRAIN_REPORT_BARRIER") if given is None else given


def port(run: RunConfig) -> int:
    """Of the run's one wire, which may be named in two places."""
    return run.port or (run.trace.port if isinstance(run.trace, TraceConfig) else 0)


def bind_host(run: RunConfig) -> str:
    return (run.trace.bind_host or "") if isinstance(run.trace, TraceConfig) else ""


def trace_settings(run: RunConfig) -> TraceSettings | None:
    """What ranks are told of tracing; None for not at all. Raises ConfigError for what does not go together."""
    from powertrain.trace.recording import patch_choice
    from powertrain.worker.tracing import TraceSettings

    trace = run.trace
    if not isinstance(trace, TraceConfig):
        return None
    if run.port and trace.port and run.port != trace.port:
        raise ConfigError(
            f"RunConfig(port={run.port}) and TraceConfig(port={trace.port}) name two ports, and a run listens on one, "
            "for reports and telemetry alike. Give it once."
        )
    chosen = (trace.patch_dataloader, trace.patch_forward, trace.patch_backward, trace.patch_h2d)
    patch_choice.choose(trace.init_mode, *chosen)
    facts = {"flops_per_sample": trace.flops_per_sample, "peak_flops": trace.peak_flops}
    return TraceSettings(
        steps=trace.profile == "run",
        mode=trace.init_mode,
        dataloader=trace.patch_dataloader,
        forward=trace.patch_forward,
        backward=trace.patch_backward,
        h2d=trace.patch_h2d,
        interval=trace.sampler_interval_sec,
        facts={name: value for name, value in facts.items() if value is not None},
    )


def pickled(filesystem: Any) -> bytes:
    """A filesystem on its way to this user's own processes."""
    return pickle.dumps(filesystem) if filesystem is not None else b""


def new_name(trainer: str) -> str:
    return f"{trainer}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def qualified(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


def loaded_versions() -> dict[str, str]:
    """Versions of what this process has loaded; loading something only to ask would cost seconds."""
    return {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("torch", "numpy", "pyarrow", "pandas")
        if name in sys.modules
    }


def user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
