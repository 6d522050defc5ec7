"""The checks: each measures one invariant on one rank and fills its fields of the row."""
