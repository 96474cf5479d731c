"""Engines start and end processes: one protocol (:mod:`powertrain.engine.base`), several implementations."""
