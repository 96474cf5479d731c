"""Training needed by TPE with ASHA to reach the result of random search.

The trials are simulated: learning curves of a small network's shape (fast, then slow, with noise, an optimum in
learning rate that moves with the width, and configurations that diverge), so that thousands of epochs take a second.
Searcher, scheduler and the order of decisions are those of real sweeps; two trials run at a time, and an epoch of
either takes as long. The budget is epochs trained; what is reached is counted without the noise that the search sees.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from typing import Any

from harness import Bound, Outcome, Row, conclude, parse_options

from powertrain.tune import schedulers, space
from powertrain.tune import trial as tr
from powertrain.tune.search.basic_variant import BasicVariantGenerator
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.stopper import as_stopper
from powertrain.tune.sweep.journal.state import SweepState
from powertrain.tune.sweep.judge import Judge

SEEDS, QUICK_SEEDS = 10, 3
RANDOM_TRIALS, EPOCHS = 64, 27
#: The claim of the issue.
BUDGET_AT_MOST = 0.5
SPACE = {
    "lr": space.loguniform(1e-5, 1.0),
    "width": space.choice([16, 32, 64, 128, 256]),
    "dropout": space.uniform(0.0, 0.9),
    "decay": space.loguniform(1e-8, 1e-1),
}


def loss_after(config: dict[str, Any], epoch: int) -> float:
    """The validation loss of a made-up network after so many epochs, without noise."""
    best_lr = 3e-3 * (64 / config["width"]) ** 0.5
    off = math.log10(config["lr"] / best_lr)
    if off > 1.5:  # it diverges
        return 2.3 + 0.1 * epoch
    floor = 0.05 + 0.15 * off**2 + 0.2 * (config["dropout"] - 0.25) ** 2 + 3.0 / config["width"] * 0.2
    floor += 0.02 * abs(math.log10(config["decay"]) + 4)
    speed = 0.35 / (1 + 1.5 * max(0.0, -off))
    return floor + 2.2 * math.exp(-speed * epoch)


def make_judge(is_clever: bool, seed: int) -> Judge:
    searcher = OptunaSearch(seed=seed) if is_clever else BasicVariantGenerator(random_state=seed)
    searcher.set_search_properties("loss", "min", SPACE)
    searcher.set_num_samples(-1)
    rule: schedulers.TrialScheduler = schedulers.FIFOScheduler()
    if is_clever:
        rule = schedulers.ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3)
        rule.set_search_properties("loss", "min")
    stop = as_stopper({"training_iteration": EPOCHS})
    return Judge(searcher, rule, stop, SweepState(), lambda trial: trial.trial_id, lambda *_: "", "made")


def play(judge: Judge, seed: int, at_a_time: int = 2) -> Iterator[tuple[int, int, float]]:
    """Train without end, ``at_a_time`` trials in turn; yields epochs trained, trials ended, and the best loss."""
    noise, spent, ended, best = random.Random(f"noise {seed}"), 0, 0, math.inf
    running: list[tr.Trial] = []
    while True:
        while len(running) < at_a_time:
            judge.suggest(0.0)
            running.append(list(judge.state.trials.values())[-1])
            running[-1].status = tr.RUNNING
        for trial in list(running):
            spent += 1
            loss = loss_after(trial.config, trial.iteration + 1)
            best = min(best, loss)
            seen = {"loss": loss + noise.gauss(0, 0.01)}
            judge.report(trial, trial.iteration + 1, seen, float(spent), float(spent))
            if trial.trial_id in judge.state.stops:
                judge.end(trial, tr.TERMINATED, "finished", "", 0.0, float(spent))
                running.remove(trial)
                ended += 1
            yield spent, ended, best


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options(__doc__.splitlines()[0])
    shares, random_bests, clever_epochs = [], [], []
    for seed in range(QUICK_SEEDS if options.quick else SEEDS):
        budget = RANDOM_TRIALS * EPOCHS
        target = next(best for spent, _, best in play(make_judge(False, seed), seed) if spent >= budget)
        needed = next(
            spent
            for spent, _, best in play(make_judge(True, seed), seed + 1000)
            if best <= target or spent >= 4 * budget
        )
        random_bests.append(target)
        clever_epochs.append(float(needed))
        shares.append(needed / budget)
    rows = [
        Row("best loss", f"random search, {RANDOM_TRIALS * EPOCHS} epochs", "", random_bests, None),
        Row("epochs to the same loss", "TPE with ASHA", "", clever_epochs, None),
    ]
    bounds = [Bound("epochs / those of random search", statistics.median(shares), at_most=BUDGET_AT_MOST)]
    outcome = Outcome("Search", len(shares), rows, bounds, (), (), samples={"shares": {"ours": shares}})
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
