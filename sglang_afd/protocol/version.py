"""The protocol's version, the first thing in every control frame."""

from __future__ import annotations

PROTOCOL_VERSION = 1  # one byte; raised when a message changes
MAGIC = b"AFD"  # so that a stray client is told apart from another version
