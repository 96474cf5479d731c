"""The dashboard: a web page over run directories, live or over. Needs the extra ``ui``."""
