"""The rules that turn a Ray Train program into one of ours: those of docs/migration.md, and nothing else."""

from __future__ import annotations

import re

#: Pattern and replacement, applied in this order to every line. The syntax is what ``sed -E`` and ``re`` share.
RULES = (
    (r"^( *)from ray import train( *#.*)?$", r"\1import powertrain as train\2"),
    (r"^( *)from ray import data( *#.*)?$", r"\1import powertrain.data as data\2"),
    (r"^( *)from ray import tune( *#.*)?$", r"\1from powertrain import tune\2"),
    (
        r"^( *)from ray import (train, *data|data, *train)( *#.*)?$",
        r"\1import powertrain as train, powertrain.data as data\3",
    ),
    (
        r"^( *)from ray import (train, *tune|tune, *train)( *#.*)?$",
        r"\1import powertrain as train; from powertrain import tune\3",
    ),
    (r"\bray\.train\.v2\.jax\b", r"powertrain.jax"),
    (r"\bray\.train\b", r"powertrain"),
    (r"\bray\.data\b", r"powertrain.data"),
    (r"\bray\.tune\b", r"powertrain.tune"),
    (r"\bray\.(init|shutdown|is_initialized|remote|get|put|wait|kill)\b", r"powertrain.\1"),
    (r"^( *)import ray( *#.*)?$", r"\1import powertrain\2"),
)


def rename(program: str) -> str:
    """Return the text of a Ray Train program with the names of its imports changed to ours."""
    for pattern, replacement in RULES:
        program = re.sub(pattern, replacement, program, flags=re.MULTILINE)
    return program


def sed_script() -> list[str]:
    """Return the rules as the expressions that ``sed -E`` takes after ``-e``."""
    return [f"s/{pattern}/{replacement}/g" for pattern, replacement in RULES]
