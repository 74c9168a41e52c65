"""Signs what servers send to the router, where both have the shared secret."""

from __future__ import annotations

import hashlib
import hmac

SIGNATURE_HEADER = "X-AFD-Signature"
MAX_SKEW_S = 60.0  # between the clocks of a server's host and the router's
_PURPOSE = b"sglang-afd registration\0"  # so that no proof of an exchange passes for a signature


def sign(secret: bytes, body: bytes) -> str:
    """The value of `SIGNATURE_HEADER` for a body, in hex."""
    return hmac.new(secret, _PURPOSE + body, hashlib.sha256).hexdigest()


def is_signed(secret: bytes, body: bytes, value: str) -> bool:
    """Was `value` made of this body with this secret? Takes the same time for every value."""
    expected = sign(secret, body).encode()
    return hmac.compare_digest(expected, value.encode(errors="replace"))
