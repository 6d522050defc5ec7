"""How the schema of an older database becomes the present one: Alembic's environment and one file a step."""
