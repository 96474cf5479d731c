"""Operations on all rows of datasets at once: sort, group, aggregate, join, partition. Computed by DuckDB."""
