"""`torchrun ... -m sdcwatch.acceptance`: what sdcwatch promises, tried on your own nodes in minutes, on one card."""
