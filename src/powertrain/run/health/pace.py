"""The pace of one rank: its last move, the usual time of a step, the lines it has been at since. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from powertrain.wire.from_worker import Beat

#: Gaps between moves that the usual step is taken from; places that are remembered of one pause.
_GAPS = 15
_PLACES = 200

#: A line of the user's code.
Place = tuple[str, int]


@dataclass
class Pace:
    """The pace of one rank. ``moved_at`` is when its clock started: its last move, or a later excuse."""

    rank: int
    moved_at: float
    heard_at: float
    #: When the call it is inside of, or its wait, changed last; and when its line did.
    waits_since: float
    placed_at: float
    #: Its last move according to heartbeats: reports that arrive between them do not show how many steps they stand
    #: for.
    counted_at: float
    over_at: float | None = None
    beat: Beat | None = None
    collectives: int = -1
    #: True once it has made its first step; and once a beat has shown that.
    begun: bool = False
    counted: bool = False
    moves: int = 0
    #: The newest row whose report has arrived.
    reported: int = 0
    #: Seconds of the first step, the set-up included.
    first_step: float = 0.0
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))
    #: True when its connection is closed and no message has come since.
    is_disconnected: bool = False
    #: Since when it compiles; None while it does not.
    compiles_since: float | None = None
    place: Place | None = None
    #: Lines it has been at since its last move.
    places: set[Place] = field(default_factory=set)

    @classmethod
    def starting(cls, rank: int, now: float) -> Pace:
        """Return the pace of a rank whose function is called now."""
        return cls(rank, now, now, now, now, now)

    @property
    def usual(self) -> float:
        """Return the usual seconds between two moves; 0 before that is known."""
        return median_low(self.gaps) if self.gaps else 0.0

    def shift(self, seconds: float) -> None:
        """Shift all times by ``seconds``."""
        for name in ("moved_at", "heard_at", "waits_since", "placed_at", "counted_at"):
            setattr(self, name, getattr(self, name) + seconds)
        if self.over_at is not None:
            self.over_at += seconds
        if self.compiles_since is not None:
            self.compiles_since += seconds

    def restart(self, now: float) -> None:
        """Ignore everything before ``now``."""
        self.moved_at = self.waits_since = self.placed_at = self.counted_at = now

    def growth(self, beat: Beat) -> int:
        """Return the steps that a new heartbeat shows: one step may be a batch, an optimizer step and a report at
        once."""
        old = self.beat
        if old is None:
            return max(beat.reports, beat.steps, beat.batches)
        return max(0, beat.reports - old.reports, beat.steps - old.steps, beat.batches - old.batches)

    def count(self, moved_at: float, grown: int) -> None:
        """Record a gap between moves from a heartbeat that shows ``grown`` of them, the last at ``moved_at``."""
        elapsed = moved_at - self.counted_at
        self.counted_at = moved_at
        if elapsed > 0 and self.counted:
            self.gaps.append(elapsed / grown)
        elif elapsed > 0:
            self.first_step = elapsed / grown

    def take(self, beat: Beat, now: float) -> None:
        """Store a heartbeat as the newest."""
        if self.beat is None or _waiting_part(self.beat) != _waiting_part(beat):
            self.waits_since = now
        place = (beat.where.frame.file, beat.where.frame.line) if beat.where else None
        if place != self.place:
            self.place, self.placed_at = place, now
        if place is not None and len(self.places) < _PLACES:
            self.places.add(place)
        if beat.collectives >= 0:
            self.collectives = beat.collectives
        # A first batch alone is no step: compiling the model comes after it.
        self.counted |= beat.reports + beat.steps > 0 or beat.batches > 1
        self.begun |= self.counted
        self.heard_at, self.is_disconnected, self.beat = now, False, beat


def _waiting_part(beat: Beat) -> tuple[object, ...]:
    where = beat.where
    spot = (where.frame.file, where.frame.line, where.inside, where.call) if where else None
    return spot, beat.awaits, beat.collectives
