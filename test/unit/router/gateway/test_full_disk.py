"""smg hears of its servers by a file, which cannot always be written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from sgl_router_afd.config import RouterConfig
from sgl_router_afd.dataplane.counters import SharedCounters
from sgl_router_afd.dataplane.messages import NOBODY, ModelRow, ServerRow, Table
from sgl_router_afd.gateway.manifest import Manifest
from sgl_router_afd.gateway.supervisor import Gateway
from sglang_afd.errors import ConfigError

TABLE = Table(
    rows=(ServerRow(slot=0, server_id="a", url="http://a:1", state="serving", reason=""),),
    models={"m": ModelRow(slots=(0,))},
    unnamed=NOBODY,
    unknown=NOBODY,
)


class Unanswered:
    """A session to an smg that does not answer."""

    def get(self, *_: Any, **__: Any) -> Any:
        raise aiohttp.ClientConnectionError("refused")


def a_gateway(directory: Path) -> Gateway:
    session = cast(aiohttp.ClientSession, Unanswered())
    config, counters = RouterConfig(data_plane="smg"), SharedCounters.create(1)
    return Gateway(config, ("127.0.0.1", 1), counters, session, lambda _: None, directory)


def test_a_file_that_cannot_be_written_stops_nobody_and_is_written_as_soon_as_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "away"

    async def publish_and_wait() -> bytes:
        gateway = a_gateway(directory)
        watching = asyncio.create_task(gateway._keep_watching())
        gateway.publish(TABLE)
        await asyncio.sleep(0.1)  # it is tried more than once
        directory.mkdir()
        async with asyncio.timeout(20):
            while not (directory / "servers.json").exists():
                await asyncio.sleep(0.005)
        watching.cancel()
        return (directory / "servers.json").read_bytes()

    written = asyncio.run(publish_and_wait())

    manifest = msgspec.json.decode(written, type=Manifest)
    assert [(worker.id, worker.model_id) for worker in manifest.workers] == [("a", "m")]
    assert caplog.text.count("smg does not hear which servers serve now") == 1


def test_a_file_that_cannot_be_written_at_the_start_is_one_error(tmp_path: Path) -> None:
    async def start() -> None:
        async with a_gateway(tmp_path / "away"):
            pass

    with pytest.raises(ConfigError, match="set TMPDIR"):
        asyncio.run(start())
