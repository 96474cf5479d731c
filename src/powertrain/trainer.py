"""DataParallelTrainer: ``fit`` makes a spec of what was asked, picks an engine, and runs the controller."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import logging
import os
import pickle
import platform
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

from powertrain import functions
from powertrain.values.arguments import as_path, flag_from_environment, has_attribute
from powertrain.config import (
    BackendConfig,
    DataConfig,
    RunConfig,
    ScalingConfig,
    TraceConfig,
    ValidationConfig,
    as_config,
    replace,
    to_json,
    without_effect,
)
from powertrain.text.errors import describe_error
from powertrain.errors import (
    CheckpointError,
    ConfigError,
    ControllerError,
    DataChangedError,
    DataError,
    EngineError,
    PowertrainError,
    PreemptedError,
    StorageError,
    WorkerGroupError,
)
from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.manifest import Manifest
    from powertrain.data.dataset import Dataset
    from powertrain.data.plan.prepared import Prepared
    from powertrain.engine.base import Engine
    from powertrain.engine.local import WarmServer
    from powertrain.result.result import Result
    from powertrain.run.controller import Controller, RunOutcome
    from powertrain.run.events import WorkerFailure
    from powertrain.run.forced_end import ForcedEnd
    from powertrain.run.record.lease import Lease
    from powertrain.run.spec import RunSpec
    from powertrain.storage import Storage
    from powertrain.trackers.base import Tracker
    from powertrain.trackers.following import TrackerProcess
    from powertrain.worker.context import Place
    from powertrain.worker.tracing import TraceSettings

TrainFunction = Union[Callable[[], Any], Callable[[dict[str, Any]], Any]]
#: Some readers of JSON and msgpack know no larger whole numbers.
_DATA_SEED_BITS = 53
#: Seconds for which journal, metrics and logs are tried to be put to storage that cannot append.
_SHIP_WITHIN = 60.0
#: Seconds for the controller's own thread to end after the rank's thread was interrupted.
_LEAVE_TIMEOUT_S = 5.0
_TrainerT = TypeVar("_TrainerT", bound="DataParallelTrainer")


class DataParallelTrainer:
    """Runs one function on every worker. Framework-neutral: ``backend_config`` names what connects the workers.

    Everything is checked here, before any process starts; then the process that workers are forked from begins to
    warm up, so that it is ready by the time ``fit`` needs it.
    """

    #: What the argument for the backend's config is called.
    _backend_argument = "backend_config"
    #: Set by a sweep that runs this trainer as one of its trials.
    _trial: TrialHooks | None = None

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        functions.check_shape(train_loop_per_worker)
        self._remarks: list[str] = []
        #: Said at every start of the run.
        self._standing_remarks: list[str] = []
        #: What :meth:`restore` needs to make this trainer again.
        self._arguments: dict[str, Any] = {
            "train_loop_per_worker": train_loop_per_worker,
            "train_loop_config": train_loop_config,
            self._backend_argument: backend_config,
            "scaling_config": scaling_config,
            "run_config": run_config,
            "datasets": datasets,
            "dataset_config": dataset_config,
            "metadata": metadata,
            "validation_config": validation_config,
        }
        self._function = train_loop_per_worker
        self._config = train_loop_config
        self._backend = as_config(backend_config, BackendConfig, self._backend_argument)
        self.scaling_config: ScalingConfig = as_config(scaling_config, ScalingConfig, "scaling_config")
        self.run_config: RunConfig = as_config(run_config, RunConfig, "run_config")
        self._metadata = _json_mapping(metadata, "metadata")
        self._begin_from = _checkpoint_to_begin_from(resume_from_checkpoint)
        self._validation: ValidationConfig | None = None
        if validation_config is not None:
            self._validation = as_config(validation_config, ValidationConfig, "validation_config")
        self._datasets = _checked_datasets(datasets)
        self._data: DataConfig = as_config(dataset_config, DataConfig, "dataset_config")
        _refuse_unknown_split(self._data, self._datasets)
        _refuse_what_is_not_here(self.run_config)
        _trace_settings(self.run_config)
        self._choose_trackers(self.run_config.name or "run")
        self._engine_name = pick_engine(self.scaling_config)
        self.scaling_config = replace(self.scaling_config, engine=self._engine_name)
        _refuse_unreachable_data(self._datasets, self._data, self._engine_name)
        from powertrain.run.record.preflight import check_directories

        if self.run_config.storage_filesystem is None:
            refuse_unwritable(self.run_config.storage_root)
        if self._starts_processes:
            functions.pickle_function(train_loop_per_worker, train_loop_config)
        else:
            _refuse_what_needs_own_processes(self.run_config, self._engine_name)
        self._check_limits()
        if self._engine_name == "ray":
            self._connect_to_ray()
            return
        check_directories(self.run_config, self._data)
        self._check_machine()
        if self._engine_name == "local":
            from powertrain.engine.local import prepare_server

            prepare_server(preloads_torch=self._will_use_torch())

    @classmethod
    def restore(
        cls: type[_TrainerT],
        path: str | os.PathLike[str],
        train_loop_per_worker: TrainFunction | None = None,
        *,
        storage_filesystem: Any = None,
        **changes: Any,
    ) -> _TrainerT:
        """A trainer that goes on with the run at ``path``, which is ``storage_path/name``.

        It is made as the run's own trainer was, with ``changes`` in place of what was given then. What the run keeps
        of its trainer is only used if this user wrote it on this machine; otherwise, give the function and configs.
        """
        from powertrain.driver import blueprint

        storage = _existing_run(path, storage_filesystem)
        arguments: dict[str, Any] = {}
        if train_loop_per_worker is None:
            arguments = blueprint.load(storage)
            _ask_for_variables(arguments.pop("needs_env", []), changes)
            _ask_for_datasets(arguments.pop("needs_datasets", []), changes)
        else:
            changes["train_loop_per_worker"] = train_loop_per_worker
        arguments |= changes
        root, name = _split_run_path(os.fspath(path))
        run = as_config(arguments.get("run_config"), RunConfig, "run_config")
        arguments["run_config"] = replace(
            run, name=name, storage_path=root, storage_filesystem=storage_filesystem or run.storage_filesystem
        )
        return cls(**arguments)

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """True when there is a run at ``path`` that :meth:`restore` can go on with."""
        try:
            _existing_run(path, storage_filesystem)
        except (ConfigError, StorageError, OSError):
            return False
        return True

    def fit(self) -> Result:
        """Train to the end. Raises :class:`~powertrain.errors.TrainingFailedError` when training fails.

        Workers see the script as it is now: its modules, with what was set and patched in them. Where this process
        cannot be forked, because it has threads or an open GPU, workers import modules from their files; a line says
        so.
        """
        _refuse_second_run_of_script()
        if self._engine_name == "torchrun":
            from powertrain.engine import torchrun

            torchrun.check_num_workers(self.scaling_config.num_workers)
            if torchrun.own_rank() != 0:
                return self._follow()
        with ExitStack() as stack:
            return self._lead(stack)

    def _lead(self, stack: ExitStack) -> Result:
        """The process that holds the run: take the lease, go on from what is there, run the controller."""
        began = time.monotonic()
        server = self._enter_server(stack)  # first: once threads run, this process can no longer be forked
        from powertrain.checkpoint.chain import Chain, tag_for
        from powertrain.checkpoint.commit import verify_alone
        from powertrain.run.record import lease_watch
        from powertrain.run.controller import Controller
        from powertrain.storage.addresses import without_secrets

        imported = time.monotonic()
        _set_log_level(self.run_config)
        self._remarks[:] = self._standing_remarks
        if server is not None and (remark := _about_clean_workers(server)):
            self._remarks.append(remark)
        configs = (self.scaling_config, self.run_config, self._data, self._validation)
        if ineffective := without_effect(config for config in configs if config is not None):
            self._remarks.append(ineffective)
        name = self.run_config.name or self._make_name()
        storage = self._open_run(name)
        taken_by: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with _naming_run(storage):
            lease = stack.enter_context(self._take_lease(storage, taken_by))
            storage.sweep()
        terminal = self._make_terminal(name, without_secrets(storage.uri))
        stack.callback(terminal.close)
        left: list[str] = []
        runtime, places = self._make_directories(name, storage, left, stack)
        datasets: dict[str, Prepared] = {}
        engine = self._make_engine(name, storage, [str(runtime), *places], datasets, stack, server)
        if self._begin_from is not None:
            verify_alone(self._begin_from)
        with _naming_run(storage):
            chain = Chain.take_over(storage, lease.number, lease.token)
            if self._trial is not None:
                self._trial.prepare(storage, chain)
            earlier = _Earlier.read(storage)
        record = self._run_record(name, earlier)
        looked = time.monotonic()
        datasets.update(self._prepare_data(record["data_seed"], places[2], earlier.checkpoint, storage))
        known = {"imports": imported - began, "datasets": time.monotonic() - looked}
        with _naming_run(storage):
            unkept = self._keep_record(storage, record)
        self._remove_ends(storage)
        kept = self._with_real_files(storage, stack, terminal)
        tag = tag_for(storage, lease.number)
        spec = self._spec(name, kept, storage, runtime, places, record, tag, datasets)
        is_displaced = functools.partial(lease_watch.is_displaced, lease)
        controller = Controller(
            spec, engine, kept, chain, earlier.state, terminal, earlier.checkpoint, is_displaced
        )
        controller.launched(began, known)
        if self._trial is not None:
            self._trial.on_controller(controller)
        remarks = [
            *(() if self._trial else earlier.messages(record, without_secrets(storage.uri))),
            *_remarks(storage),
            *_about_restoring(unkept),
            *self._remarks,
        ]
        for message in remarks:
            controller.say(message)
        stack.enter_context(lease_watch.watching(lease, controller.lost_the_lease, taken_by))
        _listen(name, lease.number, kept, runtime, controller, stack)
        trackers = self._start_trackers(storage, record, earlier, controller, stack)
        with self._live_findings(kept, name, terminal):
            outcome, is_forced = self._run_controller(controller, engine, stack)
        if is_forced:
            return self._conclude(outcome, storage, engine)
        left.extend(outcome.left)
        _tell_left_files(terminal, runtime)
        if is_displaced():
            _tell(terminal, _about_gone_directory(without_secrets(storage.uri)))
        else:
            _keep_return_value(outcome, storage.within(self._patience_at_end), kept, terminal)
            self._diagnose(kept, name, terminal)
            self._finish_trackers(trackers, outcome, storage, terminal)
        return self._conclude(outcome, storage, engine)

    # -- pieces of fit

    def _take_lease(self, storage: Storage, taken_by: queue.SimpleQueue[Any]) -> Lease:
        """Take the run's lease; ``taken_by`` receives the holder of a later one."""
        from powertrain.run.record.lease import Lease

        return Lease.take(storage, shared=self.run_config.shared_storage, on_lost=taken_by.put)

    def _run_controller(
        self, controller: Controller, engine: Engine, stack: ExitStack
    ) -> tuple[RunOutcome, bool]:
        """Run the controller to its end; returns its outcome and whether a second request to end cut it short."""
        from powertrain.run.forced_end import EndedAtOnce, ForcedEnd
        from powertrain.worker import signals

        users_code_is_here = hasattr(engine, "serve")
        # Where the rank is in this process, closing the engine releases the thread that waits for it.
        release = engine.close if users_code_is_here else _do_nothing
        ending = ForcedEnd(lambda: controller.is_ending_at_once, signals.SAME_NOTICE, release)
        if self._starts_processes:  # otherwise the rank, which is in this process, handles the signals
            stack.enter_context(signals.heard(lambda number: _notify(controller, ending, number)))
        interrupts = _interrupts(
            lambda: _interrupt(controller, ending), users_code_is_here=users_code_is_here
        )
        try:
            with ending.watching(), interrupts:
                return _run(controller, engine, ending), False
        except EndedAtOnce:
            return _forced_outcome(ending.kind), True

    def _make_terminal(self, name: str, path: str) -> Any:
        """The observer that shows the run."""
        return _terminal(self.run_config, name, path) if self._trial is None else self._trial.observer

    def _make_name(self) -> str:
        name = _new_name(type(self).__name__)
        if self._engine_name != "torchrun":
            return name
        from powertrain.engine.torchrun import agreed_name

        return agreed_name(name)

    def _keep_record(self, storage: Storage, record: Mapping[str, Any]) -> str:
        """Write down what this start is made of; returns "" or why restore(path) will not find all of it."""
        from powertrain.driver import blueprint
        from powertrain.run.record import run_json as run_record

        storage.put(run_record.KEY, run_record.encode(record))
        if self._trial is not None or not self._starts_processes:  # a sweep keeps one for all of its trials
            return ""
        return blueprint.store(storage, self._lasting_arguments())

    def _lasting_arguments(self) -> dict[str, Any]:
        """What may be kept in the run: without addresses and variables, which may hold secrets."""
        from powertrain.storage.addresses import has_secrets

        run = replace(
            self.run_config, name=None, storage_path=None, storage_filesystem=None, worker_runtime_env={}
        )
        begin = self._begin_from
        if begin is not None and has_secrets(begin.path):
            begin = None
        return {
            **self._arguments,
            "run_config": run,
            "resume_from_checkpoint": begin,
            "needs_env": sorted(self._user_env()),
        }

    def _open_run(self, name: str) -> Storage:
        """The run's own storage, proved to be writable."""
        from powertrain.storage import open_storage, probe
        from powertrain.storage.files.run_directory import refuse_links, refuse_other_owners

        run = self.run_config
        root = open_storage(
            run.storage_root, filesystem=run.storage_filesystem, timeout=run.sync_config.sync_timeout
        )
        storage = root.child(name)
        refuse_links(storage)
        if self._trial is None:  # a sweep has proved it for all of its trials
            probe(storage)
        if not run.shared_storage:
            refuse_other_owners(storage)
        return storage

    def _make_directories(
        self, name: str, storage: Storage, left: Sequence[str], stack: ExitStack
    ) -> tuple[Path, tuple[str, str, str]]:
        """The run's runtime directory and its places (:meth:`_make_places`). All go at the end, however it comes; but
        not what is in ``left`` by then."""
        from powertrain.engine import local
        from powertrain.run.record.directories import remove_data_cache, remove_unless_needed
        from powertrain.storage.files.private_roots import roots_of_one_run

        runtime = self._make_runtime_directory(name, stack)
        places = self._make_places(storage, runtime, stack)
        stack.callback(remove_unless_needed, places[0], left)
        stack.callback(remove_data_cache, places[2])
        if self._engine_name == "local":
            stack.callback(local.remove_runtime_directory, runtime)  # should we be killed, the server does it
        else:
            roots = map(str, roots_of_one_run([str(runtime), *places]))
            stack.enter_context(local.removed_at_the_end(runtime, *places, *roots))
        return runtime, places

    def _make_runtime_directory(self, name: str, stack: ExitStack) -> Path:
        """A runtime directory. On a cluster each node has it under the same path, so that cannot be guessed."""
        from powertrain.engine import local
        from powertrain.storage.files.private_roots import root_of_one_run, runtime_root

        if self._engine_name != "ray":
            return local.make_runtime_directory(name)
        return local.make_directory_of_run(name, stack.enter_context(root_of_one_run(runtime_root())))

    def _make_places(self, storage: Storage, runtime: Path, stack: ExitStack) -> tuple[str, str, str]:
        """The staging area, the directory for shared memory and that for blocks of data, all empty; "" for one that
        does not exist."""
        from powertrain.engine import local
        from powertrain.run.record import directories as places
        from powertrain.storage.files.private_roots import (
            holding_root,
            lasting_root,
            root_of_one_run,
            shared_memory_root,
        )

        for kept in places.sweep_staging(storage):
            self._remarks.append(
                f"Checkpoints that an earlier start could not bring into the storage are still in {kept}. Remove that "
                "directory when you no longer need them."
            )
        is_on_nodes = self._engine_name == "ray"
        root: Callable[[], Path] = lasting_root
        if is_on_nodes:  # made when a directory in it is needed, and once
            root = functools.cache(lambda: stack.enter_context(root_of_one_run(lasting_root())))
        staging = places.staging_directory(storage, self.run_config.checkpoint_config, runtime.name, root)
        if not is_on_nodes:
            stack.enter_context(holding_root(staging))
        blocks = ""
        if self._datasets:
            blocks = places.data_cache_directory(storage, self._data, runtime.name, root)
            stack.callback(os.close, places.own_data_cache(blocks))
        memory = shared_memory_root()
        if memory is None:
            return staging, "", blocks
        name = runtime.name.rsplit("-", 2)[0]
        if is_on_nodes:
            segments = local.make_directory_of_run(name, stack.enter_context(root_of_one_run(memory)))
        else:
            segments = local.make_runtime_directory(name, memory)
        stack.callback(local.remove_runtime_directory, segments)
        return staging, str(segments), blocks

    @property
    def _patience_at_end(self) -> float:
        """Seconds for which storage that does not answer is asked again for what is no checkpoint."""
        return min(_SHIP_WITHIN, self.run_config.sync_config.sync_timeout)

    def _with_real_files(self, storage: Storage, stack: ExitStack, terminal: Any) -> Storage:
        """Storage that journal and metrics can append to: where there are no real files, by way of a spool."""
        if storage.local_path("journal") is not None:
            return storage
        from powertrain.run.record.directories import spool_directory
        from powertrain.run.record.shipping import Shipped, spools_below

        patient = self._patience_at_end
        own, abandoned = stack.enter_context(spools_below(spool_directory(storage)))

        def close(shipped: Shipped) -> None:
            try:
                shipped.close(patient)
            except StorageError as error:
                _tell(terminal, str(error))

        for spool in abandoned:
            close(Shipped(storage.within(patient), spool))
        shipped = Shipped(storage.within(patient), own)
        stack.callback(close, shipped)
        return shipped

    def _make_engine(
        self,
        name: str,
        storage: Storage,
        swept: list[str],
        datasets: Mapping[str, Prepared],
        stack: ExitStack,
        server: WarmServer | None,
    ) -> Engine:
        """``swept`` are directories to remove should this process be killed; ``datasets`` are for a rank in it."""
        if self._engine_name == "ray":
            return self._make_ray_engine(name, storage, swept)
        if server is not None:
            from powertrain.engine.local import LocalEngine

            server.sweep_if_orphaned(swept[0], [path for path in swept if path])
            stack.callback(server.sweep_if_orphaned, swept[0], [])
            return LocalEngine(server, _custom_resources(), run=name)
        function = self._function_here(lambda _: datasets)
        if self._engine_name == "inline":
            from powertrain.engine.inline import InlineEngine

            return InlineEngine(function, _custom_resources())
        from powertrain.engine.torchrun import TorchrunEngine

        return TorchrunEngine(function, self._user_env())

    def _enter_server(self, stack: ExitStack) -> WarmServer | None:
        """The process that workers of this run are forked from, until the run ends; None on other engines."""
        if self._engine_name != "local":
            return None
        if self._trial is not None and self._trial.server is not None:
            return self._trial.server
        from powertrain.engine.local import server_of_run

        return stack.enter_context(server_of_run(preloads_torch=self._will_use_torch()))

    def _will_use_torch(self) -> bool:
        """Whether workers are likely to use torch, so that it is loaded once for all of them."""
        if type(self._backend) is BackendConfig:  # which says nothing of it
            return "torch" in sys.modules
        return bool(getattr(self._backend, "uses_torch", True))

    def _make_ray_engine(self, name: str, storage: Storage, directories: list[str]) -> Engine:
        """An engine on the cluster that this process is connected to."""
        from powertrain.engine.ray.node.agent import LAUNCH, SCRIPT
        from powertrain.engine.ray.engine import RayEngine
        from powertrain.engine.ray.client import uploaded
        from powertrain.engine.ray.options import RayOptions
        from powertrain.engine.ray.streams import Stream

        runtime, _, _, blocks = directories
        options = RayOptions(
            run=name,
            runtime_dir=runtime,
            directories=directories[1:],
            modules={LAUNCH: os.getcwd(), SCRIPT: functions.script_directory()},
            import_path=[os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],
            copied=[os.path.join(blocks, "rows")] if blocks else [],
            runtime_env=uploaded(self.scaling_config.engine_options.get("runtime_env") or {}),
            trainer_resources=self.scaling_config.trainer_resources or {},
            preloads_torch=self._will_use_torch(),
            streams=[
                Stream(name, given, self._data.is_split(name))
                for name, given in self._streamed_datasets().items()
            ],
        )
        return RayEngine(options, storage)

    def _connect_to_ray(self) -> None:
        """Be a driver of the cluster that was named, or of the one that this process is connected to."""
        from powertrain.tasks import connect_to_ray

        connect_to_ray(self.scaling_config.engine_options.get("address"))

    @property
    def _starts_processes(self) -> bool:
        """True where workers are processes that the engine starts, and not the user's own."""
        return self._engine_name in ("local", "ray")

    def _spec(
        self,
        name: str,
        storage: Storage,
        carried_to: Storage,
        runtime: Path,
        places: tuple[str, str, str],
        record: Mapping[str, Any],
        tag: str,
        datasets: Mapping[str, Prepared],
    ) -> RunSpec:
        from powertrain.run.spec import RunSpec
        from powertrain.worker.checkpoints.shared_directory import output_files

        scaling, run, streamed = self.scaling_config, self.run_config, self._streamed_datasets()
        minimum, maximum = self._worker_bounds()
        return RunSpec(
            name=name,
            path=storage.uri,
            storage_path=run.storage_root,
            launch_dir=os.getcwd(),
            runtime_dir=str(runtime),
            working_dir=_working_dir(run, str(runtime)),
            outputs=output_files(),
            min_workers=minimum,
            max_workers=maximum,
            shape=_shape(scaling),
            resources=scaling.resources,
            env=self._user_env(),
            max_failures=run.failure_config.max_failures,
            fail_fast=bool(run.failure_config.fail_fast),
            max_preemptions=run.failure_config.max_preemption_failures,
            hang_timeout=run.failure_config.hang_timeout_s,
            on_hang=run.failure_config.on_hang,
            signal_grace=run.failure_config.signal_grace_s,
            stop=run.stop if self._trial is None else self._trial.stop,
            stop_sees_all=self._trial is not None,
            callbacks=run.callbacks,
            checkpoints=run.checkpoint_config,
            staging=places[0],
            segments=places[1],
            checkpoint_tag=tag,
            sync_timeout=run.sync_config.sync_timeout,
            port=_port(run),
            bind_host=_bind_host(run),
            trace=_trace_settings(run),
            post_mortem=run.post_mortem,
            report_barrier=_has_report_barrier(run),
            queue_timeout=scaling.queue_timeout_s,
            filesystem=_pickled(getattr(carried_to, "filesystem", None)),
            logs=_directory_of(storage, "logs"),
            storage=pickle.dumps(carried_to),
            validation=self._validation,
            backend=self._backend,
            function=self._travelling_function(),
            sources=functions.sources_only_here(),
            metadata=self._metadata,
            sweep=self._trial.sweep if self._trial is not None else "",
            trial_id=self._trial.trial_id if self._trial is not None else "",
            seed=record["seed"],
            datasets=self._travelling_datasets(datasets),
            data_fingerprints={name: found.fingerprint for name, found in datasets.items()},
            data_seed=record["data_seed"],
            data_cache=places[2],
            data_streams=list(streamed),
            data_streams_whole=[name for name in streamed if not self._data.is_split(name)],
            data=self._data,
            begin_from=self._begin_from.address if self._begin_from is not None else "",
            begin_from_filesystem=_pickled(getattr(self._begin_from, "given_filesystem", None)),
            version=__version__,
            arguments=self._told_to_callbacks(),
        )

    def _told_to_callbacks(self) -> dict[str, Any]:
        return {
            "run_config": self.run_config,
            "scaling_config": self.scaling_config,
            "backend_config": self._backend,
            "train_loop_config": self._config,
        }

    def _user_env(self) -> dict[str, str]:
        return dict(self.run_config.worker_runtime_env.get("env_vars", {}))

    def _travelling_function(self) -> bytes:
        """The function as it is now: what it uses may have changed since the trainer was made."""
        if not self._starts_processes:
            return b""  # every process has its own
        return functions.pickle_function(self._function, self._config)

    # -- data

    def _prepare_data(
        self, seed: int, cache: str, checkpoint: Manifest | None, storage: Storage
    ) -> dict[str, Prepared]:
        """The datasets that ranks read themselves, looked at; those of Ray's as they were written into the run.

        Raises :class:`DataError` for what cannot be read, or is not what the run's newest checkpoint was saved with.
        """
        if not self._datasets:
            return {}
        from powertrain.data.plan.prepared import prepare

        streamed = self._streamed_datasets()
        self._remarks += [_about_stream(name, self._data.is_split(name)) for name in streamed]
        read = {
            name: self._in_storage(name, given, storage) if _is_of_ray(given) else given
            for name, given in self._datasets.items()
            if name not in streamed
        }
        prepared = prepare(read, self._data, seed, os.path.join(cache, "rows"))
        if checkpoint is not None:
            self._remarks += _about_changed_data(prepared, checkpoint, self._data.on_change)
        return prepared

    def _in_storage(self, name: str, dataset: Any, storage: Storage) -> Dataset:
        """A dataset of Ray's, as it was written into the run."""
        from powertrain.data.ray.snapshot import snapshot

        written, remark = snapshot(name, dataset, storage)
        self._remarks.append(remark)
        return written

    def _streamed_datasets(self) -> dict[str, Any]:
        """Those that are Ray's and come from Ray while training, by name."""
        if self._data.snapshot:
            return {}
        return {name: given for name, given in self._datasets.items() if _is_of_ray(given)}

    def _prepare_like_rank_zero(self, place: Place) -> dict[str, Prepared]:
        """This process's own copy of the datasets, for a rank that rank 0 cannot hand its own to."""
        from powertrain.data.plan.prepared import prepare
        from powertrain.run.record.directories import sweep_data_caches

        if place.local_rank == 0:
            sweep_data_caches(place.data_cache)
        own = os.path.join(place.data_cache, f"rows-{place.rank}")
        prepared = prepare(self._datasets, self._data, place.data_seed, own)
        for name, found in prepared.items():
            if found.fingerprint != place.data_fingerprints.get(name):
                raise DataError(
                    f"The dataset {name!r} of rank {place.rank}, with {found.rows} rows, is not the one of rank 0. "
                    "Under torchrun every process makes its datasets itself, and they must be the same: give all of "
                    "them the same files in the same state, and make no random choice that is not seeded."
                )
        return prepared

    def _function_here(self, datasets: Callable[[Place], Mapping[str, Prepared]]) -> Callable[[], Any]:
        """The function for a rank that lives in this process, where its datasets are objects already."""
        from powertrain.worker import context
        from powertrain.worker.main import bind

        function = bind(self._function, self._config)
        if not self._datasets:
            return function

        def with_datasets() -> Any:
            session = context.current("fit")
            session.data.provide(lambda: datasets(session.place))
            return function()

        return with_datasets

    def _travelling_datasets(self, datasets: Mapping[str, Prepared]) -> bytes:
        if not self._starts_processes or not datasets:
            return b""
        return _pickled_datasets(datasets)

    def _worker_bounds(self) -> tuple[int, int]:
        if self._engine_name == "inline":
            return 1, 1
        if self._engine_name == "torchrun":
            from powertrain.engine.torchrun import world_size

            return world_size(), world_size()
        return self.scaling_config.min_workers, self.scaling_config.max_workers

    def _check_limits(self) -> None:
        """Refuse a number of workers that the limits of this machine do not allow."""
        from powertrain.engine import resources
        from powertrain.engine.system_limits import check_limits

        if self._engine_name == "inline":
            return
        least, most = self._worker_bounds()
        workers = least
        if self._engine_name == "local" and most > least:  # it grows as far as this machine lets it
            machine = resources.detect(_custom_resources())
            workers = max(least, min(most, resources.slots_free(machine, _shape(self.scaling_config), ())))
        check_limits(
            f"ScalingConfig(num_workers={self.scaling_config.num_workers})",
            workers,
            connected=type(self._backend) is not BackendConfig,
            starts_processes=self._engine_name == "local",
        )

    def _check_machine(self) -> None:
        """Refuse what this machine can never hold, while nothing has been started yet."""
        from powertrain.engine import resources

        machine = resources.detect(_custom_resources())
        count = self._worker_bounds()[0]
        if self._engine_name == "torchrun":  # which may have started others on other machines
            from powertrain.engine.torchrun import local_world_size

            count = local_world_size()
        resources.check(machine, count, _shape(self.scaling_config))

    def _run_record(self, name: str, earlier: _Earlier) -> dict[str, Any]:
        """What run.json says: what was asked for, by whom, with which versions, and the seed of the run."""
        from powertrain.text.redaction import redact_values
        from powertrain.storage.addresses import without_secrets

        record = {
            "name": name,
            "trainer": type(self).__name__,
            "function": _qualified(self._function),
            "engine": self._engine_name,
            "scaling_config": to_json(self.scaling_config),
            "run_config": to_json(self.run_config),
            "backend_config": to_json(self._backend),
            "dataset_config": to_json(self._data),
            "datasets": sorted(self._datasets),
            "metadata": self._metadata,
            "resume_from_checkpoint": without_secrets(self._begin_from.path) if self._begin_from else "",
            "seed": earlier.record.get("seed", secrets.randbits(63)),
            "data_seed": self._data_seed(earlier),
            "versions": {
                "powertrain": __version__,
                "python": platform.python_version(),
                **_loaded_versions(),
            },
            "started_by": {
                "user": _user(),
                "host": platform.node(),
                "pid": os.getpid(),
                "argv": sys.argv[:1],
            },
            "started": time.time(),
            **({"sweep": self._trial.sweep} if self._trial is not None else {}),
        }
        return cast("dict[str, Any]", redact_values(record))

    def _data_seed(self, earlier: _Earlier) -> int:
        if self._data.seed is not None:
            return self._data.seed
        return int(earlier.record.get("data_seed", secrets.randbits(_DATA_SEED_BITS)))

    def _conclude(self, outcome: RunOutcome, storage: Storage, engine: Engine) -> Result:
        """The result of a good end; otherwise the one exception that says what happened."""
        from powertrain.result.result import Result, failure
        from powertrain.run.checkpoints.unsaved import error_text
        from powertrain.storage.addresses import without_secrets
        from powertrain.values.kinds import with_originals
        from powertrain.worker.debugger import where_quit

        result = Result(
            path=storage.uri,
            storage_filesystem=getattr(storage, "filesystem", None),
            state=outcome.state,
            reason=outcome.reason,
            metrics=with_originals(outcome.metrics, outcome.originals),
            config={"train_loop_config": self._config},
            value=outcome.value,
            unsaved=outcome.run.unsaved if outcome.run is not None else None,
        )
        if outcome.interrupted:
            name = _split_run_path(storage.uri)[1]
            how = "by the same script" if self.run_config.name else f"with RunConfig(name={name!r})"
            raise KeyboardInterrupt(
                f"the run was interrupted and can be resumed {how}: {without_secrets(storage.uri)}"
            )
        if outcome.state == "preempted":
            raise PreemptedError(f"the run was preempted and can be resumed: {outcome.reason}", result)
        if outcome.state != "failed" and outcome.is_to_leave:
            raise PreemptedError(f"the run is {outcome.state}, and this process was asked to end", result)
        raised: Any = getattr(engine, "error", None)
        if outcome.state == "stopped" and where_quit(raised) is not None:
            raise raised  # it was plain pdb in this very process, which leaves the whole script
        if outcome.state != "failed":
            if outcome.run is not None and outcome.run.lost_last is not None:
                self._on_lost_checkpoint(
                    error_text(result.unsaved_checkpoints, outcome.run.newest_commit[1]), result
                )
            return result
        result.error = failure(
            result, storage, outcome.failures, trusted=True, raised_here=getattr(engine, "error", None)
        )
        raise result.error from getattr(engine, "error", None)

    def _on_lost_checkpoint(self, message: str, result: Result) -> None:
        """Raise :class:`CheckpointError` for a last checkpoint that was not saved, unless the user wants the result."""
        if self.run_config.checkpoint_config.on_lost == "raise":
            raise CheckpointError(message, result)

    def _remove_ends(self, storage: Storage) -> None:
        """The summary and the return value of an earlier start: until this one has ended there are none."""
        from powertrain.result import return_value

        try:
            storage.delete("final_summary.json")
            return_value.remove(storage)
        except (StorageError, OSError) as error:
            self._remarks.append(
                f"The summary and the return value of an earlier start could not be removed: {error}"
            )

    def _live_findings(self, storage: Storage, name: str, terminal: Any) -> AbstractContextManager[Any]:
        """With ``TraceConfig(mode="cli")``: what is found while the run goes on."""
        trace = self.run_config.trace
        if not isinstance(trace, TraceConfig) or trace.mode != "cli":
            return contextlib.nullcontext()
        from powertrain.diagnosis.live import Live

        return Live(storage, name, terminal.text)

    def _diagnose(self, storage: Storage, name: str, terminal: Any) -> None:
        """Say what the run spent its time on, and keep it. The run is over: whatever fails here is only told."""
        trace = self.run_config.trace
        if not isinstance(trace, TraceConfig):
            return
        if self._trial is not None:  # of many short runs: 'powertrain diagnose' makes it when it is wanted
            return
        if getattr(storage, "problem", ""):  # it would be waited for in vain, and maybe for long
            _tell(
                terminal,
                f"The storage does not answer: 'powertrain diagnose {name}' tells later how the time was spent.",
            )
            return
        from powertrain.diagnosis import card, final

        try:
            report = final.conclude(storage, name)
            if report is None:
                return
            if final.is_telling(report):
                terminal.text(card.render(report))
            if trace.logs_dir is not None:
                final.copy_to(os.fspath(trace.logs_dir), trace.session_id, report)
        except Exception as error:
            _tell(terminal, f"The run's diagnosis could not be kept: {describe_error(error)}")

    # -- trackers

    def _choose_trackers(self, name: str) -> list[Tracker]:
        """The run's trackers; raises :class:`ConfigError` for one whose package or setting is missing."""
        if not self.run_config.trackers:
            return []
        from powertrain.storage import open_storage
        from powertrain.trackers.choosing import chosen

        run = self.run_config
        root = open_storage(run.storage_root, filesystem=run.storage_filesystem)
        inside = root.child(name).local_path("x")
        return chosen(run.trackers, str(inside.parent) if inside is not None else "")

    def _start_trackers(
        self,
        storage: Storage,
        record: Mapping[str, Any],
        earlier: _Earlier,
        controller: Controller,
        stack: ExitStack,
    ) -> TrackerProcess | None:
        """Have the run's points sent to its trackers by a process of their own; None where there are none."""
        chosen = self._choose_trackers(record["name"])
        if not chosen:
            return None
        from powertrain.trackers import following
        from powertrain.trackers.choosing import keep

        run = following.describe_run(
            storage, record, earlier.record.get("started", record["started"]), self._config
        )
        if unkept := keep(storage, chosen, run):
            controller.say(
                f"'powertrain track' will need --tracker: the trackers could not be kept ({unkept})."
            )
        try:
            process = following.start(storage, chosen, run, controller.say)
        except OSError as error:
            controller.say(f"Points are not sent to trackers: their process cannot be started ({error}).")
            return None
        stack.callback(process.close)
        return process

    def _finish_trackers(
        self, process: TrackerProcess | None, outcome: RunOutcome, storage: Storage, terminal: Any
    ) -> None:
        """Give trackers their time, and name those that have not got all points."""
        if process is None:
            return
        from powertrain.trackers import following

        is_restarted = (
            outcome.state == "failed" and self._engine_name == "torchrun"
        )  # which waits for us to end
        is_to_leave = outcome.is_to_leave or outcome.state == "preempted" or is_restarted
        ending = following.ending_of(storage, outcome.state, outcome.reason)
        for sentence in process.finish(ending, following.patience(self.run_config, is_to_leave)):
            _tell(terminal, sentence)

    def _follow(self) -> Result:
        """Any rank but 0 under torchrun."""
        from powertrain.engine import torchrun
        from powertrain.result.result import Result
        from powertrain.run.record.directories import remove_data_cache

        function = self._function_here(self._prepare_like_rank_zero)
        with _interrupts(lambda: None, users_code_is_here=True) as interrupts:
            code, rank = torchrun.follow(function, self._user_env())
        if rank.place.local_rank == 0:  # the first of a node that is not rank 0's
            remove_data_cache(rank.place.data_cache)
        if interrupts:
            from powertrain.storage.addresses import without_secrets

            place = without_secrets(rank.place.run_path)
            raise KeyboardInterrupt(f"the run was interrupted and can be resumed: {place}")
        elsewhere, stopped = rank.summary.get("failed", ""), rank.summary.get("stopped", "")
        result = Result(
            path=rank.place.run_path,
            storage_filesystem=pickle.loads(filesystem)
            if (filesystem := rank.place.run_filesystem)
            else None,
            state="failed" if code or elsewhere else "stopped" if stopped else "finished",
            reason=stopped,
            metrics=rank.summary.get("metrics"),
            value=b"",  # it is rank 0's, in whose process it is
        )
        if reason := rank.summary.get("preempted"):
            raise PreemptedError(f"the run was preempted and can be resumed: {reason}", result)
        if result.state != "failed":
            if unsaved := rank.summary.get("unsaved"):
                self._on_lost_checkpoint(unsaved, result)
            return result
        if rank.error is not None:
            from powertrain.terminal import failure_report

            failure = _own_failure(rank.place.rank, rank.error)
            with contextlib.suppress(AttributeError):  # of a class with slots
                rank.error.failure = failure  # type: ignore[attr-defined]
            result.error = WorkerGroupError(failure_report([failure]), {failure.rank: rank.error}, result)
        else:
            what = (
                f"The run failed: {elsewhere}."
                if elsewhere
                else f"Rank {rank.place.rank} could not be set up."
            )
            result.error = ControllerError(
                PowertrainError(f"{what} The output of this rank says more."), result
            )
        raise result.error from rank.error


