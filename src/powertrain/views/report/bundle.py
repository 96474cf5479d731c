"""The modules of the dashboard as one script, for pages that cannot load others. Pure.

Each module becomes a function that returns what it exports. Our own modules are all that this has to understand:
imports stand at the begin of a line and name files beside them, and exports are declarations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)
_LEFT = re.compile(r"^\s*(?:import|export)\b.*$", re.MULTILINE)


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """Return the script that runs ``entry`` after the modules that it needs.

    Args:
        modules: The text of each module by its name without ``.js``.
        entry: The name of the first one.

    Raises:
        ValueError: A module has an import or export of another form, or modules import each other.
    """
    parts: list[str] = []
    done: set[str] = set()

    def add(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"these modules import each other: {' -> '.join((*importers, name))}")
        if name in done:
            return
        for _, needed in _IMPORT.findall(modules[name]):
            add(needed, (*importers, name))
        done.add(name)
        parts.append(_as_function(name, modules[name]))

    add(entry, ())
    return '"use strict";\n' + "\n".join(parts)


def _as_function(name: str, text: str) -> str:
    exported = [found[1] for found in _EXPORT.findall(text)]
    body = _IMPORT.sub(lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = module_{found[2]};", text)
    body = _EXPORT.sub(r"\1 \2", body)
    left = _LEFT.search(body)
    if left is not None:
        raise ValueError(f"{name}.js has a line that cannot be bundled: {left[0].strip()[:80]!r}")
    return f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"
