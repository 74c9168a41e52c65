"""A directory for one living router's files; those of routers that were killed are removed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_afd.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "sgl-router-afd-"
LOCK = "lock"  # in each of them, held by its router for as long as that lives


@contextmanager
def own_directory() -> Iterator[Path]:
    """A new directory of mode 0700 in the temporary directory, gone when the block ends.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        parent = Path(tempfile.gettempdir())
        remove_leftovers(parent)
        directory, lock = _create(parent)
    except OSError as error:
        raise ConfigError(
            f"no directory for the router's own files can be made: {error}; set TMPDIR to one that "
            "the router may write to and that has room"
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def remove_leftovers(parent: Path) -> None:
    """Remove this user's directories whose lock nobody holds.

    A process number would not do: it may be another process's by now. One without a lock is left
    alone: a router may be about to make it.
    """
    removed = [path.name for path in parent.glob(f"{PREFIX}*") if _remove_leftover(path)]
    if removed:
        logger.info("removed what killed routers left in %s: %s", parent, ", ".join(removed))


def _remove_leftover(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        status = directory.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return False
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _take(lock):
                shutil.rmtree(directory)
                return True
        finally:
            os.close(lock)
    return False


def _create(parent: Path) -> tuple[Path, int]:
    """The directory, and its lock, which this process holds."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # somebody cleans the temporary directory
            continue
        # Between the two another router may have taken the lock for that of a dead one.
        if _take(lock) and _is_there(directory / LOCK, lock):
            return directory, lock
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
