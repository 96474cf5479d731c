"""Ray's options of ``remote``: supported, without effect, or refused on one machine.

An option without effect is accepted, with a warning the first time. An option that would change values is refused: a
program would not notice that it got another result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from powertrain.config.checks import did_you_mean
from powertrain.engine import base
from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.values.arguments import as_text_keys, plain_scalar, shorten

_PLACING = "there is one machine to place it on"
_NOT_RETRIED = "it is not started again; get() raises the error"
_BACKPRESSURE = "values are not streamed"
_MEMORY = "memory is not reserved"
#: Ray's options of functions and classes that have no effect on one machine, each with the reason.
_WITHOUT_EFFECT = {
    "memory": _MEMORY,
    "object_store_memory": _MEMORY,
    "accelerator_type": _PLACING,
    "label_selector": _PLACING,
    "fallback_strategy": _PLACING,
    "scheduling_strategy": _PLACING,
    "placement_group": _PLACING,
    "placement_group_bundle_index": _PLACING,
    "placement_group_capture_child_tasks": _PLACING,
    "enable_task_events": "nothing collects them",
    "_labels": "nothing collects them",
}
_WITHOUT_EFFECT_FOR_A_TASK = {
    "max_calls": "each call has a process of its own",
    "max_retries": _NOT_RETRIED,
    "retry_exceptions": _NOT_RETRIED,
    "_generator_backpressure_num_objects": _BACKPRESSURE,
    "_num_objects_per_yield": _BACKPRESSURE,
}
_WITHOUT_EFFECT_FOR_AN_ACTOR = {
    "namespace": "an actor is reached through its handle",
    "concurrency_groups": "all methods share max_concurrency",
    "max_restarts": _NOT_RETRIED,
    "max_task_retries": _NOT_RETRIED,
    "max_pending_calls": "any number of calls may wait",
    "allow_out_of_order_execution": "calls begin in the order in which they were made",
    "enable_tensor_transport": "values are copied",
    "_actor_generator_backpressure_num_objects": _BACKPRESSURE,
}
_WITHOUT_EFFECT_FOR_A_METHOD = {
    "concurrency_group": "all methods share max_concurrency",
    "max_task_retries": _NOT_RETRIED,
    "retry_exceptions": _NOT_RETRIED,
    "enable_task_events": "nothing collects them",
    "tensor_transport": "values are copied",
    "_generator_backpressure_num_objects": _BACKPRESSURE,
    "_num_objects_per_yield": _BACKPRESSURE,
}
#: Values of these that request the default behaviour.
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "placement_group": ("default",),
    "placement_group_bundle_index": (-1,),
    "scheduling_strategy": ("DEFAULT",),
    "enable_task_events": (True,),
    "max_calls": (0, 1),
    "max_retries": (0,),
    "retry_exceptions": (False,),
    "max_restarts": (0,),
    "max_task_retries": (0,),
    "max_pending_calls": (-1,),
    "allow_out_of_order_execution": (False,),
    "enable_tensor_transport": (False,),
}
_HERE = {"num_cpus", "num_gpus", "resources", "runtime_env", "name"}
#: All that ``ray.remote`` takes for a function and for a class, and ``options`` of an actor's method.
OF_A_TASK = frozenset({*_HERE, "num_returns", *_WITHOUT_EFFECT, *_WITHOUT_EFFECT_FOR_A_TASK})
OF_AN_ACTOR = frozenset(
    {*_HERE, "lifetime", "max_concurrency", "get_if_exists", *_WITHOUT_EFFECT, *_WITHOUT_EFFECT_FOR_AN_ACTOR}
)
OF_A_METHOD = frozenset({"name", "num_returns", *_WITHOUT_EFFECT_FOR_A_METHOD})

#: More than any machine has of anything.
_MOST_OF_A_RESOURCE = 2**60
_logger = module_logger(__name__)
#: Lines that were printed.
_said: set[str] = set()


class Meaning(NamedTuple):
    """The effect of options on one machine."""

    shape: base.SlotShape
    #: Environment variables of the process.
    env: dict[str, str]
    #: Of an actor: how many of its calls may be under way at once, None for as many as is usual for its kind.
    max_concurrency: int | None = None
    #: Of an actor: it stays without a handle too, until this process ends.
    detached: bool = False


def check_names(options: Mapping[str, Any], known: Iterable[str], of: str) -> None:
    """Raise :class:`ConfigError` for a name that Ray does not have."""
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{of} has no option {name!r}. {did_you_mean(name, known)}It takes {', '.join(sorted(_public(known)))}."
            )


def of_a_task(options: Mapping[str, Any], name: str) -> Meaning:
    """Return the effect of the options of a remote function.

    Raises:
        ConfigError: One of them would change the function's result, or is not an amount.
    """
    _one_value(options, name)
    _warn_without_effect(options, _WITHOUT_EFFECT | _WITHOUT_EFFECT_FOR_A_TASK, name)
    return Meaning(shape_of(options), _variables(options.get("runtime_env"), name))


def of_an_actor(options: Mapping[str, Any], name: str) -> Meaning:
    """Return the effect of the options of a remote class.

    Raises:
        ConfigError: One of them would change the actor's behaviour, or is not an amount.
    """
    if options.get("get_if_exists"):
        raise ConfigError(
            f"{name}.options(get_if_exists=True) cannot find an actor that was made elsewhere: on one machine actors "
            "are known by their handles only. Make it once and pass the handle to whatever uses it, such as "
            "train_loop_config, or call init(address=...) first."
        )
    lifetime = options.get("lifetime")
    if lifetime not in (None, "detached", "non_detached"):
        raise ConfigError(
            f"{name}.options(lifetime={shorten(lifetime)}) is not a lifetime. Give 'detached', 'non_detached' or None."
        )
    why = {"name": "an actor is reached through its handle"}
    _warn_without_effect(options, _WITHOUT_EFFECT | _WITHOUT_EFFECT_FOR_AN_ACTOR | why, name)
    return Meaning(
        # As in Ray, an actor without requested resources reserves none: it waits most of the time.
        shape_of({"num_cpus": 0, **options}),
        _variables(options.get("runtime_env"), name),
        _calls_at_once(options.get("max_concurrency"), name),
        lifetime == "detached",
    )


def check_method(options: Mapping[str, Any], name: str) -> None:
    """Check the options of one call of an actor's method: none has an effect on one machine."""
    check_names(options, OF_A_METHOD, f"{name}.options()")
    _one_value(options, name)
    _warn_without_effect(options, _WITHOUT_EFFECT_FOR_A_METHOD, name)


