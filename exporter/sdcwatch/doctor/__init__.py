"""`sdcwatch doctor`: what of this node's path from spool to replaced node is wired, and what is not."""
