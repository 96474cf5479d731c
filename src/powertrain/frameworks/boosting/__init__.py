"""Boosted trees: what the packages of XGBoost and LightGBM are made of."""
