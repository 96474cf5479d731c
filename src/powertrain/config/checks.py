"""Checks of configs: fields with their checks, one error for a wrong value, and the checks themselves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from powertrain.errors import ConfigError
from powertrain.text.reprs import repr_without_secrets
from powertrain.text.reprs import short_repr as _short
from powertrain.values.arguments import plain_scalar

_LARGEST_WHOLE = 2**31 - 1
#: Characters of a wrong name that are compared with the right ones.
_LONGEST_GUESS = 200
MOST_BYTES = 2**60
_ConfigT = TypeVar("_ConfigT", bound="Config")
_AnyT = TypeVar("_AnyT")

#: Takes a value as given and returns it as it is kept, or raises :class:`Refusal`. Idempotent.
Check = Callable[[Any], Any]


class Refusal(Exception):
    """The refusal of a value by a check: the reason (a clause), and what to write instead (a sentence)."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why, fix)
        self.why, self.fix = why, fix


def option(default: Any, check: Check) -> Any:
    """Declare a field with its default and its check, which is also run on the default."""
    return dataclasses.field(default=default, metadata={"check": check})


def ignored(default: Any, check: Check, why: str) -> Any:
    """Declare a field of Ray's that has no effect here: its values are checked, and ``fit()`` prints ``why`` once."""
    return dataclasses.field(default=default, metadata={"check": check, "ignored": why})


