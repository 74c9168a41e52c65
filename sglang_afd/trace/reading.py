"""Reads the files that `Recorder` writes, also compressed or of a server that was killed."""

from __future__ import annotations

import errno
import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file
from sglang_afd.trace.arguments import Microseconds, check_arguments
from sglang_afd.trace.header import FORMAT, HEADER_EVENT, Header

# Far above what the recorder of a server writes.
MAX_BYTES = 1 << 32


class Event(msgspec.Struct, kw_only=True):
    """One event of Chrome's format; times are microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: Microseconds
    dur: Microseconds = 0.0
    s: str = ""
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """When it was over."""
        return self.ts + self.dur


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One server's file."""

    path: Path
    header: Header
    events: list[Event]  # in the order in which they ended, roughly


_EVENT = msgspec.json.Decoder(Event)


def read_timeline(path: Path) -> Timeline:
    """Read one file; a last line that was cut off is left out.

    Raises:
        ConfigError: It cannot be read, is empty, or is no file of --afd-trace.
    """
    try:
        content = read_file(path, MAX_BYTES)
        lines = (_unpacked(content) if path.suffix == ".gz" else content).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be unpacked: {error}") from None
    events = []
    for number, line in enumerate(lines, 1):
        text = line.strip().rstrip(b",")
        if text in (b"", b"[", b"]"):
            continue
        try:
            event = _EVENT.decode(text)
            check_arguments(event.name, event.args)
            events.append(event)
        except (msgspec.MsgspecError, RecursionError) as error:
            if number == len(lines) and events:
                break
            raise ConfigError(
                f"{path} is no timeline of --afd-trace: line {number}: {error}"
            ) from None
    if not events:
        raise ConfigError(f"{path} is empty; its server recorded nothing")
    return Timeline(path=path, header=_header(path, events[0]), events=events[1:])


def _unpacked(content: bytes) -> bytes:
    unpacked = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MAX_BYTES + 1)
    if len(unpacked) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"unpacked it is larger than {MAX_BYTES >> 30} GiB")
    return unpacked


def _header(path: Path, event: Event) -> Header:
    try:
        if event.name != HEADER_EVENT:
            raise msgspec.ValidationError(f"it begins with {event.name!r}, not {HEADER_EVENT!r}")
        if event.args.get("format") != FORMAT:
            raise msgspec.ValidationError(
                f"it has format {event.args.get('format')}, this version reads {FORMAT}"
            )
        return msgspec.convert(event.args, Header)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is no timeline of --afd-trace: {error}") from None
