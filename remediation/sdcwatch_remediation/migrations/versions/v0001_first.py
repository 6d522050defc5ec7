"""Schema 1: the first one. It was made without Alembic, so this step only marks where the road begins."""

from __future__ import annotations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: `migrate` stamps a database of schema 1 with this revision."""
