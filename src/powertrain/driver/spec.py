"""Values that the driver writes into the spec and the record of a run."""

from __future__ import annotations

import os
import pickle
import platform
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from powertrain import functions
from powertrain.config.checks import replace
from powertrain.config.json import to_json
from powertrain.config.run import RunConfig
from powertrain.config.trace import ProfileConfig, TraceConfig
from powertrain.driver.checks import user
from powertrain.driver.datasets import travelling_datasets
from powertrain.driver.directories import directory_of
from powertrain.driver.engines import shape
from powertrain.errors import ConfigError
from powertrain.values.arguments import flag_from_environment
from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain.data.plan.prepared import Prepared
    from powertrain.driver.request import TrainRequest
    from powertrain.driver.resume import EarlierStarts
    from powertrain.run.spec import RunSpec
    from powertrain.storage import Storage
    from powertrain.worker.place import DataSettings, RunIdentity, SavingSettings
    from powertrain.worker.tracing import TraceSettings

#: Some readers of JSON and msgpack know no larger whole numbers.
DATA_SEED_BITS = 53


def working_dir(run: RunConfig, runtime: str) -> str:
    """Return the working directory of ranks as a path; "" for the launch directory, which nodes may have elsewhere."""
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
    """Return the ranks' trace settings; None for no tracing. Raises ConfigError for contradictory options."""
    from powertrain.trace.profiling.orders import ProfileOrder
    from powertrain.trace.recording import patch_choice
    from powertrain.worker.tracing import TraceSettings

    trace, profile = run.trace, run.profile
    records_steps = isinstance(trace, TraceConfig) and trace.profile == "run"
    if isinstance(profile, ProfileConfig) and not records_steps:
        raise ConfigError(
            "RunConfig(profile=...) profiles given steps, and without a trace of them nothing tells where a step ends. "
            'Leave out trace=False and TraceConfig(profile="watch").'
        )
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
    order = None
    if isinstance(profile, ProfileConfig):
        order = ProfileOrder(steps=profile.steps, memory=profile.memory, after=profile.start_step)
    return TraceSettings(
        steps=records_steps,
        mode=trace.init_mode,
        dataloader=trace.patch_dataloader,
        forward=trace.patch_forward,
        backward=trace.patch_backward,
        h2d=trace.patch_h2d,
        interval=trace.sampler_interval_sec,
        profile=order,
        profiled_ranks=profile.ranks if isinstance(profile, ProfileConfig) else (),
        facts={name: value for name, value in facts.items() if value is not None},
    )


def pickled(filesystem: Any) -> bytes:
    """Return a filesystem on its way to this user's own processes."""
    return pickle.dumps(filesystem) if filesystem is not None else b""


def new_name(trainer: str) -> str:
    return f"{trainer}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def qualified(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


def loaded_versions() -> dict[str, str]:
    """Return the versions of loaded packages; loading one only for its version would cost seconds."""
    return {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("torch", "numpy", "pyarrow", "pandas")
        if name in sys.modules
    }


def make_spec(
    request: TrainRequest,
    name: str,
    storage: Storage,
    upload_storage: Storage,
    runtime: Path,
    places: tuple[str, str, str],
    record: Mapping[str, Any],
    tag: str,
    datasets: Mapping[str, Prepared],
) -> RunSpec:
    from powertrain.run.spec import RunDirectories, RunSpec
    from powertrain.worker.checkpoints.shared_directory import output_files

    scaling, run = request.scaling, request.run
    minimum, maximum = request.worker_bounds
    return RunSpec(
        run=_identity(request, name, storage, upload_storage),
        directories=RunDirectories(
            runtime=str(runtime),
            working=working_dir(run, str(runtime)),
            outputs=output_files(),
            logs=directory_of(storage, "logs"),
        ),
        saving=_saving_settings(request, tag, staging=places[0], segments=places[1]),
        data=_data_settings(request, record, datasets, cache=places[2]),
        datasets=travelling_datasets(request, datasets),
        min_workers=minimum,
        max_workers=maximum,
        shape=shape(scaling),
        env=request.user_env,
        max_failures=run.failure_config.max_failures,
        fail_fast=bool(run.failure_config.fail_fast),
        max_preemptions=run.failure_config.max_preemption_failures,
        hang_timeout=run.failure_config.hang_timeout_s,
        on_hang=run.failure_config.on_hang,
        signal_grace=run.failure_config.signal_grace_s,
        stop=run.stop if request.trial is None else request.trial.stop,
        stop_sees_all=request.trial is not None,
        callbacks=run.callbacks,
        checkpoints=run.checkpoint_config,
        sync_timeout=run.sync_config.sync_timeout,
        port=port(run),
        bind_host=bind_host(run),
        trace=trace_settings(run),
        post_mortem=run.post_mortem,
        report_barrier=has_report_barrier(run),
        queue_timeout=scaling.queue_timeout_s,
        storage=pickle.dumps(upload_storage),
        validation=request.validation,
        backend=request.backend,
        function=request.pickled_function(),
        sources=functions.sources_only_here(),
        seed=record["seed"],
        begin_from=request.begin_from.address if request.begin_from is not None else "",
        begin_from_filesystem=pickled(getattr(request.begin_from, "given_filesystem", None)),
        version=__version__,
        arguments=_arguments_for_callbacks(request),
    )


