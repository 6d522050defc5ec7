"""Outside actions, each behind the same reserve-act-observe contract."""
