from __future__ import annotations

import pytest

from sglang_afd.transport.addresses import replace_wildcard


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://[::]:7000"])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.5", "tcp://10.0.0.5:7000"),
        ("mlp-0.example", "tcp://mlp-0.example:7000"),
        ("2001:db8::1", "tcp://[2001:db8::1]:7000"),
    ],
)
def test_a_wildcard_becomes_the_host_that_peers_reach(
    address: str, host: str, expected: str
) -> None:
    assert replace_wildcard(address, host) == expected


@pytest.mark.parametrize(
    "address", ["ipc:///run/0.0.0.0", "tcp://10.0.0.1:7000", "tcp://[::1]:7000", "tcp://h:1"]
)
def test_an_address_with_a_host_stays(address: str) -> None:
    assert replace_wildcard(address, "10.0.0.5") == address
