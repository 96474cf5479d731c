"""Search with Optuna: TPE, Gaussian processes, CMA-ES and every other sampler of it.

The study that suggestions come from lies in memory and follows from the calls alone, so that the calls of a journal,
repeated in a new object, give the same suggestions. Ended trials are written to a storage; see :class:`OptunaSearch`.
"""

from __future__ import annotations

import copy
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.tune.search.base import (
    FINISHED,
    Objective,
    Searcher,
    check_point_in_space,
    check_points,
    find_number,
    pick_values,
)
from powertrain.tune.search.studies import check_storage, copy_sampler, find_earlier, quiet_optuna
from powertrain.tune.search.translation import (
    Parameter,
    import_optuna,
    list_grids,
    look_up,
    nest,
    translate_space,
)
from powertrain.tune.space import Domain, Function, check_space, is_grid, resolve, walk, with_values
from powertrain.values.arguments import as_whole, shorten

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial, TrialState

#: The attribute of a study's trial with its id in the sweep.
_TRIAL_ID = "powertrain_trial_id"
#: The attribute of a trial with its index in ``points_to_evaluate``.
_POINT = "powertrain_point"

_logger = module_logger(__name__)


@dataclass(frozen=True)
class _EvaluatedPoint:
    """The arguments of ``add_evaluated_point``."""

    parameters: Mapping[str, Any]
    value: Any
    has_failed: bool = False
    is_pruned: bool = False
    intermediate_values: Sequence[float] | None = None


@dataclass
class _StudyInProgress:
    """A study, and the trials that it does not have yet."""

    study: Study
    rng: random.Random
    stored: Study | None = None
    trials: dict[str, Trial] = field(default_factory=dict)
    #: Trials that the study did not suggest: their values by name, and their reports by step.
    adopted: dict[str, tuple[dict[str, Any], dict[int, float]]] = field(default_factory=dict)
    #: The suggestion for each trial, by path.
    drawn: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The newest step that each trial has reported.
    steps: dict[str, int] = field(default_factory=dict)
    #: Whether the sampler has exhausted its space.
    is_exhausted: bool = False


