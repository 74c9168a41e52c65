"""Where a timeline is written, and what is refused: an unwritable place, another's file."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.trace.header import HEADER_EVENT

_FLAG = "--afd-trace"


def place_of(file: str, server_id: str) -> str:
    """The path to write: `file`, or a file named after the server when `file` is a directory."""
    return os.path.join(file, f"{server_id}.json") if _is_directory(file) else file


def place_of_rank(file: str, rank: int) -> str:
    """The path of one of several ranks that were started with the same `file`."""
    if _is_directory(file):
        return file
    path = Path(file)
    return str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


def check(file: str) -> None:
    """Find out before anything loads whether `file` can be written; an earlier timeline stays.

    Args:
        file: As `--afd-trace` has it, perhaps a directory.

    Raises:
        ConfigError: As `open_for_writing`.
    """
    if _is_directory(file):
        if not (os.path.isdir(file) and os.access(file, os.W_OK | os.X_OK)):
            raise ConfigError(f"{_FLAG} {file} must exist and be writable for this user")
        return
    is_new = not os.path.exists(file)
    os.close(_open(file))
    if is_new:
        os.unlink(file)


def open_for_writing(file: str) -> int:
    """A descriptor of the emptied `file`, which nobody else writes meanwhile.

    Raises:
        ConfigError: It cannot be opened, is something else than a timeline, or is being written.
    """
    descriptor = _open(file)
    os.ftruncate(descriptor, 0)
    return descriptor


def _is_directory(file: str) -> bool:
    return file.endswith("/") or os.path.isdir(file)


def _open(file: str) -> int:
    try:
        if os.path.exists(file) and not stat.S_ISREG(os.stat(file).st_mode):
            raise ConfigError(f"{_FLAG} {file} is no regular file; choose another")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{_FLAG} {file} cannot be written: {error.strerror}; its directory must exist and be "
            f"writable for this user"
        ) from None
    try:
        _refuse_foreign(descriptor, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_foreign(descriptor: int, file: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{_FLAG} {file} is in use by another server ({error.strerror}); give each server its "
            f"own file, or all of them one directory"
        ) from None
    start = os.pread(descriptor, 200, 0)
    if start and HEADER_EVENT.encode() not in start:
        raise ConfigError(
            f"{_FLAG} {file} exists and is no timeline; remove it or choose another file"
        )
