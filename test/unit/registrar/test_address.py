"""The name and the address under which a server is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_afd.config import AfdConfig, Role
from sglang_afd.registrar.address import advertised_url, server_id, with_ports

ROUTER = "http://127.0.0.1:30000"


def config_of(**settings: Any) -> AfdConfig:
    return AfdConfig(**{"role": Role.ATTN, "router_url": ROUTER} | settings)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:30001"),
        ("gpu-7.example", "http://gpu-7.example:30001"),
        ("::1", "http://[::1]:30001"),
        ("0.0.0.0", "http://127.0.0.1:30001"),
        ("", "http://127.0.0.1:30001"),
        ("::", "http://127.0.0.1:30001"),
    ],
)
def test_a_server_is_reached_where_it_listens_or_where_it_reaches_the_router_from(
    host: str, expected: str
) -> None:
    assert advertised_url(config_of(), host=host, port=30001) == expected


def test_a_router_at_an_ipv6_address_is_told_an_ipv6_address() -> None:
    config = config_of(router_url="http://[::1]:30000")

    assert advertised_url(config, host="::", port=30001) == "http://[::1]:30001"


def test_without_any_router_a_server_that_listens_everywhere_still_has_an_address() -> None:
    config = AfdConfig(role=Role.MLP)

    url = advertised_url(config, host="0.0.0.0", port=30001)

    assert re.fullmatch(r"http://[0-9.]+:30001", url)
    assert "0.0.0.0" not in url


def test_the_flag_wins() -> None:
    config = config_of(advertise_url="https://lb.example:443/")

    assert advertised_url(config, host="127.0.0.1", port=1) == "https://lb.example:443"


def test_the_name_is_made_of_role_and_address_unless_it_is_given() -> None:
    assert server_id(config_of(), "http://127.0.0.1:30001") == "attn-127.0.0.1:30001"
    assert server_id(config_of(), "http://[::1]:30001") == "attn-::1:30001"
    assert server_id(config_of(server_id="a.b"), "http://127.0.0.1:30001") == "a.b"


def test_the_name_of_a_long_address_is_short_and_stays_the_same() -> None:
    url = f"http://{'h' * 200}:30001"

    name = server_id(config_of(), url)

    assert name == server_id(config_of(), url) != server_id(config_of(), url + "0")
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", name)


def test_addresses_of_peers_get_the_port_that_http_would_take() -> None:
    urls = ("http://mlp-0", "http://[::1]", "http://h:7/", "http://[::1]:8")

    assert with_ports(urls) == (
        "http://mlp-0:80",
        "http://[::1]:80",
        "http://h:7",
        "http://[::1]:8",
    )
