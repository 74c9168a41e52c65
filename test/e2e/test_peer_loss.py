"""Peers that die without being missed: idle ones, and attention servers beside others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import fleet
import pytest
from compare import PROMPTS, ask_one_by_one, differences
from fleet import AttnPair
from servers import Server, Zygote, fetch, running
from streams import Stream, finish_all

NUM_TOKENS = 400
NUM_ATTEMPTS = 3


@pytest.fixture
def ranks(zygote: Zygote, qwen3_pair: AttnPair) -> Iterator[list[Server]]:
    """Two MLP ranks, attached."""
    ranks = fleet.start_mlp(zygote, qwen3_pair.oracle.model, qwen3_pair.mlp_ports[:2])
    with running(ranks):
        for rank in ranks:
            rank.wait("/health")
        for attn in qwen3_pair.attn:
            fleet.wait_ready(attn)
        yield ranks


def _wait_peers(rank: Server, number: int) -> None:
    rank.wait("/afd/v1/status", lambda body: body["attached_peers"] == number)


def test_a_lone_follower_that_restarts_is_met_again(
    zygote: Zygote, qwen3_pair: AttnPair, ranks: list[Server]
) -> None:
    attn = qwen3_pair.attn[0]
    ranks[1].signal(signal.SIGKILL)
    attn.wait("/afd/v1/status", lambda body: body["state"] == "stalled")

    model, ports = qwen3_pair.oracle.model, qwen3_pair.mlp_ports[:2]
    with running(fleet.start_mlp(zygote, model, ports, only_rank=1)):
        fleet.wait_ready(attn)
        got = ask_one_by_one(attn.url)

    assert differences(qwen3_pair.oracle.one_by_one, got) == []


def _kill(server: Server) -> None:
    server.kill_tree()


def _stop(server: Server) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


@pytest.mark.parametrize("end", [_kill, pytest.param(_stop, marks=pytest.mark.slow)])
def test_an_attention_server_that_dies_or_stops_is_forgotten_and_the_others_go_on(
    zygote: Zygote,
    qwen3_pair: AttnPair,
    ranks: list[Server],
    end: Callable[[Server], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    attn = qwen3_pair.attn[0]
    undisturbed = finish_all([Stream(attn.url, PROMPTS[0], NUM_TOKENS)])
    doomed = fleet.start_attn(zygote, qwen3_pair.oracle.model, qwen3_pair.mlp_ports[0])
    with running([doomed]):
        fleet.wait_ready(doomed)
        survivor = Stream(attn.url, PROMPTS[0], NUM_TOKENS)
        victim = Stream(doomed.url, PROMPTS[0], NUM_TOKENS)
        survivor.wait_for(50)
        victim.wait_for(50)

        ended_s = time.monotonic()
        end(doomed)
        for rank in ranks:
            _wait_peers(rank, 2)
        noticed_s = time.monotonic()

        assert finish_all([survivor]) == undisturbed
        gaps_s = [
            survivor.longest_gap_s(0, ended_s),
            survivor.longest_gap_s(ended_s, noticed_s),
            survivor.longest_gap_s(noticed_s),
        ]
        told = "{:.3f} s before, {:.3f} s meanwhile, {:.3f} s afterwards".format(*gaps_s)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{end.__name__}: forgotten after {noticed_s - ended_s:.2f} s; longest time "
                f"between two tokens of the other server: {told}\n"
            )
        if end is _stop:
            os.killpg(doomed.pid, signal.SIGCONT)
            assert finish_all([victim]) == undisturbed


def _losses_while_asked(attn: Server, body: object) -> int:
    """How often its MLP servers were lost while it answered."""
    fleet.wait_ready(attn)
    before = attn.get("/afd/v1/status")[1]["num_losses"]
    status, answer = fetch(f"{attn.url}/generate", body)
    assert status == 200, answer
    return int(attn.get("/afd/v1/status")[1]["num_losses"] - before)


def test_experts_slower_than_a_heartbeat_are_waited_for_and_slower_than_the_deadline_fail(
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
        losses = [_losses_while_asked(patient, body)]
        while losses[-1] and len(losses) < NUM_ATTEMPTS:
            losses.append(_losses_while_asked(patient, body))
        fleet.wait_ready(hasty)
        hasty_status, hasty_answer = fetch(f"{hasty.url}/generate", body)

        # On a busy machine an I/O thread may miss a heartbeat for once; one that the experts hold
        # up misses them each time.
        assert losses[-1] == 0, losses
        assert hasty_status == 503
        assert "the MLP servers" in str(hasty_answer)
        assert "--afd-stall-timeout" in hasty.text()


def test_rows_whose_experts_raise_fail_their_requests_at_once_and_others_are_served(
    zygote: Zygote, qwen3_pair: AttnPair
) -> None:
    model, port = qwen3_pair.oracle.model, qwen3_pair.mlp_ports[0]
    attn = qwen3_pair.attn[0]
    with running(fleet.start_mlp(zygote, model, [port], plant="experts_raise")):
        fleet.wait_ready(attn)
        short = {"text": "experts", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}

        status, answer = fetch(f"{attn.url}/generate", short | {"text": "memory " * 30})

        assert status == 503
        assert "planted: out of memory" in str(answer)
        fleet.wait_ready(attn)
        assert fetch(f"{attn.url}/generate", short)[0] == 200