@dataclass(frozen=True)
class TrialHooks:
    """How a sweep runs a trainer as one of its trials.

    Attributes:
        observer: Shows the run, in place of a terminal of its own.
        stop: Called after each row with the run's name, the report, and whether the row has brought a checkpoint;
            returns why the run ends, or "".
        on_controller: Called with the controller before it runs.
        prepare: Called with the run's storage and chain, before earlier checkpoints are looked for.
        server: The process that workers are forked from, shared by all trials; None on other engines.
        sweep: The name of the sweep.
        trial_id: The id of the trial.
    """

    observer: Any
    stop: Callable[[str, dict[str, Any], bool], str]
    on_controller: Callable[[Controller], None]
    prepare: Callable[[Storage, Any], None]
    server: WarmServer | None = None
    sweep: str = ""
    trial_id: str = ""


# --------------------------------------------------------------------------- picking an engine


def pick_engine(scaling: ScalingConfig) -> str:
    """The engine that was asked for, or the one that applies here."""
    from powertrain.engine.torchrun import is_torchrun

    if scaling.engine == "ray":
        _require_ray()
    if scaling.engine == "torchrun" and not is_torchrun():
        raise ConfigError(
            "ScalingConfig(engine='torchrun') needs torchrun, but this process was not started by it. Start the script "
            "with 'torchrun --nproc-per-node=N script.py', or use engine='local'."
        )
    if scaling.engine != "auto":
        return scaling.engine
    if is_torchrun():
        return "torchrun"
    if scaling.max_workers == 0:
        return "inline"
    if _ray_is_chosen(scaling):
        _require_ray()
        return "ray"
    if sys.platform != "linux":
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers}) needs worker processes, which this version starts on "
            f"Linux only; this is {sys.platform}. Use num_workers=0 to train in this process, or torchrun."
        )
    return "local"


