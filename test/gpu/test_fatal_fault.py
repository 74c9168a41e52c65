"""What an unorderly death does to the others on one GPU under MPS: written down, not claimed.

NVIDIA makes no promise for clients that share a GPU through MPS when one is killed while its
kernels run. So these tests assert that something was learned, whatever it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gpu_fleet
import gpu_report
import pytest
from compare import PROMPTS
from gpu_ahead import Ahead, Setup, Stage
from gpu_fleet import START_TIMEOUT_S, Combination, Fleet, say, telling
from servers import Server
from streams import Stream, start_streams

NUM_TOKENS = 600
WATCH_S = 20.0
SETTLE_S = 2.0
_TROUBLE = re.compile(r"CUDA(?: error|_ERROR)[^\n]{0,120}|CUDA said \w+|Traceback")
TWO_AND_ONE = Combination(
    family="qwen3",
    precision="exact",
    has_graphs=True,
    num_micro_batches=1,
    num_attn=2,
    num_mlp=1,
)


def _begin(fleet: Fleet) -> list[Stream]:
    streams = start_streams(fleet.urls, PROMPTS, NUM_TOKENS)
    for stream in streams:
        stream.wait_for(5)
    return streams


def _wait(streams: list[Stream]) -> None:
    """Until every stream has ended, or WATCH_S."""
    stop_s = time.monotonic() + WATCH_S
    while time.monotonic() < stop_s and not all(_has_ended(stream) for stream in streams):
        time.sleep(0.1)


def _has_ended(stream: Stream) -> bool:
    return stream.error is not None or len(stream.tokens) >= NUM_TOKENS


def _seen(server: Server) -> dict[str, Any]:
    status = server.get("/afd/v1/status")[1] or {}
    return {
        "is_alive": server.is_alive(),
        "state": status.get("state", "does not answer"),
        "log": sorted(set(_TROUBLE.findall(server.text())))[:5],
    }


def _counted(streams: list[Stream]) -> dict[str, Any]:
    return {
        "finished": sum(len(stream.tokens) >= NUM_TOKENS for stream in streams),
        "failed": sum(stream.error is not None for stream in streams),
        "errors": sorted({(stream.error or "")[:160] for stream in streams} - {""})[:3],
        "of": len(streams),
    }


@dataclass
class Victims:
    """Servers that tests kill, and those that are started instead."""

    stage: Stage
    fleet: Fleet
    servers: list[Server] = field(default_factory=list)

    def start_mlp(self) -> Server:
        """One that takes the place of the first."""
        model, flags = self.stage.models["qwen3", "exact"], gpu_fleet.exchange_flags("cuda_ipc")
        ports = [self.fleet.mlp[0].port]
        self.servers += gpu_fleet.start_mlp(self.stage.zygote, model, "exact", ports, flags)
        self.fleet.mlp[:] = self.servers[-1:]
        return self.fleet.mlp[0]

    def serves(self) -> bool:
        """Do the servers that are there serve, or else new ones?"""
        if all(_seen(server)["state"] == "ready" for server in self.fleet.attn):
            return True
        say("the servers do not serve any more: starting others")
        for server in self.servers:
            server.kill_tree()
        self.fleet = _start(self.stage).fleet
        self.servers += self.fleet.servers
        try:
            self.fleet.ready()
        except AssertionError as error:
            say(str(error))
            return False
        return True


def _start(stage: Stage) -> Victims:
    fleet = gpu_fleet.start_fleet(stage.zygote, stage.models["qwen3", "exact"], TWO_AND_ONE)
    return Victims(stage, fleet, fleet.servers)


VICTIMS = Setup("servers that are killed", 3, _start)
pytestmark = [
    pytest.mark.timeout(2 * START_TIMEOUT_S),
    pytest.mark.also_on_cpu,
    pytest.mark.wants(VICTIMS),
]


@pytest.fixture(scope="module")
def victims(ahead: Ahead) -> Iterator[Victims]:
    """Two attention servers and an MLP server."""
    victims = ahead.take(VICTIMS)
    with telling(victims.servers):
        victims.fleet.ready()
        yield victims


def test_an_mlp_server_that_is_killed(victims: Victims) -> None:
    fleet = victims.fleet
    streams = _begin(fleet)

    fleet.mlp[0].kill_tree()
    time.sleep(SETTLE_S)
    before = [_seen(server) for server in fleet.attn]
    fresh = victims.start_mlp()
    _wait(streams)

    found = {
        "attention servers after it": before,
        "and with a new MLP server": [_seen(server) for server in fleet.attn],
        "the new MLP server": _seen(fresh),
        "streams": _counted(streams),
    }
    gpu_report.record("an MLP server is killed (SIGKILL) under load", found)
    assert found["streams"]["of"] == len(PROMPTS)


def test_an_attention_server_that_is_killed(victims: Victims) -> None:
    is_served = victims.serves()
    gpu_report.record("servers serve after an MLP server was killed", is_served)
    if not is_served:
        pytest.skip("no server starts any more under this MPS daemon")
    fleet = victims.fleet
    streams = _begin(fleet)

    fleet.attn[1].kill_tree()
    _wait(streams)

    found = {
        "the other attention server": _seen(fleet.attn[0]),
        "the MLP server": _seen(fleet.mlp[0]),
        "streams, half of them on the killed server": _counted(streams),
    }
    gpu_report.record("an attention server is killed (SIGKILL) under load", found)
    assert found["the other attention server"]["state"]
