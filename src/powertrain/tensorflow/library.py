"""TensorFlow as a library that may be missing."""

from __future__ import annotations

from powertrain.frameworks.library import Library

TENSORFLOW = Library("tensorflow", "tensorflow tf-keras")
