from __future__ import annotations

import json

import pytest

from sgl_router_afd.control.prefix import prefix_key

SYSTEM = "You are a patient assistant. " * 20


def chat(*turns: str, **fields: object) -> bytes:
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": "user", "content": turn} for turn in turns]
    return json.dumps({"model": "tiny", **fields, "messages": messages}).encode()


def test_later_turns_have_the_key_of_the_first() -> None:
    assert prefix_key(chat("hello")) == prefix_key(chat("hello", "and then"))


def test_fields_before_the_prompt_do_not_matter() -> None:
    assert prefix_key(chat("hello")) == prefix_key(chat("hello", stream=True, temperature=0.5))


@pytest.mark.parametrize("field", ["prompt", "text", "input_ids"])
def test_prompts_that_begin_differently_have_different_keys(field: str) -> None:
    one, other = (json.dumps({field: value}).encode() for value in ("abc", "abd"))

    assert prefix_key(one) != prefix_key(other)


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff\x00", b'{"model":"tiny"}'])
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert prefix_key(body) == b""


def test_a_prompt_far_inside_a_body_is_not_looked_for() -> None:
    assert prefix_key(b" " * 20_000 + b'"prompt":"x"') == b""
