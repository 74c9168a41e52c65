"""Exchange addresses as other hosts see them."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def replace_wildcard(address: str, host: str) -> str:
    """Put a host that peers can reach into `tcp://0.0.0.0:port`; other addresses stay.

    Args:
        address: As bound, e.g. `tcp://0.0.0.0:7000`.
        host: A name or an IP address, without brackets.
    """
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname not in ("0.0.0.0", "::", "*"):
        return address
    shown = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{shown}:{parts.port}"))
