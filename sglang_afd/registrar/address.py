"""Under which name and address a server is known to the router and its clients."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from sglang_afd.config import AfdConfig

_NOWHERE = ("192.0.2.1", 9)  # reserved for documentation; nothing is sent there


def advertised_url(config: AfdConfig, *, host: str, port: int, scheme: str = "http") -> str:
    """Where others reach a server: `--afd-advertise-url`, else by its `--host` and `--port`.

    A server that listens everywhere takes the address from which this host reaches the router.
    """
    if config.advertise_url:
        return config.advertise_url.rstrip("/")
    reached = _own_address(config.router_urls) if _is_wildcard(host) else host
    shown = f"[{reached}]" if ":" in reached else reached
    return f"{scheme}://{shown}:{port}"


def with_ports(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses as a registration wants them: no path, and HTTP's own port where none was given."""
    whole = []
    for url in urls:
        parts = urlsplit(url)
        netloc = parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:80"
        whole.append(f"{parts.scheme}://{netloc.rpartition('@')[2]}")
    return tuple(whole)


def server_id(config: AfdConfig, url: str) -> str:
    """`--afd-server-id`, else one that stays the same over restarts at the same address."""
    if config.server_id:
        return config.server_id
    place = url.partition("://")[2]
    name = f"{config.role}-" + re.sub(r"[^A-Za-z0-9._:-]", "", place)
    if len(name) <= 64:
        return name
    return f"{config.role}-{hashlib.sha256(place.encode()).hexdigest()[:32]}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _own_address(router_urls: tuple[str, ...]) -> str:
    targets: list[tuple[str, int]] = []
    for url in router_urls:
        parts = urlsplit(url)
        targets.append((parts.hostname or "", parts.port or 80))
    for host, port in [*targets, _NOWHERE]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)  # of UDP: chooses the address, sends nothing
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return "127.0.0.1"
