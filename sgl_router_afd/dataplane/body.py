"""What the router reads of a request's body: the few top-level fields that decide where it goes.

A whole body is decoded; one that is too large to be kept is scanned as it arrives. Everything else
in it is the server's to judge: a body that is no JSON object simply says nothing.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

import msgspec

NO_NAME = "default"  # SGLang's own word for a model that the client did not name
MAX_TOKEN_BYTES = 4096  # of a key or a value that matters; of longer ones the beginning is kept
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Said(msgspec.Struct):
    """The fields, None where they are missing; a later one of two wins, as in SGLang's parsers."""

    model: Any = None
    previous_response_id: Any = None
    background: Any = None

    @property
    def name(self) -> str | None:
        """Of the model, if it has one."""
        return self.model if isinstance(self.model, str) else None


FIELDS = frozenset(Said.__struct_fields__)
NOTHING = Said()
_decode = msgspec.json.Decoder(Said).decode


def read(body: bytes) -> Said:
    """What a whole body says."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_slowly(body) if body else NOTHING


def _read_slowly(body: bytes) -> Said:
    """Servers parse with Python's json, which takes NaN, UTF-16, lone surrogates and more."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return NOTHING
    if not isinstance(found, dict):
        return NOTHING
    return Said(**{name: found[name] for name in FIELDS if name in found})


class _Mode(Enum):
    """What the next byte belongs to."""

    START = auto()
    KEY = auto()  # or the end of the object
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_TEXT = auto()
    IN_SCALAR = auto()
    INSIDE = auto()  # of a nested value
    IN_INNER_TEXT = auto()
    AFTER = auto()  # a value
    END = auto()


_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # up to its quote, or a last backslash
_MARK = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,}\]\s]*")
_SPACE = re.compile(rb"[ \t\r\n]*")
_AFTER_TEXT = {
    _Mode.IN_KEY: _Mode.COLON,
    _Mode.IN_TEXT: _Mode.AFTER,
    _Mode.IN_INNER_TEXT: _Mode.INSIDE,
}


class Scanner:
    """Finds the fields of a JSON object that arrives in pieces, in memory that does not grow."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}
        self.contradiction = ""  # the name of a field that came twice with different values
        self._mode = _Mode.START
        self._depth = 0
        self._is_escaped = False
        self._token = bytearray()  # of the key or the value that is being read
        self._field = ""  # whose value comes; "" for one that does not matter

    @property
    def said(self) -> Said:
        """What it has said so far."""
        return Said(**self._said)

    @property
    def is_over(self) -> bool:
        """The object has ended, or is none."""
        return self._mode is _Mode.END

    def feed(self, piece: bytes) -> None:
        at = 0
        while at < len(piece) and self._mode is not _Mode.END:
            if self._mode in _AFTER_TEXT:
                at = self._read_text(piece, at)
            elif self._mode is _Mode.INSIDE:
                at = self._read_inside(piece, at)
            elif self._mode is _Mode.IN_SCALAR:
                at = self._read_scalar(piece, at)
            else:
                at = self._read_mark(piece, at)

    def _read_text(self, piece: bytes, at: int) -> int:
        start = at
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        found = _TEXT.match(piece, at)
        assert found is not None, "the pattern matches nothing, too"
        end = found.end()
        is_cut = end == len(piece)
        if not is_cut and piece[end] == ord("\\"):
            self._is_escaped = is_cut = True
            end += 1
        self._keep(piece[start:end])
        if is_cut:
            return end
        mode, self._mode = self._mode, _AFTER_TEXT[self._mode]
        if mode is _Mode.IN_KEY:
            key = _text(self._token)
            self._field = key if key in FIELDS else ""
        elif mode is _Mode.IN_TEXT:
            self._take(_text(self._token))
        return end + 1

    def _read_inside(self, piece: bytes, at: int) -> int:
        found = _MARK.search(piece, at)
        if found is None:
            return len(piece)
        match found.group():
            case b'"':
                self._mode = _Mode.IN_INNER_TEXT
            case b"[" | b"{":
                self._depth += 1
            case _:
                self._depth -= 1
                if not self._depth:
                    self._mode = _Mode.AFTER
        return found.end()

    def _read_scalar(self, piece: bytes, at: int) -> int:
        found = _SCALAR.match(piece, at)
        assert found is not None, "the pattern matches nothing, too"
        self._keep(found.group())
        if found.end() < len(piece):
            self._mode = _Mode.AFTER
            self._take({b"true": True, b"false": False}.get(bytes(self._token)))
        return found.end()

    def _read_mark(self, piece: bytes, at: int) -> int:
        """One byte of the object itself, behind white space."""
        found = _SPACE.match(piece, at)
        at = found.end() if found is not None else at
        if at == len(piece):
            return at
        mark = piece[at : at + 1]
        match self._mode:
            case _Mode.START if mark == b"{":
                self._mode = _Mode.KEY
            case _Mode.START if mark in BYTE_ORDER_MARK:
                pass
            case _Mode.KEY if mark == b'"':
                self._token.clear()
                self._mode = _Mode.IN_KEY
            case _Mode.COLON if mark == b":":
                self._mode = _Mode.VALUE
            case _Mode.AFTER if mark == b",":
                self._mode = _Mode.KEY
            case _Mode.VALUE:
                return self._begin_value(mark, at)
            case _:
                self._mode = _Mode.END
        return at + 1

    def _begin_value(self, mark: bytes, at: int) -> int:
        self._token.clear()
        if mark == b'"':
            self._mode = _Mode.IN_TEXT
            return at + 1
        if mark in (b"{", b"["):
            self._take(None)
            self._depth = 1
            self._mode = _Mode.INSIDE
            return at + 1
        self._mode = _Mode.IN_SCALAR
        return at

    def _keep(self, text: bytes) -> None:
        if self._mode is _Mode.IN_KEY or (self._field and self._mode is not _Mode.IN_INNER_TEXT):
            self._token += text[: MAX_TOKEN_BYTES - len(self._token)]

    def _take(self, value: Any) -> None:
        field = self._field
        if not field:
            return
        if field in self._said and self._said[field] != value:
            self.contradiction = field
        self._said[field] = value


def _text(token: bytearray) -> str:
    try:
        text: str = json.loads(f'"{token.decode()}"')
    except ValueError:
        return ""
    return text
