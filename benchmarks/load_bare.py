"""What the machine gives: the same load on an endpoint that does nothing but commit each body to SQLite.

What it does: serves a bare ASGI application under the service's own HTTP server from a process of its own; each request
is one transaction in WAL mode with `synchronous=FULL`, and its 200 comes after the commit.
What it never does: share a commit, look at a body, or authenticate.
Its place: `load` puts it beside each measurement, on the same disk and under the same other work.
"""

from __future__ import annotations

import multiprocessing
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn


@contextmanager
def bare(folder: Path) -> Iterator[str]:
    """Serve it with a database in a folder; yields the URL."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=_serve, args=(str(folder / "bare.sqlite3"), ready), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ready.get(timeout=60)}/"
    finally:
        process.terminate()
        process.join(10)


def _serve(path: str, ready: Any) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", "CREATE TABLE bodies (body BLOB)"):
        database.execute(statement).close()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        database.execute("INSERT INTO bodies VALUES (?)", (body,))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    ready.put(listener.getsockname()[1])
    config = uvicorn.Config(app, http="h11", log_config=None, access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
