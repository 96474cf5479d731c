"""Figures of a run for Prometheus: ``RunConfig(metrics_port=...)``."""
