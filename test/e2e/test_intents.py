"""Intents are hints: outputs are the same when they are lost, late or wrong."""

from __future__ import annotations

from pathlib import Path

import fleet
import pytest
from compare import ask_at_once, differences
from fleet import Oracle
from servers import Zygote, running

from sglang_afd.ports import free_ports

FAULTS = ("drop_intents", "delay_intents", "false_intents")


@pytest.mark.slow
def test_lost_late_and_false_intents_change_no_token(
    zygote: Zygote, qwen3_oracle: Oracle, tmp_path: Path
) -> None:
    [port] = free_ports(1)
    mlp = fleet.start_mlp(zygote, qwen3_oracle.model, [port])
    attn = [fleet.start_attn(zygote, qwen3_oracle.model, port, plant=fault) for fault in FAULTS]
    with running([*mlp, *attn]):
        for server in attn:
            fleet.wait_ready(server)

        got = ask_at_once([server.url for server in attn] * 2)
        again = ask_at_once([server.url for server in attn][::-1])

    assert differences(qwen3_oracle.at_once, got) == []
    assert differences(qwen3_oracle.at_once, again) == []
