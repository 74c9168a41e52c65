"""Which header fields go on to the next hop (pure)."""

from __future__ import annotations

from collections.abc import Iterable

Field = tuple[bytes, bytes]

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
NOT_FOR_A_SERVER = HOP_BY_HOP | FRAMING
REQUEST_ID = b"x-request-id"


def request_lines(fields: Iterable[Field], connection: bytes | None) -> list[bytes]:
    """The lines for a server, in the order, spelling and number in which a client sent them.

    Args:
        fields: All that the client sent.
        connection: The value of its Connection fields, joined with commas.
    """
    return _lines(fields, NOT_FOR_A_SERVER, connection)


def response_lines(fields: Iterable[Field], connection: bytes | None) -> list[bytes]:
    """The lines for a client, likewise; a Content-Length goes on as it is."""
    return _lines(fields, HOP_BY_HOP, connection)


def _lines(
    fields: Iterable[Field], dropped: frozenset[bytes], connection: bytes | None
) -> list[bytes]:
    if connection is not None:
        named = {token.strip().lower() for token in connection.split(b",")}
        # A length that is not written anew must stay, or its reader waits for another end.
        dropped = dropped | (named - {b"content-length"})
    return [b"%b: %b\r\n" % (name, value) for name, value in fields if name.lower() not in dropped]
