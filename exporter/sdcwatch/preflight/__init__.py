"""`sdcwatch preflight`: a known-answer test of this machine's devices."""
