"""Keys and secrets: read from files, compared in constant time, never shown."""

from __future__ import annotations

import hmac
import stat
from dataclasses import dataclass, field
from pathlib import Path

from sglang_afd.errors import ConfigError

MAX_KEY_BYTES = 4096


@dataclass(frozen=True)
class Key:
    """What somebody must know; an empty one means that nothing is asked for."""

    value: bytes = field(default=b"", repr=False)  # no repr, so that no log and no error has it

    def __bool__(self) -> bool:
        return bool(self.value)

    def is_equal_to(self, given: bytes) -> bool:
        """Whether that is the key; takes as long for a nearly right one as for any other."""
        return hmac.compare_digest(self.value, given)


NO_KEY = Key()


def key_of(flag: str, text: str | None, path: str | None) -> Key:
    """The key of `flag TEXT` or `flag-file PATH`, of which at most one is given.

    Raises:
        ConfigError: Both are given, the file cannot be read or others can read it, or what it holds
            cannot be sent in a header. An empty key is refused, too: a variable of a shell that is
            not set must not open a router.
    """
    if text is not None and path is not None:
        raise ConfigError(f"{flag} and {flag}-file are both given; give one of them")
    if path is not None:
        return Key(_checked(f"{flag}-file {path}", _read(f"{flag}-file", path)))
    if text is not None:
        return Key(_checked(flag, text.encode("utf-8", "surrogateescape")))
    return NO_KEY


def _read(flag: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            value = file.read(MAX_KEY_BYTES + 2).strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{flag} {path} has mode {mode:04o}, so others can read it; chmod 600 {path}"
        )
    return value


def _checked(what: str, value: bytes) -> bytes:
    if not value:
        raise ConfigError(f"{what} holds no key; give one, e.g. of `openssl rand -hex 32`")
    if len(value) > MAX_KEY_BYTES:
        raise ConfigError(f"{what} holds more than {MAX_KEY_BYTES} bytes; give a shorter key")
    if any(not 0x21 <= byte <= 0x7E for byte in value):
        raise ConfigError(
            f"{what} has a space, a line break or a character beyond ASCII inside the key; a header"
            " cannot carry those, give a key without them"
        )
    return value
