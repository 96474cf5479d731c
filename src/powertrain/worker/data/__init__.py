"""A rank's datasets: shards and plans of batches."""
