"""Time stamps of a rank from the order to train until its first step, sent once.

The first step is the first optimizer step or report, whichever comes first. Once it is sent, nothing more is recorded:
a loop pays one comparison a step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from powertrain.wire.from_worker import FirstStep

#: Seconds of loading a function from which the loaded package is named; and of the function before its first step, with
#: the modules that it has then loaded at least.
_WORTH_A_NAME, _MANY_MODULES = 1.0, 300
#: Packages of which this process and torch's compiler load more by themselves.
_NOT_OF_USER = ("powertrain", "torch", "triton")
#: Part of the loaded modules that a package must have to be named.
_NOTICEABLE = 0.05


class StartupStamps:
    """Stamps of one attempt by the process's own clock. The training thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Sends the stamps; None before the order to train, and after they were sent.
        self._send: Callable[[FirstStep], None] | None = None
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
        """Return True between the call of the function and its first step."""
        return self._send is not None

    def begin(self, send: Callable[[FirstStep], None]) -> None:
        """Begin with the order to train; ``send`` is called once."""
        self._send = send
        self._called = self._loaded = self._clock()
        self._modules = frozenset(sys.modules)

    def loaded(self) -> None:
        """Note that the user's function is loaded, and is called next."""
        self._loaded = self._clock()
        if self._loaded - self._called >= _WORTH_A_NAME:
            self._package = most_loaded(sys.modules.keys() - self._modules)
        self._modules = frozenset(sys.modules)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the block as a wait for data."""
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
        """Note that the first batch is handed out."""
        self._batch = self._clock()

    def stepped(self) -> None:
        """Note a step or a report: the first of them sends the stamps."""
        self._end(stepped=True)

    def over(self) -> None:
        """Note the end of the function; where it has made no step, the stamps are sent without one."""
        self._end(stepped=False)

    def _end(self, *, stepped: bool) -> None:
        send, self._send = self._send, None
        if send is None:
            return
        now, data = self._clock(), self._data
        if self._depth and self._batch is None:  # it has ended in the middle of a wait
            data += now - self._since
        imported = ""
        if now - self._loaded >= _WORTH_A_NAME:
            new = [name for name in list(sys.modules) if name not in self._modules and _is_of_user(name)]
            imported = first_loaded(new) if len(new) >= _MANY_MODULES else ""
        begun = self._loaded + data if self._batch is None else max(self._batch, self._loaded + data)
        send(
            FirstStep(
                function=self._loaded - self._called,
                setup=max(0.0, begun - self._loaded - data),
                data=data,
                step=max(0.0, now - begun),
                stepped=stepped,
                loaded=self._package,
                imported=imported,
            )
        )


def _is_of_user(module: str) -> bool:
    return module.partition(".")[0] not in _NOT_OF_USER


def first_loaded(modules: Sequence[str]) -> str:
    """Return the package that began to load first, of those with a noticeable part of these modules.

    ``modules`` are in the order in which their loading began: a package that loads others comes before them.
    """
    packages = Counter(name.partition(".")[0] for name in modules)
    return next((name for name in packages if packages[name] >= _NOTICEABLE * len(modules)), "")


def most_loaded(modules: Iterable[str]) -> str:
    """Return the package that most of these modules belong to; "" for none."""
    packages = Counter(name.partition(".")[0] for name in modules)
    return max(packages, key=lambda name: (packages[name], name), default="")
