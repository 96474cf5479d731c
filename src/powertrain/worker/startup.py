"""What a rank does from the moment it is told to train until its first step: stamps, told once.

The first step is the first optimizer step or report, whichever comes first. Once it is told, nothing more is noted: a
loop pays for it with one comparison a step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from powertrain.wire.from_worker import FirstStep

#: Seconds of loading a function from which it is worth to say what was loaded.
_WORTH_A_NAME = 1.0


class StartupStamps:
    """Stamps of one attempt by the process's own clock. The training thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Who is told; None before the rank is to train, and when it has told.
        self._tell: Callable[[FirstStep], None] | None = None
        self._called = self._loaded = 0.0
        self._modules: frozenset[str] = frozenset()
        self._package = ""
        #: Seconds of waiting for data; since when it waits now, and in how many calls within each other.
        self._data = self._since = 0.0
        self._depth = 0
        #: When the first batch was handed out; None before.
        self._batch: float | None = None

    @property
    def is_noted(self) -> bool:
        """True between the call of the function and its first step."""
        return self._tell is not None

    def begin(self, tell: Callable[[FirstStep], None]) -> None:
        """The rank was told to train; ``tell`` is called once."""
        self._tell = tell
        self._called = self._loaded = self._clock()
        self._modules = frozenset(sys.modules)

    def loaded(self) -> None:
        """The user's function is there, and is called next."""
        self._loaded = self._clock()
        if self._loaded - self._called >= _WORTH_A_NAME:
            self._package = most_loaded(sys.modules.keys() - self._modules)
        self._modules = frozenset()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data."""
        self.wait_began()
        try:
            yield
        finally:
            self.wait_ended()

    def wait_began(self) -> None:
        if self._depth == 0:
            self._since = self._clock()
        self._depth += 1

    def wait_ended(self) -> None:
        if self._depth:
            self._depth -= 1
            if self._depth == 0 and self._batch is None:
                self._data += self._clock() - self._since

    def batch(self) -> None:
        """The first batch is handed out."""
        self._batch = self._clock()

    def stepped(self) -> None:
        """A step or a report was made: the first of them is told."""
        self._end(stepped=True)

    def over(self) -> None:
        """The function has ended; where it has made no step, that is told."""
        self._end(stepped=False)

    def _end(self, *, stepped: bool) -> None:
        tell, self._tell = self._tell, None
        if tell is None:
            return
        now, data = self._clock(), self._data
        if self._depth and self._batch is None:  # it has ended in the middle of a wait
            data += now - self._since
        begun = self._loaded + data if self._batch is None else max(self._batch, self._loaded + data)
        tell(
            FirstStep(
                function=self._loaded - self._called,
                setup=max(0.0, begun - self._loaded - data),
                data=data,
                step=max(0.0, now - begun),
                stepped=stepped,
                loaded=self._package,
            )
        )


def most_loaded(modules: Iterable[str]) -> str:
    """The package that most of these modules are of; "" for none."""
    packages = Counter(name.partition(".")[0] for name in modules)
    return max(packages, key=lambda name: (packages[name], name), default="")
