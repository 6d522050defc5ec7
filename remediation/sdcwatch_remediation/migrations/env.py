"""Alembic's environment: runs the steps on the one connection that `migrate` hands over.

What it does: runs inside the transaction that is already open, so that a step that fails leaves the old schema.
What it never does: open a database, read an `alembic.ini`, or log.
Its place: loaded by Alembic, never imported.
"""

from __future__ import annotations

from alembic import context

from sdcwatch_remediation import schema

context.configure(connection=context.config.attributes["connection"], target_metadata=schema.metadata)
context.run_migrations()
