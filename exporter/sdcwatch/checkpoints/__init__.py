"""Checkpoints one can trust: the manifest beside each, what a verdict does to them, and the command that chooses."""
