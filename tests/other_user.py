"""Another user of the machine, for tests of what one user can do to the runs of another. Needs root to become one."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
#: A uid without an account, which no file of the machine belongs to.
UID = 64321


class OtherUser:
    """A user without any rights on the files of the one who runs the tests."""

    uid = UID

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a child process as this user and return its result; raises what it raises."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._answer(write, function, arguments)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            data = file.read()
        os.waitpid(pid, 0)
        succeeded, value = pickle.loads(data)
        if not succeeded:
            raise value
        return value

    @contextlib.contextmanager
    def holding(
        self, function: Callable[..., contextlib.AbstractContextManager[Any]], *arguments: Any
    ) -> Iterator[int]:
        """Keep a context open in a child process of this user for as long as the block lasts; yields its pid."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become()
            try:
                with function(*arguments):
                    os.write(write, b"x")
                    signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        try:
            assert os.read(read, 1) == b"x", "the other user's process has failed"
            yield pid
        finally:
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _answer(self, write: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._become()
            answer: tuple[bool, Any] = (True, function(*arguments))
        except BaseException as error:
            answer = (False, error)
        try:
            with os.fdopen(write, "wb") as file:
                file.write(pickle.dumps(answer))
        finally:
            os._exit(0)

    @staticmethod
    def _become() -> None:
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
        os.umask(0)
