"""sdcwatch_remediation: from a proven SDC alert to one replaced node, within limits."""
