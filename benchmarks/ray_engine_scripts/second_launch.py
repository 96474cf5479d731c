"""A script of ``launch_scripts`` twice in one driver: python second_launch.py SCRIPT DIRECTORY WORKERS

The second run's ranks write their seconds to DIRECTORY, as those of a script that is run once; they count from the
construction of the second trainer.
"""

from __future__ import annotations

import os
import runpy
import sys

script, directory, workers = sys.argv[1:]
first = os.path.join(os.path.dirname(directory), "first")
os.mkdir(first)
for place in (first, directory):
    sys.argv = [script, place, workers]
    runpy.run_path(script, run_name="__main__")
