"""The running watch of one membership: set-up, exchange, audits, reports and containment, inside the training loop."""
