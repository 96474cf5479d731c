"""Population based training: the worst trials continue from checkpoints of the best, with changed parameters."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.schedulers.base import Action, Decision, TrialScheduler, check_numbers, number_of
from powertrain.tune.space import Categorical, Domain, Float, Integer
from powertrain.tune.trial import flat_numbers
from powertrain.values.arguments import shorten

#: The values that a parameter may change to: a list, a distribution, a function without arguments, or a dict of them.
Mutations = Mapping[str, Any]


@dataclass
class _Member:
    """A trial of the population.

    Attributes:
        config: The current configuration.
        score: Its newest score, greater for better; -inf if that is not finite, None before the first.
        time: The time of its newest report.
        perturbed_at: Time of the last comparison.
        has_had_turn: Whether it was compared since it began or was resumed, and yields its slot if others wait.
    """

    config: Mapping[str, Any]
    score: float | None = None
    time: float = 0.0
    perturbed_at: float = 0.0
    has_had_turn: bool = False


class PopulationBasedTraining(TrialScheduler):
    """Population based training (Jaderberg et al., 2017).

    Every ``perturbation_interval`` a trial is compared with the others. One of the worst ``quantile_fraction`` loads
    the checkpoint of one of the best and continues with that trial's configuration, changed by ``explore``.

    If the population has more trials than slots, they take turns: after each comparison a trial yields its slot to the
    one with the least progress, at a report with a checkpoint.

    Args:
        time_attr: The report entry that measures time.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        perturbation_interval: How often a trial is compared, in units of ``time_attr``.
        burn_in_period: No trial is compared before this time.
        hyperparam_mutations: By parameter the values that it may change to: a list, a distribution, a function
            without arguments, or a dict of them for nested configurations. A trial begins with a draw of those that
            ``param_space`` does not have.
        quantile_fraction: Which part of the population is best, and which is worst: at most 0.5.
        resample_probability: Probability that a parameter is resampled instead of perturbed.
        perturbation_factors: A changed number is multiplied by one of these.
        custom_explore_fn: Called with the changed configuration; returns the one to use.
        log_config: Whether the sweep writes ``pbt_policy_<trial>.txt`` into its directory for each trial that has
            continued from another, for :class:`PopulationBasedTrainingReplay`.
        require_attrs: Whether a report without the metric or the time is an error.
        synch: Whether trials wait for each other before they are compared.

    Example::

        scheduler = PopulationBasedTraining(
            perturbation_interval=4, hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-1)}
        )
        tune.TuneConfig(scheduler=scheduler, num_samples=8, metric="loss", mode="min")
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        burn_in_period: float = 0.0,
        hyperparam_mutations: Mutations | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        perturbation_factors: tuple[float, float] = (1.2, 0.8),
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        check_numbers(
            self,
            perturbation_interval=(perturbation_interval, 0),
            burn_in_period=(burn_in_period, 0),
            quantile_fraction=(quantile_fraction, 0),
            resample_probability=(resample_probability, 0),
        )
        if perturbation_interval <= 0:
            raise ConfigError("PopulationBasedTraining(perturbation_interval=0): must be above 0.")
        if quantile_fraction > 0.5:
            raise ConfigError(
                f"PopulationBasedTraining(quantile_fraction={quantile_fraction}): at most 0.5, or a trial could be "
                "among the best and the worst."
            )
        if not hyperparam_mutations and custom_explore_fn is None:
            raise ConfigError(
                "PopulationBasedTraining needs hyperparam_mutations or custom_explore_fn: without them no parameter "
                "would change."
            )
        check_mutations(hyperparam_mutations or {})
        self._interval, self._burn_in = perturbation_interval, burn_in_period
        self._mutations = dict(hyperparam_mutations or {})
        self._fraction, self._resample = quantile_fraction, resample_probability
        self._factors, self._explore_fn = tuple(perturbation_factors), custom_explore_fn
        self._requires = require_attrs
        self.logs_policies = bool(log_config)
        self._is_synchronous, self.takes_turns = synch, not synch
        self._rng = random.Random(f"population {seed}")
        self._seed = seed
        self._members: dict[str, _Member] = {}
        #: All trials that were ever in the population, and whether no more will be added.
        self._added: set[str] = set()
        self._is_complete = False
        #: Trials that wait for the others, with synchronous comparison.
        self._waiting: list[str] = []

    def fill_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`TrialScheduler.fill_config`: parameters that only ``hyperparam_mutations`` has are drawn."""
        return _filled(config, self._mutations, random.Random(f"{self._seed} {len(self._added)}"))

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        self._added.add(trial)
        self._members[trial] = _Member(config)

    def adopt(self, decision: Decision) -> None:
        """See :meth:`TrialScheduler.adopt`."""
        member = self._members.get(decision.trial)
        if member is None:
            return
        if decision.config is not None:
            member.config = decision.config
        if decision.action is not Action.PAUSE and decision.trial in self._waiting:
            self._waiting.remove(decision.trial)

    def on_trials_complete(self) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trials_complete`."""
        self._is_complete = True
        return self._compare_waiting()

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        time, value = self.time_of(result), number_of(result, self.metric or "")
        if time is None or value is None:
            if self._requires:
                raise ConfigError(self._describe_missing(trial, result, time is None, value is None))
            return []
        member = self._members.get(trial)
        if member is None:  # it failed before, and runs again
            began = time - time % self._interval
            member = self._members[trial] = _Member(dict(result.get("config", {})), perturbed_at=began)
        score = value if self.mode == "max" else -value
        member.score, member.time = score if math.isfinite(score) else -math.inf, time
        is_due = time >= self._burn_in and time - member.perturbed_at >= self._interval
        if is_due:
            member.perturbed_at = time
        if not self._is_synchronous:
            return self._take_turns(trial, member, is_due)
        if not is_due:
            return []
        if trial not in self._waiting:
            self._waiting.append(trial)
        return self._compare_waiting() or [Decision(trial, Action.PAUSE)]

    def on_stalled(self) -> list[Decision]:
        """See :meth:`TrialScheduler.on_stalled`: the searcher allows no more trials at a time than those that wait."""
        return self._compare_waiting(is_all=True)

    def choose(self, pending: Sequence[str]) -> str | None:
        """See :meth:`TrialScheduler.choose`: the trial with the least progress."""
        return min(pending, key=self._time_of_member, default=None)

    def _time_of_member(self, trial: str) -> float:
        return self._members[trial].time if trial in self._members else 0.0

    def _take_turns(self, trial: str, member: _Member, is_due: bool) -> list[Decision]:
        """Compare a trial if it is due, and let it yield its slot afterwards."""
        decisions = self._exploit(trial, *self._quantiles()) if is_due else []
        member.has_had_turn = (member.has_had_turn or is_due) and not decisions
        if member.has_had_turn and self.can_give_way:
            member.has_had_turn = False
            decisions = [Decision(trial, Action.PAUSE)]
        return decisions

    def on_trial_end(self, trial: str) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_end`."""
        if trial in self._waiting:
            self._waiting.remove(trial)
        self._members.pop(trial, None)
        return self._compare_waiting()

    def _describe_missing(self, trial: str, result: Mapping[str, Any], no_time: bool, no_metric: bool) -> str:
        missing = [
            repr(name)
            for name, is_missing in ((self.metric, no_metric), (self.time_attr, no_time))
            if is_missing
        ]
        reported = ", ".join(repr(name) for name, _ in flat_numbers(result)) or "none"
        return (
            f"Trial {trial} did not report {' and '.join(missing)} as a number. It reported the numbers {reported}. "
            "Report what trials are compared by each time, or set PopulationBasedTraining(require_attrs=False)."
        )

    def _compare_waiting(self, is_all: bool = False) -> list[Decision]:
        """Decide about the whole population, once all (possible) members are present and wait."""
        is_all = is_all or (self._is_complete and len(self._waiting) >= len(self._members))
        if not is_all or not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        worst, best = (
            self._quantiles()
        )  # computed once: trials that exploit others leave no other trial the worst
        decisions = []
        for trial in waiting:
            decisions += self._exploit(trial, worst, best) or [Decision(trial, Action.CONTINUE)]
        return decisions

    def _exploit(self, trial: str, worst: Sequence[str], best: Sequence[str]) -> list[Decision]:
        """Let one of the worst trials continue from one of the best. Its score is kept until its next report."""
        if trial not in worst or not best:
            return []
        source = self._rng.choice(best)
        config = self._explore(self._members[source].config)
        self._members[trial].config = config
        return [Decision(trial, Action.CONTINUE, source=source, config=config)]

    def _explore(self, config: Mapping[str, Any]) -> dict[str, Any]:
        changed = self._change(config)
        if self._explore_fn is None:
            return changed
        returned = self._explore_fn(changed)
        if not isinstance(returned, dict):
            raise ConfigError(
                f"custom_explore_fn returned {shorten(returned)}, not a configuration (a dict)."
            )
        return returned

    def _change(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return explore(config, self._mutations, self._resample, self._factors, self._rng)

    def _quantiles(self) -> tuple[list[str], list[str]]:
        """Return the worst and the best trials, of those that have a score.

        Every trial whose score is not finite is among the worst, and none among the best.
        """
        scores = {trial: member.score for trial, member in self._members.items() if member.score is not None}
        ranked = sorted(scores, key=lambda trial: scores[trial])
        if len(ranked) <= 1 or not self._fraction:
            return [], []
        count = min(math.ceil(len(ranked) * self._fraction), len(ranked) // 2)
        worst = [trial for place, trial in enumerate(ranked) if place < count or scores[trial] == -math.inf]
        best = [trial for trial in ranked[len(ranked) - count :] if scores[trial] != -math.inf]
        return worst, best


def check_mutations(mutations: Mutations, path: tuple[str, ...] = ()) -> None:
    """Raise a :class:`ConfigError` that names the parameter whose values cannot be drawn."""
    for key, spec in mutations.items():
        name = "/".join((*path, str(key)))
        if isinstance(spec, Mapping):
            check_mutations(spec, (*path, str(key)))
        elif isinstance(spec, Domain):
            if problem := spec.find_problem():
                raise ConfigError(f"hyperparam_mutations[{name!r}] cannot be used: {problem}")
        elif not callable(spec) and not (
            isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec)
        ):
            raise ConfigError(
                f"hyperparam_mutations[{name!r}]={shorten(spec)} must be a list of values, a distribution such as "
                "tune.uniform(0, 1), or a function without arguments."
            )


def explore(
    config: Mapping[str, Any],
    mutations: Mutations,
    resample_probability: float,
    factors: Sequence[float],
    rng: random.Random,
) -> dict[str, Any]:
    """Return a changed copy of a configuration.

    A number is multiplied by one of ``factors`` and stays within the bounds of its distribution; a value of a list
    becomes a neighbour of it. With ``resample_probability``, or without a neighbour, it is drawn again.
    """
    changed = copy.deepcopy(dict(config))
    for key, spec in mutations.items():
        if isinstance(spec, Mapping):
            changed[key] = explore(changed.get(key, {}), spec, resample_probability, factors, rng)
        else:
            is_new = rng.random() < resample_probability or key not in changed
            changed[key] = _drawn(spec, rng) if is_new else _changed(changed[key], spec, factors, rng)
    return changed


def _filled(config: Mapping[str, Any], mutations: Mutations, rng: random.Random) -> dict[str, Any]:
    """Return a configuration with draws for its missing parameters."""
    filled = dict(config)
    for key, spec in mutations.items():
        if isinstance(spec, Mapping):
            if isinstance(below := filled.get(key, {}), Mapping):
                filled[key] = _filled(below, spec, rng)
        elif key not in filled:
            filled[key] = _drawn(spec, rng)
    return filled


def _drawn(spec: Any, rng: random.Random) -> Any:
    if isinstance(spec, Domain):
        return spec.sample(rng)
    return rng.choice(list(spec)) if isinstance(spec, Sequence) else spec()


def _changed(value: Any, spec: Any, factors: Sequence[float], rng: random.Random) -> Any:
    values = spec.categories if isinstance(spec, Categorical) else spec
    if isinstance(values, Sequence):
        if value not in values:
            return rng.choice(list(values))
        place = list(values).index(value) + rng.choice((-1, 1))
        return values[min(max(place, 0), len(values) - 1)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _drawn(spec, rng)
    scaled = value * rng.choice(list(factors))
    if isinstance(spec, Integer):
        return min(max(round(scaled), spec.lower), spec.last)
    if isinstance(spec, Float):
        return min(max(float(scaled), spec.lower), spec.upper)
    return round(scaled) if isinstance(value, int) else scaled


class PopulationBasedTrainingReplay(TrialScheduler):
    """Replay the changes of one trial of an earlier population, with a single trial.

    Args:
        policy_file: The file ``pbt_policy_<trial>.txt`` of that trial, from a sweep of this package or of Ray Tune.

    Raises:
        ConfigError: It cannot be read.

    Example::

        tune.TuneConfig(scheduler=PopulationBasedTrainingReplay("~/powertrain_runs/search/pbt_policy_00003.txt"))
    """

    needs_metric = False

    def __init__(self, policy_file: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            with open(os.path.expanduser(policy_file), encoding="utf-8") as file:
                #: (time, configuration) of each change; the first is the initial one.
                self._policy = _read_policy([json.loads(line) for line in file if line.strip()])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"The policy file {os.fspath(policy_file)!r} cannot be read ({error}). Give the file pbt_policy_*.txt "
                "that a sweep with PopulationBasedTraining has written."
            ) from error
        self._next = 1
        self._trial = ""

    @property
    def config(self) -> dict[str, Any]:
        """The initial configuration of the trial."""
        return dict(self._policy[0][1]) if self._policy else {}

    def fill_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`TrialScheduler.fill_config`: the policy's configuration, if it has one."""
        return self.config if self._policy else dict(config)

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        if self._trial:
            raise ConfigError(
                "PopulationBasedTrainingReplay repeats one trial. Set num_samples=1, without a grid."
            )
        self._trial = trial

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        time = self.time_of(result)
        if time is None or self._next >= len(self._policy) or time < self._policy[self._next][0]:
            return []
        _, config = self._policy[self._next]
        self._next += 1
        return [Decision(trial, Action.CONTINUE, source=trial, config=config)]


def _read_policy(entries: Sequence[Any]) -> list[tuple[float, dict[str, Any]]]:
    """Return the (time, configuration) of each change, the initial one first.

    Args:
        entries: Objects with "time" and "config", or lists as Ray writes them: the names of the trial and of its
            source, their steps, the configuration of the source and the new one.
    """
    if not any(isinstance(entry, list) for entry in entries):
        return [(float(entry["time"]), dict(entry["config"])) for entry in entries]
    changes: list[tuple[float, dict[str, Any]]] = []
    began: dict[str, Any] = {}
    source = None
    for name, its_source, _, step, old, new in reversed(entries):
        if source is not None and name != source:
            break  # this trial's own state was replaced by that of another
        source, began = its_source, dict(old)
        changes.append((float(step), dict(new)))
    return [(0.0, began), *reversed(changes)]
