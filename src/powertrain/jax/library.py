"""JAX as a library that may be missing."""

from __future__ import annotations

from powertrain.frameworks.library import Library

JAX = Library("jax", "jax")
