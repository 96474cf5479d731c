"""The import rules of docs/migration.md: which module of Ray or TraceML is which of Powertrain. Pure."""

from __future__ import annotations

#: Packages with rules. Names are looked up below them; others are left alone.
ROOTS = ("ray", "traceml_ai")
#: Functions of ``ray`` itself that ``powertrain`` has.
CORE_NAMES = frozenset({"init", "shutdown", "is_initialized", "remote", "get", "put", "wait", "kill"})
#: Longer names come first.
_MODULES = (
    ("ray.train.v2.jax", "powertrain.jax"),
    ("ray.train.v2.api", "powertrain"),
    ("ray.train", "powertrain"),
    ("ray.data", "powertrain.data"),
    ("ray.tune", "powertrain.tune"),
    ("traceml_ai", "powertrain.trace"),
)
#: Modules of ``ray.train.v2.api`` all have their names in ``powertrain`` itself.
_FLAT = "ray.train.v2.api"
#: Parts of Ray without a counterpart, with the remedy.
_REMEDIES = (
    ("ray.get_actor", "pass the handle of the actor, for example in train_loop_config"),
    ("ray.cluster_resources", "use os.cpu_count() and torch.cuda.device_count(), or keep Ray for clusters"),
    ("ray.available_resources", "use os.cpu_count() and torch.cuda.device_count(), or keep Ray for clusters"),
    ("ray.nodes", "keep Ray for clusters"),
    ("ray.get_gpu_ids", "use powertrain.torch.get_devices() in the training function"),
    ("ray.get_runtime_context", "use powertrain.get_context() in the training function"),
    ("ray.cancel", "use kill() for actors"),
    ("ray.method", "return a list in place of several values"),
    ("ray.exceptions", "use powertrain.errors; a timeout is Python's TimeoutError"),
    ("ray.util", "use an actor of your own, or keep Ray for this part"),
    ("ray.air.integrations.mlflow", "use RunConfig(trackers=['mlflow']): docs/trackers.md"),
    ("ray.air.integrations.wandb", "use RunConfig(trackers=['wandb']): docs/trackers.md"),
    ("ray.air.integrations.keras", "use ray.train.tensorflow.keras, and run this again"),
    ("ray.air", "use the names of ray.train, which have replaced it, and run this again"),
    ("ray.data.preprocessors", "use map_batches() with the same computation"),
    ("ray.train.horovod", "use TorchTrainer with torch.distributed, or keep Ray for Horovod"),
    ("ray.train.v2", "use the names of ray.train"),
    ("ray.tune.examples", "copy what you need of it into the program"),
    ("ray.tune.search", "use OptunaSearch: docs/tune.md names the replacements"),
    ("ray.rllib", "keep Ray for reinforcement learning"),
    ("ray.serve", "keep Ray for serving"),
)


def target_of(module: str) -> str | None:
    """Return the module of Powertrain for one of Ray's or TraceML's; None where no rule applies.

    Whether Powertrain really has that module is another question: see ``resolving``.
    """
    if any(part.startswith("_") for part in module.split(".")):
        return None  # internal to the other library
    for theirs, ours in _MODULES:
        if module == theirs or module.startswith(f"{theirs}."):
            if theirs == _FLAT:
                return ours
            rest = module[len(theirs) :]
            return None if rest == ".v2" or rest.startswith(".v2.") else ours + rest
    return None


def is_covered(name: str) -> bool:
    """Return True for a dotted name of a package that the rules are about."""
    return name.partition(".")[0] in ROOTS


def remedy_for(name: str) -> str:
    """Return what to do about a name without a counterpart."""
    for theirs, remedy in _REMEDIES:
        if name == theirs or name.startswith(f"{theirs}."):
            return remedy
    return "see 'Missing features' in docs/migration.md, or keep Ray for this part"
