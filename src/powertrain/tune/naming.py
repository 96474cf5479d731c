"""Names of trials, which are those of their directories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.config.run import NAME_LIMIT_BYTES
from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.tune.sweep.journal.record import RESERVED_NAMES
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from powertrain.tune.config import TuneConfig
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)

#: Maximum bytes of a name for drawn values; the rest of a file name is left for suffixes.
_TAG_BYTES = 60


class TrialNames:
    """Name trials by the user's functions, without duplicates.

    Args:
        tune: Provides the user's functions.
        trainable: The name of the function or trainer.
        trials: The trials so far, which grow with the sweep.
    """

    def __init__(self, tune: TuneConfig, trainable: str, trials: Mapping[str, Trial]) -> None:
        self._tune, self._trials = tune, trials
        self._trainable = _cleaned(trainable).strip("-") or "trial"  # "lambda" for a lambda
        self._has_warned = False

    def __call__(self, trial: Trial) -> str:
        """Return the name of a trial's directory.

        Raises:
            ConfigError: A user function returned a value that is not valid as a directory name.
        """
        tune = self._tune
        trial.trainable_name = self._trainable
        trial.name = f"{self._trainable}_{trial.trial_id}"
        if tune.trial_name_creator is not None:
            trial.name = _checked(tune.trial_name_creator(trial), "trial_name_creator")
        if tune.trial_dirname_creator is not None:
            name = _checked(tune.trial_dirname_creator(trial), "trial_dirname_creator")
            return self._made_unique(name, trial.number, "trial_dirname_creator")
        if tune.trial_name_creator is not None:
            return self._made_unique(trial.name, trial.number, "trial_name_creator")
        return f"{trial.name}_{_cleaned(trial.experiment_tag)}"

    def _made_unique(self, name: str, number: int, function: str) -> str:
        """Return a unique name: two trials with one directory would be one run, with the checkpoints of both."""
        unique = name
        while self._is_taken(unique):
            suffix = f"_{number}"
            unique, number = f"{name[: NAME_LIMIT_BYTES - len(suffix)]}{suffix}", number + 1
        if unique != name and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "TuneConfig(%s=...) returned %r for several trials, and each needs a directory of its own: the later "
                "ones get their number as a suffix, such as %r. This message is shown once.",
                function,
                name,
                unique,
            )
        return unique

    def _is_taken(self, name: str) -> bool:
        # A restarted trial has left its first run under the name without the suffix.
        return any(
            other.name == name or other.name.startswith(f"{name}-restart") for other in self._trials.values()
        )


def restart_name(name: str, start: int) -> str:
    """Return the name of the run of a trial that is restarted from the beginning."""
    suffix = f"-restart{start}"
    return f"{re.sub(r'-restart[0-9]+$', '', name)[: NAME_LIMIT_BYTES - len(suffix)]}{suffix}"


def _cleaned(text: str) -> str:
    return (
        re.sub(r"[^A-Za-z0-9_=.,+-]+", "-", text).encode()[:_TAG_BYTES].decode(errors="ignore").rstrip(".,-")
    )


def _checked(name: Any, function: str) -> str:
    given_as = f"TuneConfig({function}=...) returned {shorten(name)}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_=.,+@-]+", name) or name.startswith("."):
        raise ConfigError(f"{given_as}, which cannot name a directory. Use letters, digits, and _ = . , + -.")
    if len(name) > NAME_LIMIT_BYTES:
        raise ConfigError(f"{given_as}, which is longer than {NAME_LIMIT_BYTES} characters. Shorten it.")
    if name in RESERVED_NAMES:
        raise ConfigError(f"{given_as}, which the sweep uses itself. Return another name.")
    return name