def _ray_is_chosen(scaling: ScalingConfig) -> bool:
    """True when something but the engine's name says that the run is meant for a Ray cluster."""
    from powertrain.tasks import is_on_ray

    asked = scaling.engine_options.keys() & {"address", "runtime_env"} or scaling.label_selector
    return bool(asked) or is_on_ray()


def _require_ray() -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "This run uses a Ray cluster, and Ray is not installed here. Install it with: "
            "pip install 'powertrain[ray]'. To run on this machine, use ScalingConfig(engine='local')."
        )


def _refuse_second_run_of_script() -> None:
    """Raise :class:`ConfigError` in a child of multiprocessing's that runs the script again to import its classes."""
    from powertrain.engine.local import is_loading_main

    if is_loading_main():
        raise ConfigError(
            "fit() was called while a child process (a DataLoader worker or another process started with 'spawn' or "
            "'forkserver') runs the script again to import its classes. Put the lines that train below "
            "`if __name__ == '__main__':`, so that only the script itself trains."
        )


#: Whether this process has said that its workers import modules anew.
_has_said_clean = False


def _about_clean_workers(server: WarmServer) -> str:
    """What workers do not see, said once in a process; "" where they see all of it."""
    global _has_said_clean
    if server.is_forked or _has_said_clean:
        return ""
    _has_said_clean = True
    return (
        f"Workers import the script's modules anew from their files, because {server.unsafe}: they "
        "do not see what this process has set or patched in modules. Pass settings in train_loop_config."
    )


