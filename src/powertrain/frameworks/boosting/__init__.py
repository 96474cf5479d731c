"""Boosted trees: the common part of the XGBoost and LightGBM packages."""
