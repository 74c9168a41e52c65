"""Rows that travel as FP8: how far values may be off, and what that does to a model's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gpu_fleet
import gpu_report
import pytest
from gpu_fleet import START_TIMEOUT_S, metric, telling, wait_ready
from gpu_oracles import Key, Oracles
from gpu_questions import continue_texts, distance
from servers import Zygote

# Every layer's rows are off by 2 to 3 % of themselves; logits have a standard deviation of about 2.
AT_90_PERCENT = 0.6
MEAN = 0.3
pytestmark = pytest.mark.timeout(2 * START_TIMEOUT_S)


def test_quantised_rows_are_as_near_as_e4m3_allows(zygote: Zygote, tmp_path: Path) -> None:
    file = tmp_path / "found.json"

    process = zygote.start("call", ["gpu_fp8", str(file)])

    process.wait_ended(60)
    assert file.exists(), process.text()[-4000:]
    found = json.loads(file.read_text())
    gpu_report.record("fp8", found)
    assert found["largest_share_of_bound"] <= 1
    assert found["largest_share_of_amax"] <= 1 / 28 * (1 + 1e-3)
    assert found["largest_relative_error_of_a_scale"] <= 1e-6
    assert found["largest_of_zeros"] == 0


def test_answers_with_fp8_are_within_their_bound(
    zygote: Zygote, models: Mapping[Key, Path], oracles: Oracles
) -> None:
    server = (zygote, models["qwen3", "fast"], "fast")
    flags = gpu_fleet.exchange_flags("cuda_ipc", "--afd-dispatch-dtype", "fp8")
    ports = gpu_fleet.mlp_ports(1)
    ranks = gpu_fleet.start_mlp(*server, ports, flags)
    attn = gpu_fleet.start_attn(*server, ports[0], flags)
    with telling([*ranks, attn]):
        words = oracles.words("qwen3")
        wait_ready(attn)

        got = continue_texts([attn.url], words.texts)

        found = distance(words.continuations, got)
        gpu_report.record("fp8, apart from stock SGLang in bfloat16", str(found))
        assert found.at_90_percent <= AT_90_PERCENT
        assert found.mean <= MEAN
        assert found.mean > 2 * words.own_distance.mean  # it was quantised
        assert metric(ranks[0], "launches_total") > 0
