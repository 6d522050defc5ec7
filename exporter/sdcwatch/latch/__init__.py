"""The latch that keeps a halted job from starting: its files, and the command that shows or releases it."""
