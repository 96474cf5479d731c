"""``ValidationConfig`` and ``ValidationTaskConfig``: how checkpoints are validated beside the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from powertrain.config.checks import (
    Config,
    Refusal,
    a_type,
    did_you_mean,
    finite,
    instance_of,
    option,
    optional,
    positive,
    takes,
)
from powertrain.text.reprs import short_repr as _short


def _keyword_arguments(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Refusal("it is not a dict with names as keys", 'Give keyword arguments: {"batch_size": 64}.')
    if "checkpoint" in value:
        raise Refusal("'checkpoint' is always handed over first", "Remove 'checkpoint' from it.")
    return dict(value)


@dataclass(frozen=True, repr=False)
class ValidationTaskConfig(Config):
    """One validation of one checkpoint.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        report(metrics, checkpoint, validation=ValidationTaskConfig(fn_kwargs={"split": "test"}, timeout_s=600))
    """

    fn_kwargs: Mapping[str, Any] = option(None, _keyword_arguments)
    """Keyword arguments of the validation function beside the checkpoint: in ``ValidationConfig`` any picklable values,
    in ``report`` JSON values only, because they are kept with the checkpoint."""

    timeout_s: float | None = option(None, optional(positive))
    """Seconds after which the validation is ended; None never."""


def _validation_function(value: Any) -> Callable[..., Mapping[str, Any]]:
    shape = "Give a function of a checkpoint that returns a dict of metrics."
    if value is None:
        raise Refusal("the validation function is missing", shape)
    if not callable(value):
        raise Refusal(f"{a_type(value)} cannot be called", shape)
    if not takes(value, "checkpoint"):
        raise Refusal("the function does not take a checkpoint as its first argument", shape)
    return value  # type: ignore[no-any-return]


_AMOUNTS_OF_A_VALIDATION = ("num_cpus", "num_gpus")
#: Options of Ray's tasks that are accepted for a validation without effect.
VALIDATION_OPTIONS_WITHOUT_EFFECT = (
    *("name", "memory", "object_store_memory", "accelerator_type", "label_selector", "fallback_strategy"),
    *(
        "scheduling_strategy",
        "placement_group",
        "placement_group_bundle_index",
        "enable_task_events",
        "_labels",
    ),
    *("placement_group_capture_child_tasks", "max_calls", "max_retries", "retry_exceptions"),
    *("_generator_backpressure_num_objects", "_num_objects_per_yield"),
)


def _validation_resources(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Refusal(f"{a_type(value)} is not a dict", 'Give amounts, such as {"num_gpus": 1}.')
    kept: dict[str, Any] = {}
    for name, given in value.items():
        if name in VALIDATION_OPTIONS_WITHOUT_EFFECT:
            kept[name] = given
        elif name in _AMOUNTS_OF_A_VALIDATION:
            kept[name] = finite(given)
            if kept[name] < 0:
                raise Refusal("an amount is below zero", "Give 0 or more.")
        else:
            known = (*_AMOUNTS_OF_A_VALIDATION, *VALIDATION_OPTIONS_WITHOUT_EFFECT)
            fix = f"{did_you_mean(name, known)}Use {' and '.join(_AMOUNTS_OF_A_VALIDATION)} only."
            raise Refusal(f"{_short(name)} does not apply to a validation", fix)
    return kept


class ValidationFn(Protocol):
    """A function that validates a checkpoint: the type of ``ValidationConfig(fn=...)``."""

    def __call__(self, checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the metrics of a checkpoint."""
        ...


@dataclass(frozen=True, repr=False)
class ValidationConfig(Config):
    """Validation of checkpoints reported with ``validation=True``, concurrently with the training.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        TorchTrainer(train_func, validation_config=ValidationConfig(fn=validate))
    """

    fn: Callable[..., Mapping[str, Any]] = option(None, _validation_function)
    """The function: takes a checkpoint and the task's keyword arguments, returns metrics, which join the
    checkpoint's. Required."""

    task_config: ValidationTaskConfig = option(None, instance_of(ValidationTaskConfig))
    """Defaults of each validation, which ``report`` may override."""

    ray_remote_kwargs: Mapping[str, Any] = option(None, _validation_resources)
    """Resources of a validation's process: ``num_cpus`` and ``num_gpus``. The name is Ray Train's; it applies to every
    engine. Options of a Ray task about retries and placement, such as ``max_retries``, have no effect."""

    def _ignored_parts(self) -> Iterator[tuple[str, str]]:
        if ignored := [name for name in self.ray_remote_kwargs if name not in _AMOUNTS_OF_A_VALIDATION]:
            shown = f"{type(self).__name__}(ray_remote_kwargs={{{', '.join(map(repr, ignored))}}})"
            yield shown, "a validation is a process of the run, and is made once"
