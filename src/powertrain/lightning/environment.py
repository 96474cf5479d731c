"""Lightning's interface to a cluster: the rank of this process, and the world size. The run has decided them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.lightning.packages import PackageClass, derived
from powertrain.worker import context


class _WorkerEnvironment:
    """Answers from the context of this worker."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return context.get_context().get_world_size()

    def global_rank(self) -> int:
        return context.get_context().get_world_rank()

    def local_rank(self) -> int:
        return context.get_context().get_local_rank()

    def node_rank(self) -> int:
        return context.get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Leave it as the run has decided it."""

    def set_global_rank(self, rank: int) -> None:
        """Leave it as the run has decided it."""

    def teardown(self) -> None:
        """Leave the environment variables of the worker alone."""


class LightningEnvironment(
    metaclass=PackageClass,
    build=derived(_WorkerEnvironment, "plugins", "environments", "LightningEnvironment"),
):
    """Tells Lightning's Trainer the ranks of a worker.

    The strategies of this package bring it along. In a Slurm job name it all the same: Lightning looks at Slurm's
    variables first.

    Example::

        trainer = lightning.Trainer(strategy=DDPStrategy(), plugins=[LightningEnvironment()])
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance of the class for the package in use."""
