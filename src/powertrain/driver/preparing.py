"""Checks of a request against this machine before ``fit()``, and the warm-up of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain import functions
from powertrain.driver.checks import (
    refuse_missing_sources,
    refuse_process_options,
    refuse_unknown_split,
    refuse_unreachable_data,
    refuse_unwritable,
)
from powertrain.driver.engines import check_limits_of_run, check_machine, prepare_engine
from powertrain.driver.spec import trace_settings
from powertrain.driver.trackers import choose_trackers

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest


def check_request(request: TrainRequest) -> None:
    """Refuse invalid requests before anything is started; then begin to warm up the process that workers are forked
    from.

    Raises:
        ConfigError: A setting contradicts another one, or this machine.
    """
    from powertrain.run.record.preflight import check_directories

    refuse_unknown_split(request.data, request.datasets)
    refuse_missing_sources(request.run)
    trace_settings(request.run)
    choose_trackers(request, request.run.name or "run")
    refuse_unreachable_data(request.datasets, request.data, request.traits)
    if request.run.storage_filesystem is None:
        refuse_unwritable(request.run.storage_root)
    if request.starts_processes:
        functions.pickle_function(request.function, request.config)
    else:
        refuse_process_options(request.run, request.traits)
    check_limits_of_run(request)
    if not request.traits.spans_nodes:
        check_directories(request.run, request.data)
        check_machine(request)
    prepare_engine(request)
