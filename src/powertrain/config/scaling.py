"""``ScalingConfig``: number of workers, their resources, and the engine."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain import plugins
from powertrain.config.checks import (
    Config,
    Refusal,
    a_type,
    did_you_mean,
    finite,
    flag,
    ignored,
    one_of,
    only,
    option,
    optional,
    positive,
    text,
    whole,
)
from powertrain.text.reprs import short_repr as _short

PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ENGINES = ("auto", "local", "ray", "inline", "torchrun")
#: Keys of ``engine_options`` by engine of this package; "auto" takes those of any of them.
ENGINE_OPTIONS: dict[str, tuple[str, ...]] = {"ray": ("address", "runtime_env")}


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
        raise Refusal(f"{a_type(value)} is not a number of workers", how)
    if value < 0:
        raise Refusal("the number of workers cannot be negative", how)
    return int(whole(at_least=0)(value))


def _amounts(value: Any) -> dict[str, float] | None:
    """Check resource amounts by name; an empty dict becomes None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise Refusal(f"{a_type(value)} is not a dict", 'Give amounts by name, such as {"CPU": 2, "GPU": 1}.')
    kept: dict[str, float] = {}
    for name, amount in value.items():
        if not isinstance(name, str) or not name:
            raise Refusal(f"the resource name {_short(name)} is not a string", 'Name it, such as "CPU".')
        if name in ("cpu", "gpu", "Cpu", "Gpu"):
            raise Refusal(f"the resource {name!r} is spelled in capitals", f"Write {name.upper()!r}.")
        if name.upper() == "TPU":
            raise Refusal("TPUs are not supported", "Use CPUs or GPUs.")
        try:
            kept[name] = finite(amount)
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
        raise Refusal(f"{a_type(value)} is not a dict", 'Give options by name, such as {"address": "auto"}.')
    return dict(value)


def _engine_name(value: Any) -> str:
    """Check the name of an engine. Entry points are only read for a name that is not one of this package's."""
    if isinstance(value, str) and value in ENGINES:
        return value
    added = plugins.names(plugins.ENGINES) if isinstance(value, str) else ()
    if isinstance(value, str) and value in added:
        return value
    known = (*ENGINES, *added)
    raise Refusal(
        "there is no engine of this name",
        f"{did_you_mean(value, known)}Use one of {', '.join(map(repr, known))}. A package adds an engine with an entry "
        f"point of the group {plugins.ENGINES!r}; see docs/engines.md.",
    )


_NO_TPU = "TPUs are not supported"


