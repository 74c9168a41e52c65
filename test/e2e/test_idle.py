"""Servers with nothing to do: a night passes, and no core is kept awake."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

import fleet
import pytest
from compare import ask_one_by_one, differences
from fleet import Oracle
from servers import Server, Zygote, running

from sglang_afd.ports import free_ports

IDLE_S = 5.0
MAX_SHARE = 0.05  # of a core for all processes of one server
NUM_LOOKS = 6  # on a busy machine what follows the last request may take a while


def test_a_night_without_requests_is_no_loss_and_a_request_is_answered_afterwards(
    zygote: Zygote, qwen3_oracle: Oracle, tmp_path: Path
) -> None:
    ports, night = free_ports(2), tmp_path / "night"
    leap = {"TEST_LEAP_FILE": str(night)}
    model, plant = qwen3_oracle.model, "leap_in_time"
    ranks = fleet.start_mlp(zygote, model, ports, *fleet.CALM, plant=plant, env=leap)
    attn = fleet.start_attn(zygote, model, ports[0], *fleet.CALM, plant=plant, env=leap)
    with running([*ranks, attn]):
        fleet.wait_ready(attn)
        before = attn.get("/afd/v1/status")[1]

        night.touch()
        time.sleep(3)  # for every timer to run out that would
        got = ask_one_by_one(attn.url)

        assert differences(qwen3_oracle.one_by_one, got) == []
        after = attn.get("/afd/v1/status")[1]
        assert after["num_failed_requests"] == 0
        assert (after["state"], after["num_losses"]) == ("ready", before["num_losses"])
        assert all(rank.get("/health")[0] == 200 for rank in ranks)
        first, *_, last = re.findall(r"^\[(\d{4}-\d\d-\d\d [^\]]+)\] ", attn.text(), re.M)
        slept = datetime.fromisoformat(last) - datetime.fromisoformat(first)
        assert slept > timedelta(hours=11)  # its clocks did go ahead


def test_idle_servers_of_both_roles_leave_the_cores_alone(
    zygote: Zygote, qwen3_oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = free_ports(2)
    ranks = fleet.start_mlp(zygote, qwen3_oracle.model, ports)
    attn = fleet.start_attn(zygote, qwen3_oracle.model, ports[0])
    with running([*ranks, attn]):
        fleet.wait_ready(attn)
        ask_one_by_one(attn.url, ["experts"])
        time.sleep(1)  # for what follows the last request
        servers = {"attn": attn, "mlp rank 0": ranks[0], "mlp rank 1": ranks[1]}

        for _ in range(NUM_LOOKS):  # a server that keeps a core awake does so each time
            shares = _shares(servers)
            if all(share < MAX_SHARE for share in shares.values()):
                break

    told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    with capsys.disabled():
        sys.stdout.write(f"\nshare of a core while idle: {told}\n")
    assert all(share < MAX_SHARE for share in shares.values()), shares


def _shares(servers: Mapping[str, Server]) -> dict[str, float]:
    """Of a core, for a while from now on."""
    before = {name: _cpu_s(server) for name, server in servers.items()}
    started_s = time.monotonic()
    time.sleep(IDLE_S)
    passed_s = time.monotonic() - started_s
    return {name: (_cpu_s(server) - before[name]) / passed_s for name, server in servers.items()}


def _cpu_s(server: Server) -> float:
    """User and system time of every process of a server's session."""
    ticks = 0
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == server.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
