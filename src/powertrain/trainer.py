"""DataParallelTrainer: ``fit`` makes a spec of what was asked, picks an engine, and runs the controller."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import platform
import queue
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

from powertrain import functions
from powertrain.backend import BackendConfig
from powertrain.config.checks import as_config, replace, without_effect
from powertrain.config.data import DataConfig
from powertrain.config.json import to_json
from powertrain.config.run import RunConfig
from powertrain.config.scaling import ScalingConfig
from powertrain.config.trace import TraceConfig
from powertrain.config.validation import ValidationConfig
from powertrain.driver.checks import (
    checked_datasets,
    checkpoint_to_begin_from,
    json_mapping,
    refuse_second_run_of_script,
    refuse_unknown_split,
    refuse_unreachable_data,
    refuse_unwritable,
    refuse_what_is_not_here,
    refuse_what_needs_own_processes,
)
from powertrain.driver.conclusion import (
    about_gone_directory,
    keep_return_value,
    own_failure,
    tell,
    tell_left_files,
)
from powertrain.driver.datasets import about_changed_data, about_stream, is_of_ray, pickled_datasets
from powertrain.driver.directories import SHIP_WITHIN, directory_of, naming_run
from powertrain.driver.engines import about_clean_workers, custom_resources, pick_engine, shape
from powertrain.driver.resume import (
    Earlier,
    ask_for_datasets,
    ask_for_variables,
    existing_run,
    split_run_path,
)
from powertrain.driver.running import (
    about_restoring,
    do_nothing,
    forced_outcome,
    handle_interrupts,
    interrupt_run,
    listen,
    make_terminal,
    notify,
    run_controller,
    set_log_level,
    standing_remarks,
)
from powertrain.driver.spec import (
    DATA_SEED_BITS,
    bind_host,
    has_report_barrier,
    loaded_versions,
    new_name,
    pickled,
    port,
    qualified,
    trace_settings,
    user,
    working_dir,
)
from powertrain.errors import (
    CheckpointError,
    ConfigError,
    ControllerError,
    DataError,
    PowertrainError,
    PreemptedError,
    StorageError,
    WorkerGroupError,
)
from powertrain.text.errors import describe_error
from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.manifest import Manifest
    from powertrain.data.dataset import Dataset
    from powertrain.data.plan.prepared import Prepared
    from powertrain.engine.base import Engine
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.result.result import Result
    from powertrain.run.controller import Controller
    from powertrain.run.outcome import RunOutcome
    from powertrain.run.record.lease import Lease
    from powertrain.run.spec import RunSpec
    from powertrain.storage import Storage
    from powertrain.trackers.base import Tracker
    from powertrain.trackers.following import TrackerProcess
    from powertrain.worker.place import Place


TrainFunction = Union[Callable[[], Any], Callable[[dict[str, Any]], Any]]
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
        self._metadata = json_mapping(metadata, "metadata")
        self._begin_from = checkpoint_to_begin_from(resume_from_checkpoint)
        self._validation: ValidationConfig | None = None
        if validation_config is not None:
            self._validation = as_config(validation_config, ValidationConfig, "validation_config")
        self._datasets = checked_datasets(datasets)
        self._data: DataConfig = as_config(dataset_config, DataConfig, "dataset_config")
        refuse_unknown_split(self._data, self._datasets)
        refuse_what_is_not_here(self.run_config)
        trace_settings(self.run_config)
        self._choose_trackers(self.run_config.name or "run")
        self._engine_name = pick_engine(self.scaling_config)
        self.scaling_config = replace(self.scaling_config, engine=self._engine_name)
        refuse_unreachable_data(self._datasets, self._data, self._engine_name)
        from powertrain.run.record.preflight import check_directories

        if self.run_config.storage_filesystem is None:
            refuse_unwritable(self.run_config.storage_root)
        if self._starts_processes:
            functions.pickle_function(train_loop_per_worker, train_loop_config)
        else:
            refuse_what_needs_own_processes(self.run_config, self._engine_name)
        self._check_limits()
        if self._engine_name == "ray":
            self._connect_to_ray()
            return
        check_directories(self.run_config, self._data)
        self._check_machine()
        if self._engine_name == "local":
            from powertrain.engine.local.warm_server import prepare_server

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

        storage = existing_run(path, storage_filesystem)
        arguments: dict[str, Any] = {}
        if train_loop_per_worker is None:
            arguments = blueprint.load(storage)
            ask_for_variables(arguments.pop("needs_env", []), changes)
            ask_for_datasets(arguments.pop("needs_datasets", []), changes)
        else:
            changes["train_loop_per_worker"] = train_loop_per_worker
        arguments |= changes
        root, name = split_run_path(os.fspath(path))
        run = as_config(arguments.get("run_config"), RunConfig, "run_config")
        arguments["run_config"] = replace(
            run, name=name, storage_path=root, storage_filesystem=storage_filesystem or run.storage_filesystem
        )
        return cls(**arguments)

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """True when there is a run at ``path`` that :meth:`restore` can go on with."""
        try:
            existing_run(path, storage_filesystem)
        except (ConfigError, StorageError, OSError):
            return False
        return True

    def fit(self) -> Result:
        """Train to the end. Raises :class:`~powertrain.errors.TrainingFailedError` when training fails.

        Workers see the script as it is now: its modules, with what was set and patched in them. Where this process
        cannot be forked, because it has threads or an open GPU, workers import modules from their files; a line says
        so.
        """
        refuse_second_run_of_script()
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
        from powertrain.checkpoint.committed import verify_alone
        from powertrain.run.controller import Controller
        from powertrain.run.record import lease_watch
        from powertrain.storage.addresses import without_secrets

        imported = time.monotonic()
        set_log_level(self.run_config)
        self._remarks[:] = self._standing_remarks
        if server is not None and (remark := about_clean_workers(server)):
            self._remarks.append(remark)
        configs = (self.scaling_config, self.run_config, self._data, self._validation)
        if ineffective := without_effect(config for config in configs if config is not None):
            self._remarks.append(ineffective)
        name = self.run_config.name or self._make_name()
        storage = self._open_run(name)
        taken_by: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with naming_run(storage):
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
        with naming_run(storage):
            chain = Chain.take_over(storage, lease.number, lease.token)
            if self._trial is not None:
                self._trial.prepare(storage, chain)
            earlier = Earlier.read(storage)
        record = self._run_record(name, earlier)
        looked = time.monotonic()
        datasets.update(self._prepare_data(record["data_seed"], places[2], earlier.checkpoint, storage))
        known = {"imports": imported - began, "datasets": time.monotonic() - looked}
        with naming_run(storage):
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
            *standing_remarks(storage),
            *about_restoring(unkept),
            *self._remarks,
        ]
        for message in remarks:
            controller.say(message)
        stack.enter_context(lease_watch.watching(lease, controller.lost_the_lease, taken_by))
        listen(name, lease.number, kept, runtime, controller, stack)
        trackers = self._start_trackers(storage, record, earlier, controller, stack)
        with self._live_findings(kept, name, terminal):
            outcome, is_forced = self._run_controller(controller, engine, stack)
        if is_forced:
            return self._conclude(outcome, storage, engine)
        left.extend(outcome.left)
        tell_left_files(terminal, runtime)
        if is_displaced():
            tell(terminal, about_gone_directory(without_secrets(storage.uri)))
        else:
            keep_return_value(outcome, storage.within(self._patience_at_end), kept, terminal)
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
        release = engine.close if users_code_is_here else do_nothing
        ending = ForcedEnd(lambda: controller.is_ending_at_once, signals.SAME_NOTICE, release)
        if self._starts_processes:  # otherwise the rank, which is in this process, handles the signals
            stack.enter_context(signals.heard(lambda number: notify(controller, ending, number)))
        interrupts = handle_interrupts(
            lambda: interrupt_run(controller, ending), users_code_is_here=users_code_is_here
        )
        try:
            with ending.watching(), interrupts:
                return run_controller(controller, engine, ending), False
        except EndedAtOnce:
            return forced_outcome(ending.kind), True

    def _make_terminal(self, name: str, path: str) -> Any:
        """The observer that shows the run."""
        return make_terminal(self.run_config, name, path) if self._trial is None else self._trial.observer

    def _make_name(self) -> str:
        name = new_name(type(self).__name__)
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
        from powertrain.engine.local import runtime_directories
        from powertrain.run.record.directories import remove_data_cache, remove_unless_needed
        from powertrain.storage.files.private_roots import roots_of_one_run

        runtime = self._make_runtime_directory(name, stack)
        places = self._make_places(storage, runtime, stack)
        stack.callback(remove_unless_needed, places[0], left)
        stack.callback(remove_data_cache, places[2])
        if self._engine_name == "local":
            stack.callback(
                runtime_directories.remove_runtime_directory, runtime
            )  # should we be killed, the server does it
        else:
            roots = map(str, roots_of_one_run([str(runtime), *places]))
            stack.enter_context(runtime_directories.removed_at_the_end(runtime, *places, *roots))
        return runtime, places

    def _make_runtime_directory(self, name: str, stack: ExitStack) -> Path:
        """A runtime directory. On a cluster each node has it under the same path, so that cannot be guessed."""
        from powertrain.engine.local import runtime_directories
        from powertrain.storage.files.private_roots import root_of_one_run, runtime_root

        if self._engine_name != "ray":
            return runtime_directories.make_runtime_directory(name)
        return runtime_directories.make_directory_of_run(
            name, stack.enter_context(root_of_one_run(runtime_root()))
        )

    def _make_places(self, storage: Storage, runtime: Path, stack: ExitStack) -> tuple[str, str, str]:
        """The staging area, the directory for shared memory and that for blocks of data, all empty; "" for one that
        does not exist."""
        from powertrain.engine.local import runtime_directories
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
            segments = runtime_directories.make_directory_of_run(
                name, stack.enter_context(root_of_one_run(memory))
            )
        else:
            segments = runtime_directories.make_runtime_directory(name, memory)
        stack.callback(runtime_directories.remove_runtime_directory, segments)
        return staging, str(segments), blocks

    @property
    def _patience_at_end(self) -> float:
        """Seconds for which storage that does not answer is asked again for what is no checkpoint."""
        return min(SHIP_WITHIN, self.run_config.sync_config.sync_timeout)

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
                tell(terminal, str(error))

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
            from powertrain.engine.local.engine import LocalEngine

            server.sweep_if_orphaned(swept[0], [path for path in swept if path])
            stack.callback(server.sweep_if_orphaned, swept[0], [])
            return LocalEngine(server, custom_resources(), run=name)
        function = self._function_here(lambda _: datasets)
        if self._engine_name == "inline":
            from powertrain.engine.inline import InlineEngine

            return InlineEngine(function, custom_resources())
        from powertrain.engine.torchrun import TorchrunEngine

        return TorchrunEngine(function, self._user_env())

    def _enter_server(self, stack: ExitStack) -> WarmServer | None:
        """The process that workers of this run are forked from, until the run ends; None on other engines."""
        if self._engine_name != "local":
            return None
        if self._trial is not None and self._trial.server is not None:
            return self._trial.server
        from powertrain.engine.local.warm_server import server_of_run

        return stack.enter_context(server_of_run(preloads_torch=self._will_use_torch()))

    def _will_use_torch(self) -> bool:
        """Whether workers are likely to use torch, so that it is loaded once for all of them."""
        if type(self._backend) is BackendConfig:  # which says nothing of it
            return "torch" in sys.modules
        return bool(getattr(self._backend, "uses_torch", True))

    def _make_ray_engine(self, name: str, storage: Storage, directories: list[str]) -> Engine:
        """An engine on the cluster that this process is connected to."""
        from powertrain.engine.ray.client import uploaded
        from powertrain.engine.ray.engine import RayEngine
        from powertrain.engine.ray.node.files import LAUNCH, SCRIPT
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
            working_dir=working_dir(run, str(runtime)),
            outputs=output_files(),
            min_workers=minimum,
            max_workers=maximum,
            shape=shape(scaling),
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
            port=port(run),
            bind_host=bind_host(run),
            trace=trace_settings(run),
            post_mortem=run.post_mortem,
            report_barrier=has_report_barrier(run),
            queue_timeout=scaling.queue_timeout_s,
            filesystem=pickled(getattr(carried_to, "filesystem", None)),
            logs=directory_of(storage, "logs"),
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
            begin_from_filesystem=pickled(getattr(self._begin_from, "given_filesystem", None)),
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
        from powertrain.data.plan.prepare import prepare

        streamed = self._streamed_datasets()
        self._remarks += [about_stream(name, self._data.is_split(name)) for name in streamed]
        read = {
            name: self._in_storage(name, given, storage) if is_of_ray(given) else given
            for name, given in self._datasets.items()
            if name not in streamed
        }
        prepared = prepare(read, self._data, seed, os.path.join(cache, "rows"))
        if checkpoint is not None:
            self._remarks += about_changed_data(prepared, checkpoint, self._data.on_change)
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
        return {name: given for name, given in self._datasets.items() if is_of_ray(given)}

    def _prepare_like_rank_zero(self, place: Place) -> dict[str, Prepared]:
        """This process's own copy of the datasets, for a rank that rank 0 cannot hand its own to."""
        from powertrain.data.plan.prepare import prepare
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
        from powertrain.worker import session as worker_session
        from powertrain.worker.main import bind

        function = bind(self._function, self._config)
        if not self._datasets:
            return function

        def with_datasets() -> Any:
            session = worker_session.current("fit")
            session.data.provide(lambda: datasets(session.place))
            return function()

        return with_datasets

    def _travelling_datasets(self, datasets: Mapping[str, Prepared]) -> bytes:
        if not self._starts_processes or not datasets:
            return b""
        return pickled_datasets(datasets)

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
            machine = resources.detect(custom_resources())
            workers = max(least, min(most, resources.slots_free(machine, shape(self.scaling_config), ())))
        check_limits(
            f"ScalingConfig(num_workers={self.scaling_config.num_workers})",
            workers,
            connected=type(self._backend) is not BackendConfig,
            starts_processes=self._engine_name == "local",
        )

    def _check_machine(self) -> None:
        """Refuse what this machine can never hold, while nothing has been started yet."""
        from powertrain.engine import resources

        machine = resources.detect(custom_resources())
        count = self._worker_bounds()[0]
        if self._engine_name == "torchrun":  # which may have started others on other machines
            from powertrain.engine.torchrun import local_world_size

            count = local_world_size()
        resources.check(machine, count, shape(self.scaling_config))

    def _run_record(self, name: str, earlier: Earlier) -> dict[str, Any]:
        """What run.json says: what was asked for, by whom, with which versions, and the seed of the run."""
        from powertrain.storage.addresses import without_secrets
        from powertrain.text.redaction import redact_values

        record = {
            "name": name,
            "trainer": type(self).__name__,
            "function": qualified(self._function),
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
                **loaded_versions(),
            },
            "started_by": {
                "user": user(),
                "host": platform.node(),
                "pid": os.getpid(),
                "argv": sys.argv[:1],
            },
            "started": time.time(),
            **({"sweep": self._trial.sweep} if self._trial is not None else {}),
        }
        return cast("dict[str, Any]", redact_values(record))

    def _data_seed(self, earlier: Earlier) -> int:
        if self._data.seed is not None:
            return self._data.seed
        return int(earlier.record.get("data_seed", secrets.randbits(DATA_SEED_BITS)))

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
            name = split_run_path(storage.uri)[1]
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
            tell(
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
            tell(terminal, f"The run's diagnosis could not be kept: {describe_error(error)}")

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
        earlier: Earlier,
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
            tell(terminal, sentence)

    def _follow(self) -> Result:
        """Any rank but 0 under torchrun."""
        from powertrain.engine import torchrun
        from powertrain.result.result import Result
        from powertrain.run.record.directories import remove_data_cache

        function = self._function_here(self._prepare_like_rank_zero)
        with handle_interrupts(lambda: None, users_code_is_here=True) as interrupts:
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
            from powertrain.terminal.failures import failure_report

            failure = own_failure(rank.place.rank, rank.error)
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
