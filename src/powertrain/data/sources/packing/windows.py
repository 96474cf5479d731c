"""Token streams cut into windows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
#: Tokens that are cut into windows at a time.
_TOKENS_AT_A_TIME = 4 << 20


@dataclass(frozen=True)
class Documents:
    """Some documents: their tokens one after the other, and where each begins; the last entry is the end."""

    tokens: Any
    offsets: Ints
    #: The number of each document.
    numbers: Ints

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TokenStream:
    """A stretch of the stream of all tokens: each token, the number of its document, and its place there."""

    tokens: Any
    numbers: Any = None
    positions: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    def between(self, start: int, stop: int) -> TokenStream:
        """Return a part of it."""
        return TokenStream(*(None if each is None else each[start:stop] for each in self._parts()))

    def then(self, other: TokenStream) -> TokenStream:
        """Return it with another one behind it."""
        if not len(self):
            return other
        pairs = zip(self._parts(), other._parts(), strict=True)
        return TokenStream(*(None if one is None else np.concatenate([one, two]) for one, two in pairs))

    def padded(self, length: int, padding: int) -> TokenStream:
        """Return it filled up to ``length`` tokens; those added belong to document -1."""
        missing = length - len(self)
        fills = (padding, -1, 0)
        return TokenStream(
            *(
                None if each is None else np.concatenate([each, np.full(missing, fill, each.dtype)])
                for each, fill in zip(self._parts(), fills, strict=True)
            )
        )

    def _parts(self) -> tuple[Any, Any, Any]:
        return self.tokens, self.numbers, self.positions


def tokens_of(lengths: Ints, separated: bool) -> int:
    """Return how many tokens documents of these lengths give."""
    return int(lengths.sum()) + (len(lengths) if separated else 0)


def stream_of(documents: Documents, separator: int | None, *, with_documents: bool) -> TokenStream:
    """Return the tokens of documents, each with the separator behind it where there is one."""
    lengths = documents.lengths
    tokens = documents.tokens[documents.offsets[0] : documents.offsets[-1]]
    if separator is not None:
        ends = np.cumsum(lengths + 1) - 1
        places = np.ones(len(tokens) + len(lengths), bool)
        places[ends] = False
        joined = np.empty(len(places), tokens.dtype)
        joined[places], joined[ends] = tokens, separator
        tokens, lengths = joined, lengths + 1
    if not with_documents:
        return TokenStream(tokens)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
    return TokenStream(tokens, np.repeat(documents.numbers, lengths), positions)


def windows_between(first: int, last: int, total: int, length: int, keeps_tail: bool) -> tuple[int, int]:
    """Return the numbers of the windows whose first token is one of ``first`` to before ``last``, of ``total`` tokens.

    Window w has the tokens from ``w * length`` on. The last may be shorter; it counts where ``keeps_tail``.
    """
    most = -(-total // length) if keeps_tail else total // length
    return min(-(-first // length), most), min(-(-last // length), most)


def cut(
    streams: Iterable[TokenStream], length: int, skip: int, windows: int, padding: int
) -> Iterator[TokenStream]:
    """Yield ``windows`` windows of a stream after its first ``skip`` tokens, several at a time, in order.

    Only the last may need padding. Requests no more of the stream than needed.
    """
    held: TokenStream | None = None
    for stream in streams:
        if skip >= len(stream):
            skip -= len(stream)
            continue
        stream, skip = stream.between(skip, len(stream)), 0
        held = stream if held is None else held.then(stream)
        ready = min(len(held) // length, windows)
        most = max(1, _TOKENS_AT_A_TIME // length)
        for first in range(0, ready, most):
            count = min(most, ready - first)
            yield held.between(first * length, (first + count) * length)
        held, windows = held.between(ready * length, len(held)), windows - ready
        if windows == 0:
            return
    if windows and held is not None and len(held):
        yield held.padded(length, padding)
