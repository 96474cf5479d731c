"""A scenario as a Powertrain run, and its diagnosis."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scenarios import BY_NAME, Scenario

from powertrain import Checkpoint, RunConfig, ScalingConfig, get_context, report
from powertrain.config.trace import TraceConfig
from powertrain.torch import TorchConfig, TorchTrainer, prepare_model

#: Sampling interval for some dozens of memory samples in a run of a few seconds.
LOOK_EVERY = 0.1
_REPORT_EVERY = 10


@dataclass(frozen=True)
class Said:
    """The first finding of a run's diagnosis, and a summary of the rest."""

    kind: str
    phase: str
    ranks: tuple[int, ...]
    summary: str
    action: str
    evidence: dict[str, Any]
    #: (kind, ranks) of the others.
    others: tuple[tuple[str, tuple[int, ...]], ...]
    #: Median seconds of each phase, and the host of each rank.
    phases: dict[str, float]
    hosts: tuple[str, ...]
    #: The slowed host, if any.
    slow_host: str = ""


def run(
    scenario: Scenario, ranks: int, storage: str, *, name: str = "", steps: int = 0, loader_workers: int = 0
) -> Said:
    """Run a scenario on this machine, or on the Ray that this process is connected to."""
    on_gpu = scenario.device != "cpu"
    name = name or f"{scenario.name}-{ranks}"
    trainer = TorchTrainer(
        _train,
        train_loop_config={"name": scenario.name, "steps": steps, "loader_workers": loader_workers},
        scaling_config=ScalingConfig(
            num_workers=ranks,
            use_gpu=on_gpu,
            # All ranks share one GPU, which NCCL does not allow: gradients use gloo.
            resources_per_worker={"GPU": round(1 / ranks, 2)} if on_gpu else None,
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            verbose=0,
            trace=TraceConfig(sampler_interval_sec=LOOK_EVERY),
        ),
    )
    return said(Path(trainer.fit().path))


def said(directory: Path) -> Said:
    """Return the diagnosis, read from the run's directory."""
    summary = json.loads((directory / "final_summary.json").read_text())
    first, *others = summary["findings"]
    return Said(
        kind=first["kind"],
        phase=first["phase"],
        ranks=tuple(first["ranks"]),
        summary=first["summary"],
        action=first["action"],
        evidence=first["evidence"],
        others=tuple((other["kind"], tuple(other["ranks"])) for other in others),
        phases={time["phase"]: time["seconds"] for time in summary["phases"]},
        hosts=tuple(rank["host"] for rank in summary["ranks"]),
        slow_host=slow_host(),
    )


def _train(config: dict[str, Any]) -> None:
    import dataclasses

    import faulty_loop

    context = get_context()
    scenario = BY_NAME[config["name"]]
    if config["steps"]:
        scenario = dataclasses.replace(scenario, steps=config["steps"])
    slowness = scenario.slow_host if scenario.slow_host and socket.gethostname() == slow_host() else 1.0
    rank = faulty_loop.Rank(scenario, context.get_world_rank(), context.get_world_size(), slowness)
    tools = faulty_loop.Tools(wrap=prepare_model, after_step=_after_step, save=_save)
    faulty_loop.train(rank, tools, config["loader_workers"] or scenario.loader_workers)


def slow_host() -> str:
    """Return the slow host, from an environment variable set by the code that creates the hosts."""
    return os.environ.get("SLOW_HOST", "")


def _after_step(step: int, loss: Any, model: Any) -> None:
    if step % _REPORT_EVERY == _REPORT_EVERY - 1:
        report({"loss": loss.item()})


def _save(step: int, directory: str) -> None:
    report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def as_json(answer: Said) -> str:
    return json.dumps(asdict(answer))