def _custom_resources() -> Mapping[str, float]:
    """Custom resources that ``powertrain.init(resources=...)`` declared."""
    from powertrain import tasks

    return tasks.declared_resources()


def _shape(scaling: ScalingConfig) -> Any:
    from powertrain.engine.base import SlotShape

    amounts = scaling.resources
    custom = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU")}
    return SlotShape(
        cpus=amounts.get("CPU", 0.0),
        gpus=amounts.get("GPU", 0.0),
        custom=custom,
        explicit=scaling.explicit_resources,
        placement=scaling.placement_strategy,
        gang=not scaling.is_elastic,
        labels=_labels(scaling.label_selector),
    )


def _labels(selector: Any) -> tuple[Mapping[str, str], ...]:
    if selector is None:
        return ()
    return (selector,) if isinstance(selector, Mapping) else tuple(selector)


# --------------------------------------------------------------------------- storage and what is there already


def refuse_unwritable(root: str) -> None:
    """Raise :class:`StorageError` when ``root`` can be seen not to be writable, without touching anything."""
    from powertrain.storage import open_storage

    path = open_storage(root).local_path("x")
    if path is None:
        return
    directory = path.parent
    while not os.path.lexists(directory):
        directory = directory.parent
    if not directory.is_dir():
        problem = f"{str(directory)!r} is a file, not a directory"
    elif not os.access(directory, os.W_OK | os.X_OK):
        problem = f"{str(directory)!r} is not writable for {_user()}"
    else:
        return
    raise StorageError(
        f"The storage path {root!r} cannot be used: {problem}. Set RunConfig(storage_path=...) or the environment "
        "variable POWERTRAIN_STORAGE to a directory you can write to."
    )


