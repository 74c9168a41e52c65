"""The sockets on which clients reach the router: one for each relay process and address."""

from __future__ import annotations

import os
import socket

from sglang_afd.errors import ConfigError

BACKLOG = 2048


def open_listeners(
    host: str, port: int, num_relays: int, *, flag: str = "--port"
) -> list[list[socket.socket]]:
    """Listen; the kernel spreads new connections over the relay processes.

    They are made here and handed on, so that connections that wait outlive a relay process.

    Args:
        host: Name or address; every address of a name is listened on.
        port: 0 takes a free one.
        num_relays: Processes that will accept.
        flag: What the port was given with.
    Returns: For each relay its sockets.
    Raises: ConfigError, naming the address, the cause and what to do.
    """
    opened: list[list[socket.socket]] = [[] for _ in range(num_relays)]
    try:
        for family, address in _addresses(host, port):
            if port == 0 and opened[0]:
                address = (address[0], opened[0][0].getsockname()[1], *address[2:])
            for sockets in opened:
                sockets.append(_listen(family, address, is_first=sockets is opened[0]))
                address = sockets[-1].getsockname()
    except (OSError, ValueError) as error:  # a name that no resolver takes is a ValueError
        close(opened)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {_cause(error)}; choose an address of this host with "
            f"--host and a free port with {flag}{' (0 picks one)' if flag == '--port' else ''}, or "
            "stop what holds it"
        ) from error
    return opened


def close(listeners: list[list[socket.socket]]) -> None:
    for sockets in listeners:
        for opened in sockets:
            opened.close()


def _cause(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return f"no host has that name ({error})"
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno) if known and error.errno else str(error.strerror or error)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listen(
    family: socket.AddressFamily, address: tuple[object, ...], *, is_first: bool
) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if not is_first:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(address)
        # Only once bound: two routers on one port would otherwise share it without a word.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened
