"""The specification of a run as values: the one argument that ``fit`` hands to the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.backend import BackendConfig
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.validation import ValidationConfig
from powertrain.engine.base import SlotShape
from powertrain.run import stopping
from powertrain.worker.place import DataSettings, RunIdentity, SavingSettings
from powertrain.worker.tracing import TraceSettings


@dataclass(frozen=True, kw_only=True)
class RunDirectories:
    """Directories that a run uses beside its storage."""

    #: On this machine, for sockets and scratch; removed at the end.
    runtime: str
    #: The working directory of ranks, the same path on every node; "" for the launch directory as each node has it.
    working: str = ""
    #: Files that the driver's standard output and standard error go to.
    outputs: Sequence[str] = ()
    #: Where workers' output is kept; "" for ``logs`` in the run's directory.
    logs: str = ""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The specification of a run, frozen by ``fit``."""

    run: RunIdentity
    directories: RunDirectories
    saving: SavingSettings = field(default_factory=SavingSettings)
    data: DataSettings = field(default_factory=DataSettings)
    min_workers: int
    max_workers: int
    shape: SlotShape
    env: Mapping[str, str] = field(default_factory=dict)
    max_failures: int = 0
    fail_fast: bool = False
    max_preemptions: int = -1
    #: Seconds without progress after which ``on_hang`` happens; None to derive it from the run's pace.
    hang_timeout: float | None = None
    on_hang: str = "restart"
    #: Seconds between a signal that asks for an end and the kill that follows it.
    signal_grace: float = 30.0
    stop: stopping.Criterion = None
    #: True when ``stop`` is that of a sweep: called with every row, also while the run is ending, and with whether the
    #: row has a checkpoint.
    stop_sees_all: bool = False
    callbacks: Sequence[Any] = ()
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    #: Seconds after which storage that keeps refusing is given up.
    sync_timeout: float = 1800.0
    #: Seconds to wait for slots before the run fails; None for as long as it takes.
    queue_timeout: float | None = None
    #: The port that the run listens on for processes of other machines; 0 for any that is free.
    port: int = 0
    #: The address that it listens on; "" for the engine's choice.
    bind_host: str = ""
    #: The run's storage, pickled, as processes on other nodes know it.
    storage: bytes = b""
    validation: ValidationConfig | None = None
    backend: BackendConfig = field(default_factory=BackendConfig)
    #: The pickled (function, config) and the sources that tracebacks may need.
    function: bytes = b""
    sources: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    #: The pickled datasets; b"" where there are none, or each process has its own.
    datasets: bytes = b""
    #: How ranks are traced; None for not at all.
    trace: TraceSettings | None = None
    #: True when an error opens a debugger before the rank ends.
    post_mortem: bool = False
    #: True where ranks run whole scripts: the exit code 0 is a good end also without a message, and once one has ended
    #: after a request to end, the others have ``signal_grace`` seconds.
    runs_scripts: bool = False
    #: True when every report waits for all ranks.
    report_barrier: bool = False
    #: A checkpoint of another run to begin from, as a path; "" for none.
    begin_from: str = ""
    begin_from_filesystem: bytes = b""
    version: str = ""
    #: The trainer's arguments for callbacks: fields of ``RunContext``.
    arguments: Mapping[str, Any] = field(default_factory=dict)
