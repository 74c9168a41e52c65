"""What the router warns of at its start."""

from __future__ import annotations

import pytest

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.keys import Key
from sgl_router_afd.surprises import surprises

URL = "http://a:1"


def test_usual_settings_surprise_nobody() -> None:
    assert surprises(RouterConfig()) == surprises(RouterConfig(attn_urls=(URL,))) == []


def test_a_router_that_others_reach_lets_no_server_register_without_a_secret() -> None:
    (open_one,) = surprises(RouterConfig(host="0.0.0.0"))

    assert "listens on 0.0.0.0" in open_one and "--afd-secret-file" in open_one
    assert surprises(RouterConfig(host="0.0.0.0", afd_secret=Key(b"x" * 16))) == []


@pytest.mark.parametrize("urls", [{"attn_urls": (URL,)}, {"mlp_urls": (URL,)}])
def test_polls_that_are_rarer_than_leases_are_long_make_servers_late(
    urls: dict[str, tuple[str]],
) -> None:
    (late,) = surprises(RouterConfig(**urls, lease_s=2, status_interval_s=2))  # type: ignore[arg-type]

    assert "--status-interval-s is 2 and --lease-s 2" in late
    assert surprises(RouterConfig(lease_s=2, status_interval_s=2)) == []
