"""The beginning of a request's prompt, as a key for stickiness, without parsing its body."""

from __future__ import annotations

import hashlib

PREFIX_BYTES = 256  # about 64 tokens: more than a short system prompt, less than most turns
SEARCH_BYTES = 16 * 1024  # the prompt's field is looked for this far into the body
FIELDS = (b'"messages"', b'"prompt"', b'"text"', b'"input_ids"')


def prefix_key(body: bytes, num_bytes: int = PREFIX_BYTES) -> bytes:
    """16 bytes that are the same for bodies whose prompts begin the same; b"" without a prompt.

    Wrong guesses cost a cache hit and nothing else, so a field's name inside a text may mislead it.

    Args:
        body: JSON, as the client sent it.
        num_bytes: How much of the prompt counts.
    """
    found = [at for field in FIELDS if (at := body.find(field, 0, SEARCH_BYTES)) >= 0]
    if not found:
        return b""
    start = min(found)
    return hashlib.blake2b(body[start : start + num_bytes], digest_size=16).digest()