class Config:
    """The base of all configs: one error for anything wrong, a short repr, equality by value.

    Subclasses are dataclasses with ``frozen=True, repr=False`` whose fields are made with :func:`option`.
    After construction every value is valid and normalised.
    """

    #: Names of fields elsewhere, each with a sentence on what to write instead.
    _moved: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[_ConfigT], *args: Any, **kwargs: Any) -> _ConfigT:
        """Check the names of the arguments, for one clear error about an unknown one."""
        # Here and not in __init__, because a dataclass raises a bare TypeError for an unknown keyword.
        # Unpickling calls this without arguments, so missing fields are left to the checks.
        _check_names(cls, args, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
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
        """Return parts of fields without an effect here, each with the reason. :func:`ignored` is for whole fields."""
        return iter(())

    def _contradiction(self, names: Iterable[str], why: str, fix: str) -> ConfigError:
        values = {name: getattr(self, name) for name in names}
        return _config_error(type(self), values, "is contradictory", Refusal(why, fix))

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if not _is_default(self, f)}
        shown = [f"{name}={repr_without_secrets(value, name)}" for name, value in changed.items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def without_effect(configs: Iterable[Config]) -> str:
    """Return one sentence that names the fields that were set without effect, "" where there are none."""
    found = [f"{shown} ({why})" for config in configs for shown, why in _set_and_ignored(config)]
    return f"Accepted as in Ray, but without effect here: {'; '.join(found)}." if found else ""


def _set_and_ignored(config: Config) -> Iterator[tuple[str, str]]:
    yield from config._ignored_parts()
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            yield from _set_and_ignored(value)
        elif "ignored" in field.metadata and not _is_default(config, field):
            shown = f"{type(config).__name__}({field.name}={_short(value, field.name)})"
            yield shown, field.metadata["ignored"]


def fields(config: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a config."""
    # Through Any, because only its subclasses are dataclasses.
    return dataclasses.fields(config)


def _config_error(cls: type, values: Mapping[str, Any], verdict: str, refusal: Refusal) -> ConfigError:
    named = ", ".join(f"{name}={_short(value, name)}" for name, value in values.items())
    return ConfigError(f"{cls.__name__}({named}) {verdict}: {refusal.why}. {refusal.fix}")


@functools.cache
def _parameters(cls: Any) -> tuple[tuple[str, ...], bool]:
    """Return the positional names of ``cls(...)``, and whether a subclass's own ``__init__`` takes any others."""
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
            # Without its value: an unknown field may hold a secret.
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
    """Return a question with the nearest of ``names``, and a blank after it; "" where none is near."""
    from difflib import get_close_matches

    if not isinstance(name, str):
        return ""
    by_folded = {known.casefold(): known for known in names}
    close = get_close_matches(name[:_LONGEST_GUESS].casefold(), by_folded, n=1, cutoff=0.6)
    return f"Did you mean {by_folded[close[0]]!r}? " if close else ""


def as_config(value: Any, cls: type[_AnyT], argument: str) -> _AnyT:
    """Return ``value`` if it is a ``cls``, and a default one for None.

    Args:
        value: The value that the user gave.
        cls: The class of the config.
        argument: The user's code, such as ``"TorchTrainer(scaling_config=...)"``, for the error.

    Returns:
        The config.

    Raises:
        ConfigError: ``value`` is neither a ``cls`` nor None.
    """
    try:
        kept: _AnyT = instance_of(cls)(value)
    except Refusal as refusal:
        raise ConfigError(f"{argument} got {_short(value)}: {refusal.why}. {refusal.fix}") from None
    return kept


def replace(config: _ConfigT, **changes: Any) -> _ConfigT:
    """Return a copy with some fields changed, checked like any other config."""
    if not isinstance(config, Config):
        raise ConfigError(
            f"replace() got {_short(config)}, which is not a config. Give it one, such as RunConfig()."
        )
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def whole(at_least: int, at_most: int = _LARGEST_WHOLE) -> Check:
    """Check a whole number within bounds; a bool is refused."""
    bounds = (
        f"at least {at_least}" if at_most in (_LARGEST_WHOLE, MOST_BYTES) else f"from {at_least} to {at_most}"
    )

    def check(value: Any) -> int:
        value = plain_scalar(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise Refusal(f"{a_type(value)} is not a whole number", f"Give a whole number, {bounds}.")
        if not at_least <= int(value) <= at_most:
            raise Refusal("the number is out of range", f"Give a whole number, {bounds}.")
        return int(value)

    return check


def positive(value: Any) -> float:
    """Check a finite number above zero."""
    found = finite(value)
    if found <= 0:
        raise Refusal("the number must be above zero", "Give a positive number of seconds.")
    return found


def flag(value: Any) -> bool:
    """Check True or False, also numpy's and torch's; other values are refused."""
    plain = plain_scalar(value)
    if not isinstance(plain, bool):
        raise Refusal(f"{a_type(value)} is neither True nor False", "Write True or False.")
    return plain


def text(value: Any) -> str:
    """Check a string that is not empty."""
    if not isinstance(value, str):
        raise Refusal(f"{a_type(value)} is not a string", "Give a string.")
    if not value.strip():
        raise Refusal("the string is empty", "Give a string with something in it, or leave the field out.")
    return _whole_characters(value)


def _whole_characters(value: str) -> str:
    """Check text that can be a file's name and can be sent: without NUL and lone surrogates."""
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
    """Check one of these words, spelled exactly so."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Refusal(
                "it is not one of the known words",
                f"{did_you_mean(value, choices)}Use one of {', '.join(repr(c) for c in choices)}.",
            )
        return value

    return check


def optional(check: Check) -> Check:
    """Check None, or a value that ``check`` accepts."""
    return lambda value: None if value is None else check(value)


def instance_of(cls: type) -> Check:
    """Check an instance of a config class; None stands for its defaults."""

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
        raise Refusal(f"{a_type(value)} is not a {name}", f"Give a {name}, or leave it out for the defaults.")

    return check


def only(*allowed: Any, why: str, fix: str) -> Check:
    """Check one of these values, all without effect. The first is the one that is kept."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float, str, type(None))) and value in allowed:
            return allowed[0]
        raise Refusal(why, fix)

    return check


def a_type(value: Any) -> str:
    """Return the type of a value in words, for an error."""
    return f"a value of type {type(value).__name__}"


def anything(value: Any) -> Any:
    """Accept every value as it is."""
    return value


def finite(value: Any) -> float:
    """Check a finite number; a bool is refused."""
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Refusal(f"{a_type(value)} is not a number", "Give a number.")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise Refusal("the number is not finite", "Give a finite number.")
    return int(value) if isinstance(value, numbers.Integral) else found


def takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether the function can be called with these positional arguments (True where unknown)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind_partial(*arguments)
    except TypeError:
        return False
    return True


def local_directory(value: Any) -> str:
    """Check a path on the node's own disk, and make it absolute."""
    path = any_path(value)
    if "://" in path:
        raise Refusal("checkpoints wait on the node's own disk", "Give a directory on it.")
    return os.path.abspath(os.path.expanduser(path))


def any_path(value: Any) -> str:
    """Check a path or an address that is not empty."""
    try:
        found = os.fspath(value)
    except Exception:  # not a path, or one that raises when it is read
        found = None
    if not isinstance(found, str):
        raise Refusal(f"{a_type(value)} is not a path", "Give a string or a pathlib.Path.")
    if not found.strip():
        raise Refusal("it is empty", "Give a path, or leave the field out.")
    return _whole_characters(found)
