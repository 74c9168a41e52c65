"""Where the router is reached: by clients, and by servers and people."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.listen import close, open_listeners, url_of
from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Doors:
    """With relay processes everything is behind one; smg lets nobody else behind its own."""

    url: str  # for clients
    address: tuple[str, int]  # the same, numbers
    relays: list[list[socket.socket]]  # for each relay process; none with smg
    own: list[socket.socket]  # for the router's own endpoints; none with relay processes
    own_url: str


def open_doors(config: RouterConfig) -> Doors:
    """Listen.

    Raises: ConfigError, when an address cannot be had.
    """
    listeners = open_listeners(config.host, config.port, config.num_relays)
    first = listeners[0][0]
    url, (host, port) = url_of(first), first.getsockname()[:2]
    if config.data_plane == "relay":
        return Doors(url=url, address=(host, port), relays=listeners, own=[], own_url=url)
    try:
        _check_is_one(config.host, listeners[0])
        own_port = config.control_port or (port + 1 if config.port else 0)
        (own,) = open_listeners(config.host, own_port, 1, flag="--control-port")
    finally:
        close(listeners)  # smg listens by itself; now it is known that it can
    return Doors(url=url, address=(host, port), relays=[], own=own, own_url=url_of(own[0]))


def _check_is_one(host: str, listeners: list[socket.socket]) -> None:
    if len(listeners) > 1:
        found = ", ".join(str(listener.getsockname()[0]) for listener in listeners)
        raise ConfigError(f"--host {host} is {found}, and smg listens on one address; give one")
