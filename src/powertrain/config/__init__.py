"""What a person may ask for: every config class, frozen and checked at the moment it is written down.

A field is one statement: its type, its default, its check, with its meaning in the string below it::

    max_failures: int = option(0, whole(at_least=-1))

``option`` ties the check to the field, :class:`Config` runs all checks at construction, and a class adds
``_contradictions`` for pairs of fields that cannot both hold. So a new field needs no other place.

Whatever is wrong (a value, a field that does not exist, a contradictory pair) raises one
:class:`~powertrain.errors.ConfigError` that names the field, the value and the fix. Fields that Ray Train has
and that would have no effect here are known by name: their defaults pass, and any other value is refused with
what to do instead (:func:`only`). Positional arguments follow the order of Ray Train 2.60.
"""

# ruff: noqa: RUF009 (``option`` makes a dataclass field, once per class, which is what RUF009 cannot see)
from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import ipaddress
import logging
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from powertrain.values.arguments import plain_scalar
from powertrain.errors import ConfigError
from powertrain.text.redaction import without_secrets
from powertrain.text.reprs import ENVIRONMENT_NAMES, repr_without_secrets
from powertrain.text.reprs import short_repr as _short

__all__ = [
    "BackendConfig",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "Config",
    "DataConfig",
    "FailureConfig",
    "LoggingConfig",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
    "TorchConfig",
    "TRAIN_DATASET_KEY",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "as_config",
    "replace",
    "to_json",
]

#: Names a run's directory may have must leave room for what is put beside it in a file name of 255 bytes.
NAME_LIMIT_BYTES = 200
#: Environment variable that replaces the default storage path.
STORAGE_VARIABLE = "POWERTRAIN_STORAGE"
DEFAULT_STORAGE_PATH = "~/powertrain_runs"
PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ENGINES = ("auto", "local", "ray", "inline", "torchrun")
#: Keys of ``engine_options`` that each engine understands; "auto" takes what any of them does.
ENGINE_OPTIONS: dict[str, tuple[str, ...]] = {"ray": ("address", "runtime_env")}
#: What a callback may define; it needs at least one of them.
CALLBACK_HOOKS = ("after_report", "after_exception", "on_event")
#: What a callback of a sweep may define (``powertrain.tune.Callback``).
SWEEP_HOOKS = (
    "on_trial_result",
    "on_trial_start",
    "on_trial_complete",
    "on_trial_error",
    "on_experiment_end",
)
#: Trackers that are chosen by name (``powertrain.trackers``).
TRACKER_NAMES = ("tensorboard", "mlflow", "wandb", "csv")
#: The dataset that ``get_dataset_shard`` gives where none is named.
TRAIN_DATASET_KEY = "train"
TORCH_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl")

_LARGEST_WHOLE = 2**31 - 1
#: Characters of a wrong name that are compared with the right ones.
_LONGEST_GUESS = 200
_MOST_BYTES = 2**60
_ConfigT = TypeVar("_ConfigT", bound="Config")
_AnyT = TypeVar("_AnyT")

# --------------------------------------------------------------------------- how a config is checked

#: Takes a value as given and returns it as it is kept, or raises :class:`Refusal`. Idempotent.
Check = Callable[[Any], Any]


class Refusal(Exception):
    """A check's no: why the value cannot be used (a clause), and what to write instead (a sentence)."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why, fix)
        self.why, self.fix = why, fix


def option(default: Any, check: Check) -> Any:
    """A field with its default and its check. The default is given to the check too when nothing is said."""
    return dataclasses.field(default=default, metadata={"check": check})


def ignored(default: Any, check: Check, why: str) -> Any:
    """Declare a field of Ray's that has no effect here: its values are checked, and ``fit()`` prints ``why`` once."""
    return dataclasses.field(default=default, metadata={"check": check, "ignored": why})


class Config:
    """The base of all configs: one error for whatever is wrong, a short repr, equality by value.

    Subclasses are dataclasses with ``frozen=True, repr=False`` whose fields are made with :func:`option`.
    After construction every value is valid and in its kept form.
    """

    #: Names that existed elsewhere, each with the sentence that says what to write instead.
    _moved: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[_ConfigT], *args: Any, **kwargs: Any) -> _ConfigT:
        # Here and not in __init__, because a dataclass answers an unknown keyword with a bare TypeError.
        # Unpickling calls this without arguments, so what is missing is left to the checks.
        _check_names(cls, args, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in _fields(self):
            check = field.metadata.get("check")
            if check is None:
                continue
            value = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, check(value))
            except Refusal as refusal:
                raise _config_error(type(self), {field.name: value}, "cannot be used", refusal) from None
        self._contradictions()

    def _contradictions(self) -> None:
        """Raise through :meth:`_contradiction` where two valid fields cannot both hold."""

    def _ignored_parts(self) -> Iterator[tuple[str, str]]:
        """Parts of fields that have no effect here, each with the reason. :func:`ignored` is for whole fields."""
        return iter(())

    def _contradiction(self, names: Iterable[str], why: str, fix: str) -> ConfigError:
        values = {name: getattr(self, name) for name in names}
        return _config_error(type(self), values, "is contradictory", Refusal(why, fix))

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in _fields(self) if not _is_default(self, f)}
        shown = [f"{name}={repr_without_secrets(value, name)}" for name, value in changed.items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def without_effect(configs: Iterable[Config]) -> str:
    """One sentence that names the fields that were set and have no effect here, "" where there are none."""
    found = [f"{shown} ({why})" for config in configs for shown, why in _set_and_ignored(config)]
    return f"Accepted as in Ray, but without effect here: {'; '.join(found)}." if found else ""


def _set_and_ignored(config: Config) -> Iterator[tuple[str, str]]:
    yield from config._ignored_parts()
    for field in _fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            yield from _set_and_ignored(value)
        elif "ignored" in field.metadata and not _is_default(config, field):
            shown = f"{type(config).__name__}({field.name}={_short(value, field.name)})"
            yield shown, field.metadata["ignored"]


def _fields(config: Any) -> tuple[dataclasses.Field[Any], ...]:
    # Through Any, because the base itself is no dataclass: only its subclasses are.
    return dataclasses.fields(config)


def _config_error(cls: type, values: Mapping[str, Any], verdict: str, refusal: Refusal) -> ConfigError:
    named = ", ".join(f"{name}={_short(value, name)}" for name, value in values.items())
    return ConfigError(f"{cls.__name__}({named}) {verdict}: {refusal.why}. {refusal.fix}")


@functools.cache
def _parameters(cls: Any) -> tuple[tuple[str, ...], bool]:
    """Names that ``cls(...)`` takes in order, and whether a subclass's own ``__init__`` takes any others."""
    found = list(inspect.signature(cls.__init__).parameters.values())[1:]
    open_ended = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in found)
    return tuple(p.name for p in found), open_ended


