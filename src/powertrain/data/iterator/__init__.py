"""``DataIterator`` where programs for Ray Data import it from."""

from powertrain.data.shard import DataShard

DataIterator = DataShard

__all__ = ["DataIterator"]
