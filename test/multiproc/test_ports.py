"""Ports held for servers that are about to start."""

from __future__ import annotations

import errno
import random
import socket

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.ports import FREE_PORTS, free_ports, hold_free_ports, hold_port

HOST = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """What asyncio and uvicorn do."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((HOST, port))
    server.listen()
    return server


def test_a_server_can_listen_on_a_held_port() -> None:
    with hold_free_ports(HOST, 3) as ports:
        servers = [listen(port) for port in ports]

        for server in servers:
            with socket.create_connection(server.getsockname()):
                pass

    for server in servers:
        server.close()


def draw_first(monkeypatch: pytest.MonkeyPatch, *starts: int) -> list[int]:
    """Where free ports are looked for first, then anywhere: others may have the next ones."""
    left, draw = [*starts], random.randrange
    monkeypatch.setattr("random.randrange", lambda *bounds: left.pop(0) if left else draw(*bounds))
    return left


def test_nobody_else_is_given_a_held_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_free_ports(HOST, 2) as held:
        left = draw_first(monkeypatch, held[0], held[1])

        with hold_free_ports(HOST, 2) as others:
            assert left == [] and not {*held} & {*others}


def test_a_held_port_is_not_an_outgoing_one() -> None:
    with hold_free_ports(HOST, 2) as ports:
        assert all(port in FREE_PORTS for port in ports)
        with socket.socket() as other, pytest.raises(OSError) as error_info:
            other.bind((HOST, ports[0]))

    assert error_info.value.errno == errno.EADDRINUSE


def test_no_process_is_given_a_port_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    [given] = free_ports(1)
    left = draw_first(monkeypatch, given, given - 1)

    assert given not in free_ports(2) and left == []


def test_a_taken_router_port_is_refused_with_its_address() -> None:
    with hold_free_ports(HOST, 1) as ports, listen(ports[0]):
        wanted = f"{HOST}:{ports[0]} cannot be .*already in use.*--port"

        with pytest.raises(ConfigError, match=wanted), hold_port(HOST, ports[0]):
            pass


def test_a_router_can_start_right_after_its_predecessor() -> None:
    with hold_free_ports(HOST, 1) as ports:
        port = ports[0]
    with listen(port) as server:
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the address for a minute
        client.close()

    with hold_port(HOST, port), listen(port) as successor:
        assert successor.getsockname()[1] == port
