"""Text for people: errors, tracebacks, reprs; secrets and control characters removed. Pure."""
