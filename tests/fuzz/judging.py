"""What becomes of a reader that meets damage: judged against what it makes of the whole run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.fuzz.damage import CUT, DIRECTORY, FORGE, PIPE, Damage
from tests.fuzz.readers import WITHOUT_HASH, Reading

CRASH, HANG, RAW, SILENT = "crash", "hang", "raw error", "silent change"
FAULTS = (CRASH, HANG, RAW, SILENT)


def fault_of(reader: str, damage: Damage, whole: Reading, found: Reading) -> str:
    """What is wrong with a reading; "" where the reader coped."""
    if found.raw:
        return RAW
    if found.refusal or found.text == whole.text or set(found.warnings) - set(whole.warnings):
        return ""
    if reader in WITHOUT_HASH or damage.file.startswith("logs/") or _is_indistinguishable(damage):
        return ""
    return SILENT


def _is_indistinguishable(damage: Damage) -> bool:
    """True for what a directory without the file, a writer that died earlier, or another run would look like."""
    grows = damage.run == "killed" and damage.file.endswith((".open", ".jsonl"))
    return damage.kind in (DIRECTORY, PIPE, FORGE) or (grows and damage.kind == CUT)


@dataclass
class Tally:
    """All that was found."""

    readings: int = 0
    damages: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    #: Some of each kind, in words.
    examples: dict[str, list[str]] = field(default_factory=dict)
    #: By kind of damage how often it was met, and how often something was said of it.
    noticed: Counter[str] = field(default_factory=Counter)

    def add(self, damage: Damage, whole: Mapping[str, Reading], found: Mapping[str, Reading]) -> None:
        """Judge the readings of one damaged run."""
        self.damages += 1
        self.readings += len(found)
        self.noticed[f"{damage.kind} tried"] += 1
        if any(one.refusal or set(one.warnings) - set(whole[name].warnings) for name, one in found.items()):
            self.noticed[f"{damage.kind} noticed"] += 1
        for name, one in found.items():
            if fault := fault_of(name, damage, whole[name], one):
                self.blame(fault, f"{damage}: {name}: {one.raw or 'another text, and no warning'}")

    def blame(self, fault: str, what: str) -> None:
        self.faults[fault] += 1
        self.examples.setdefault(fault, []).append(what)

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.damages} damages, {self.readings} readings"]
        lines += [f"{fault}: {self.faults[fault]}" for fault in FAULTS]
        lines += [f"  {name}: {count}" for name, count in sorted(self.noticed.items())]
        for fault, examples in self.examples.items():
            lines += [f"{fault}: {example}" for example in examples[:40]]
        return lines
