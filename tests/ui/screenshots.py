"""Screenshots of the dashboard for the guide: ``python -m tests.ui.screenshots``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.ui import sample_runs
from tests.ui.in_browser import browsing, serving

TARGET = Path(__file__).parents[2] / "docs" / "images"
PAGES = {
    "runs": ("/", "tr[data-run=digits] .spark"),
    "run": ("/runs/resnet50-imagenet", "#resources .line"),
    "sweep": ("/sweeps/lr-search", "#curves .line"),
}
SIZES = {1280: 1600, 390: 1400}


def make_all() -> None:
    """Write all screenshots to docs/images, in 256 colours so that they stay small."""
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "runs")
        sample_runs.write_all(root)
        with serving(root, "--token", "a-token-for-screenshots") as address:
            for width, height in SIZES.items():
                for scheme in ("light", "dark"):
                    _make(address, str(root), width, height, scheme)


#: Replaces the temporary directory by the default storage path in all texts of a page.
_RENAME = """([from, to]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(from, to);
}"""


def _make(address: str, root: str, width: int, height: int, scheme: str) -> None:
    from PIL import Image

    options: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    with browsing(**options) as visit:
        visit.open(address)
        for name, (path, drawn) in PAGES.items():
            visit.go(address, path)
            visit.page.wait_for_selector(drawn)
            visit.page.evaluate(_RENAME, [root, "~/powertrain_runs"])
            file = TARGET / f"{name}-{width}-{scheme}.png"
            visit.page.screenshot(path=file)
            with Image.open(file) as image:
                image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    make_all()
