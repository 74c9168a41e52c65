"""The memory that every connection of a relay process reads into."""

from __future__ import annotations


class ReadBuffer:
    """One for all: what is read is parsed before the next read; the parser copies what it keeps."""

    def __init__(self, num_bytes: int = 64 * 1024) -> None:
        self.memory = bytearray(num_bytes)
        self.view = memoryview(self.memory)
