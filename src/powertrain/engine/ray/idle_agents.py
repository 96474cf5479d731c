"""Agents whose run is over, kept for the next run of this process: it then starts no processes on their nodes.

A second ``fit()`` and each trial of a sweep find an actor and a warm server with the frameworks loaded. Agents hold no
resources in Ray, but the memory of two processes. One that is not used again ends by itself after
:data:`IDLE_TIMEOUT_S`, since a node with an actor does not count as idle for Ray's autoscaler. Ray ends all of them
with this process, and when it leaves the cluster.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.backend import modules_of_others

#: Seconds after which an agent without a run ends.
IDLE_TIMEOUT_S = 60.0
#: The most idle agents of one node: runs of several kinds may take turns.
MOST_OF_NODE = 4
#: Seconds before that in which it is not used any more: a run would find it gone.
_EXPIRY_MARGIN_S = 2.0


@dataclass(frozen=True)
class AgentKind:
    """All that differs between agents of one node when they have started: those of one kind can replace each other."""

    #: Ray's id of this process's connection to its cluster.
    job: str
    runtime_env: str
    #: The modules of others that their servers have imported, and where these were found.
    preload: tuple[str, ...]
    import_path: tuple[str, ...]


def kind_of(
    job: str, runtime_env: Mapping[str, Any], preload: Sequence[str], import_path: Sequence[str]
) -> AgentKind:
    """Return the kind of agent that a run of this process needs."""
    as_text = json.dumps(dict(runtime_env), sort_keys=True, default=repr)
    return AgentKind(job, as_text, modules_of_others(preload), tuple(import_path))


@dataclass(frozen=True, eq=False)
class IdleAgent:
    """One that is kept, until this time."""

    kind: AgentKind
    node: str
    actor: Any
    until: float


class IdleAgents:
    """The actors of idle agents. Any thread may use it.

    An actor's last reference calls Ray when it goes, so none goes while the lock is held.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._idle: list[IdleAgent] = []
        #: Those of the process that this one was forked from. They are never released: that would call Ray.
        self._inherited: list[IdleAgent] = []

    def keep(self, kind: AgentKind, node: str, actor: Any, seconds: float) -> IdleAgent:
        """Keep an actor whose process ends after so many seconds."""
        kept = IdleAgent(kind, node, actor, self._now() + seconds - _EXPIRY_MARGIN_S)
        with self._lock:
            self._idle.append(kept)
        return kept

    def forget(self, gone: IdleAgent) -> None:
        """Keep it no longer, if it is kept still."""
        with self._lock:
            before, self._idle = self._idle, [one for one in self._idle if one is not gone]
        del before

    def take(self, kind: AgentKind, node: str) -> Any | None:
        """Return an actor of this kind on the node, the last that was kept, and forget it; None where there is none."""
        with self._lock:
            before = self._forget_expired()
            found = next((one for one in reversed(self._idle) if (one.kind, one.node) == (kind, node)), None)
            if found is not None:
                self._idle.remove(found)
        del before
        return found.actor if found is not None else None

    def take_surplus(self, node: str) -> list[Any]:
        """Forget the oldest agents of a node beyond :data:`MOST_OF_NODE`, and return their actors, to be ended."""
        with self._lock:
            before = self._forget_expired()
            of_node = [one for one in self._idle if one.node == node]
            surplus = of_node[: max(0, len(of_node) - MOST_OF_NODE)]
            for one in surplus:
                self._idle.remove(one)
        del before
        return [one.actor for one in surplus]

    def actors(self) -> list[Any]:
        """Return all actors that are kept."""
        with self._lock:
            before = self._forget_expired()
            found = [one.actor for one in self._idle]
        del before
        return found

    def _forget_expired(self) -> list[IdleAgent]:
        """Forget those that end about now; the lock is held. Return all, to be dropped when it is not."""
        before, now = self._idle, self._now()
        self._idle = [one for one in before if one.until > now]
        return before

    def leave_to_parent(self) -> None:
        """Forget all of them in a process that was forked."""
        self._lock = threading.Lock()  # another thread may have held it
        self._inherited, self._idle = [*self._inherited, *self._idle], []


#: Those of this process.
idle_agents = IdleAgents()
os.register_at_fork(after_in_child=idle_agents.leave_to_parent)
