"""The one thing that must outlive the router: below which epoch no group may ever be again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from sglang_afd.errors import ConfigError

MAX_STATE_BYTES = 4 * 1024 * 1024
MAX_EPOCH = 2**47  # half of what a lease has room for


class Floors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds."""

    version: int = 1
    base: int = 0  # of groups that are not named, since they were forgotten
    groups: dict[str, int] = {}  # msgspec copies the default


def load(path: Path) -> Floors:
    """Read the floors; a file that is missing is one of a first start.

    Raises:
        ConfigError: It cannot be read, or is not ours.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_STATE_BYTES + 1)
    except FileNotFoundError:
        return Floors()
    except OSError as error:
        raise ConfigError(f"--state-file {path} cannot be read: {error.strerror}") from None
    try:
        floors = msgspec.json.decode(text, type=Floors)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = f"--state-file {path} is damaged or not ours: {error}"
        raise ConfigError(f"{what}; {_WAY_OUT}") from None
    if floors.version != 1:
        raise ConfigError(f"--state-file {path} is of another version; {_WAY_OUT}")
    for epoch in (floors.base, *floors.groups.values()):
        if not 0 <= epoch <= MAX_EPOCH:
            what = f"--state-file {path} is damaged: it has the epoch {epoch}"
            raise ConfigError(f"{what}; {_WAY_OUT}")
    return floors


_WAY_OUT = "with all servers stopped it may be deleted, else give another path: servers tell theirs"


def save(path: Path, floors: Floors) -> None:
    """Replace the file in one go: whoever reads it, after a power cut too, finds old or new.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(floors))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise ConfigError(
            f"--state-file {path} cannot be written: {error.strerror}; give a path in a directory "
            "that the router may write to"
        ) from None


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