@contextlib.contextmanager
def _naming_run(storage: Storage) -> Iterator[None]:
    """Turn what the operating system says of a file of the run into a :class:`StorageError` that names both."""
    from powertrain.storage.addresses import without_secrets

    try:
        yield
    except OSError as error:
        which = f" ({str(error.filename)!r})" if error.filename else ""
        raise StorageError(
            f"The run at {without_secrets(storage.uri)!r} cannot be opened: {error.strerror or error}{which}. Mend or "
            "move away what is named, or choose another run name."
        ) from error


def _existing_run(path: str | os.PathLike[str], filesystem: Any) -> Storage:
    """The storage of a run that exists; raises :class:`ConfigError` where there is none."""
    from powertrain.storage import open_storage
    from powertrain.storage.addresses import without_secrets
    from powertrain.storage.base import RECORD_BYTES_LIMIT

    path = as_path(path, "The path of a run")
    storage = open_storage(path, filesystem=filesystem, timeout=30.0)
    try:
        storage.get("run.json", limit=RECORD_BYTES_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"There is no run at {without_secrets(path)!r}: it has no run.json. Give the directory of one run, which "
            "is storage_path/name."
        ) from None
    except OSError as error:
        raise StorageError(
            f"The run at {without_secrets(path)!r} cannot be restored: its run.json cannot be read "
            f"({error.strerror or error}). Make it readable, or move it away and start the run again."
        ) from error
    return storage


