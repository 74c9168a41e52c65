"""A step that is cut into micro-batches answers what stock SGLang answers, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import fleet
import pytest
from compare import ask_at_once, ask_one_by_one, differences
from fleet import Oracle
from servers import Server, Zygote, running


@pytest.fixture(scope="module")
def mlp(zygote: Zygote, qwen3_oracle: Oracle) -> Iterator[Server]:
    """One MLP rank for all attention servers of this file."""
    [rank] = fleet.start_mlp(zygote, qwen3_oracle.model, fleet.mlp_ports(1))
    with running([rank]):
        rank.wait("/health")
        yield rank


@pytest.mark.parametrize("setting", ["2"])
def test_answers_do_not_depend_on_the_number_of_micro_batches(
    zygote: Zygote, qwen3_oracle: Oracle, mlp: Server, setting: str
) -> None:
    attn = fleet.start_attn(
        zygote, qwen3_oracle.model, mlp.port, "--afd-num-micro-batches", setting
    )
    with running([attn]):
        fleet.wait_ready(attn)

        one_by_one = ask_one_by_one(attn.url)
        at_once = ask_at_once([attn.url])
        again = ask_at_once([attn.url])
        status = attn.get("/afd/v1/status")[1]
        print(status)

    assert differences(qwen3_oracle.one_by_one, one_by_one) == []
    assert differences(qwen3_oracle.at_once, at_once) == []
    assert differences(qwen3_oracle.at_once, again) == []
    assert status["num_split_steps"] > 0
