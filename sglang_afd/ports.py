"""TCP ports for servers that are about to start, held so that nobody else takes them."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence

from sglang_afd.errors import ConfigError

# Below the range that Linux gives to outgoing connections (32768 and up), where SGLang also looks
# for the ports that it takes by itself.
FREE_PORTS = range(20000, 32000)
ATTEMPTS = 100

_given: set[int] = set()  # by free_ports


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Neighbouring ports that nobody used a moment ago, and that no connection will be given.

    Args:
        count: How many.
        host: Address that servers will listen on.
    Returns: Ports that this process was not given before.
    Raises: ConfigError when no such stretch turned up.
    """
    for _ in range(ATTEMPTS):
        with hold_free_ports(host, count) as ports:
            if _given.isdisjoint(ports):
                _given.update(ports)
                return list(ports)
    raise _none_free(host, count)


@contextlib.contextmanager
def hold_port(host: str, port: int) -> Iterator[None]:
    """Keep one port that the user chose.

    Raises: ConfigError when it is taken.
    """
    try:
        # Sharing the address lets a router start while connections to its predecessor linger.
        _listen_once(host, port, share=True)
        holder = _bind(host, port, share=True)
    except (OSError, UnicodeError) as error:  # the latter for a name that no resolver takes
        cause = error.strerror if isinstance(error, OSError) else "no host has that name"
        raise ConfigError(
            f"{host}:{port} cannot be the router's address ({cause}); "
            "choose another with --host and --port"
        ) from error
    with holder:
        yield


@contextlib.contextmanager
def hold_free_ports(host: str, count: int) -> Iterator[Sequence[int]]:
    """Keep neighbouring ports that nobody uses.

    Args:
        host: Address that the servers will listen on.
        count: How many ports.
    Returns: The ports, for as long as the `with` block runs.
    Raises: ConfigError when no such stretch turned up.
    """
    for _ in range(ATTEMPTS):
        first = random.randrange(FREE_PORTS.start, FREE_PORTS.stop - count)
        ports = range(first, first + count)
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    _listen_once(host, port, share=False)
                    stack.enter_context(_bind(host, port, share=True))
            except OSError:
                continue
            yield ports
            return
    raise _none_free(host, count)


def _none_free(host: str, count: int) -> ConfigError:
    return ConfigError(f"found no {count} free neighbouring ports on {host} in {FREE_PORTS}")


def _listen_once(host: str, port: int, *, share: bool) -> None:
    """Fail when a server listens there already; without sharing, also when somebody holds it."""
    with _bind(host, port, share=share) as probe:
        probe.listen(1)


def _bind(host: str, port: int, *, share: bool) -> socket.socket:
    """A socket bound to the port.

    Linux lets sockets that all set SO_REUSEADDR have one address while at most one of them listens:
    the server does, the holder does not.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    holder = socket.socket(family, kind, protocol)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, share)
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder
