"""A Checkpoint by itself: ``from_directory``, ``as_directory``, ``to_directory``."""

import os
import shutil
import tempfile

from ray.train import Checkpoint

source = tempfile.mkdtemp()
with open(os.path.join(source, "a.txt"), "w") as file:
    file.write("a")
os.mkdir(os.path.join(source, "below"))
with open(os.path.join(source, "below", "b.txt"), "w") as file:
    file.write("b")

checkpoint = Checkpoint.from_directory(source)
assert checkpoint.path == source
with checkpoint.as_directory() as directory, open(os.path.join(directory, "below", "b.txt")) as file:
    assert file.read() == "b"

copy = checkpoint.to_directory(os.path.abspath("copy"))
assert copy == os.path.abspath("copy")
with open(os.path.join("copy", "a.txt")) as file:
    assert file.read() == "a"
elsewhere = checkpoint.to_directory()
assert sorted(name for name in os.listdir(elsewhere) if not name.startswith(".")) == ["a.txt", "below"]
for directory in (source, elsewhere):
    shutil.rmtree(directory)
