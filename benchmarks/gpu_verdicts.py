"""Faults injected into runs on one GPU, and healthy runs, with their first findings.

Each is a training function of ``gpu_verdict_scripts/troubles.py`` with one thing wrong, or nothing: mostly 100 steps of
a small GPT. It is run by a TorchTrainer with one worker and default tracing. The first finding of its diagnosis must be
of the fault's kind, and name the line where there is one; a healthy run must have no finding that asks for an action.

    python benchmarks/gpu_verdicts.py [--only NAME]... [--json FILE] [--check] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Bound, Options, Outcome, Row, conclude

sys.path.append(str(Path(__file__).resolve().parent / "gpu_verdict_scripts"))

from troubles import BY_NAME, TROUBLES, Trouble

from powertrain import RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer

#: The claims of the issue.
TROUBLES_AT_LEAST, HEALTHY_AT_LEAST, WRONG_AT_MOST = 16, 6, 0


def train(config: dict[str, Any]) -> None:
    BY_NAME[config["name"]].train()


def findings_of(trouble: Trouble, storage: str) -> list[dict[str, Any]]:
    """Run it, and return the findings of its diagnosis."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"name": trouble.name},
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(name=trouble.name, storage_path=storage, verbose=0, report=False),
    )
    summary = json.loads((Path(trainer.fit().path) / "final_summary.json").read_text())
    found: list[dict[str, Any]] = summary["findings"]
    return found


def fault_of(trouble: Trouble, findings: list[dict[str, Any]]) -> str:
    """Return what is wrong about the findings; "" for nothing."""
    troubles = [finding for finding in findings if finding["severity"] != "info"]
    if not trouble.kinds:
        return "" if not troubles else f"healthy, but {troubles[0]['kind']}"
    if not troubles or troubles[0]["kind"] not in trouble.kinds:
        return f"expected {' or '.join(trouble.kinds)}"
    line = str(troubles[0]["evidence"].get("line", ""))
    return "" if trouble.line in line else f"expected a line with {trouble.line!r}, not {line!r}"


def judge(trouble: Trouble, storage: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        findings = findings_of(trouble, storage)
        wrong = fault_of(trouble, findings)
    except Exception as error:  # the others are still judged
        findings, wrong = [], f"the run failed: {type(error).__name__}: {error}"
    took = time.monotonic() - began
    print(f"{'WRONG' if wrong else 'right'}  {trouble.name} ({took:.1f} s) {wrong}", flush=True)
    for finding in findings[:3]:
        print(f"       {finding['kind']}, {finding['severity']}: {finding['summary']}", flush=True)
    shown = [{name: one[name] for name in ("kind", "severity", "cost", "evidence")} for one in findings]
    return {"name": trouble.name, "wrong": wrong, "findings": shown}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(BY_NAME))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    chosen = [trouble for trouble in TROUBLES if not given.only or trouble.name in given.only]
    with tempfile.TemporaryDirectory(prefix="ptb-") as storage:
        judged = [judge(trouble, storage) for trouble in chosen]
    sick = [trouble for trouble in chosen if trouble.kinds]
    wrong = sum(bool(one["wrong"]) for one in judged)
    outcome = Outcome(
        title="Verdicts on runs on a GPU",
        repetitions=1,
        rows=[
            Row("faults injected", "Powertrain", "", [len(sick)]),
            Row("healthy runs", "Powertrain", "", [len(chosen) - len(sick)]),
            Row("wrong first verdicts", "Powertrain", "", [wrong]),
        ],
        bounds=[
            Bound("faults injected", len(sick), at_least=TROUBLES_AT_LEAST),
            Bound("healthy runs", len(chosen) - len(sick), at_least=HEALTHY_AT_LEAST),
            Bound("wrong first verdicts", wrong, WRONG_AT_MOST),
        ],
        samples={"verdicts": judged},
    )
    return conclude(outcome, Options(given.quick, given.json, given.check))


if __name__ == "__main__":
    raise SystemExit(main())