def _ask_for_variables(names: list[str], changes: Mapping[str, Any]) -> None:
    """A run does not keep the values of variables; raises :class:`ConfigError` when they are not given again."""
    if names and "run_config" not in changes:
        raise ConfigError(
            f"The run was started with RunConfig(worker_runtime_env=...) and the variables {', '.join(names)}, whose "
            "values are not kept in it. Give them again: restore(path, run_config=RunConfig(worker_runtime_env=...))."
        )


def _ask_for_datasets(names: list[str], changes: Mapping[str, Any]) -> None:
    """Not all datasets are kept in the run; raises :class:`ConfigError` when those are not given again."""
    if names and "datasets" not in changes:
        raise ConfigError(
            f"The run does not keep its datasets ({', '.join(names)}), because they hold many rows in memory, or a "
            "secret in an address, or are Ray's, or cannot be pickled. Give them again: restore(path, datasets={...})."
        )


def _split_run_path(path: str) -> tuple[str, str]:
    """A run's directory as (storage path, name). What follows a "?" in an address belongs to the storage path."""
    address, mark, query = path.partition("?") if "://" in path else (path, "", "")
    root, _, name = address.rstrip("/").rpartition("/")
    return f"{root or '.'}{mark}{query}", name


@dataclass(frozen=True)
class _Earlier:
    """What earlier starts of the same run left."""

    state: Any
    record: dict[str, Any]
    checkpoint: Any
    remarks: tuple[str, ...]

    @classmethod
    def read(cls, storage: Storage) -> _Earlier:
        from powertrain.checkpoint import commit
        from powertrain.run.record import journal
        from powertrain.run.record import run_json as run_record

        commit.refuse_other_versions(storage)
        remarks: list[str] = []
        state = journal.replay(journal.read(storage))
        record: dict[str, Any] = {}
        try:
            record = run_record.read(storage)
        except FileNotFoundError:
            pass
        except StorageError as error:
            remarks.append(f"{error} The run goes on with new seeds, so its data come in another order.")
        checkpoint = commit.newest_verified(storage, remarks.append)
        for place in commit.set_aside_newer(storage, checkpoint):
            remarks.append(f"A checkpoint that cannot be used was moved to {place}.")
        commit.sweep_uncommitted(storage)
        return cls(state, record, checkpoint, tuple(remarks))

    def messages(self, record: Mapping[str, Any], path: str) -> list[str]:
        """What the user should know before this start. ``path`` is the run's directory, fit to be shown."""
        messages = list(self.remarks)
        if self.state.state == "finished":
            where = (
                f"continues from {self.checkpoint.name}"
                if self.checkpoint
                else "has no checkpoint to continue from"
            )
            messages.append(
                f"This run had finished already; this start {where}. To begin anew, give RunConfig(name=...) another "
                f"name, or remove {path}."
            )
        changed = [
            f"{section}.{field}: {old!r} -> {new!r}"
            for section in ("scaling_config", "run_config", "backend_config", "dataset_config")
            if section in self.record
            for field, old, new in _differences(self.record[section], record[section])
        ]
        if self.record and changed:
            messages.append(f"This run was started before with other settings: {'; '.join(changed)}.")
        return messages


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*old, *new}):
        if old.get(key) != json.loads(json.dumps(new.get(key))):
            yield key, old.get(key), new.get(key)


# --------------------------------------------------------------------------- data


def _checked_datasets(datasets: Any) -> dict[str, Dataset | Callable[[], Dataset]]:
    """The datasets by name; raises :class:`ConfigError` for what can be seen to be none."""
    if datasets is None:
        return {}
    if not isinstance(datasets, Mapping) or not all(isinstance(name, str) and name for name in datasets):
        raise ConfigError(
            f"datasets must be a dict from names to datasets, such as {{'train': powertrain.data.read_parquet(path)}}, "
            f"and not a {type(datasets).__name__} like this one."
        )
    found = {name: _from_hugging_face(value) for name, value in datasets.items()}
    for name, value in found.items():
        _refuse_what_is_no_dataset(name, value)
    return found


