"""One module a schema version, named after it; each is frozen once it has been released."""
