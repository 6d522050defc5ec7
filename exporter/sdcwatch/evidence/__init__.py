"""Evidence that travels: what a replay verdict rested on, in one file that runs again on another machine."""
