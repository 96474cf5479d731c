"""From a plan to batches in order: readers, caches, pipelines."""