def _from_hugging_face(value: Any) -> Any:
    """Return a ``datasets.Dataset`` of Hugging Face as a dataset of ours, and anything else as it is."""
    if type(value).__module__.partition(".")[0] != "datasets":
        return value
    from powertrain.data.reading import from_huggingface

    return from_huggingface(value)


def _is_of_ray(dataset: Any) -> bool:
    """True for a ``ray.data.Dataset``, without importing Ray."""
    return type(dataset).__module__.partition(".")[0] == "ray" and hasattr(dataset, "streaming_split")


def _refuse_what_is_no_dataset(name: str, value: Any) -> None:
    kind = type(value)
    origin = f"{kind.__module__}.{kind.__qualname__}"
    accepted = "a powertrain.data.Dataset, or a function without arguments that returns one"
    if _is_of_ray(value):
        return
    if kind.__module__.partition(".")[0] == "ray":
        raise ConfigError(
            f"datasets[{name!r}] is a {origin}, which is of Ray but not a ray.data.Dataset. Give the dataset that it "
            f"was made from, or {accepted}: for example powertrain.data.read_parquet(path)."
        )
    if callable(value):
        return
    from powertrain.data.dataset import Dataset

    if not isinstance(value, Dataset):
        raise ConfigError(
            f"datasets[{name!r}] is a {origin}. Give {accepted}: powertrain.data has read_parquet, read_csv and others "
            "for files, and from_torch, from_huggingface, from_pandas, from_numpy, from_arrow and from_items for what "
            "is in memory."
        )


def _refuse_unreachable_data(datasets: Mapping[str, Any], config: DataConfig, engine: str) -> None:
    """Raise :class:`ConfigError` for datasets of Ray's that workers of this engine cannot be given."""
    of_ray = [name for name, value in datasets.items() if _is_of_ray(value)]
    if not of_ray or engine == "ray":
        return
    if engine == "torchrun":
        raise ConfigError(
            f"The dataset {', '.join(map(repr, of_ray))} is Ray's, and under torchrun every process would compute one "
            "of its own. Write it to files once, with its write_parquet(path), and give "
            "powertrain.data.read_parquet(path)."
        )
    if not config.snapshot:
        raise ConfigError(
            f"The dataset {', '.join(map(repr, of_ray))} is Ray's, and the workers of engine={engine!r} are not on a "
            "Ray cluster that could stream it to them. Use ScalingConfig(engine='ray'), or "
            "DataConfig(snapshot=True), which writes it once into the run's storage and works on any engine, or "
            "powertrain.data.read_parquet(path) in place of ray.data.read_parquet(path)."
        )


def _about_stream(name: str, is_split: bool) -> str:
    rows = (
        "every rank gets the same number of rows, so an epoch may leave out up to one row fewer than there are ranks"
        if is_split
        else "every rank gets all rows, in an order of its own"
    )
    return (
        f"The Ray dataset {name!r} is streamed from Ray: {rows}, and a restart begins its epoch again. "
        "DataConfig(snapshot=True) writes it once into the run's storage instead: then every row comes exactly once "
        "per epoch, and a restart goes on at the row where it was."
    )


def _refuse_unknown_split(config: DataConfig, datasets: Mapping[str, Any]) -> None:
    if config.datasets_to_split == "all":
        return
    unknown = [name for name in config.datasets_to_split if name not in datasets]
    if unknown:
        there = ", ".join(map(repr, datasets)) or "none"
        raise ConfigError(
            f"DataConfig(datasets_to_split=...) names {', '.join(map(repr, unknown))}, which is not among the datasets "
            f"of the trainer ({there}). Correct the name, or add the dataset to datasets=."
        )


def _pickled_datasets(datasets: Mapping[str, Prepared]) -> bytes:
    """The datasets on their way to workers; raises :class:`ConfigError` naming one that cannot travel."""
    import cloudpickle

    plans = [found.inspected.plan for found in datasets.values()]
    used = [getattr(op, "fn", None) for plan in plans for part in plan.parts for op in part.operations]
    try:
        with functions.by_value_where_needed(*(function for function in used if function is not None)):
            data: bytes = cloudpickle.dumps(dict(datasets))
            return data
    except Exception as error:  # whatever the user's objects do when they are pickled
        culprits = [name for name, found in datasets.items() if not _can_be_pickled(found)]
        raise ConfigError(
            f"The dataset {', '.join(map(repr, culprits))} cannot be sent to the workers: something that it reads or "
            f"maps with cannot be pickled ({describe_error(error)}). Make that inside the function, or give a "
            "class to map_batches, which is made in the worker."
        ) from error


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _about_changed_data(datasets: Mapping[str, Prepared], checkpoint: Manifest, on_change: str) -> list[str]:
    """What to say of data that are not those of the checkpoint; raises :class:`DataChangedError` to refuse them."""
    from powertrain.data.plan.changes import changed_message, mixing_warning
    from powertrain.data.plan.position import Position
    from powertrain.worker.data.shards import is_of_stream, positions_in

    remarks = []
    for name, state in positions_in(checkpoint.extras).items():
        if name not in datasets or is_of_stream(state):
            continue
        now, saved = datasets[name], Position.from_dict(state, name)
        if now.is_of(saved.fingerprint):
            continue
        if on_change == "refuse":
            raise DataChangedError(changed_message(now, saved))
        remarks.append(
            f"The dataset {name!r} is not what it was at {checkpoint.name} ({saved.rows} rows then, {now.rows} now): "
            f"its epoch {saved.epoch} starts again with the data as they are now.{mixing_warning(now)}"
        )
    return remarks


# --------------------------------------------------------------------------- running


def _do_nothing() -> None:
    pass


def _interrupt(controller: Controller, ending: ForcedEnd) -> None:
    ending.request("interrupt")
    controller.interrupt()


def _notify(controller: Controller, ending: ForcedEnd, number: signal.Signals) -> None:
    controller.notify(_asked_to_end(number))
    ending.request("notice")


def _forced_outcome(kind: str) -> RunOutcome:
    """Return the outcome of a run that was stuck when it was asked for the second time to end."""
    from powertrain.run.controller import RunOutcome
    from powertrain.run.lifecycle import STOPPED

    return RunOutcome(
        STOPPED,
        "it was asked twice to end, and was stuck",
        None,
        b"",
        (),
        interrupted=kind == "interrupt",
        is_to_leave=kind == "notice",
    )


def _run(controller: Controller, engine: Engine, ending: ForcedEnd) -> RunOutcome:
    """Run the controller here; where the rank itself needs this thread, beside it."""
    from powertrain.run.forced_end import EndedAtOnce

    serve = getattr(engine, "serve", None)
    if serve is None:
        return controller.run()
    outcome: list[RunOutcome] = []
    problem: list[BaseException] = []

    def control() -> None:
        try:
            outcome.append(controller.run())
            _leave_if_hung(outcome[0], engine)
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=control, name="powertrain-controller", daemon=True)
    thread.start()
    try:
        serve()
    except BaseException as error:  # nothing will come of it any more: the controller need not wait
        controller.interrupt()
        thread.join(None if isinstance(error, EngineError) else _LEAVE_TIMEOUT_S)
        raise
    thread.join(_LEAVE_TIMEOUT_S if ending.has_forced else None)
    if thread.is_alive():
        raise EndedAtOnce
    if problem:
        raise problem[0]
    return outcome[0]


