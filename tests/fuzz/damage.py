"""Damaging one file of a run: which ways there are, and in which order they are tried. Pure, but for ``apply``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.forging import ODD, forge, places_in

FLIP, CUT, EXTEND, ZERO, DIRECTORY, PIPE = "flip", "cut", "extend", "zero", "directory", "pipe"
#: An odd value with a hash that is right.
FORGE = "forge"
_PIPES = hasattr(os, "mkfifo")
#: Bytes that are zeroed together, as a lost block of a disk.
_BLOCK = 64


@dataclass(frozen=True)
class Damage:
    """One change of one file of one run."""

    run: str
    file: str
    kind: str
    place: int = 0
    value: int = 0

    def __str__(self) -> str:
        return f"{self.run}/{self.file} {self.kind} at {self.place} ({self.value:#x})"

    def changed(self, data: bytes) -> bytes:
        """The content after a change of bytes."""
        if self.kind == FLIP:
            return data[: self.place] + bytes([data[self.place] ^ self.value]) + data[self.place + 1 :]
        if self.kind == CUT:
            return data[: self.place]
        if self.kind == FORGE:
            return forge(self.file, data, self.place, self.value)
        if self.kind == ZERO:
            end = min(len(data), self.place + _BLOCK)
            return data[: self.place] + bytes(end - self.place) + data[end:]
        return data + random.Random(self.value).randbytes(self.place)

    def apply(self, root: Path) -> None:
        """Damage the file below ``root``."""
        path = root / self.run / self.file
        if self.kind not in (DIRECTORY, PIPE):
            path.write_bytes(self.changed(path.read_bytes()))
            return
        path.unlink()
        if self.kind == DIRECTORY:
            path.mkdir()
        else:
            os.mkfifo(path)


def repair(root: Path, damage: Damage, content: bytes) -> None:
    """Put the file back as it was."""
    path = root / damage.run / damage.file
    if path.is_dir():
        path.rmdir()
    elif path.exists() and not path.is_file():
        path.unlink()
    path.write_bytes(content)


def every_damage(files: dict[tuple[str, str], bytes], seed: int) -> Iterator[Damage]:
    """All of them in an order of the seed: flips of every byte, cuts at every place, and what is done to whole files.

    Whole files come first, so that a small budget has each of these.
    """
    chance = random.Random(seed)
    whole, bytewise = [], []
    for (run, file), data in sorted(files.items()):
        size = len(data)
        kinds = [DIRECTORY, PIPE] if _PIPES else [DIRECTORY]
        whole += [Damage(run, file, kind) for kind in kinds]
        lengths = (1, 16, 300)
        whole += [Damage(run, file, EXTEND, length, chance.randrange(1 << 30)) for length in lengths]
        if size:
            whole.append(Damage(run, file, CUT, 0))
            blocks = range(0, size, _BLOCK)
            bytewise += [Damage(run, file, ZERO, place) for place in blocks]
        bytewise += [Damage(run, file, FLIP, place, chance.randrange(1, 256)) for place in range(size)]
        bytewise += [Damage(run, file, CUT, place) for place in range(1, size)]
        places = range(places_in(file, data))
        bytewise += [Damage(run, file, FORGE, place, odd) for place in places for odd in range(len(ODD))]
    chance.shuffle(whole)
    chance.shuffle(bytewise)
    # A small budget sees some of both.
    for number, one in enumerate(bytewise):
        if number % 3 == 0 and whole:
            yield whole.pop()
        yield one
    yield from whole
