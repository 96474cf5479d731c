"""The same trials with Optuna's own optimize, 2 threads in one process: python with_optuna.py DIRECTORY TRIALS"""

from __future__ import annotations

import json
import sys
import time

import optuna


def objective(trial: optuna.Trial) -> float:
    x, loss = trial.suggest_float("x", 0, 1), 0.0
    for step in range(5):
        loss = x / (step + 1)
        trial.report(loss, step)
    return loss


if __name__ == "__main__":
    count = int(sys.argv[2])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    began = time.monotonic()
    study.optimize(objective, n_trials=count, n_jobs=2)
    print(json.dumps({"seconds": time.monotonic() - began}))
