"""Schema 3: indexes for what every delivery and every round of the worker asks about cases."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add three indexes."""
    op.create_index("cases_of_instance", "cases", ["cluster", "instance_id", "opened_at"])
    op.create_index("cases_by_end", "cases", ["closed_at"])
    op.create_index("cases_by_event", "cases", ["cluster", "event_time"])
