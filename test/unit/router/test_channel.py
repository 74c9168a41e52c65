from __future__ import annotations

import asyncio
import socket

from sgl_router_afd.dataplane.channel import Channel
from sgl_router_afd.dataplane.messages import (
    LENGTH_BYTES,
    ModelRow,
    Table,
    ToControl,
    encode,
)

LARGE = "x" * 200_000
FEW_BYTES = 16_384  # in the socket, whatever this machine's default is: a table is far more
NUM_TABLES = 200


def a_table(number: int) -> bytes:
    row = ModelRow(slots=(number,), reason=LARGE)
    return encode(Table(rows=(), models={}, unnamed=row, unknown=row))


async def sent_to_one_that_does_not_read() -> list[bytes]:
    """What such a process finds once it reads again."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FEW_BYTES)
    loop = asyncio.get_running_loop()
    channel: Channel[ToControl] = Channel(ToControl, lambda message: None, lambda: None)
    await loop.create_unix_connection(lambda: channel, sock=ours)
    for number in range(NUM_TABLES):
        channel.send_latest(a_table(number))
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    found = []
    while not found or found[-1] != a_table(NUM_TABLES - 1):
        length = await reader.readexactly(LENGTH_BYTES)
        found.append(length + await reader.readexactly(int.from_bytes(length, "big")))
    writer.close()
    channel.close()
    return found


def test_a_process_that_does_not_read_is_kept_the_last_table_alone() -> None:
    found = asyncio.run(asyncio.wait_for(sent_to_one_that_does_not_read(), 20))

    assert found == [a_table(0), a_table(NUM_TABLES - 1)]
