"""Fault injection as a product: faults go into data, never into a verdict."""
