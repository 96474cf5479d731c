"""Resources of the trainer itself, held by an actor on the cluster before those of the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.engine.ray.actors import SlotLocation, slot_actor
from powertrain.engine.ray.client import RayThread, in_a_line
from powertrain.engine.ray.options import RayOptions


class TrainerResources:
    """Holds ``ScalingConfig(trainer_resources=...)``. The thread that talks to Ray only."""

    def __init__(
        self,
        asking: RayThread,
        options: RayOptions,
        on_held: Callable[[], None],
        refuse: Callable[[str], None],
    ) -> None:
        """``on_held`` is called once they are held; ``refuse`` with the reason where they cannot be."""
        self._ray, self._options, self._on_held, self._refuse = asking, options, on_held, refuse
        self._actor: Any = None
        self._is_held = not any(options.trainer_resources.values())

    @property
    def needs(self) -> dict[str, float]:
        """The amounts that are not 0, by name."""
        return {name: amount for name, amount in self._options.trainer_resources.items() if amount}

    def reserve(self) -> bool:
        """Return True once they are held: workers come after the trainer, and leave it room."""
        if not self._is_held and self._actor is None:
            self._actor = self._start()
            self._ray.then(self._actor.where.remote(), self._on_found)
        return self._is_held

    def release(self) -> None:
        """End the actor. After the thread that talks to Ray has stopped."""
        self._ray.kill(self._actor)

    def _start(self) -> Any:
        return slot_actor(self._options.runtime_env, self.needs).remote()

    def _on_found(self, _: SlotLocation | None, error: BaseException | None) -> None:
        if self._ray.closing:
            return
        if error is not None:
            self._actor = None
            self._refuse(f"Ray cannot hold trainer_resources: {in_a_line(error)}")
            return
        self._is_held = True
        self._ray.then(self._actor.hold.remote(), self._on_end)
        self._on_held()

    def _on_end(self, _: None, error: BaseException | None) -> None:
        """Hold them elsewhere as soon as there is room: the node is gone, and the workers continue meanwhile."""
        if not self._ray.closing:
            self._actor = self._start()
            self._ray.then(self._actor.hold.remote(), self._on_end)
