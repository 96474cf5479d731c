"""``ExecutionOptions`` and ``ExecutionResources``: Ray Data's limits of an execution, of which memory has an effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import ConfigError
from powertrain.text.reprs import short_repr


def _checked_amount(name: str, value: Any) -> float | None:
    """Return an amount of a resource, None for no limit."""
    if value is None or (isinstance(value, float) and value == float("inf")):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(
            f"ExecutionResources({name}={short_repr(value)}) is not an amount. Give a number of at least 0, or None "
            "for no limit."
        )
    return value


@dataclass
class ExecutionResources:
    """Amounts of resources, as in Ray Data. ``object_store_memory`` limits the memory of reading; others are kept.

    Example::

        ExecutionResources(object_store_memory=2**30)
    """

    cpu: float | None = None
    """CPUs. Without effect: ``concurrency`` is the number of processes of a function."""
    gpu: float | None = None
    """GPUs. Without effect: functions run where the rank runs."""
    object_store_memory: float | None = None
    """Bytes of memory for reading ahead and decoding."""
    memory: float | None = None
    """Bytes of memory of functions. Without effect: memory is not reserved."""

    def __post_init__(self) -> None:
        for name in ("cpu", "gpu", "object_store_memory", "memory"):
            _checked_amount(name, getattr(self, name))

    @classmethod
    def for_limits(
        cls,
        cpu: float | None = None,
        gpu: float | None = None,
        object_store_memory: float | None = None,
        memory: float | None = None,
    ) -> ExecutionResources:
        """Return limits; those left out are infinite.

        Args:
            cpu: CPUs.
            gpu: GPUs.
            object_store_memory: Bytes of memory for reading.
            memory: Bytes of memory of functions.
        """
        given = (cpu, gpu, object_store_memory, memory)
        return cls(*(float("inf") if value is None else value for value in given))


@dataclass
class ExecutionOptions:
    """Options of an execution, as in Ray Data. ``resource_limits.object_store_memory`` has an effect; others are kept.

    Example::

        DataContext.get_current().execution_options.resource_limits.object_store_memory = 2**30
    """

    resource_limits: ExecutionResources = field(default_factory=ExecutionResources)
    """Limits of an execution outside a run; in a run those of ``DataConfig(memory_bytes=…)`` hold."""
    exclude_resources: ExecutionResources = field(default_factory=ExecutionResources)
    """Without effect: nothing is reserved."""
    preserve_order: bool = True
    """Without effect: rows always come in order."""
    actor_locality_enabled: bool = True
    """Without effect: every node reads its own rows."""
    verbose_progress: bool | None = None
    """Without effect."""
    label_selector: Any = None
    """Without effect: functions run where the rank runs."""
    locality_with_output: Any = False
    """Without effect: every node reads its own rows."""

    def __post_init__(self) -> None:
        for name in ("resource_limits", "exclude_resources"):
            given = getattr(self, name)
            if given is None:
                setattr(self, name, ExecutionResources())
            elif not isinstance(given, ExecutionResources):
                raise ConfigError(
                    f"ExecutionOptions({name}={short_repr(given)}) is a {type(given).__name__}. Give "
                    "ExecutionResources(object_store_memory=...)."
                )

    def validate(self) -> None:
        """Check the values again, after some were set."""
        self.__post_init__()
        self.resource_limits.__post_init__()
