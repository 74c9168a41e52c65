"""The file of what must outlive the router."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import msgspec

from sglang_afd.errors import ConfigError
from sglang_afd.protocol.registration import Fingerprint, GroupName

MAX_STATE_BYTES = 64 * 1024 * 1024
MAX_EPOCH = 2**47  # half of what a lease has room for
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class SavedDrain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's wish about one process of a server."""

    boot_id: str
    reason: str


class SavedWord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process of a server said last, as far as a router wrote it down."""

    boot_id: str
    started_at_s: float
    seq: int
    sent_at_s: float
    said_goodbye: bool


class Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds; msgspec copies the defaults."""

    version: int = 1
    base: int = 0  # the epoch that no group may go below whose name is not known any more
    groups: dict[GroupName, int] = {}  # the epoch of each
    places: dict[str, GroupName] = {}  # the group of each server, by its id
    drains: dict[str, SavedDrain] = {}  # by server id
    group_drains: dict[GroupName, str] = {}  # the reason of each
    models: dict[str, Fingerprint] = {}  # which model each name meant
    words: dict[str, SavedWord] = {}  # by server id; of those here when they registered


def load(path: Path) -> Saved:
    """Read it; a file that is missing is one of a first start.

    Raises:
        ConfigError: It is no file, cannot be read, or is not ours.
    """
    try:
        _check_is_file(path)
        with path.open("rb") as file:
            text = file.read(MAX_STATE_BYTES + 1)
    except FileNotFoundError:
        return Saved()
    except OSError as error:
        raise ConfigError(f"--state-file {path} cannot be read: {error.strerror}") from None
    try:
        saved = msgspec.json.decode(text, type=Saved)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"--state-file {path} is damaged or not ours: {error}"
        raise ConfigError(f"{what}; {_WAY_OUT}") from None
    if saved.version != 1:
        raise ConfigError(f"--state-file {path} is of another version; {_WAY_OUT}")
    for epoch in (saved.base, *saved.groups.values()):
        if not 0 <= epoch <= MAX_EPOCH:
            what = f"--state-file {path} is damaged: it has the epoch {epoch}"
            raise ConfigError(f"{what}; {_WAY_OUT}")
    return saved


_WAY_OUT = "with all servers stopped it may be deleted, else give another path: servers tell theirs"


def _check_is_file(path: Path) -> None:
    """Before it is opened: a named pipe would wait for a writer, and a device may do anything."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise ConfigError(
            f"--state-file {path} is {KINDS.get(kind, 'no file')}, wanted a file, or a path at "
            "which there is nothing yet; give another path"
        )


def save(path: Path, saved: Saved) -> None:
    """Replace the file in one go: whoever reads it, after a power cut too, finds old or new.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(saved))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise not_written(path, error) from None


def not_written(path: Path, error: OSError) -> ConfigError:
    """What a person is told of it."""
    return ConfigError(
        f"--state-file {path} cannot be written: {error.strerror}; give a path in a directory "
        "that the router may write to"
    )


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
