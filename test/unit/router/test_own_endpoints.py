from __future__ import annotations

import asyncio
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp import web

from sgl_router_afd.launch_router import _own_endpoints


def test_hundreds_of_servers_may_come_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def connect_all(num_servers: int) -> int:
        with ExitStack() as stack:
            async with _own_endpoints(web.Application()) as path:
                for _ in range(num_servers):  # while the event loop accepts nobody
                    one = stack.enter_context(socket.socket(socket.AF_UNIX))
                    one.setblocking(False)
                    one.connect(path)
                return num_servers

    assert asyncio.run(connect_all(300)) == 300