def shape_of(options: Mapping[str, Any]) -> base.SlotShape:
    """Return the resources that a process needs to start."""
    num_cpus, num_gpus = options.get("num_cpus"), options.get("num_gpus")
    return base.SlotShape(
        cpus=_amount(num_cpus, "num_cpus") if num_cpus is not None else 1.0,
        gpus=_amount(num_gpus, "num_gpus") if num_gpus is not None else 0,
        custom={
            name: _amount(amount, f"resources={{{name!r}: ...}}")
            for name, amount in as_text_keys(options.get("resources"), "remote(resources=...)").items()
        },
        explicit=num_cpus is not None,
    )


def _warn_without_effect(options: Mapping[str, Any], reasons: Mapping[str, str], name: str) -> None:
    found = [
        f"{option} ({reasons[option]})"
        for option, value in options.items()
        if option in reasons and value is not None and not _is_one_of(value, _AS_IT_IS.get(option, ()))
    ]
    line = f"Accepted as in Ray, but without effect on one machine: {'; '.join(found)}, of {name}."
    if found and line not in _said:
        _said.add(line)
        _logger.warning(line)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return True when it is one of these, by type too: ``==`` of a user's own value may do anything."""
    return any(type(value) is type(one) and value == one for one in values)


def _one_value(options: Mapping[str, Any], name: str) -> None:
    count = options.get("num_returns")
    if count is not None and not _is_one_of(count, (1,)):
        raise ConfigError(
            f"{name}.options(num_returns={shorten(count)}) cannot be met on one machine: a call gives one reference. "
            "Return a tuple or a list and take it apart after get(), or call init(address=...) first."
        )


def _variables(runtime_env: Any, name: str) -> dict[str, str]:
    if not runtime_env:
        return {}
    only = "Give {'env_vars': {'NAME': 'value'}}, or call init(address=...) first."
    if not isinstance(runtime_env, Mapping):
        raise ConfigError(f"runtime_env of {name} was given a {type(runtime_env).__name__}. {only}")
    for key, value in runtime_env.items():
        if key != "env_vars" and value:
            raise ConfigError(
                f"runtime_env of {name} has {key!r}, and only a Ray cluster can set that up: on one machine a process "
                f"has the packages and files of the script. {only}"
            )
    variables = as_text_keys(runtime_env.get("env_vars"), "runtime_env={'env_vars': ...}")
    for variable, value in variables.items():
        if not isinstance(value, str):
            # Without its value, which may be a secret.
            raise ConfigError(
                f"runtime_env of {name} has a {type(value).__name__} for {variable!r}. Write it as a string."
            )
    return dict(variables)


def _calls_at_once(given: Any, name: str) -> int | None:
    count = plain_scalar(given)
    if count is None or (type(count) is int and count >= 1):
        return count
    raise ConfigError(
        f"{name}.options(max_concurrency={shorten(given)}) is not a number of calls. Give a whole number from 1."
    )


def _amount(value: Any, option: str) -> float:
    """Return a finite number that is not below 0; whole numbers stay such."""
    amount = plain_scalar(value)
    is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if is_number and 0 <= amount < _MOST_OF_A_RESOURCE:
        return amount  # type: ignore[no-any-return]
    raise ConfigError(
        f"remote({option}) was given {shorten(value)}. Give a finite number that is not below 0."
    )


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]
