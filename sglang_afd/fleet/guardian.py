"""Ends the servers of a launcher that got SIGKILL; a program of its own, see guard.py.

Standard input names one process group per line and ends when the launcher is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the launcher's end, then kill every group that it named."""
    groups = [int(line) for line in sys.stdin]
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
