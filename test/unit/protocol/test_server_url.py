"""What counts as the HTTP address of a server."""

from __future__ import annotations

import socket

import pytest
from yarl import URL

from sglang_afd.protocol.server_url import check_url

SOUND = ["http://a:1", "https://a-1.b_c.d.:65535", "http://10.0.0.1:80", "http://[::1]:1"]
UNSOUND = ["http://a:0", "http://a:65536", "http://a..b:1", "http://.:1", "http://[1.2]:1"]
UNSOUND += ["http://[:::]:1", "http://xn--:1", f"http://{'a' * 64}.b:1"]


@pytest.mark.parametrize("url", SOUND)
def test_an_address_that_parsers_and_resolvers_take_is_sound(url: str) -> None:
    check_url(url)

    assert URL(url).port in (1, 80, 65535)


@pytest.mark.parametrize("url", UNSOUND)
def test_an_address_that_one_of_them_breaks_on_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server"):
        check_url(url)


def test_a_resolver_does_not_only_fail_but_breaks_on_a_name_with_an_empty_label() -> None:
    with pytest.raises(UnicodeError):
        socket.getaddrinfo("a..b", 1)
