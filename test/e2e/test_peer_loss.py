"""MLP servers that die, stop or dawdle, and what clients see of it."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fleet
import pytest
from compare import ask_at_once, ask_one_by_one, differences
from fleet import AttnPair
from servers import Server, Zygote, fetch, running

LONG = {
    "text": "experts",
    "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0},
}
ERROR_WITHIN_S = 10.0


@pytest.fixture
def ranks(zygote: Zygote, qwen3_pair: AttnPair) -> Iterator[list[Server]]:
    """Two MLP ranks, attached."""
    ranks = _start_ranks(zygote, qwen3_pair)
    with running(ranks):
        yield ranks


def _start_ranks(zygote: Zygote, pair: AttnPair, **kwargs: Any) -> list[Server]:
    ranks = fleet.start_mlp(zygote, pair.oracle.model, pair.mlp_ports[:2], **kwargs)
    for rank in ranks:
        rank.wait("/health")
    for attn in pair.attn:
        fleet.wait_ready(attn)
    return ranks


def _wait_detached(attn: Server) -> None:
    attn.wait("/afd/v1/status", lambda body: body["state"] == "detached")


def _stream_events(url: str) -> Iterator[Any]:
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "experts"}],
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@pytest.mark.parametrize("victim", [0, 1])
def test_killing_an_mlp_rank_fails_what_runs_and_its_restart_brings_it_back(
    zygote: Zygote, qwen3_pair: AttnPair, ranks: list[Server], victim: int
) -> None:
    attn = qwen3_pair.attn[0]
    with ThreadPoolExecutor(1) as pool:
        events = _stream_events(attn.url)
        next(events)
        plain = pool.submit(fetch, f"{attn.url}/generate", LONG)
        next(events)

        ranks[victim].signal(signal.SIGKILL)
        killed_s = time.monotonic()
        last = [event for event in events if "error" in event]
        status, answer = plain.result(60)

    assert time.monotonic() - killed_s < ERROR_WITHIN_S
    assert last and last[-1]["error"]["code"] == 503
    assert status == 503 and "MLP" in str(answer)
    _wait_detached(attn)
    assert attn.get("/health")[0] == 200  # alive, though it cannot serve
    status, answer = fetch(f"{attn.url}/generate", LONG)
    assert status == 503 and "away" in str(answer)
    assert attn.get("/health_generate")[0] == 503

    ranks[1 - victim].stop()
    with running(_start_ranks(zygote, qwen3_pair)):
        one_by_one = ask_one_by_one(attn.url)
        at_once = ask_at_once([server.url for server in qwen3_pair.attn])
    assert differences(qwen3_pair.oracle.one_by_one, one_by_one) == []
    assert differences(qwen3_pair.oracle.at_once, at_once) == []


def test_a_lone_follower_that_restarts_is_met_again(
    zygote: Zygote, qwen3_pair: AttnPair, ranks: list[Server]
) -> None:
    attn = qwen3_pair.attn[0]
    ranks[1].signal(signal.SIGKILL)
    _wait_detached(attn)
    ranks[0].wait("/afd/v1/status", lambda body: body["attached_peers"] == 0)

    model, ports = qwen3_pair.oracle.model, qwen3_pair.mlp_ports[:2]
    with running(fleet.start_mlp(zygote, model, ports, only_rank=1)):
        fleet.wait_ready(attn)
        got = ask_one_by_one(attn.url)

    assert differences(qwen3_pair.oracle.one_by_one, got) == []


def test_a_stopped_mlp_server_is_noticed_and_met_again_when_it_goes_on(
    qwen3_pair: AttnPair, ranks: list[Server]
) -> None:
    attn = qwen3_pair.attn[0]
    events = _stream_events(attn.url)
    next(events)

    ranks[0].signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    last = [event for event in events if "error" in event]
    noticed_s = time.monotonic() - stopped_s
    ranks[0].signal(signal.SIGCONT)

    assert last and last[-1]["error"]["code"] == 503
    assert noticed_s < ERROR_WITHIN_S
    fleet.wait_ready(attn)
    assert differences(qwen3_pair.oracle.one_by_one, ask_one_by_one(attn.url)) == []


def test_attention_servers_that_die_do_not_disturb_the_others(
    zygote: Zygote, qwen3_pair: AttnPair, ranks: list[Server]
) -> None:
    doomed = fleet.start_attn(zygote, qwen3_pair.oracle.model, qwen3_pair.mlp_ports[0])
    with running([doomed]):
        fleet.wait_ready(doomed)
        events = _stream_events(doomed.url)
        next(events)

        doomed.kill_tree()
        got = ask_one_by_one(qwen3_pair.attn[0].url)

    assert differences(qwen3_pair.oracle.one_by_one, got) == []
    ranks[0].wait("/afd/v1/status", lambda body: body["attached_peers"] == 2)


def test_experts_slower_than_a_heartbeat_are_waited_for_and_slower_than_the_deadline_are_not(
    zygote: Zygote, qwen3_pair: AttnPair
) -> None:
    model, port = qwen3_pair.oracle.model, qwen3_pair.mlp_ports[0]
    delay = {"TEST_EXPERT_DELAY_S": "2.0"}  # --afd-heartbeat-timeout is 1
    slow = fleet.start_mlp(zygote, model, [port], plant="slow_experts", env=delay)
    hasty = fleet.start_attn(
        zygote, model, port, "--afd-stall-timeout", "1.0", "--skip-server-warmup"
    )
    patient = qwen3_pair.attn[0]
    body = {"text": "experts", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    with running([*slow, hasty]):
        fleet.wait_ready(patient)
        fleet.wait_ready(hasty)
        losses = patient.get("/afd/v1/status")[1]["num_losses"]

        patient_status, _ = fetch(f"{patient.url}/generate", body)
        hasty_status, hasty_answer = fetch(f"{hasty.url}/generate", body)

        assert patient_status == 200
        assert patient.get("/afd/v1/status")[1]["num_losses"] == losses
        assert hasty_status == 503
        assert "--afd-stall-timeout" in str(hasty_answer)
    _wait_detached(patient)
