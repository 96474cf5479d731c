"""Where processes live: one protocol (:mod:`powertrain.engine.base`), several places that keep it."""
