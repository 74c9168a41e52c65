"""Signatures of registrations."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from sglang_afd.protocol.signature import is_signed, sign

SECRET = b"s" * 32
BODY = b'{"type":"leave"}'


def test_a_signature_is_the_hmac_of_the_purpose_and_the_body() -> None:
    expected = hmac.new(SECRET, b"sglang-afd registration\0" + BODY, hashlib.sha256).hexdigest()

    assert sign(SECRET, BODY) == expected


def test_what_was_signed_is_known_as_such() -> None:
    assert is_signed(SECRET, BODY, sign(SECRET, BODY))


@pytest.mark.parametrize(
    ("secret", "body", "value"),
    [
        (b"t" * 32, BODY, sign(SECRET, BODY)),
        (SECRET, BODY + b" ", sign(SECRET, BODY)),
        (SECRET, BODY, ""),
        (SECRET, BODY, sign(SECRET, BODY).upper()),
        (SECRET, BODY, sign(SECRET, BODY)[:-1]),
        (SECRET, BODY, "é" * 64),
        (SECRET, BODY, "\udc80" * 64),
        (SECRET, BODY, hmac.new(SECRET, BODY, hashlib.sha256).hexdigest()),
    ],
    ids=[
        "another secret",
        "another body",
        "none",
        "in capitals",
        "cut",
        "no ASCII",
        "no UTF-8",
        "without the purpose",
    ],
)
def test_anything_else_is_not(secret: bytes, body: bytes, value: str) -> None:
    assert not is_signed(secret, body, value)
