from __future__ import annotations

from dataclasses import fields
from typing import Any

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.messages import encode, setup_of
from sgl_router_afd.keys import Key


def test_a_relay_process_is_told_of_all_keys_the_one_that_clients_must_send() -> None:
    names = [field.name for field in fields(RouterConfig) if isinstance(field.default, Key)]
    keys: dict[str, Any] = {name: Key(b"<" + name.encode() + b">") for name in names}

    message = encode(setup_of(RouterConfig(**keys, queue_size=7), 0, "/control"))

    assert [name for name in names if keys[name].value in message] == ["api_key"]
    assert {"api_key", "admin_api_key", "afd_secret"} <= set(names)


def test_a_relay_process_is_told_every_other_setting() -> None:
    config = RouterConfig(attn_urls=("http://a:1",), queue_size=7, policy="prefix")

    setup = setup_of(config, 3, "/control")

    assert (setup.config, setup.relay, setup.control_path) == (config, 3, "/control")
