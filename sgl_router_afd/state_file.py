"""The state file while one router has it: nobody else writes it meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_router_afd.control import persist
from sgl_router_afd.control.ledger import Ledger
from sgl_router_afd.control.persist import Saved
from sglang_afd.errors import ConfigError

logger = logging.getLogger(__name__)


class State:
    """What outlives one router.

    Args:
        path: Of the file; None keeps nothing.

    Raises:
        ConfigError: The file cannot be read or written, or another router has it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock: int | None = None
        if path is None:
            self.ledger = Ledger(Saved(), lambda saved: None)
            return
        persist.load(path)  # what is no file has no lock beside it
        self._lock = _lock(path)
        try:
            _remove_leftovers(path)
            last = persist.load(path)
            persist.save(path, last)  # what cannot be written is known now, not at a first change
        except BaseException:
            self.let_go()
            raise
        self.ledger = Ledger(last, self._save)

    def let_go(self) -> None:
        """Another router may have the file from now on; this one writes it no more."""
        self._path = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _save(self, saved: Saved) -> None:
        # In the loop: an epoch is on the disk before anybody hears of it, and requests go through
        # other processes.
        if self._path is not None:
            persist.save(self._path, saved)


@contextmanager
def open_state(path: str) -> Iterator[State]:
    """The state of a router that lives as long as the block.

    Args:
        path: Of the file, or of a link to it; "" keeps nothing.

    Raises:
        ConfigError: The file cannot be read or written, or another router has it.
    """
    # A file that is replaced would else take the place of the link.
    state = State(Path(os.path.realpath(path)) if path else None)
    try:
        yield state
    finally:
        state.let_go()


def _lock(path: Path) -> int:
    """A lock beside the file, since the file itself is another one after each save."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise persist.not_written(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"--state-file {path} is another router's, which runs: each would undo what the other "
            "saved; give each router a file of its own, or stop the other one first"
        ) from None
    except OSError as error:
        logger.warning(
            "--state-file %s cannot be locked (%s): see to it that no other router has it",
            *(path, error.strerror),
        )
    return lock


def _remove_leftovers(path: Path) -> None:
    """Of routers that were killed while they saved: `persist.save` writes beside the file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}-????????"):
        with contextlib.suppress(OSError):
            leftover.unlink()
