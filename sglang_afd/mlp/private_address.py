"""The default exchange address: a socket in a directory that only this user can enter."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

_PREFIX = "sglang-afd-"
_NAME = "exchange"
MIN_AGE_S = 60.0  # a younger one may belong to a server that is about to listen


def private_ipc_address() -> str:
    """`ipc://` in a new directory of mode 0700, which is removed when this process ends.

    Directories that killed servers of this user left behind are removed, too.
    """
    remove_leftovers(Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return f"ipc://{directory}/{_NAME}"


def remove_leftovers(parent: Path) -> None:
    """Remove this user's exchange directories on whose socket nobody listens any more."""
    for path in parent.glob(f"{_PREFIX}*/{_NAME}"):
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
