"""``DataContext`` where programs for Ray Data import it from."""

from powertrain.config.execution import ExecutionOptions, ExecutionResources
from powertrain.data.options.context import DataContext

DatasetContext = DataContext

__all__ = ["DataContext", "DatasetContext", "ExecutionOptions", "ExecutionResources"]
