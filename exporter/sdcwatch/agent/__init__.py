"""The node agent: merges this node's spool into one /metrics and /events."""
