"""Diagnosis of a run: from recorded steps and samples to findings. Pure: tables in, findings out."""
