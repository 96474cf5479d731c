"""The content of pages about a run as plain values for JSON, reduced to what their pixels can show."""
