"""What sdcwatch costs, measured: `make bench`. Ratios and medians of one run; never part of the product."""