@dataclass(frozen=True, repr=False)
class ScalingConfig(Config):
    """Number of workers, their resources, and the engine that runs them.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value, or for fields that exclude each other.

    Example::

        TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=4, use_gpu=True))
    """

    trainer_resources: Mapping[str, float] | None = option(None, _amounts)
    """Resources of the controller on a Ray cluster. On one machine it runs in the calling process and reserves
    nothing."""

    num_workers: int | tuple[int, int] = option(1, _worker_count)
    """Worker processes: N, ``(min, max)`` for an elastic run, or 0 to train in the calling process. An elastic run
    takes as many as there is room for; on one machine, without named resources, that is one per core. A fixed N is
    started at any number of cores."""

    use_gpu: bool = option(False, flag)
    """Give each worker a GPU (one, unless ``resources_per_worker`` says how many)."""

    resources_per_worker: Mapping[str, float] | None = option(None, _amounts)
    """Amounts that each worker reserves, such as ``{"CPU": 4, "GPU": 1, "accelerator_type:T4": 0.001}``. Named amounts
    are checked against the machine; without them a worker counts as one CPU, which is never refused."""

    placement_strategy: str = option("PACK", one_of(*PLACEMENT_STRATEGIES))
    """Placement of workers on nodes: PACK (few nodes), SPREAD (many), STRICT_PACK (one node or fail), STRICT_SPREAD
    (each on its own node or fail)."""

    accelerator_type: str | None = option(None, optional(text))
    """The kind of GPU every worker must have, such as ``"A100"``."""

    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = option(None, _labels)
    """Labels of the Ray nodes that workers may run on: one dict for all, or a list with one per worker."""

    use_tpu: bool = option(False, only(False, why=_NO_TPU, fix="Use use_gpu=True, or CPUs."))
    """Ray Train's; only False."""

    topology: str | None = option(None, only(None, why=_NO_TPU, fix="Leave topology out."))
    """Ray Train's shape of a TPU slice; only None."""

    elastic_resize_monitor_interval_s: float = ignored(60.0, finite, "capacity is watched continuously")
    """Ray Train's polling period. Without effect: capacity is watched continuously."""

    engine: str = option("auto", _engine_name)
    """The engine that runs the processes: ``"local"`` (this machine), ``"ray"`` (a Ray cluster), ``"inline"`` (the
    calling process), ``"torchrun"`` (this process is one of torchrun's), or ``"auto"`` for the one that applies. Other
    packages add engines, by the name of an entry point of the group ``powertrain.engines``."""

    engine_options: Mapping[str, Any] = option(None, _options)
    """Options of the engine, for Ray ``{"address": ..., "runtime_env": ...}``."""

    queue_timeout_s: float | None = option(None, optional(positive))
    """Seconds to wait for resources before the run fails with the missing ones; None waits indefinitely. A validation
    waits as long for a slot of its own once the training is over."""

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
        """True if the number of workers may change during the run."""
        return self.min_workers < self.max_workers

    @property
    def elasticity_enabled(self) -> bool:
        """True if ``num_workers`` was given as ``(min, max)``."""
        return isinstance(self.num_workers, tuple)

    @property
    def total_resources(self) -> dict[str, float]:
        """Resources of all workers together, at most, as in Ray Train."""
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
        """Resources of each worker beside CPUs and GPUs."""
        return {name: amount for name, amount in self._reserved.items() if name not in ("CPU", "GPU")}

    @property
    def _reserved(self) -> dict[str, float]:
        """Resources of one worker on a cluster: a worker with a GPU reserves a CPU only where that is named."""
        named = {name: amount for name, amount in self.resources.items() if amount}
        if self.use_gpu and self.resources_per_worker is None:
            named.pop("CPU", None)
        return named

    @property
    def explicit_resources(self) -> bool:
        """True if amounts were named, which are then checked against the machine."""
        return self.resources_per_worker is not None

    @property
    def resources(self) -> dict[str, float]:
        """Resources of one worker: always CPU and GPU, and each custom resource with an amount above zero.

        Where amounts are named, others are not requested, so a worker with ``{"accelerator_type:T4": 0.001}`` requests
        no CPU.
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
        if self.engine not in ("auto", "inline", "torchrun") and self.num_workers == 0:
            raise self._contradiction(
                pair,
                "0 workers means to train in the calling process",
                f'Set num_workers=1 or more, or engine="inline" in place of {self.engine!r}.',
            )

    def _check_engine_and_rest(self) -> None:
        if self.engine not in ENGINES:
            return  # the package that provides it checks its own limits
        self._check_options()
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

    def _check_options(self) -> None:
        every = tuple(name for names in ENGINE_OPTIONS.values() for name in names)
        for name in self.engine_options:
            if name not in every:
                raise self._contradiction(
                    ("engine", "engine_options"),
                    f"no engine has an option {_short(name)}",
                    f"{did_you_mean(name, every)}The options are {', '.join(every)}.",
                )
        known = every if self.engine == "auto" else ENGINE_OPTIONS.get(self.engine, ())
        foreign = [name for name in self.engine_options if name not in known]
        if foreign:
            raise self._contradiction(
                ("engine", "engine_options"),
                f"the engine {self.engine!r} has no option {foreign[0]!r}",
                f'Remove {foreign[0]!r} from engine_options, or use engine="ray".',
            )
