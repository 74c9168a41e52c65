"""The protocol's version, the first thing in every control frame."""

from __future__ import annotations

PROTOCOL_VERSION = 3
MAGIC = b"AFD"  # so that a stray client is told apart from another version
