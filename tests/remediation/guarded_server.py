"""A service for the API campaign, in a process that writes down what it does outside: processes, connections, files.

Started as `guarded_server.py FOLDER`: prints its URL and the cases it holds as one JSON line, serves until SIGTERM,
then prints what Python's audit hook saw since it began to serve, having shown that the hook sees a call of each kind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from sdcwatch_remediation.server import make_server
from sdcwatch_remediation.testing import alert, fleet, make_rig

PROCESS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Guard:
    """What the process did outside while it was armed."""

    def __init__(self, folder: Path) -> None:
        self.armed = False
        self.processes: list[str] = []
        self.connections: list[str] = []
        self.files: list[str] = []
        self._folder = os.fspath(folder)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, words: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in PROCESS:
            self.processes.append(f"{event} {words!r}"[:300])
        elif event in NETWORK:
            self.connections.append(f"{event} {words!r}"[:300])
        elif event == "open" and words[2] & WRITES and not str(words[0]).startswith(self._folder):
            self.files.append(str(words[0])[:300])

    def seen(self) -> dict[str, list[str]]:
        """Return it, a few of each kind."""
        return {"processes": self.processes[:20], "connections": self.connections[:20], "files": self.files[:20]}

    def works(self, port: int) -> bool:
        """Do one of each and see whether it is noticed."""
        before = [len(found) for found in (self.processes, self.connections, self.files)]
        subprocess.run(["true"], check=False)
        with socket.socket() as probe:
            probe.connect_ex(("127.0.0.1", port))
        Path(self._folder).with_name("outside").write_text("")
        after = [len(found) for found in (self.processes, self.connections, self.files)]
        return all(late > early for early, late in zip(before, after, strict=True))


def main() -> int:
    """Serve."""
    folder = Path(sys.argv[1]) / "inside"
    folder.mkdir()
    guard = Guard(folder)
    members = fleet(6)
    with make_rig(folder, members, mode="approve") as rig:
        rig.fault(2)
        rig.rounds(3)
        rig.ring(alert(members[4], 4))
        # Requests are what is tried here; what the worker does about a case, the other tests hold. With no group
        # allowed the doctor asks no agent.
        rig.restart(groups=())
        server = make_server(rig.service)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        cases = [{"id": case["id"], "request_sha256": case["request_sha256"]} for case in rig.cases()]
        print(json.dumps({"url": f"http://127.0.0.1:{port}", "cases": cases}), flush=True)
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        guard.armed = True
        server.run(sockets=[listener])
        seen = guard.seen()
        report = {**seen, "guard_works": guard.works(port), "replace_calls": rig.provider.calls}
        guard.armed = False
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
