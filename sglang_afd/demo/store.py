"""Put a directory on disk so that it is either whole or absent, whoever else tries the same."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_afd.errors import ConfigError


@contextmanager
def build_lock(target: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of one target directory.

    The kernel drops the lock when its holder dies. Its file stays: removing it would let a
    third process lock a new file of the same name beside the holder of the old one.

    Args:
        target: Directory to be built; its parent exists.
        on_wait: Called once before waiting, if another process holds the lock.
    """
    with (target.parent / f".{target.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty sibling of the target that takes its place when the block ends well.

    The caller holds the target's lock, so whatever lies at the sibling's path was left by a
    builder that died. What was at the target before is removed only after the exchange.
    """
    staging = target.parent / f".{target.name}.building"
    _remove(staging)
    staging.mkdir()
    try:
        yield staging
        _fsync_directory(staging)
        _exchange(staging, target)
    finally:
        _remove(staging)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def storage_errors(target: Path) -> Iterator[None]:
    """Turn failures of the file system into a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, or choose another place"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "choose a place that you may write to"
        else:
            remedy = "choose another place"
        raise ConfigError(
            f"cannot write the embedded model to {target}: {error.strerror or error} "
            f"({error.filename or 'no file named'}); {remedy} "
            "(--output, or XDG_CACHE_HOME for the cache)"
        ) from error


def require_free_space(target: Path, needed_bytes: int) -> None:
    """Refuse before the work instead of failing in the middle of it.

    Raises: ConfigError when the file system of the target's parent has less space.
    """
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"the embedded model needs {needed_bytes / 1e6:.0f} MB at {target.parent}, "
            f"{free_bytes / 1e6:.0f} MB are free; free some space, or choose another place "
            "(--output, or XDG_CACHE_HOME for the cache)"
        )


def _exchange(staging: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old"
    _remove(old)
    if target.exists():
        target.rename(old)
    staging.rename(target)
    _fsync_directory(target.parent)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
