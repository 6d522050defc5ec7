"""`sdcwatch run`: the parent of a launcher, which waits out a halt and starts it afresh."""
