"""A server that answers every request with the same bytes, whatever they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class OneAnswer:
    """Where it is, and what it received."""

    url: str = ""
    received: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def answering(sent: bytes | None) -> AsyncIterator[OneAnswer]:
    """Serve on a loopback port; None stands for no answer until the client leaves."""
    one, talks = OneAnswer(), set[asyncio.Task[None]]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client may leave first
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, after = head.lower().partition(b"content-length: ")
            length = int(after.partition(b"\r\n")[0] or 0)
            one.received.append(head + await reader.readexactly(length))
            if sent is None:
                await reader.read()
            else:
                writer.write(sent)
            writer.close()
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(talk(reader, writer)))

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield one
        await asyncio.gather(*talks)
