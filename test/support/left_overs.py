"""Which processes a program left behind, told by a directory of its own in their environment."""

from __future__ import annotations

from pathlib import Path


def processes_of(directory: Path) -> list[str]:
    """Command lines of the processes whose environment names `directory`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
