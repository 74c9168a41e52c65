"""Sockets in directories that only this user can enter, removed when their servers end."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

_PREFIX = "sglang-afd-"
MIN_AGE_S = 60.0  # a younger one may belong to a server that is about to listen


def private_path(name: str) -> str:
    """A path for a socket in a new directory of mode 0700, which goes when this process ends.

    Directories that killed servers of this user left behind are removed, too.
    """
    remove_leftovers(Path(tempfile.gettempdir()), name)
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return f"{directory}/{name}"


def remove_leftovers(parent: Path, name: str) -> None:
    """Remove this user's directories on whose socket of this name nobody listens any more."""
    for path in parent.glob(f"{_PREFIX}*/{name}"):
        try:
            status = path.parent.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_S:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(path))
        except ConnectionRefusedError:
            shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:
            continue