class OptunaSearch(Searcher):
    """Suggests configurations by a sampler of Optuna, from the results so far.

    The space is the ``param_space`` of the Tuner. Functions of ``sample_from`` are called after the other values have
    been suggested. A grid becomes a choice: its values are tried as often as seems promising, not all of them. A
    normal distribution is searched by its quantile, between 3.7 standard deviations to either side.

    Args:
        space: The space, if it is not ``param_space``: a dict of distributions, Powertrain's or Optuna's, "a/b" for
            nested entries; or a function that calls the ``suggest_...`` methods of the trial it is given and returns a
            dict of constants or None. Entries may then depend on each other. Constants of ``param_space`` are added.
        metric: The metric to improve; a list for several objectives.
        mode: "min" or "max"; a list for several objectives.
        points_to_evaluate: Configurations to try first. Entries that a point leaves out are suggested.
        sampler: A sampler of Optuna; ``TPESampler`` by default. It is copied, and not used itself.
        study_name: The name of the study in ``storage``; "optuna" by default.
        storage: A storage of Optuna, or its address, that ended trials are written to. Trials of the study that ended
            before this sweep began count as results. Trials that other processes add later do not.
        seed: The seed of the default sampler and of functions. Without one a seed is chosen and kept, also when the
            searcher is pickled. Has no effect on a ``sampler``, which has a seed of its own.
        evaluated_rewards: The metrics of ``points_to_evaluate``, if known: the points are not tried again.

    Raises:
        ConfigError: An argument cannot be used, or Optuna is not installed.

    Example::

        tune.TuneConfig(search_alg=OptunaSearch(seed=1), metric="loss", mode="min", num_samples=16)
    """

    needs_metric = True
    _transient = ("_progress", "_parameters")
    _progress: _StudyInProgress | None
    _parameters: dict[str, Parameter]

    def __init__(
        self,
        space: Mapping[str, Any] | Callable[[Trial], Mapping[str, Any] | None] | None = None,
        metric: Objective = None,
        mode: Objective = None,
        points_to_evaluate: Sequence[Mapping[str, Any]] | None = None,
        sampler: BaseSampler | None = None,
        study_name: str | None = None,
        storage: BaseStorage | str | None = None,
        seed: int | None = None,
        evaluated_rewards: Sequence[Any] | None = None,
    ) -> None:
        import_optuna()
        super().__init__(metric, mode)
        self._space = _check_given_space(space)
        self._param_space: Mapping[str, Any] = {}
        self._points = check_points(points_to_evaluate, "OptunaSearch(points_to_evaluate=...)")
        self._sampler = None if sampler is None else copy_sampler(sampler)
        if sampler is not None and seed is not None:
            _logger.warning(
                "Accepted as in Ray, but without effect here: OptunaSearch(seed=%s) (give the seed to the sampler).",
                seed,
            )
        #: The seed of the default sampler.
        self.seed = (
            secrets.randbelow(2**32)
            if seed is None
            else as_whole(seed, "OptunaSearch(seed=...)", 0, 2**32 - 1, ConfigError)
        )
        self._has_given_seed = seed is not None
        self._study_name = study_name or "optuna"
        self._storage = check_storage(storage)
        self._evaluated: list[_EvaluatedPoint] = []
        self._has_rewards = evaluated_rewards is not None
        if self._has_rewards:
            self._take_rewards(evaluated_rewards)
        self.restart()

    @property
    def study(self) -> Study | None:
        """The study of Optuna, for its plots and importances; None before the first suggestion."""
        return None if self._progress is None else self._progress.study

    def set_search_properties(
        self, metric: Objective, mode: Objective, config: Mapping[str, Any], **spec: Any
    ) -> bool:
        """See :meth:`Searcher.set_search_properties`.

        Raises:
            ConfigError: Metric or mode differ or are missing, the space cannot be searched, there are two spaces, or a
                point to evaluate is not one of the space.
        """
        check_space(config)
        if self._space is not None:
            for path, entry in walk(config):
                if is_grid(entry) or (isinstance(entry, Domain) and not isinstance(entry, Function)):
                    raise ConfigError(
                        f"OptunaSearch has a space of its own, and param_space has another with {'/'.join(path)!r}. "
                        "Give the distributions in one of the two; constants may be in param_space."
                    )
        self._param_space = config
        super().set_search_properties(metric, mode, config)
        self._check_search()
        if grids := list_grids(self._whole_space()):
            _logger.warning(
                "OptunaSearch treats %s as a choice: its values are tried as often as seems promising, and perhaps not "
                "all. To try every value, use BasicVariantGenerator.",
                ", ".join(grids),
            )
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """See :meth:`Searcher.suggest`."""
        run = self._progress = self._progress or self._begin_study(trial_id)
        if run.is_exhausted:
            return FINISHED
        trial = run.study.ask({name: each.distribution for name, each in self._parameters.items()})
        trial.set_user_attr(_TRIAL_ID, trial_id)
        config = self._make_config(trial, run.rng)
        run.trials[trial_id] = trial
        run.drawn[trial_id] = dict(trial.params) if callable(self._space) else self._pick_drawn(config)
        return config

    def drawn_values(self, trial_id: str) -> dict[str, Any]:
        """See :meth:`Searcher.drawn_values`."""
        return {} if self._progress is None else self._progress.drawn.get(trial_id, {})

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Report an intermediate value. With several objectives Optuna takes none."""
        run = self._progress
        is_known = run is not None and (trial_id in run.trials or trial_id in run.adopted)
        if run is None or not is_known or not isinstance(self.metric, str):
            return
        value, step = find_number(result, self.metric), find_number(result, "training_iteration")
        # A restarted trial may repeat iterations.
        if value is None or step is None or step <= run.steps.get(trial_id, -1):
            return
        run.steps[trial_id] = int(step)
        if trial_id in run.adopted:
            run.adopted[trial_id][1][int(step)] = value
        else:
            run.trials[trial_id].report(value, int(step))

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> bool:
        """See :meth:`Searcher.adopt`. The trial is added to the study when it ends; the suggestion counts as failed."""
        run = self._progress = self._progress or self._begin_study(trial_id)
        try:
            parameters = self._encode(config, f"The configuration of {trial_id}")
            self._freeze_parameters(parameters, f"The configuration of {trial_id}")
        except ConfigError:
            return False
        trial = run.trials.get(trial_id)
        if trial is None or not _are_close(parameters, trial.params):
            self.on_trial_complete(trial_id, None, error=True)
            run.adopted[trial_id] = parameters, {}
        run.drawn[trial_id] = dict(parameters) if callable(self._space) else self._pick_drawn(config)
        return True

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report an ended trial: pruned without a number for its metric, failed where it has several metrics."""
        run = self._progress
        if run is None or (trial_id not in run.trials and trial_id not in run.adopted):
            return
        states = import_optuna().trial.TrialState
        run.steps.pop(trial_id, None)
        run.drawn.pop(trial_id, None)
        values = [find_number(result, name) for name in self._objectives(self.metric)]
        final_values: list[float] | None = None
        if error:
            state = states.FAIL
        elif None not in values:
            state, final_values = states.COMPLETE, [value for value in values if value is not None]
        else:
            # Samplers learn from a pruned trial that its region is bad, and nothing from a failed one.
            state = states.PRUNED if len(values) == 1 else states.FAIL
        if trial_id in run.adopted:
            parameters, steps = run.adopted.pop(trial_id)
            attributes = {_TRIAL_ID: trial_id}
            trial = self._freeze_parameters(parameters, trial_id, state, final_values, steps, attributes)
            run.study.add_trial(trial)
        else:
            trial = self._complete_trial(run, trial_id, state, final_values)
        if run.stored is not None:
            self._store(run.stored, trial)

    def _complete_trial(
        self, run: _StudyInProgress, trial_id: str, state: TrialState, final_values: list[float] | None
    ) -> FrozenTrial:
        """Report the end of a trial to the study; return the trial."""
        samplers = import_optuna().samplers
        trial = run.trials.pop(trial_id)
        try:
            run.study.tell(trial, final_values, state=state)
        except RuntimeError:
            # After their last point these samplers stop the study, which is possible within optimize() only.
            if not isinstance(run.study.sampler, (samplers.GridSampler, samplers.BruteForceSampler)):
                raise
            run.is_exhausted = True
        return run.study.get_trials(deepcopy=False)[trial.number]

    def add_evaluated_point(
        self,
        parameters: Mapping[str, Any],
        value: float | Sequence[float],
        error: bool = False,
        pruned: bool = False,
        intermediate_values: Sequence[float] | None = None,
    ) -> None:
        """See :meth:`Searcher.add_evaluated_point`. Points added before the sweep begins are kept until then."""
        point = _EvaluatedPoint(dict(parameters), value, error, pruned, intermediate_values)
        if self._progress is not None:
            self._progress.study.add_trial(self._freeze(point))
        self._evaluated.append(point)

    def restart(self) -> None:
        """Forget every trial. Points of :meth:`add_evaluated_point` are kept."""
        self._progress = None
        self._parameters = {} if callable(self._space) else translate_space(self._whole_space())

    # ----------------------------------------------------------------------- the study

    def _check_search(self) -> None:
        """Raise :class:`ConfigError` if there is no space or no metric, or a point is not in the space."""
        if not self._parameters and not callable(self._space):
            raise ConfigError(
                "OptunaSearch has nothing to search: neither its space nor param_space has a distribution. Add one, "
                "such as tune.uniform(0, 1), or use BasicVariantGenerator."
            )
        if not (self.metric and self.mode):
            raise ConfigError(
                "OptunaSearch needs to know what to improve. Set metric and mode in TuneConfig, such as metric='loss', "
                "mode='min'."
            )
        for number, point in enumerate(self._points):
            self._encode(point, f"points_to_evaluate[{number}]")
        for evaluated in self._evaluated:
            self._freeze(evaluated)

    def _begin_study(self, first_trial: str) -> _StudyInProgress:
        self._check_search()
        optuna = import_optuna()
        sampler = copy.deepcopy(self._sampler) or optuna.samplers.TPESampler(seed=self.seed)
        with quiet_optuna():
            study = optuna.create_study(
                sampler=sampler, pruner=optuna.pruners.NopPruner(), directions=self._directions()
            )
        run = _StudyInProgress(study, random.Random(self.seed))
        if self._storage is not None:
            run.stored = self._open_stored()
            study.add_trials(find_earlier(run.stored, first_trial))
        study.add_trials([self._freeze(point) for point in self._evaluated])
        if not self._has_rewards:
            for number, point in enumerate(self._points):
                study.enqueue_trial(self._encode(point, f"points_to_evaluate[{number}]"), {_POINT: number})
        return run

    def _open_stored(self) -> Study:
        optuna = import_optuna()
        try:
            with quiet_optuna():
                stored: Study = optuna.create_study(
                    storage=self._storage,
                    study_name=self._study_name,
                    directions=self._directions(),
                    load_if_exists=True,
                )
        except Exception as error:
            raise ConfigError(
                f"OptunaSearch(storage={shorten(self._storage)}) cannot be opened: {describe_error(error)}. Give a "
                "storage that this process can write to, or none."
            ) from error
        directions = [direction.name.lower() for direction in stored.directions]
        if directions != self._directions():
            raise ConfigError(
                f"The study {self._study_name!r} in OptunaSearch(storage=...) has the directions {directions}, and "
                f"this sweep has {self._directions()}. Give another study_name."
            )
        return stored

    def _store(self, stored: Study, trial: FrozenTrial) -> None:
        """Write an ended trial to the storage, unless an earlier process of this sweep has done so."""
        trial_id = trial.user_attrs[_TRIAL_ID]
        try:
            written = stored.get_trials(deepcopy=False)
            if all(each.user_attrs.get(_TRIAL_ID) != trial_id for each in written):
                stored.add_trial(trial)
        except Exception as error:  # the sweep itself does not need the storage
            _logger.warning(
                "OptunaSearch could not write trial %s to its storage: %s", trial_id, describe_error(error)
            )

    def _directions(self) -> list[str]:
        return ["minimize" if mode == "min" else "maximize" for mode in self._objectives(self.mode)]

    @staticmethod
    def _objectives(names: Objective) -> list[str]:
        return names if isinstance(names, list) else [names] if names else []

    # ----------------------------------------------------------------------- configurations

    def _whole_space(self) -> dict[str, Any]:
        """Return the entries of both spaces; with a function as space, those of ``param_space``."""
        return with_values(self._param_space, {} if callable(self._space) else self._space or {})

    def _make_config(self, trial: Trial, rng: random.Random) -> dict[str, Any]:
        """Build the configuration of a trial: suggested values, constants, and then the functions."""
        number = trial.user_attrs.get(_POINT)
        point = {} if number is None else self._points[number]
        if callable(self._space):
            constants = self._call_space(trial)
            suggested = with_values(nest(trial.params), nest(constants))
            return resolve(with_values(self._param_space, suggested), rng)
        chosen = {
            each.path: each.to_config(trial.params[each.name])
            for each in self._parameters.values()
            if not look_up(point, each.path)[0]
        }
        space = self._whole_space()
        return resolve(with_values(space, _match_keys(point, space)), rng, chosen)

    def _pick_drawn(self, config: Mapping[str, Any]) -> dict[str, Any]:
        searched = {parameter.path for parameter in self._parameters.values()}
        space = walk(self._whole_space())
        return pick_values(
            config, [path for path, entry in space if path in searched or isinstance(entry, Domain)]
        )

    def _call_space(self, trial: Any) -> Mapping[str, Any]:
        """Call the function that defines the space; return its constants."""
        assert callable(self._space)
        try:
            constants = self._space(trial)
        except Exception as error:
            raise ConfigError(
                f"The function in OptunaSearch(space=...) failed: {describe_error(error)}. It must only call methods "
                "such as trial.suggest_float and return a dict of constants or None."
            ) from error
        if constants is None:
            return {}
        if not isinstance(constants, Mapping) or not all(isinstance(key, str) for key in constants):
            raise ConfigError(
                f"The function in OptunaSearch(space=...) returned {shorten(constants)}. Return a dict of constants by "
                "name, or None."
            )
        return constants

    # ----------------------------------------------------------------------- points

    def _take_rewards(self, rewards: Any) -> None:
        if not isinstance(rewards, (list, tuple)):
            raise ConfigError(
                f"OptunaSearch(evaluated_rewards={shorten(rewards)}) is not a list. Give one reward for each point."
            )
        if len(rewards) != len(self._points):
            raise ConfigError(
                f"OptunaSearch has {len(self._points)} points_to_evaluate and {len(rewards)} evaluated_rewards. Give "
                "one reward for each point."
            )
        self._evaluated += [
            _EvaluatedPoint(point, reward) for point, reward in zip(self._points, rewards, strict=True)
        ]

    def _encode(self, point: Mapping[str, Any], given_as: str) -> dict[str, Any]:
        """Return the study's values for a point, by name."""
        if callable(self._space):
            return {"/".join(path): value for path, value in walk(point)}
        space = self._whole_space()
        check_point_in_space(_match_keys(point, space), space, given_as)
        encoded = {}
        for name, parameter in self._parameters.items():
            has_value, value = look_up(point, parameter.path)
            if has_value:
                encoded[name] = parameter.encode(value, given_as)
        return encoded

    def _freeze(self, point: _EvaluatedPoint) -> FrozenTrial:
        """Return an evaluated point as a trial of the study."""
        states = import_optuna().trial.TrialState
        state = states.FAIL if point.has_failed else states.PRUNED if point.is_pruned else states.COMPLETE
        given_as = f"The evaluated point {shorten(dict(point.parameters))}"
        parameters = self._encode(point.parameters, given_as)
        values = list(point.value) if isinstance(point.value, (list, tuple)) else [point.value]
        steps = dict(enumerate(point.intermediate_values or ()))
        trial = self._freeze_parameters(
            parameters, given_as, state, None if point.has_failed else values, steps
        )
        if not point.has_failed and len(values) != len(self._directions()):
            raise ConfigError(
                f"{given_as} has {len(values)} values for {len(self._directions())} metrics. Give one for each."
            )
        return trial

    def _freeze_parameters(
        self,
        parameters: Mapping[str, Any],
        given_as: str,
        state: TrialState | None = None,
        values: Sequence[Any] | None = None,
        steps: Mapping[int, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> FrozenTrial:
        """Return a trial of the study with these parameter values; failed by default."""
        optuna = import_optuna()
        known = dict(parameters)
        distributions = {
            name: self._parameters[name].distribution for name in known if name in self._parameters
        }
        if callable(self._space):
            fixed = optuna.trial.FixedTrial(known)
            self._call_space(fixed)
            known, distributions = fixed.params, fixed.distributions
        try:
            trial: FrozenTrial = optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL if state is None else state,
                values=None if values is None else [float(value) for value in values],
                params=known,
                distributions=distributions,
                intermediate_values=dict(steps or {}),
                user_attrs=dict(attributes or {}),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{given_as} cannot be used: {describe_error(error)}.") from error
        return trial


# --------------------------------------------------------------------------- helpers


def _check_given_space(space: Any) -> Any:
    if space is None or callable(space):
        return space
    if not isinstance(space, Mapping):
        raise ConfigError(
            f"OptunaSearch(space={shorten(space)}) is neither a dict of distributions nor a function of a trial. "
            "Leave it out to search param_space."
        )
    nested = nest(space)
    check_space(nested)
    return nested or None


def _are_close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sets of parameters are equal up to rounding."""
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=1e-9)
        if isinstance(value, float) and isinstance(other[name], float)
        else value == other[name]
        for name, value in one.items()
    )


def _match_keys(point: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point with "a/b" nested, unless the space has it as one key."""
    matched: dict[str, Any] = {key: value for key, value in point.items() if key in space or "/" not in key}
    return with_values(matched, nest({key: value for key, value in point.items() if key not in matched}))
