"""Lets Debian's alertmanager run from a folder of ours: it opens its templates at a fixed path that only root can fill.

    python setup/alertmanager_anywhere.py .tools/bin/alertmanager

Does nothing where that path exists or the program does not name it. Else the program is copied with the path replaced
by one of the same length below /proc/self/fd/9, and a wrapper takes its place that opens our folder as descriptor 9.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FIXED = b"/usr/share/prometheus/alertmanager"
MOVED = b"/proc/self/fd/9".ljust(len(FIXED) - 1, b"/") + b"/"
WRAPPER = """#!/bin/sh
# Written by setup/alertmanager_anywhere.py: descriptor 9 is the folder where this build looks for its templates.
tools=$(dirname "$(dirname "$(readlink -f "$0")")")
exec 9<"$tools/share/alertmanager"
exec "$tools/libexec/alertmanager" "$@"
"""


def main(program: Path) -> int:
    """0: alertmanager can start from where it is."""
    if os.path.exists(os.fsdecode(FIXED) + "/default.tmpl"):
        return 0
    content = program.read_bytes()
    if FIXED not in content:
        return 0
    tools = program.absolute().parent.parent
    libexec, share = tools / "libexec", tools / "share" / "alertmanager"
    libexec.mkdir(parents=True, exist_ok=True)
    share.mkdir(parents=True, exist_ok=True)
    moved = libexec / "alertmanager"
    moved.write_bytes(content.replace(FIXED, MOVED))
    moved.chmod(0o755)
    shipped = tools / "root" / os.fsdecode(FIXED).lstrip("/")
    for name in ("default.tmpl", "email.tmpl"):
        if (shipped / name).exists():
            shutil.copy(shipped / name, share / name)
        else:  # only mail and chat receivers use these templates; webhooks need the files to be there
            (share / name).write_text(f'{{{{ define "__sdcwatch_{name}" }}}}{{{{ end }}}}\n')
    beside = program.with_name(program.name + ".partial")
    beside.write_text(WRAPPER)
    beside.chmod(0o755)
    beside.replace(program)  # replaces a symlink, too, and leaves what it pointed to alone
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