def _identity(request: TrainRequest, name: str, storage: Storage, upload_storage: Storage) -> RunIdentity:
    from powertrain.worker.place import RunIdentity

    trial = request.trial
    return RunIdentity(
        name=name,
        path=storage.uri,
        storage_path=request.run.storage_root,
        launch_dir=os.getcwd(),
        filesystem=pickled(getattr(upload_storage, "filesystem", None)),
        metadata=request.metadata,
        resources=dict(request.scaling.resources),
        sweep=trial.sweep if trial is not None else "",
        trial_id=trial.trial_id if trial is not None else "",
    )


def _saving_settings(request: TrainRequest, tag: str, *, staging: str, segments: str) -> SavingSettings:
    from powertrain.worker.place import SavingSettings

    config = request.run.checkpoint_config
    return SavingSettings(
        tag=tag,
        frequency=config.checkpoint_frequency or 0,
        staging=staging,
        staging_bytes=config.staging_bytes or 0,
        segments=segments,
        validates=request.validation is not None,
    )


def _data_settings(
    request: TrainRequest, record: Mapping[str, Any], datasets: Mapping[str, Prepared], *, cache: str
) -> DataSettings:
    from powertrain.worker.place import DataSettings

    data, streamed = request.data, request.streamed_datasets
    return DataSettings(
        cache=cache,
        cache_bytes=-1 if data.cache_bytes is None else data.cache_bytes,
        memory_bytes=data.memory_bytes,
        seed=record["data_seed"],
        fingerprints={name: found.fingerprint for name, found in datasets.items()},
        on_change=data.on_change,
        resume=data.resume,
        streams=list(streamed),
        whole_streams=[name for name in streamed if not data.is_split(name)],
    )


def _arguments_for_callbacks(request: TrainRequest) -> dict[str, Any]:
    return {
        "run_config": request.run,
        "scaling_config": request.scaling,
        "backend_config": request.backend,
        "train_loop_config": request.config,
    }


def run_record(request: TrainRequest, name: str, earlier: EarlierStarts) -> dict[str, Any]:
    """Return the content of run.json: the request, the user, the versions, and the seed of the run."""
    from powertrain.storage.addresses import without_secrets
    from powertrain.text.redaction import redact_values

    record = {
        "name": name,
        "trainer": request.trainer,
        "function": qualified(request.function),
        "engine": request.engine,
        "scaling_config": to_json(request.scaling),
        "run_config": to_json(request.run),
        "backend_config": to_json(request.backend),
        "dataset_config": to_json(request.data),
        "datasets": sorted(request.datasets),
        "metadata": request.metadata,
        "resume_from_checkpoint": without_secrets(request.begin_from.path) if request.begin_from else "",
        "seed": earlier.record.get("seed", secrets.randbits(63)),
        "data_seed": _data_seed(request, earlier),
        "versions": {
            "powertrain": __version__,
            "python": platform.python_version(),
            **loaded_versions(),
        },
        "started_by": {
            "user": user(),
            "host": platform.node(),
            "pid": os.getpid(),
            "argv": sys.argv[:1],
        },
        "started": time.time(),
        **({"sweep": request.trial.sweep} if request.trial is not None else {}),
    }
    return cast("dict[str, Any]", redact_values(record))


def _data_seed(request: TrainRequest, earlier: EarlierStarts) -> int:
    if request.data.seed is not None:
        return request.data.seed
    return int(earlier.record.get("data_seed", secrets.randbits(DATA_SEED_BITS)))


def keep_record(request: TrainRequest, storage: Storage, record: Mapping[str, Any]) -> str:
    """Store the arguments of this start; return "" or the reason why restore(path) will lack some."""
    from powertrain.driver import blueprint
    from powertrain.run.record import run_json as run_record

    storage.put(run_record.KEY, run_record.encode(record))
    if request.trial is not None or not request.starts_processes:  # a sweep keeps one for all of its trials
        return ""
    return blueprint.store(storage, lasting_arguments(request))


def lasting_arguments(request: TrainRequest) -> dict[str, Any]:
    """Return the arguments to keep in the run: without addresses and variables, which may hold secrets."""
    from powertrain.storage.addresses import has_secrets

    run = replace(request.run, name=None, storage_path=None, storage_filesystem=None, worker_runtime_env={})
    begin = request.begin_from
    if begin is not None and has_secrets(begin.path):
        begin = None
    return {
        **request.arguments,
        "run_config": run,
        "resume_from_checkpoint": begin,
        "needs_env": sorted(request.user_env),
    }


def make_name(request: TrainRequest) -> str:
    name = new_name(request.name_stem or request.trainer)
    if not request.traits.has_launcher:
        return name
    from powertrain.engine.torchrun import agreed_name

    return agreed_name(name)
