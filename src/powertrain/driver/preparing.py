"""Checks of a request against this machine before ``fit()``, and the warm-up of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain import functions
from powertrain.driver.checks import (
    refuse_unknown_split,
    refuse_unreachable_data,
    refuse_unwritable,
    refuse_what_is_not_here,
    refuse_what_needs_own_processes,
)
from powertrain.driver.engines import check_limits_of_run, check_machine
from powertrain.driver.spec import trace_settings
from powertrain.driver.trackers import choose_trackers

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest


def check_request(request: TrainRequest) -> None:
    """Refuse what cannot work, before anything is started; then begin to warm the process that workers come from.

    Raises:
        ConfigError: A setting contradicts another one, or this machine.
    """
    from powertrain.run.record.preflight import check_directories

    refuse_unknown_split(request.data, request.datasets)
    refuse_what_is_not_here(request.run)
    trace_settings(request.run)
    choose_trackers(request, request.run.name or "run")
    refuse_unreachable_data(request.datasets, request.data, request.engine)
    if request.run.storage_filesystem is None:
        refuse_unwritable(request.run.storage_root)
    if request.starts_processes:
        functions.pickle_function(request.function, request.config)
    else:
        refuse_what_needs_own_processes(request.run, request.engine)
    check_limits_of_run(request)
    if request.engine == "ray":
        _connect_to_ray(request)
        return
    check_directories(request.run, request.data)
    check_machine(request)
    if request.engine == "local":
        from powertrain.engine.local.warm_server import prepare_server

        prepare_server(preloads_torch=request.will_use_torch)


def _connect_to_ray(request: TrainRequest) -> None:
    """Join the cluster that was named, or the one that this process is connected to."""
    from powertrain.tasks import connect_to_ray

    connect_to_ray(request.scaling.engine_options.get("address"))
