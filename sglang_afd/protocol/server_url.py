"""The HTTP address of one server, so strict that every resolver and parser takes it."""

from __future__ import annotations

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

Url = Annotated[
    str,
    Meta(
        pattern=r"^https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z",
        max_length=320,
    ),
]


def check_url(url: str) -> None:
    """Check what the pattern of `Url` cannot.

    Whoever opens a connection would only find out then, and one bad address would end a whole
    process.

    Raises:
        ValueError: Says what is wrong.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError as error:
        raise ValueError(f"{url} is no address of a server: {error}") from None
    if port == 0:
        raise ValueError(f"{url} is no address of a server: wanted a port from 1 to 65535")
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
        else:  # both ways: getaddrinfo goes one, yarl the other
            host.encode("idna")
            host.encode().decode("idna")
    except ValueError:
        raise ValueError(f"{url} is no address of a server: no host has that name") from None