def _leave_if_hung(outcome: RunOutcome, engine: Engine) -> None:
    """Under torchrun a process must end for torchrun to begin again, and the main thread of one that hangs will not."""
    if engine.name == "torchrun" and any(failure.kind == "hung" for failure in outcome.failures):
        from powertrain.terminal import failure_report

        print(failure_report(outcome.failures, outcome.reason), file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def _interrupts(ask_to_end: Callable[[], None], *, users_code_is_here: bool) -> Iterator[list[float]]:
    """Turn Ctrl-C into a graceful end, the second one into an end at once. Other threads cannot, and need not.

    Yields the times at which interrupts have come. Under torchrun every rank gets them: rank 0 asks, the others wait
    to be told where to stop.
    """
    interrupts: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def interrupt(*_: Any) -> None:
        interrupts.append(time.time())
        ask_to_end()
        if len(interrupts) > 1 and users_code_is_here:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _asked_to_end(number: signal.Signals) -> str:
    return f"the driver (process {os.getpid()}) was asked to end by {number.name}"


def _listen(
    name: str, lease: int, storage: Storage, runtime: Path, controller: Controller, stack: ExitStack
) -> None:
    """Let the command line find this run and talk to it."""
    from powertrain.run.remote import protocol as control

    files = os.path.dirname(_directory_of(storage, "logs"))
    card = control.card_of(name, storage.uri, files, lease)
    try:
        stack.enter_context(control.listening(runtime, card, controller.visit))
    except OSError as error:
        controller.say(
            f"'powertrain stop' and others will not find this run: its socket cannot be made ({error})."
        )


def _terminal(run: RunConfig, name: str, path: str) -> Any:
    from powertrain.terminal import Terminal
    from powertrain.worker.debugger import is_attached

    live, verbose = {None: (None, 1), 0: (None, 0), 1: (False, 1), 2: (None, 1)}.get(run.verbose, (None, 2))
    if is_attached():  # its prompt would be drawn over
        live = False
    return Terminal(name, path, live=live, log_to_file=bool(run.log_to_file), verbose=verbose)


def _own_failure(rank: int, error: BaseException) -> WorkerFailure:
    """A failure as the rank itself can tell it, where the controller is in another process."""
    from powertrain.run.health.failures import reported
    from powertrain.worker.failure import describe

    kind = "exit" if isinstance(error, SystemExit) else "raised"
    return reported(rank, describe(error), kind, host=platform.node(), pid=os.getpid())


def _remarks(storage: Storage) -> list[str]:
    """What the user should know of the place that was chosen."""
    from powertrain.storage.files.private_roots import take_notices
    from powertrain.storage.safety import remarks_about

    path = storage.local_path("x")
    return [*storage.lacks, *(remarks_about(path.parent) if path is not None else ()), *take_notices()]


def _about_restoring(unkept: str) -> list[str]:
    if not unkept:
        return []
    return [f"restore(path) will need the training function again: the trainer could not be kept ({unkept})."]


def _tell(terminal: Any, message: str) -> None:
    from powertrain.run.events import Warned

    terminal.event(Warned(time=time.time(), message=message))


def _keep_return_value(outcome: RunOutcome, storage: Storage, kept: Storage, terminal: Any) -> None:
    """So that ``Result.from_path`` has it too. What does not answer is not waited for once more."""
    from powertrain.result import return_value

    unkept = getattr(kept, "problem", "") if outcome.value else ""
    unkept = unkept or return_value.store(storage, outcome.value)
    if unkept:
        _tell(
            terminal,
            f"What the training function returned is not kept in the run's directory: {unkept}. "
            "Result.return_value has it while this process lives.",
        )


def _about_gone_directory(path: str) -> str:
    return (
        f"The run's directory {path!r} is gone: it was removed, or made anew by another start, while the run was going "
        "on. The Result has the last metrics and the return value of this process; checkpoints and all else that was "
        "kept there are lost."
    )


def _tell_left_files(terminal: Any, runtime: Path) -> None:
    """The scratch directory goes with the run: say so where the user's code left files there."""
    from powertrain.run.events import Warned

    left = sorted(str(p.relative_to(runtime)) for p in runtime.glob("scratch/**/*") if p.is_file())
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        terminal.event(
            Warned(
                time=time.time(),
                message=f"Files left in the scratch directory of the ranks are removed now: {shown}. Write to "
                "get_context().launch_dir, report them as a checkpoint, or leave RunConfig(working_dir='scratch') out.",
            )
        )


# --------------------------------------------------------------------------- arguments


def _refuse_what_is_not_here(run: RunConfig) -> None:
    """One clear error for what this version accepts by name but cannot do yet."""
    if run.log_to_file not in (True, False):
        raise ConfigError(
            "RunConfig(log_to_file=<name>) is not supported yet by this version of Powertrain. Use log_to_file=True: "
            "each rank's output goes to its own file under the run's logs/."
        )


def _working_dir(run: RunConfig, runtime: str) -> str:
    """The working directory of ranks as a path; "" for the launch directory, which nodes may have elsewhere."""
    from powertrain.run.workers.launch import scratch_directory

    if run.working_dir in (None, "."):
        return ""
    if run.working_dir == "scratch":
        return scratch_directory(runtime)
    return os.path.abspath(os.path.expanduser(str(run.working_dir)))


def _has_report_barrier(run: RunConfig) -> bool:
    given = run.report_barrier
    return flag_from_environment("POWERTRAIN_REPORT_BARRIER") if given is None else given


def _port(run: RunConfig) -> int:
    """Of the run's one wire, which may be named in two places."""
    return run.port or (run.trace.port if isinstance(run.trace, TraceConfig) else 0)


def _bind_host(run: RunConfig) -> str:
    return (run.trace.bind_host or "") if isinstance(run.trace, TraceConfig) else ""


def _trace_settings(run: RunConfig) -> TraceSettings | None:
    """What ranks are told of tracing; None for not at all. Raises ConfigError for what does not go together."""
    from powertrain.trace.recording import patches
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
    patches.choose(trace.init_mode, *chosen)
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


def _refuse_what_needs_own_processes(run: RunConfig, engine: str) -> None:
    """Where a rank lives in a process that is not ours, its output and its directory are not ours to move."""
    asked = [
        name
        for name, value in (("log_to_file=True", run.log_to_file), ("working_dir=...", run.working_dir))
        if value
    ]
    if asked:
        instead = {
            "inline": "The output of inline ranks is this process's own, and so is its directory. Leave it out, or use "
            "num_workers=1",
            "torchrun": "torchrun owns the output and the directory of its processes. Leave it out, and see torchrun's "
            "--log-dir and --redirects",
        }[engine]
        raise ConfigError(f"RunConfig({', '.join(asked)}) does nothing on the {engine} engine. {instead}.")


def _checkpoint_to_begin_from(checkpoint: Checkpoint | None) -> Checkpoint | None:
    if checkpoint is None:
        return None
    path = checkpoint.path if has_attribute(checkpoint, "path") else None
    if not isinstance(path, str) or not has_attribute(checkpoint, "given_filesystem"):
        raise ConfigError(
            f"resume_from_checkpoint must be a Checkpoint, not {type(checkpoint).__name__}. Write "
            "Checkpoint.from_directory(path)."
        )
    local = "://" not in path and checkpoint.given_filesystem is None
    if local and not os.path.isdir(path):
        raise ConfigError(f"resume_from_checkpoint names {path!r}, which is not a directory. Check the path.")
    return checkpoint


def _directory_of(storage: Storage, name: str) -> str:
    """Where this machine has the files of a directory of the run."""
    inside = storage.local_path(f"{name}/x")
    assert inside is not None
    return str(inside.parent)


def _pickled(filesystem: Any) -> bytes:
    """A filesystem on its way to this user's own processes."""
    return pickle.dumps(filesystem) if filesystem is not None else b""


def _json_mapping(value: Mapping[str, Any] | None, argument: str) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps({} if value is None else dict(value))))
    except Exception as error:  # whatever the value raises when it is looked at
        raise ConfigError(f"{argument} must be a dict of JSON values: {error}.") from error


def _new_name(trainer: str) -> str:
    return f"{trainer}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def _qualified(function: Any) -> str:
    return (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


def _loaded_versions() -> dict[str, str]:
    """Versions of what this process has loaded; loading something only to ask would cost seconds."""
    return {
        name: str(getattr(sys.modules[name], "__version__", ""))
        for name in ("torch", "numpy", "pyarrow", "pandas")
        if name in sys.modules
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def _set_log_level(run: RunConfig) -> None:
    logging.getLogger("powertrain").setLevel(run.logging_config.log_level)
