"""Resuming a sweep of earlier drivers: comparison of the scripts, and the trials that run again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from powertrain.tune import trial as tr
from powertrain.tune.config import ResumeConfig, ResumeType
from powertrain.tune.naming import restart_name
from powertrain.tune.search.base import Searcher
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal import record
from powertrain.tune.sweep.judge import Judge

if TYPE_CHECKING:
    from powertrain.storage import Storage
    from powertrain.tune.config import TuneConfig

#: Levels of nested values that are compared.
_DEPTH = 20
#: Types of generators of random numbers, which differ from process to process.
_GENERATORS = ("LazyRandomState", "RandomState", "Generator")


def load_kept(storage: Storage) -> dict[str, Any]:
    """Return the stored arguments of a sweep; {} if this user cannot load them here."""
    try:
        return record.load_arguments(storage)
    except Exception:  # not stored, by another user, or with classes that no longer exist
        return {}


def choose_kept(kept: Mapping[str, Any], given: Searcher) -> Searcher:
    """Return the stored searcher, which has the seed of the sweep, if the given one has the same arguments."""
    own = kept.get("searcher")
    return own if isinstance(own, Searcher) and are_alike(own, given) else given


def describe_changes(
    kept: Mapping[str, Any], space: Mapping[str, Any], tune: TuneConfig, judge: Judge
) -> str:
    """Return the differences of a script from the one that began the sweep, as text; "" for none.

    Args:
        kept: The stored arguments of the sweep; {} if they cannot be loaded.
        space: The ``param_space`` of the script.
        tune: Its ``TuneConfig``.
        judge: Has replayed the journal of the earlier drivers.
    """
    return " ".join(
        filter(None, (_describe_differing(kept, space, tune, judge), _describe_fewer(tune, judge)))
    )


def _describe_fewer(tune: TuneConfig, judge: Judge) -> str:
    total, trials = judge.searcher.total_trials(), judge.state.trials
    limit = tune.num_samples if total is None else total
    if limit < 0 or len(trials) <= limit:
        return ""
    count = "1 trial" if limit == 1 else f"{limit} trials"
    return (
        f"num_samples={tune.num_samples} asks for {count}, and the sweep has {len(trials)} already: all of them stay, "
        "and none is added."
    )


def _describe_differing(
    kept: Mapping[str, Any], space: Mapping[str, Any], tune: TuneConfig, judge: Judge
) -> str:
    if not kept:
        return ""
    before: TuneConfig = kept["tune_config"]
    pairs = {
        "param_space": (kept["param_space"], space),
        "metric": (before.metric, tune.metric),
        "mode": (before.mode, tune.mode),
        "scheduler": (before.scheduler, tune.scheduler),
        "search_alg": (type(kept["searcher"]), type(judge.searcher)),
    }
    changed = [name for name, (old, new) in pairs.items() if not are_alike(old, new)]
    if not changed:
        return ""
    verb = "differs" if len(changed) == 1 else "differ"
    return (
        f"It continues an earlier sweep, from which {' and '.join(changed)} {verb}: that applies from now on, and the "
        "trials that it has keep their configurations and decisions. Another RunConfig(name=...) begins a new sweep."
    )


def resume_facts(judge: Judge, resume: ResumeConfig, num_samples: int, at: float) -> list[ev.SweepEvent]:
    """Return the facts for the trials that run again. The judge has applied them.

    Args:
        judge: Has replayed the journal of the earlier drivers.
        resume: The treatment of failed and of unfinished trials.
        num_samples: Number of trials if the searcher does not know it; -1 for no limit.
        at: The time of the facts.
    """
    state = judge.state
    facts = judge.complete_decisions(at)
    for trial in list(state.trials.values()):
        if trial.status == tr.ERROR and resume.errored is not ResumeType.SKIP:
            fresh = restart_name(trial.name, state.starts) if resume.errored is ResumeType.RESTART else ""
            facts += judge.revive(trial, fresh, at)
        elif not trial.is_ended and resume.unfinished is ResumeType.SKIP:
            facts += judge.end(trial, tr.TERMINATED, "", "it was not resumed", trial.seconds, at)
    total = judge.searcher.total_trials()
    limit = num_samples if total is None else total
    if state.is_search_over and (limit < 0 or limit > len(state.trials)):
        facts += judge.reopen_search(at)
    return facts


def are_alike(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Return whether two arguments are equal as far as can be determined, also across processes.

    Seeds chosen by a searcher, and the states of generators, are ignored.
    """
    if one is other or depth == 0:
        return True
    if type(one) is not type(other):
        # A class of the script is not identical after unpickling by value.
        return isinstance(one, type) and isinstance(other, type) and one.__qualname__ == other.__qualname__
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key], depth - 1) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if isinstance(one, FunctionType):
        return (one.__qualname__, one.__code__.co_code) == (other.__qualname__, other.__code__.co_code)
    if isinstance(one, random.Random) or type(one).__name__ in _GENERATORS:
        return True
    if hasattr(one, "__dict__") and not isinstance(one, type):
        return are_alike(_lasting(one), _lasting(other), depth - 1)
    return repr(one) == repr(other)


def _lasting(value: Any) -> dict[str, Any]:
    if not isinstance(value, Searcher):
        return dict(vars(value))
    left_out = {"_num_samples", *(() if getattr(value, "_has_given_seed", True) else ("seed",))}
    return {name: each for name, each in value.__getstate__().items() if name not in left_out}
