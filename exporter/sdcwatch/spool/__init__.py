"""The spool: where ranks write and the agent reads. `folders` owns the layout, `rank` writes, `reader` reads."""
