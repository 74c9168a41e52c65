"""Which header fields go on to the next hop (pure)."""

from __future__ import annotations

Field = tuple[bytes, bytes]

# Options rather than names; and a length, without which its reader waits for another end.
UNNAMED = frozenset({b"close", b"keep-alive", b"content-length", b""})
# Source: RFC 9110 section 7.6.1, and RFC 2616 section 13.5.1 for the two Proxy-Auth ones.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Written anew from what the parser understood, so that nobody can understand it differently.
FRAMING = frozenset({b"host", b"content-length", b"expect"})
AUTHORIZATION = b"authorization"
REQUEST_ID = b"x-request-id"
MAX_SPELLINGS = 4096


class Names(dict[bytes, bytes]):
    """For a field name in any spelling its lower case if it is one of `special`, else nothing.

    It keeps the spellings that it was asked for, since clients use few.
    """

    def __init__(self, special: frozenset[bytes]) -> None:
        super().__init__()
        self._special = special

    def __missing__(self, spelling: bytes) -> bytes:
        name = spelling.lower()
        found = name if name in self._special else b""
        if len(self) < MAX_SPELLINGS:
            self[spelling] = found
        return found


def line(name: bytes, value: bytes) -> bytes:
    """A field on the wire."""
    return b"%b: %b\r\n" % (name, value)


def without_named(lines: list[bytes], connection: bytes) -> list[bytes]:
    """The lines but for those that a Connection field of this value keeps to the connection."""
    named = {token.strip() for token in connection.lower().split(b",")} - UNNAMED
    if not named:
        return lines
    return [each for each in lines if each.partition(b":")[0].lower() not in named]
