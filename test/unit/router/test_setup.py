from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.messages import Setup, encode, setup_of
from sgl_router_afd.keys import Key


def test_a_relay_process_is_told_of_all_keys_the_one_that_clients_must_send() -> None:
    names = [field.name for field in fields(RouterConfig) if isinstance(field.default, Key)]
    keys: dict[str, Any] = {name: Key(b"<" + name.encode() + b">") for name in names}

    message = encode(setup_of(RouterConfig(**keys, queue_size=7), 0, "/control"))

    assert [name for name in names if keys[name].value in message] == ["api_key"]
    assert {"api_key", "admin_api_key", "afd_secret"} <= set(names)


@pytest.mark.parametrize("name", ["admin_api_key", "afd_secret"])
def test_no_message_can_be_made_that_tells_a_relay_process_another_key(name: str) -> None:
    keys: dict[str, Any] = {name: Key(b"k")}

    with pytest.raises(AssertionError, match="a key that no relay may be told"):
        Setup(config=RouterConfig(**keys), relay=0, control_path="/control")


def test_a_relay_process_is_told_every_other_setting() -> None:
    config = RouterConfig(attn_urls=("http://a:1",), queue_size=7, policy="prefix")

    setup = setup_of(config, 3, "/control")

    assert (setup.config, setup.relay, setup.control_path) == (config, 3, "/control")
