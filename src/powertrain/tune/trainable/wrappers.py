"""Additions to a trainable: parameters that are no part of the space, and the resources of its trials."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from powertrain.errors import ConfigError
from powertrain.tune.trainable.base import Trainable
from powertrain.tune.trainable.functions import is_trainable_class
from powertrain.tune.trainable.resources import Request, as_amounts, as_request
from powertrain.values.arguments import shorten

_T = TypeVar("_T", bound=Callable[..., Any])
#: The attribute of a trainable that holds its request.
_ATTRIBUTE = "_resources"
_NAMING = ("__name__", "__qualname__", "__module__", "__doc__")


def with_parameters(trainable: _T, **kwargs: Any) -> _T:
    """Return a trainable with additional arguments besides the configuration, such as datasets.

    They are pickled with the trainable, once for each trial's process, and are not part of the recorded configuration.

    Args:
        trainable: A function, which is called with the configuration and ``kwargs``; or a class derived from
            ``Trainable``, whose ``setup`` is.
        **kwargs: The arguments.

    Raises:
        ConfigError: The trainable is neither, or does not take these arguments.

    Example::

        tune.Tuner(tune.with_parameters(train, data=dataset), param_space={"lr": tune.loguniform(1e-4, 1e-1)})
    """
    _check_trainable(trainable, "with_parameters")
    if is_trainable_class(trainable):
        return _class_with_parameters(trainable, kwargs)  # type: ignore[arg-type, return-value]
    _check_takes(trainable, kwargs, f"The function {_name(trainable)}()", ({},))
    return _bound(trainable, kwargs)  # type: ignore[return-value]


def with_resources(trainable: _T, resources: Any) -> _T:
    """Return a trainable whose trials request these resources. The given one stays as it is.

    Args:
        trainable: A function, or a class derived from ``Trainable``.
        resources: A dict such as ``{"cpu": 2, "gpu": 0.5, "my_resource": 1}``, a list of bundles, a
            ``PlacementGroupFactory``, a ``ScalingConfig``, or a function of the configuration that returns one of
            these.

    Raises:
        ConfigError: The trainable is neither, or the resources are none of these.

    Example::

        tune.Tuner(tune.with_resources(train, {"cpu": 2, "gpu": 0.5}))
    """
    _check_trainable(trainable, "with_resources")
    request = as_request(resources)
    if is_trainable_class(trainable):
        return _derived(trainable, {_ATTRIBUTE: _Held(request)})  # type: ignore[return-value, arg-type]
    bound = _bound(trainable, {})
    setattr(bound, _ATTRIBUTE, _Held(request))
    return bound  # type: ignore[return-value]


def request_of(trainable: Any) -> Request | None:
    """Return the request of a trainable as it was made.

    A ``PlacementGroupFactory``, a ``ScalingConfig`` or a function of the configuration; None for a trainable that makes
    no request.
    """
    held = getattr(trainable, _ATTRIBUTE, None)
    if isinstance(held, _Held):
        return held.request
    owner = getattr(trainable, "trainable_class", trainable)
    if owner is not trainable:
        return request_of(owner)
    if is_trainable_class(owner):
        own = owner.default_resource_request
        if own.__func__ is not Trainable.default_resource_request.__func__:  # type: ignore[attr-defined]
            request: Request = own
            return request
    return None


def resources_of(
    trainable: Any,
) -> dict[str, float] | Callable[[dict[str, Any]], dict[str, float]] | None:
    """Return the resources of a trial of a trainable, as sums by name.

    Returns:
        The amounts, such as ``{"CPU": 2.0, "GPU": 0.5}``; a function of the configuration if they depend on it; None
        for no request.
    """
    request = request_of(trainable)
    return None if request is None else as_amounts(request)


class _Held:
    """Holder of a request as an attribute: a plain function would become a method of a class."""

    def __init__(self, request: Request) -> None:
        self.request = request


def _check_trainable(trainable: Any, caller: str) -> None:
    is_class = isinstance(trainable, type)
    if callable(trainable) and (not is_class or is_trainable_class(trainable)):
        return
    raise ConfigError(
        f"{caller}({shorten(trainable)}) takes a function of the configuration, or a class that is derived from "
        "powertrain.tune.Trainable. Give one of these; a trainer has its own arguments and ScalingConfig."
    )


def _check_takes(function: Any, kwargs: dict[str, Any], shown: str, before: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have no signature; the call itself will fail
    try:
        signature.bind_partial(*before, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{shown} takes {signature}, and cannot be called with the configuration and "
            f"{', '.join(kwargs)}: {error}. Add them to its arguments, or leave them out of with_parameters()."
        ) from error


def _bound(function: Any, kwargs: dict[str, Any]) -> functools.partial[Any]:
    """Return a function with bound arguments, with its name and resources. Partials can be pickled."""
    bound = functools.partial(function, **kwargs)
    for attribute in _NAMING:
        value = getattr(function, attribute, None)
        setattr(bound, attribute, _name(function) if value is None and attribute == "__name__" else value)
    held = getattr(function, _ATTRIBUTE, None)
    if held is not None:
        setattr(bound, _ATTRIBUTE, held)
    return bound


def _class_with_parameters(trainable: type[Trainable], kwargs: dict[str, Any]) -> type[Trainable]:
    _check_takes(trainable.setup, kwargs, f"{trainable.__name__}.setup()", (None, {}))

    def setup(self: Trainable, config: dict[str, Any], **more: Any) -> None:
        arguments: dict[str, Any] = {**kwargs, **more}
        trainable.setup(self, config, **arguments)

    return _derived(trainable, {"setup": setup})


def _derived(trainable: type[Trainable], members: dict[str, Any]) -> type[Trainable]:
    """Return a subclass of the same name. cloudpickle pickles it by value, as it cannot be imported."""
    naming = {name: getattr(trainable, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(trainable.__name__, (trainable,), {**naming, **members})


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