def _check_names(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names, open_ended = _parameters(cls)
    if open_ended:
        return
    for name in kwargs:
        if name not in names:
            fix = cls._moved.get(name) or f"{did_you_mean(name, names)}Its fields are {', '.join(names)}."
            # Without its value: what an unknown field holds is not known, and may be a secret.
            raise ConfigError(f"{cls.__name__} has no field {name!r}. {fix}")
    if len(args) > len(names):
        raise ConfigError(
            f"{cls.__name__} has {len(names)} fields, but {len(args)} values were given by position, "
            f"beginning with {_short(args[0], names[0])}. Write them by name: {', '.join(names)}."
        )
    for name in names[: len(args)]:
        if name in kwargs:
            raise ConfigError(
                f"{cls.__name__} got the field {name!r} twice, once by position and once as "
                f"{name}={_short(kwargs[name], name)}. Keep the one by name."
            )


def _is_default(config: Config, field: dataclasses.Field[Any]) -> bool:
    try:
        default = field.metadata["check"](field.default)
    except (KeyError, Refusal):  # no check, or a field that must be given
        return False
    return bool(getattr(config, field.name) == default)


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """A question with the nearest of ``names``, and a blank after it; "" where none is near."""
    from difflib import get_close_matches

    if not isinstance(name, str):
        return ""
    by_folded = {known.casefold(): known for known in names}
    close = get_close_matches(name[:_LONGEST_GUESS].casefold(), by_folded, n=1, cutoff=0.6)
    return f"Did you mean {by_folded[close[0]]!r}? " if close else ""


def as_config(value: Any, cls: type[_AnyT], argument: str) -> _AnyT:
    """``value`` if it is a ``cls``, a default one for None, else a ConfigError that names ``argument``.

    ``argument`` is what the user wrote, such as ``"TorchTrainer(scaling_config=...)"``.
    """
    try:
        kept: _AnyT = instance_of(cls)(value)
    except Refusal as refusal:
        raise ConfigError(f"{argument} got {_short(value)}: {refusal.why}. {refusal.fix}") from None
    return kept


def replace(config: _ConfigT, **changes: Any) -> _ConfigT:
    """A copy with some fields changed, checked like any other config."""
    if not isinstance(config, Config):
        raise ConfigError(
            f"replace() got {_short(config)}, which is not a config. Give it one, such as RunConfig()."
        )
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def to_json(config: Config | BackendConfig) -> dict[str, Any]:
    """All fields as JSON has them, for ``run.json``.

    Functions and objects are given by their qualified names. Values of environment variables and credentials in
    addresses are left out, because run directories are shared.
    """
    if isinstance(config, Config):
        return {field.name: _json_value(field.name, getattr(config, field.name)) for field in _fields(config)}
    public = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    described = {name: _json_value(name, value) for name, value in public.items()}
    return {"type": _qualified_name(type(config)), **described}


def _json_value(name: str, value: Any) -> Any:
    if name in ENVIRONMENT_NAMES and isinstance(value, Mapping):
        return {str(key): "<hidden>" for key in value}
    if isinstance(value, Config):
        return to_json(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return without_secrets(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value("", item) for item in value]
    return _qualified_name(value)


def _qualified_name(value: Any) -> str:
    """``module.name`` of a class or function, and of the class of anything else."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"


# --------------------------------------------------------------------------- the checks


def whole(at_least: int, at_most: int = _LARGEST_WHOLE) -> Check:
    """A whole number within bounds; a bool is not one."""

    bounds = (
        f"at least {at_least}"
        if at_most in (_LARGEST_WHOLE, _MOST_BYTES)
        else f"from {at_least} to {at_most}"
    )

    def check(value: Any) -> int:
        value = plain_scalar(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise Refusal(f"{_a_type(value)} is not a whole number", f"Give a whole number, {bounds}.")
        if not at_least <= int(value) <= at_most:
            raise Refusal("the number is out of range", f"Give a whole number, {bounds}.")
        return int(value)

    return check


def positive(value: Any) -> float:
    """A finite number above zero."""
    found = _finite(value)
    if found <= 0:
        raise Refusal("the number must be above zero", "Give a positive number of seconds.")
    return found


def flag(value: Any) -> bool:
    """True or False, also numpy's and torch's, and nothing that only looks like it."""
    plain = plain_scalar(value)
    if not isinstance(plain, bool):
        raise Refusal(f"{_a_type(value)} is neither True nor False", "Write True or False.")
    return plain


def text(value: Any) -> str:
    """A string with something in it."""
    if not isinstance(value, str):
        raise Refusal(f"{_a_type(value)} is not a string", "Give a string.")
    if not value.strip():
        raise Refusal("the string is empty", "Give a string with something in it, or leave the field out.")
    return _whole_characters(value)


def _whole_characters(value: str) -> str:
    """Text that can be a file's name and can be sent: without NUL, and without half a character."""
    if "\0" in value:
        raise Refusal("it holds a NUL character", "Leave that character out.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            f"it holds half a character ({value[error.start]!r}), as text has that was not decoded as UTF-8",
            "Write it with whole characters, or rename the file.",
        ) from None
    return value


def one_of(*choices: str) -> Check:
    """One of these words, spelled exactly so."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Refusal(
                "it is not one of the known words",
                f"{did_you_mean(value, choices)}Use one of {', '.join(repr(c) for c in choices)}.",
            )
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what ``check`` takes."""
    return lambda value: None if value is None else check(value)


def instance_of(cls: type) -> Check:
    """An instance of a config class; None stands for its defaults."""

    def check(value: Any) -> Any:
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        name = f"powertrain.{cls.__name__}"
        if isinstance(value, Mapping):
            raise Refusal(f"a dict was given where a {name} belongs", f"Write {cls.__name__}(**{{...}}).")
        if isinstance(value, type) and issubclass(value, cls):
            raise Refusal("the class itself was given", f"Make an instance: {value.__name__}().")
        raise Refusal(
            f"{_a_type(value)} is not a {name}", f"Give a {name}, or leave it out for the defaults."
        )

    return check


def only(*allowed: Any, why: str, fix: str) -> Check:
    """These values, which ask for nothing special. The first is the one that is kept."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float, str, type(None))) and value in allowed:
            return allowed[0]
        raise Refusal(why, fix)

    return check


def _a_type(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def _anything(value: Any) -> Any:
    return value


def _finite(value: Any) -> float:
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Refusal(f"{_a_type(value)} is not a number", "Give a number.")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Refusal("the number is not finite", "Give a finite number.")
    return int(value) if isinstance(value, numbers.Integral) else found


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the function can be called with these positional arguments (True where it cannot be told)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind_partial(*arguments)
    except TypeError:
        return False
    return True


# --------------------------------------------------------------------------- scaling


def _worker_count(value: Any) -> int | tuple[int, int]:
    how = "Use 0 to train in this very process, N for N worker processes, or (min, max) for an elastic run."
    if callable(value):
        raise Refusal("the number of workers cannot be computed by a function", how)
    if isinstance(value, tuple):
        if len(value) != 2:
            raise Refusal("an elastic size is a pair", "Write it as (min, max), for example (2, 8).")
        try:
            low, high = (int(whole(at_least=1)(part)) for part in value)
        except Refusal:
            raise Refusal("both ends of an elastic size must be whole numbers from 1 on", how) from None
        if low > high:
            raise Refusal("the minimum is above the maximum", f"Write it as ({high}, {low}).")
        return low, high
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise Refusal(f"{_a_type(value)} is not a number of workers", how)
    if value < 0:
        raise Refusal("the number of workers cannot be negative", how)
    return int(whole(at_least=0)(value))


def _amounts(value: Any) -> dict[str, float] | None:
    """Resource amounts by name; an empty dict says nothing, so it becomes None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise Refusal(
            f"{_a_type(value)} is not a dict", 'Give amounts by name, such as {"CPU": 2, "GPU": 1}.'
        )
    kept: dict[str, float] = {}
    for name, amount in value.items():
        if not isinstance(name, str) or not name:
            raise Refusal(f"the resource name {_short(name)} is not a string", 'Name it, such as "CPU".')
        if name in ("cpu", "gpu", "Cpu", "Gpu"):
            raise Refusal(f"the resource {name!r} is spelled in capitals", f"Write {name.upper()!r}.")
        if name.upper() == "TPU":
            raise Refusal("TPUs are not supported", "Use CPUs or GPUs.")
        try:
            kept[name] = _finite(amount)
        except Refusal:
            fix = f"Give a finite number, such as {{{name!r}: 1}}."
            raise Refusal(f"the amount of {name!r} is {_short(amount)}, which is not a number", fix) from None
        if kept[name] < 0:
            fix = f"Give 0 or more for {name!r}."
            raise Refusal(f"the amount of {name!r} is {_short(amount)}, below zero", fix)
    _check_gpu_share(kept.get("GPU", 0))
    return kept or None


def _check_gpu_share(gpus: float) -> None:
    if gpus > 1 and gpus != int(gpus):
        raise Refusal(
            f"a worker cannot have {gpus} GPUs", "Give a whole number of GPUs, or a share of one below 1."
        )


def _labels(value: Any) -> dict[str, str] | list[dict[str, str]] | None:
    if value is None:
        return None
    selectors = value if isinstance(value, (list, tuple)) else [value]
    for selector in selectors:
        if not isinstance(selector, Mapping) or not all(
            isinstance(part, str) for item in selector.items() for part in item
        ):
            raise Refusal(
                f"{_short(selector)} is not a dict of strings",
                'Give node labels, such as {"ray.io/market-type": "spot"}, or one such dict per worker.',
            )
    return [dict(s) for s in selectors] if isinstance(value, (list, tuple)) else dict(value)


def _options(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Refusal(f"{_a_type(value)} is not a dict", 'Give options by name, such as {"address": "auto"}.')
    known = tuple(name for names in ENGINE_OPTIONS.values() for name in names)
    for name in value:
        if name not in known:
            raise Refusal(
                f"no engine has an option {_short(name)}",
                f"{did_you_mean(name, known)}The options are {', '.join(known)}.",
            )
    return dict(value)


_NO_TPU = "TPUs are not supported"


@dataclass(frozen=True, repr=False)
class ScalingConfig(Config):
    """How many workers, what each of them gets, and where they live."""

    trainer_resources: Mapping[str, float] | None = option(None, _amounts)
    """What the controller reserves on a Ray cluster. On one machine it lives in the calling process and
    reserves nothing."""

    num_workers: int | tuple[int, int] = option(1, _worker_count)
    """Worker processes: N, ``(min, max)`` for an elastic run, or 0 to train in the calling process. An elastic run
    takes as many as there is room for; on one machine, where no resource is asked for by name, that is one per core. A
    fixed N is started whatever the number of cores."""

    use_gpu: bool = option(False, flag)
    """Give each worker a GPU (one, unless ``resources_per_worker`` says how many)."""

    resources_per_worker: Mapping[str, float] | None = option(None, _amounts)
    """Amounts each worker reserves, such as ``{"CPU": 4, "GPU": 1, "accelerator_type:T4": 0.001}``. What is
    named is checked against the machine; without it a worker counts as one CPU, which is never refused."""

    placement_strategy: str = option("PACK", one_of(*PLACEMENT_STRATEGIES))
    """How workers lie on nodes: PACK (few nodes), SPREAD (many), STRICT_PACK (one node or fail),
    STRICT_SPREAD (each on its own node or fail)."""

    accelerator_type: str | None = option(None, optional(text))
    """The kind of GPU every worker must have, such as ``"A100"``."""

    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = option(None, _labels)
    """Labels of the Ray nodes workers may lie on: one dict for all, or a list with one per worker."""

    use_tpu: bool = option(False, only(False, why=_NO_TPU, fix="Use use_gpu=True, or CPUs."))
    """Ray Train's; only False."""

    topology: str | None = option(None, only(None, why=_NO_TPU, fix="Leave topology out."))
    """Ray Train's shape of a TPU slice; only None."""

    elastic_resize_monitor_interval_s: float = ignored(60.0, _finite, "capacity is watched continuously")
    """Ray Train's polling period. Without effect: capacity is watched continuously."""

    engine: str = option("auto", one_of(*ENGINES))
    """Where processes live: ``"local"`` (this machine), ``"ray"`` (a Ray cluster), ``"inline"`` (the calling
    process), ``"torchrun"`` (this process is one of torchrun's), or ``"auto"`` for the one that applies."""

    engine_options: Mapping[str, Any] = option(None, _options)
    """Options of the engine, for Ray ``{"address": ..., "runtime_env": ...}``."""

    queue_timeout_s: float | None = option(None, optional(positive))
    """How long to wait for room before the run fails with what was missing; None waits as long as it takes. So long a
    validation waits for a slot of its own, too, once the training is over."""

    _moved: ClassVar[Mapping[str, str]] = {
        "bundle_label_selector": "Use label_selector.",
        "num_gpus": 'Use use_gpu=True, with resources_per_worker={"GPU": n} for other than one GPU.',
        "num_cpus": 'Use resources_per_worker={"CPU": n}.',
        "min_workers": "Use num_workers=(min, max).",
        "max_workers": "Use num_workers=(min, max).",
    }

    @property
    def min_workers(self) -> int:
        """The smallest number of workers to train with."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers to train with."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.min_workers < self.max_workers

    @property
    def elasticity_enabled(self) -> bool:
        """Whether ``num_workers`` was given as ``(min, max)``."""
        return isinstance(self.num_workers, tuple)

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers reserve together, at most, as in Ray Train."""
        return {name: amount * self.max_workers for name, amount in self._reserved.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        """The CPUs that each worker reserves."""
        return self._reserved.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        """The GPUs that each worker reserves."""
        return self._reserved.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        """0: TPUs are not supported."""
        return 0

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What each worker reserves beside CPUs and GPUs."""
        return {name: amount for name, amount in self._reserved.items() if name not in ("CPU", "GPU")}

    @property
    def _reserved(self) -> dict[str, float]:
        """What one worker reserves on a cluster: a worker with a GPU reserves a CPU only where that is named."""
        named = {name: amount for name, amount in self.resources.items() if amount}
        if self.use_gpu and self.resources_per_worker is None:
            named.pop("CPU", None)
        return named

    @property
    def explicit_resources(self) -> bool:
        """Whether the user named amounts, which are then checked against the machine."""
        return self.resources_per_worker is not None

    @property
    def resources(self) -> dict[str, float]:
        """What one worker needs: always CPU and GPU, and each custom resource with an amount above zero.

        Where amounts are named, what is not named is not asked for, so a worker with
        ``{"accelerator_type:T4": 0.001}`` asks for no CPU.
        """
        named = self.resources_per_worker or {"CPU": 1}
        resolved = {"CPU": named.get("CPU", 0), "GPU": named.get("GPU", 1 if self.use_gpu else 0)}
        resolved.update((name, amount) for name, amount in named.items() if name not in resolved and amount)
        if self.accelerator_type:
            resolved.setdefault(f"accelerator_type:{self.accelerator_type}", 0.001)
        return resolved

    def _contradictions(self) -> None:
        self._check_gpus()
        self._check_engine_and_size()
        self._check_engine_and_rest()
        if self.is_elastic and self.placement_strategy.startswith("STRICT_"):
            soft = self.placement_strategy.removeprefix("STRICT_")
            raise self._contradiction(
                ("num_workers", "placement_strategy"),
                "workers that come and go one by one cannot be placed as one group",
                f'Use placement_strategy="{soft}", or one number of workers.',
            )
        if isinstance(self.label_selector, list) and len(self.label_selector) != self.max_workers:
            raise self._contradiction(
                ("num_workers", "label_selector"),
                f"{len(self.label_selector)} selectors were given for {self.max_workers} workers",
                "Give one selector per worker, or one dict for all of them.",
            )

    def _check_gpus(self) -> None:
        gpus = (self.resources_per_worker or {}).get("GPU")
        if self.use_gpu and gpus == 0:
            raise self._contradiction(
                ("use_gpu", "resources_per_worker"),
                "GPUs are wanted, but each worker gets none",
                'Set use_gpu=False, or give "GPU" an amount above 0 in resources_per_worker.',
            )
        if not self.use_gpu and gpus:
            raise self._contradiction(
                ("use_gpu", "resources_per_worker"),
                "each worker gets GPUs, but they are not to be used",
                'Set use_gpu=True, or remove "GPU" from resources_per_worker.',
            )
        if self.accelerator_type and not self.use_gpu:
            raise self._contradiction(
                ("use_gpu", "accelerator_type"),
                "a kind of GPU is named, but GPUs are not to be used",
                "Set use_gpu=True, or remove accelerator_type.",
            )

    def _check_engine_and_size(self) -> None:
        pair = ("engine", "num_workers")
        if self.engine == "inline" and self.max_workers > 1:
            raise self._contradiction(
                pair,
                "inline trains in the calling process, which is one worker",
                'Set num_workers=0, or engine="local" for several workers on this machine.',
            )
        if self.engine in ("inline", "torchrun") and isinstance(self.num_workers, tuple):
            raise self._contradiction(
                pair,
                f"the engine {self.engine!r} cannot change the number of workers",
                'Give one number, or use engine="local" or "ray" for an elastic run.',
            )
        if self.engine in ("local", "ray") and self.num_workers == 0:
            raise self._contradiction(
                pair,
                "0 workers means to train in the calling process",
                f'Set num_workers=1 or more, or engine="inline" in place of {self.engine!r}.',
            )

    def _check_engine_and_rest(self) -> None:
        if self.engine in ("auto", "ray"):
            return
        if self.label_selector is not None:
            raise self._contradiction(
                ("engine", "label_selector"),
                "labels belong to the nodes of a Ray cluster",
                'Remove label_selector, or use engine="ray".',
            )
        if self.placement_strategy == "STRICT_SPREAD" and self.engine == "local" and self.max_workers > 1:
            raise self._contradiction(
                ("engine", "placement_strategy", "num_workers"),
                "STRICT_SPREAD wants each worker on its own node, and there is one machine",
                'Use placement_strategy="SPREAD", or engine="ray".',
            )
        known = ENGINE_OPTIONS.get(self.engine, ())
        foreign = [name for name in self.engine_options if name not in known]
        if foreign:
            raise self._contradiction(
                ("engine", "engine_options"),
                f"the engine {self.engine!r} has no option {foreign[0]!r}",
                f'Remove {foreign[0]!r} from engine_options, or use engine="ray".',
            )


# --------------------------------------------------------------------------- failures and checkpoints


def _fail_fast(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() == "raise":
        return "raise"
    raise Refusal("it is neither True, False nor 'raise'", "Use one of True, False, 'raise'.")


@dataclass(frozen=True, repr=False)
class FailureConfig(Config):
    """What happens when a worker fails. The loss of a slot or node is not a failure and is not counted."""

    max_failures: int = option(0, whole(at_least=-1))
    """How many failures of workers to recover from, each from the newest committed checkpoint; -1 for any
    number."""

    fail_fast: bool | str = option(False, _fail_fast)
    """True ends the run at the first failure. ``"raise"`` is Ray Tune's word for the same: ``fit`` raises in
    any case."""

    controller_failure_limit: int = ignored(
        -1,
        whole(-1),
        "the controller lives in the process that called fit(); start the script again to go on",
    )
    """Ray Train's limit for restarts of its controller. Without effect: the controller lives in the process that called
    ``fit()``, and the run goes on when the script is started again."""

    max_preemption_failures: int = option(-1, whole(at_least=-1))
    """How many times to go on after slots were taken away that a notice had come for, counted apart from
    ``max_failures``; -1 for any number, 0 to end the run instead."""

    relax_collectives_on_preemption: bool = ignored(
        False,
        flag,
        "report() waits for other ranks only with report_barrier, and a lost rank ends the attempt",
    )
    """Ray Train's. Without effect: ``report()`` waits for other ranks only with ``report_barrier``, and a lost rank
    ends the attempt in any case."""

    preemption_grace_s: float = ignored(0.0, _finite, "no time is added after a node's deadline")
    """Ray Train's. Without effect: no time is added after a node's deadline."""

    hang_timeout_s: float | None = option(None, optional(positive))
    """Seconds without any progress after which ``on_hang`` happens, whatever the rank is doing. None: 120 s, or three
    times the longest pause that this run has come out of by itself, or sixty usual steps, whichever is longest; half an
    hour before a rank's first step and while it saves a checkpoint; and never while a rank goes on from line to line
    of its code. A notice that says who hangs and where comes long before, after 5 s or five usual steps. Where ranks
    wait in a collective for a rank that has returned, it happens after 10 s at the latest."""

    on_hang: str = option("restart", one_of("restart", "report", "fail"))
    """What happens then: ``"restart"`` counts as a failure of the rank that hangs and starts again if ``max_failures``
    allows it, ``"fail"`` ends the run, ``"report"`` only tells. With ``num_workers=0`` the process is your own, and
    a hang is only told."""

    signal_grace_s: float = option(30.0, positive)
    """Seconds from a SIGTERM (or a grace signal of the scheduler) to the kill that follows it: what a run has to save
    and end. 30 is the usual of Kubernetes and Slurm. Signals to the driver are heard where ``fit`` runs in its main
    thread."""

    def _contradictions(self) -> None:
        if self.fail_fast and self.max_failures != 0:
            raise self._contradiction(
                ("max_failures", "fail_fast"),
                "a run cannot both end at the first failure and recover from it",
                "Set max_failures=0, or leave fail_fast out.",
            )


_OWN_LOOP = "the training loop is yours, so no one else can save in it"


def _frequency(value: Any) -> int | None:
    return optional(whole(at_least=0))(value) or None


def _local_directory(value: Any) -> str:
    path = _path(value)
    if "://" in path:
        raise Refusal("checkpoints wait on the node's own disk", "Give a directory on it.")
    return os.path.abspath(os.path.expanduser(path))


@dataclass(frozen=True, repr=False)
class CheckpointConfig(Config):
    """Which of the reported checkpoints are kept."""

    num_to_keep: int | None = option(None, optional(whole(at_least=1)))
    """How many checkpoints to keep; None keeps all. The newest is never deleted."""

    checkpoint_score_attribute: str | None = option(None, optional(text))
    """The reported metric that ranks checkpoints (``"eval/loss"`` looks inside nested metrics). None ranks
    them by age."""

    checkpoint_score_order: Literal["max", "min"] = option("max", one_of("max", "min"))
    """Whether the highest or the lowest score is best."""

    checkpoint_frequency: int | None = option(None, _frequency)
    """Save what ``register_state`` was given every so many reports; None or 0 for never. A report that brings a
    checkpoint of its own is left as it is."""

    checkpoint_at_end: bool | None = ignored(
        None,
        lambda value: None if value is None else flag(value) or None,
        "the loop reports its checkpoints itself",
    )
    """Ray Train's, for trainers that own the loop. Without effect: the loop reports its checkpoints itself."""

    staging_dir: str | os.PathLike[str] | None = option(None, optional(_local_directory))
    """Where checkpoints wait on each node until they are in storage. None: on the storage itself where that is a
    local disk, else ``/var/tmp``."""

    staging_bytes: int | None = option(None, optional(whole(1, _MOST_BYTES)))
    """How many bytes may wait there on one node; None for half of what is free."""

    on_full: Literal["replace", "wait"] = option("replace", one_of("replace", "wait"))
    """What happens when no more may wait: the oldest that is not committed yet gives way to the new one, which is
    told; or ``report`` waits for the storage."""

    on_lost: Literal["raise", "warn"] = option("raise", one_of("raise", "warn"))
    """What ``fit`` does when the checkpoint that was reported last could not be saved: raise
    :class:`~powertrain.errors.CheckpointError`, whose ``result`` is the run's; or return the result. Each loss is
    printed, and all are in ``Result.unsaved_checkpoints``, either way."""

    _moved: ClassVar[Mapping[str, str]] = {
        "_checkpoint_keep_all_ranks": "Report a checkpoint on every rank whose files are to be kept.",
        "_checkpoint_upload_from_workers": "Leave it out: files always go from their node to the storage.",
    }

    def _contradictions(self) -> None:
        if self.checkpoint_score_order == "min" and self.checkpoint_score_attribute is None:
            raise self._contradiction(
                ("checkpoint_score_attribute", "checkpoint_score_order"),
                "there is an order, but no score to put in order",
                "Name the metric in checkpoint_score_attribute, or leave checkpoint_score_order out.",
            )


class CheckpointUploadMode(Enum):
    """How ``report`` hands a checkpoint to the storage."""

    ASYNC = "ASYNC"
    """Training goes on while the files travel."""
    SYNC = "SYNC"
    """``report`` returns when the checkpoint is committed."""
    NO_UPLOAD = "NO_UPLOAD"
    """The files are already where they belong; only the commit is made."""


class CheckpointConsistencyMode(Enum):
    """What a reader of reported checkpoints waits for."""

    COMMITTED = "COMMITTED"
    """The newest reported checkpoint is committed."""
    VALIDATED = "VALIDATED"
    """The newest reported checkpoint is committed and its validation has ended."""


@dataclass(frozen=True, repr=False)
class SyncConfig(Config):
    """How files reach a remote storage path."""

    sync_period: float = ignored(300, _finite, "files are sent when they are ready")
    """Ray Train's. Without effect: files are sent when they are ready."""

    sync_timeout: float = option(1800, positive)
    """Seconds after which an operation on the storage that keeps failing is given up."""

    sync_artifacts: bool = ignored(False, flag, "files to keep belong into a checkpoint")
    """Ray Tune's. Without effect: a rank's working directory is not sent anywhere. Put files to keep into a checkpoint,
    or write them to the storage."""

    sync_artifacts_on_checkpoint: bool = ignored(True, flag, "artifacts are not sent at all")
    """Ray Tune's. Without effect: artifacts are not sent at all."""

    _moved: ClassVar[Mapping[str, str]] = {
        "upload_dir": "Use RunConfig(storage_path=...).",
        "syncer": "Use RunConfig(storage_path=...), with storage_filesystem for a filesystem of your own.",
    }


# --------------------------------------------------------------------------- the run


def _log_level(value: Any) -> str:
    levels = ("CRITICAL", "FATAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG", "NOTSET")
    folded = value.upper() if isinstance(value, str) else value
    if isinstance(folded, int) and not isinstance(folded, bool):
        named = f" ({folded} is {logging.getLevelName(folded)})" if 0 <= folded <= logging.CRITICAL else ""
        raise Refusal("levels are given by name", f"Use one of {', '.join(levels)}{named}.")
    return str(one_of(*levels)(folded))


@dataclass(frozen=True, repr=False)
class LoggingConfig(Config):
    """What Powertrain itself logs. What your code prints or logs is not touched."""

    log_level: str = option("INFO", _log_level)
    """The lowest level of Powertrain's own messages that is shown, by name, such as ``"DEBUG"``."""


def _run_name(value: Any) -> str:
    name = text(value)
    shape = "Use letters, digits, '-', '_' and '.', such as 'resnet-2'."
    if "/" in name or "\\" in name:
        raise Refusal("a run's name is one directory below storage_path and has no slash", shape)
    if name in (".", ".."):
        raise Refusal("it would name another directory than the run's own", shape)
    if name != name.strip() or not name.isprintable():
        raise Refusal("it has blanks at an end or characters that cannot be seen", shape)
    if len(name.encode("utf-8", "surrogatepass")) > NAME_LIMIT_BYTES:
        raise Refusal(f"it is longer than {NAME_LIMIT_BYTES} bytes", "Use a shorter name.")
    return name


def _path(value: Any) -> str:
    try:
        found = os.fspath(value)
    except Exception:  # no path, or one that raises when it is looked at
        found = None
    if not isinstance(found, str):
        raise Refusal(f"{_a_type(value)} is not a path", "Give a string or a pathlib.Path.")
    if not found.strip():
        raise Refusal("it is empty", "Give a path, or leave the field out.")
    return _whole_characters(found)


def _storage_path(value: Any) -> str:
    path = _path(value)
    wanted = 'Give a directory, or a place such as "s3://bucket/runs".'
    if re.fullmatch(r"[A-Za-z][\w+.-]*://+", path):
        raise Refusal("nothing comes after the '://'", wanted)
    one_slash = re.match(r"(s3|gs|gcs|az|abfs|abfss|file|hdfs):/?(?!/)", path)
    if one_slash:
        rest = path[one_slash.end() :]
        start = f"{one_slash[1]}:///" if one_slash[1] == "file" else f"{one_slash[1]}://"
        raise Refusal("a slash is missing after the ':'", f"Write {_short(start + rest)}.")
    return path


def _filesystem(value: Any) -> Any:
    known = {("pyarrow", "FileSystem"), ("fsspec", "AbstractFileSystem")}
    if {(c.__module__.partition(".")[0], c.__name__) for c in type(value).__mro__} & known:
        return value
    raise Refusal(
        f"{_a_type(value)} is not a filesystem", "Give a pyarrow.fs.FileSystem or an fsspec filesystem."
    )


def _callbacks(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise Refusal(f"{_a_type(value)} is not a list", "Put the callbacks into a list: callbacks=[...].")
    for callback in value:
        if isinstance(callback, type):
            raise Refusal(
                f"{callback.__name__} is a class, not an instance",
                f"Write {callback.__name__}() in the list.",
            )
        if not any(callable(getattr(callback, hook, None)) for hook in (*CALLBACK_HOOKS, *SWEEP_HOOKS)):
            raise Refusal(
                f"{_short(callback)} has none of the methods {', '.join(CALLBACK_HOOKS)}",
                "Give objects that define at least one of them.",
            )
    return tuple(value)


def _trackers(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise Refusal(f"{_a_type(value)} is not a list", "Put the trackers into a list: trackers=[...].")
    for tracker in value:
        if isinstance(tracker, str):
            if tracker not in TRACKER_NAMES:
                fix = f"{did_you_mean(tracker, TRACKER_NAMES)}Known are {', '.join(TRACKER_NAMES)}."
                raise Refusal(f"there is no tracker {_short(tracker)}", fix)
        elif isinstance(tracker, type):
            fix = f"Write {tracker.__name__}() in the list."
            raise Refusal(f"{tracker.__name__} is a class, not an instance", fix)
        elif not callable(getattr(tracker, "open", None)) or not callable(getattr(tracker, "settled", None)):
            fix = f"Give {', '.join(map(repr, TRACKER_NAMES))}, or an instance of a powertrain.trackers.Tracker."
            raise Refusal(f"{_short(tracker)} is not a tracker", fix)
    return tuple(value)


def _worker_environment(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    example = 'Give {"env_vars": {"NAME": "value"}}.'
    if not isinstance(value, Mapping):
        raise Refusal(f"{_a_type(value)} is not a dict", example)
    for key in value:
        if key == "working_dir":
            raise Refusal("'working_dir' is set elsewhere", "Use RunConfig(working_dir=...).")
        if key != "env_vars":
            fix = 'Use ScalingConfig(engine="ray", engine_options={"runtime_env": ...}).'
            raise Refusal(f"{_short(key)} is not for every engine; only 'env_vars' is", fix)
    variables = value.get("env_vars", {})
    if not isinstance(variables, Mapping):
        raise Refusal(f"its 'env_vars' are {_a_type(variables)}, not a dict", example)
    for name, setting in variables.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise Refusal(f"{_short(name)} cannot be the name of an environment variable", example)
        if not isinstance(setting, str) or "\0" in setting:
            fix = f'Write its value as a string: {{"env_vars": {{{name!r}: "..."}}}}.'
            raise Refusal(f"the variable {name!r} is {_a_type(setting)}, not a string", fix)
        try:
            (name + setting).encode()
        except UnicodeEncodeError:
            raise Refusal(f"the variable {_short(name)} holds half a character", example) from None
    return {"env_vars": dict(variables)} if variables else {}


def _stop_criterion(value: Any) -> dict[str, float] | Callable[[str, Mapping[str, Any]], bool]:
    example = 'Give limits by metric, such as {"training_iteration": 100}, or a function of (name, metrics).'
    if callable(value) and not isinstance(value, type):
        if not _takes(value, "name", {}):
            raise Refusal("the function does not take two arguments, the run's name and the metrics", example)
        return value  # type: ignore[no-any-return]
    if not isinstance(value, Mapping):
        raise Refusal(f"{_a_type(value)} is neither a dict nor a function", example)
    if not value:
        raise Refusal("the dict is empty", example)
    for metric, limit in value.items():
        if not isinstance(metric, str) or not metric:
            raise Refusal(f"the metric {_short(metric)} is not named by a string", example)
        if not isinstance(limit, numbers.Real) or limit != limit:
            raise Refusal(f"the limit of {metric!r} is {_short(limit)}, which is not a number", example)
    return dict(value)


def _log_destination(value: Any) -> bool | str | tuple[str, str]:
    if isinstance(value, bool):
        return value
    names = value if isinstance(value, (tuple, list)) else [value]
    if isinstance(value, (tuple, list)) and len(value) != 2:
        raise Refusal("a pair has two file names", 'Write it as ("stdout.log", "stderr.log").')
    for name in names:
        if (
            not isinstance(name, str)
            or name != os.path.basename(name)
            or name in ("", ".", "..")
            or "\0" in name
        ):
            raise Refusal(
                f"{_short(name)} is not the name of a file",
                "Use True, a file name without a slash, or a pair of them for stdout and stderr.",
            )
    return (names[0], names[1]) if len(names) == 2 else str(value)


def _address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(text(value)))
    except ValueError:
        raise Refusal(
            "it is no IP address", "Give one of this machine's, or 0.0.0.0 for all of them."
        ) from None


#: Seconds between two looks at the machine, at least.
_LEAST_INTERVAL = 0.1


def _not_too_often(value: Any) -> float:
    found = positive(value)
    if found < _LEAST_INTERVAL:
        raise Refusal(
            f"a look takes about a millisecond, and more than {1 / _LEAST_INTERVAL:g} of them a second would disturb "
            "the training",
            f"Give at least {_LEAST_INTERVAL:g}.",
        )
    return found


def _directory_here(value: Any) -> str:
    path = _path(value)
    if "://" in path:
        raise Refusal(
            "it is an address, and the copy goes to a directory of this machine", "Give a plain path."
        )
    return path


def _one_name(value: Any) -> str:
    if isinstance(value, str) and value == "":
        return ""
    name = text(value)
    if "/" in name or name in (".", ".."):
        raise Refusal("it names a directory below logs_dir, which has no '/' in it", "Give a plain name.")
    return name


@dataclass(frozen=True, repr=False)
class TraceConfig(Config):
    """What is recorded of where the time goes, and what is made of it."""

    mode: str = option("summary", one_of("summary", "cli"))
    """``"summary"`` says at the end of the run what was found; ``"cli"`` also while it goes on, in the terminal."""

    profile: str = option("run", one_of("run", "watch"))
    """What is recorded: ``"run"``, every step of every rank and looks at its machine; ``"watch"``, only the looks."""

    init_mode: str = option("auto", one_of("auto", "manual", "selective"))
    """What is traced without a word in the loop: everything, nothing, or what the ``patch_...`` options name."""

    patch_dataloader: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: torch's DataLoader."""

    patch_forward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: calls of models."""

    patch_backward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: backward passes."""

    patch_h2d: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: copies to a device."""

    sampler_interval_sec: float = option(1.0, _not_too_often)
    """How often each rank looks at processor, memory, disk, network and GPU."""

    logs_dir: str | os.PathLike[str] | None = option(None, optional(_directory_here))
    """A directory that gets a copy of the summary, besides the run's own."""

    session_id: str = option("", _one_name)
    """The name of that copy; the run's own name by default."""

    bind_host: str | None = option(None, optional(_address))
    """The address on which the run listens for its workers on other machines; None for this node's own. There is one
    wire, for reports and telemetry alike, and nobody without its keys is heard on it."""

    port: int = option(0, whole(at_least=0, at_most=65535))
    """The port of that wire, as ``RunConfig(port=...)``; 0 for any that is free."""

    flops_per_sample: float | None = option(None, optional(positive))
    """Floating-point operations that one sample takes, forward and backward: with it the summary says how much of what
    the device could do was used (MFU)."""

    peak_flops: float | None = option(None, optional(positive))
    """Floating-point operations a second that one worker's device can do at best; None for what its maker says, where
    the kind of GPU is known."""


def _trace(value: Any) -> Any:
    if value is None or value is True:
        return TraceConfig()
    return value if value is False else instance_of(TraceConfig)(value)


def _working_dir(value: Any) -> str:
    path = _path(value)
    if "://" in path:
        raise Refusal(
            "ranks work in a local directory",
            'Give a local path, or "scratch" for one that goes with the run.',
        )
    return path


@dataclass(frozen=True, repr=False)
class RunConfig(Config):
    """What the run is called, where it is kept, and how it behaves."""

    name: str | None = option(None, optional(_run_name))
    """The run's name and directory below ``storage_path``. The same name and path again means: go on with
    it. None makes up a new one."""

    storage_path: str | os.PathLike[str] | None = option(None, optional(_storage_path))
    """Where runs are kept: a directory, or ``s3://``, ``gs://``, ``az://`` and a path there. None stands for
    the environment variable POWERTRAIN_STORAGE, or else ``~/powertrain_runs`` (see ``storage_root``)."""

    storage_filesystem: Any = option(None, optional(_filesystem))
    """A pyarrow or fsspec filesystem to reach ``storage_path`` with, which then is a plain path on it."""

    failure_config: FailureConfig = option(None, instance_of(FailureConfig))
    """What happens when a worker fails."""

    checkpoint_config: CheckpointConfig = option(None, instance_of(CheckpointConfig))
    """Which checkpoints are kept."""

    callbacks: Sequence[Any] = option(None, _callbacks)
    """Objects with ``after_report``, ``after_exception`` or ``on_event``, called in the controller. An
    exception in one is logged and never ends the run."""

    worker_runtime_env: Mapping[str, Any] = option(None, _worker_environment)
    """``{"env_vars": {...}}``: environment variables of every worker."""

    logging_config: LoggingConfig = option(None, instance_of(LoggingConfig))
    """What Powertrain itself logs."""

    sync_config: SyncConfig = option(None, instance_of(SyncConfig))
    """How files reach a remote storage path."""

    verbose: int | None = option(None, optional(whole(at_least=0, at_most=3)))
    """What the terminal shows of the run: 0 warnings and errors, 1 plain lines, 2 or 3 the live view. None is
    the live view on a terminal and plain lines elsewhere."""

    stop: Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool] | None = option(
        None, optional(_stop_criterion)
    )
    """When to end early: ``{metric: limit}`` ends at the first row in which a metric reaches its limit; a
    function of (run name, metrics) ends where it returns True. ``training_iteration`` is the row."""

    progress_reporter: Any = ignored(
        None, _anything, "verbose is for the terminal, callbacks for a view of your own"
    )
    """Ray Tune's. Without effect: ``verbose`` is for the terminal, ``callbacks`` for a view of your own."""

    log_to_file: bool | str | tuple[str, str] = option(False, _log_destination)
    """True keeps the workers' output off the terminal: it goes to the log files of the run only. A name, or a
    pair for stdout and stderr, does so with files of that name for each rank."""

    port: int | None = option(None, optional(whole(at_least=1, at_most=65535)))
    """The TCP port on which the run listens for its workers on other machines, for clusters with a firewall between
    nodes; None takes any that is free. On one machine a Unix socket is used, and no port."""

    trace: TraceConfig | bool | None = option(None, _trace)
    """What is recorded of where the time goes: None and True for the defaults, False for nothing."""

    post_mortem: bool = option(False, flag)
    """True opens a debugger in the launching terminal where a rank's function raises, before the run fails: the first
    rank that does so, not those whose collectives break because of it. Without a terminal it changes nothing."""

    working_dir: str | os.PathLike[str] | None = option(None, optional(_working_dir))
    """The working directory of ranks. None or ``"."``: the directory in which ``fit`` was called; on a cluster each
    node that does not have it gets a copy, which its ranks share. ``"scratch"``: an empty directory per node, shared by
    its ranks and removed at the end. Any other path: that directory, on every node (``"./scratch"`` for one of that
    name)."""

    shared_storage: bool = option(False, flag)
    """True accepts a run directory with files of other users: for a group that takes turns with a run. Everybody who
    can write there is trusted then. Links in it are not followed in any case. No effect on object stores."""

    report_barrier: bool | None = option(None, optional(flag))
    """True makes every ``report`` a global barrier, as in Ray Train: it returns when all ranks have made that report.
    False does not. None stands for the environment variable POWERTRAIN_REPORT_BARRIER (1 or 0), or else False."""

    trackers: Sequence[Any] = option(None, _trackers)
    """Where rank 0's reports are sent as well: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, ``"csv"``, or objects
    such as ``powertrain.trackers.MLflow(...)``. A process of its own sends them, and never holds up training."""

    tracker_timeout_s: float = option(30.0, positive)
    """Seconds that trackers have to catch up when the run is over. One that refuses has 5. The rest is sent by
    ``powertrain track``."""

    _moved: ClassVar[Mapping[str, str]] = {
        "local_dir": "Use storage_path.",
        "upload_dir": "Use storage_path.",
        "validation_config": "Give it to the trainer: TorchTrainer(..., validation_config=...).",
        "scaling_config": "Give it to the trainer: TorchTrainer(..., scaling_config=...).",
        "max_failures": "Use failure_config=FailureConfig(max_failures=...).",
        "num_to_keep": "Use checkpoint_config=CheckpointConfig(num_to_keep=...).",
    }

    @property
    def storage_root(self) -> str:
        """The storage path to use now: as given, else from the environment, else the default.

        A place on this machine comes back absolute with ``~`` expanded; a URL as it was given.
        """
        path = os.fspath(self.storage_path) if self.storage_path is not None else _storage_from_environment()
        if self.storage_path is None and self.storage_filesystem is not None and "://" in path:
            raise ConfigError(
                f"RunConfig(storage_filesystem=...) without a storage_path takes that of {STORAGE_VARIABLE}="
                f"{_short(path)}, which is not a plain path on a file system. Give storage_path as well."
            )
        if "://" in path or (self.storage_filesystem is not None and self.storage_path is not None):
            return path
        return os.path.abspath(os.path.expanduser(path))

    def _contradictions(self) -> None:
        if self.storage_filesystem is None:
            return
        if self.storage_path is not None and "://" in os.fspath(self.storage_path):
            raise self._contradiction(
                ("storage_path", "storage_filesystem"),
                "with a filesystem of your own the storage path is a plain path on it",
                'Write it without the scheme, such as storage_path="bucket/runs".',
            )


def _storage_from_environment() -> str:
    path = os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE_PATH
    try:
        return _storage_path(path)
    except Refusal as refusal:
        raise ConfigError(
            f"The environment variable {STORAGE_VARIABLE}={_short(path)} cannot be used: {refusal.why}. "
            f"{refusal.fix}"
        ) from None


# --------------------------------------------------------------------------- data and validation


def _dataset_names(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value == "all":
            return value
        raise Refusal("the only word is 'all'", f"Write [{_short(value)}] for one dataset, or 'all'.")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise Refusal("it is not a list of dataset names", "Use 'all', or a list such as ['train'].")
    if len(set(value)) != len(value):
        raise Refusal("a dataset is named twice", "Name each dataset once.")
    return tuple(value)


def _cache_directory(value: Any) -> str:
    path = _path(value)
    if "://" in path:
        raise Refusal("decoded blocks are kept on the node's own disk", "Give a directory on it.")
    return os.path.abspath(os.path.expanduser(path))


@dataclass(frozen=True, repr=False)
class DataConfig(Config):
    """How datasets are given to ranks."""

    datasets_to_split: Literal["all"] | Sequence[str] = option("all", _dataset_names)
    """Names of the datasets of which each rank gets its own part, or ``"all"``. Of any other dataset each
    rank gets the whole."""

    execution_options: Any = ignored(
        None, _anything, "they belong to Ray Data's executor; set them in its DataContext"
    )
    """Ray Data's. Without effect: its executor reads them from its own ``DataContext``."""

    enable_shard_locality: bool = ignored(True, flag, "every node reads its own rows")
    """Ray Data's. Without effect: every node reads its own rows."""

    cache_bytes: int | None = option(None, optional(whole(0, _MOST_BYTES)))
    """Bytes of disk on each node for decoded blocks, which its ranks share; 0 for none, None for a quarter of what is
    free there."""

    cache_dir: str | os.PathLike[str] | None = option(None, optional(_cache_directory))
    """Where decoded blocks are kept on each node while the run lasts. None: in ``$TMPDIR``, else ``/var/tmp``."""

    memory_bytes: int = option(512 * 2**20, whole(2**20, _MOST_BYTES))
    """Bytes of memory that each rank uses to read ahead and to decode, beside the batches it has given out."""

    seed: int | None = option(None, optional(whole(0, 2**53 - 1)))
    """Orders every shuffled dataset that was given no seed of its own. None: drawn once and kept with the run, so
    that its restarts go on in the same order."""

    on_change: Literal["refuse", "restart_epoch"] = option("refuse", one_of("refuse", "restart_epoch"))
    """What happens when a run goes on and a dataset is not what it was: an error before anything starts, or the epoch
    it was in begins again with the data as it is now."""

    resume: Literal["batch", "epoch"] = option("batch", one_of("batch", "epoch"))
    """Where the data go on after a restart, for a loop that asks for its checkpoint: behind the last batch before the
    checkpoint, or at the first batch of that epoch, for a loop that skips batches by itself."""

    snapshot: bool = option(False, flag)
    """Whether a ``ray.data.Dataset`` is written once, as Parquet, into the run's storage and read from there: every row
    exactly once per epoch, and exact going on, on any engine. False streams it from Ray while training (engine "ray"
    only). Datasets of our own are read where they are in any case."""

    def __new__(cls, *args: Any, **kwargs: Any) -> DataConfig:
        """Raises :class:`ConfigError` for a subclass with a ``configure()`` of its own, which nothing would call."""
        # Here and not among the checks, because a subclass's __init__ need not call ours.
        if hasattr(cls, "configure"):
            raise ConfigError(
                f"{cls.__name__}.configure() would not be called: datasets are divided among the ranks without it, "
                "each row once per epoch for any number of workers, so change the datasets before they are given to "
                "the trainer (datasets={'train': dataset.map_batches(...)}), name those to divide in "
                "DataConfig(datasets_to_split=[...]), and remove configure()."
            )
        return super().__new__(cls, *args, **kwargs)

    def is_split(self, dataset: str) -> bool:
        """Whether each rank gets its own part of this dataset."""
        return self.datasets_to_split == "all" or dataset in self.datasets_to_split


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
    """One validation of one checkpoint."""

    fn_kwargs: Mapping[str, Any] = option(None, _keyword_arguments)
    """Keyword arguments of the validation function beside the checkpoint: in ``ValidationConfig`` whatever can be
    pickled, in ``report`` JSON values only, because they are kept with the checkpoint."""

    timeout_s: float | None = option(None, optional(positive))
    """Seconds after which the validation is ended; None never."""


def _validation_function(value: Any) -> Callable[..., Mapping[str, Any]]:
    shape = "Give a function of a checkpoint that returns a dict of metrics."
    if value is None:
        raise Refusal("the validation function is missing", shape)
    if not callable(value):
        raise Refusal(f"{_a_type(value)} cannot be called", shape)
    if not _takes(value, "checkpoint"):
        raise Refusal("the function does not take a checkpoint as its first argument", shape)
    return value  # type: ignore[no-any-return]


_AMOUNTS_OF_A_VALIDATION = ("num_cpus", "num_gpus")
#: Options of Ray's tasks that a validation may be given and that have no effect on it.
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
        raise Refusal(f"{_a_type(value)} is not a dict", 'Give amounts, such as {"num_gpus": 1}.')
    kept: dict[str, Any] = {}
    for name, given in value.items():
        if name in VALIDATION_OPTIONS_WITHOUT_EFFECT:
            kept[name] = given
        elif name in _AMOUNTS_OF_A_VALIDATION:
            kept[name] = _finite(given)
            if kept[name] < 0:
                raise Refusal("an amount is below zero", "Give 0 or more.")
        else:
            known = (*_AMOUNTS_OF_A_VALIDATION, *VALIDATION_OPTIONS_WITHOUT_EFFECT)
            fix = f"{did_you_mean(name, known)}Use {' and '.join(_AMOUNTS_OF_A_VALIDATION)} only."
            raise Refusal(f"{_short(name)} does not apply to a validation", fix)
    return kept


class ValidationFn(Protocol):
    """A function that validates a checkpoint: what ``ValidationConfig(fn=...)`` takes."""

    def __call__(self, checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the metrics of a checkpoint."""
        ...


@dataclass(frozen=True, repr=False)
class ValidationConfig(Config):
    """How checkpoints reported with ``validation=True`` are validated beside the training."""

    fn: Callable[..., Mapping[str, Any]] = option(None, _validation_function)
    """The function: takes a checkpoint and the task's keyword arguments, returns metrics, which join the
    checkpoint's. Required."""

    task_config: ValidationTaskConfig = option(None, instance_of(ValidationTaskConfig))
    """What each validation gets unless ``report`` says otherwise."""

    ray_remote_kwargs: Mapping[str, Any] = option(None, _validation_resources)
    """What a validation's process reserves: ``num_cpus`` and ``num_gpus``. The name is Ray Train's; it
    applies to every engine. Options of a Ray task about retries and placement, such as ``max_retries``, have no
    effect."""

    def _ignored_parts(self) -> Iterator[tuple[str, str]]:
        if ignored := [name for name in self.ray_remote_kwargs if name not in _AMOUNTS_OF_A_VALIDATION]:
            shown = f"{type(self).__name__}(ray_remote_kwargs={{{', '.join(map(repr, ignored))}}})"
            yield shown, "a validation is a process of the run, and is made once"


# --------------------------------------------------------------------------- backends


class BackendConfig:
    """What a framework needs set up on the workers before training. Subclass it with a ``backend_cls``.

    It is a plain class, so a subclass may be anything: a dataclass, frozen or not, or one with its own
    ``__init__``.
    """

    #: False where no worker needs torch: the process that workers are forked from then does not load it.
    uses_torch: ClassVar[bool] = True

    @property
    def backend_cls(self) -> type[Any]:
        """The :class:`powertrain.backend.Backend` that does the setting up; the base one does nothing."""
        return _load("powertrain.backend", "Backend")


def _load(module: str, name: str) -> type[Any]:
    # By name, because a config describes its backend but lies below it.
    loaded: type[Any] = getattr(importlib.import_module(module), name)
    return loaded


def _torch_backend(value: Any) -> str:
    """A process group backend that torch knows or has registered, or a list such as "cpu:gloo,cuda:nccl"."""
    given = text(value)
    known = set(TORCH_BACKENDS)
    distributed: Any = sys.modules.get("torch.distributed")
    known.update(getattr(getattr(distributed, "Backend", None), "backend_list", ()))
    for part in given.split(","):
        device, colon, name = part.rpartition(":")
        if name.lower() not in known or (colon and not device):
            raise Refusal(
                f"{_short(name)} is not a process group backend",
                f"{did_you_mean(name, sorted(known))}Use one of {', '.join(sorted(known))}, or by device as "
                "in 'cpu:gloo,cuda:nccl'. One that a plugin registers is known after the plugin is imported.",
            )
    return given


@dataclass(frozen=True, repr=False)
class TorchConfig(Config, BackendConfig):
    """How torch's process group is set up."""

    backend: str | None = option(None, optional(_torch_backend))
    """The process group's backend; None is nccl with GPUs and gloo without."""

    init_method: Literal["env", "tcp"] = option("env", one_of("env", "tcp"))
    """How ranks find each other. ``"env"`` names a port in MASTER_ADDR and MASTER_PORT, as torchrun does. With workers
    on several nodes rank 0 serves torch's store there; where all are on one node they meet through a file that only
    the run's user can open, and nothing listens at the port, which is reserved for code that serves something there
    itself. ``"tcp"`` always serves the store on a TCP port, which torch does not protect from other users, and sets
    no variables."""

    timeout_s: float = option(1800, positive)
    """Seconds after which a collective that does not complete is an error."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that sets up the process group."""
        return _load("powertrain.torch.backend", "TorchBackend")
