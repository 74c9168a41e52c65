"""MLP servers that die, stop or cannot be reached while requests run: a pause, and no more."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import fleet
import pytest
from compare import PROMPTS, ask_one_by_one, differences
from fleet import AttnPair, Oracle
from forwarder import forwarding
from servers import Server, Zygote, fetch, running, wait_until
from streams import Stream, finish_all, start_streams

from sglang_afd.ports import free_ports

NUM_TOKENS = 120
NUM_ATTEMPTS = 5
STALL_TIMEOUT_S = 200.0  # MLP servers come back sooner, however busy the machine is
ROOM = ("--max-running-requests", "48")  # so that all of them run at once
MANY = tuple(f"{prompt} {word}" for prompt in PROMPTS for word in ("again", "once"))  # 32
LONG = tuple(" ".join(PROMPTS[start:] + PROMPTS[:start])[:3500] for start in range(8))


@contextmanager
def _mlp(
    zygote: Zygote, pair: AttnPair, num_ranks: int = 2, *flags: str, **kwargs: Any
) -> Iterator[list[Server]]:
    """MLP ranks that serve; those that a test starts later go into the list."""
    ranks = _start(zygote, pair, num_ranks, *flags, **kwargs)
    try:
        for rank in ranks:
            rank.wait("/health")
        yield ranks
    finally:
        for rank in ranks:
            rank.kill_tree()


def _start(
    zygote: Zygote, pair: AttnPair, num_ranks: int = 2, *flags: str, **kwargs: Any
) -> list[Server]:
    model = kwargs.pop("model", pair.oracle.model)
    return fleet.start_mlp(zygote, model, pair.mlp_ports[:num_ranks], *flags, **kwargs)


def _kill(ranks: Sequence[Server]) -> None:
    for rank in ranks:
        rank.kill_tree()
    for rank in ranks:
        rank.wait_ended()


def _status(attn: Server) -> Any:
    return attn.get("/afd/v1/status")[1]


def _wait_state(attn: Server, state: str, reason: str = "") -> None:
    attn.wait(
        "/afd/v1/status",
        lambda body: body["state"] == state and re.search(reason, body["reason"]) is not None,
    )


def _begin(attn: Server, num_tokens: int = 5, **more: Any) -> list[Stream]:
    """32 streams in their middle, without cached prefixes before them."""
    for _ in range(NUM_ATTEMPTS):  # on a busy machine clients may hear of their tokens too late
        fleet.forget_prefixes(attn)
        streams = start_streams([attn.url], MANY, NUM_TOKENS, **more)
        for stream in streams:
            stream.wait_for(num_tokens)
        if all(len(stream.tokens) < NUM_TOKENS // 2 for stream in streams):
            return streams
        finish_all(streams)
    raise AssertionError("32 streams were never in their middle at once")


@pytest.fixture(scope="module")
def pair(zygote: Zygote, qwen3_oracle: Oracle) -> Iterator[AttnPair]:
    """An attention server; tests start the MLP servers."""
    ports = free_ports(2)
    patience = ("--afd-stall-timeout", f"{STALL_TIMEOUT_S:g}")
    attn = fleet.start_attn(zygote, qwen3_oracle.model, ports[0], *patience, *ROOM)
    with running([attn]):
        yield AttnPair(oracle=qwen3_oracle, attn=[attn], mlp_ports=ports)


@pytest.fixture(scope="module")
def expected(zygote: Zygote, pair: AttnPair) -> list[list[int]]:
    """What 32 clients get when nothing happens."""
    with _mlp(zygote, pair):
        fleet.wait_ready(pair.attn[0])
        return finish_all(_begin(pair.attn[0]))


@pytest.fixture(scope="session")
def hold_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, servers with the plant `hold_while_told` hold requests for long."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture
def long_hold(hold_file: Path) -> Iterator[None]:
    """No machine is too slow to bring MLP servers back while requests are held."""
    hold_file.touch()
    yield
    hold_file.unlink()


@pytest.fixture(scope="module")
def hasty(zygote: Zygote, pair: AttnPair, hold_file: Path) -> Iterator[Server]:
    """An attention server whose stall timeout is over soon."""
    model, port = pair.oracle.model, pair.mlp_ports[0]
    flags, env = ("--afd-stall-timeout", "4", *ROOM), {"TEST_HOLD_FILE": str(hold_file)}
    attn = fleet.start_attn(zygote, model, port, *flags, plant="hold_while_told", env=env)
    with running([attn]):
        yield attn


@pytest.mark.parametrize("victims", [pytest.param([1], marks=pytest.mark.slow), [0, 1]])
def test_killed_mlp_servers_that_restart_cost_32_streams_a_pause_and_not_a_token(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]], victims: list[int]
) -> None:
    attn = pair.attn[0]
    with _mlp(zygote, pair) as ranks:
        fleet.wait_ready(attn)
        streams = _begin(attn)

        _kill([ranks[victim] for victim in victims])
        _wait_state(attn, "stalled", "connection to MLP rank|MLP rank 1 went away")
        assert attn.get("/health")[0] == 200
        assert attn.get("/health_generate")[0] == 503
        status = _status(attn)
        assert status["stalled_for_s"] >= 0 and status["gives_up_in_s"] <= STALL_TIMEOUT_S
        both_s = status["stalled_for_s"] + status["gives_up_in_s"]
        assert both_s == pytest.approx(STALL_TIMEOUT_S, abs=0.01)
        late = Stream(attn.url, MANY[0], NUM_TOKENS)  # comes during the stall
        for victim in victims:
            ranks += _start(zygote, pair, only_rank=victim)

        assert finish_all(streams) == expected
        assert finish_all([late]) == expected[:1]
        _wait_state(attn, "ready")
        assert _status(attn)["num_failed_requests"] == 0


@pytest.mark.slow
def test_mlp_servers_that_die_twice_cost_two_pauses(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]]
) -> None:
    attn = pair.attn[0]
    with _mlp(zygote, pair, 1) as ranks:
        fleet.wait_ready(attn)
        streams = _begin(attn)
        losses = _status(attn)["num_losses"]

        for _ in range(2):
            _kill(ranks)
            num_tokens = max(len(stream.tokens) for stream in streams)
            assert num_tokens < NUM_TOKENS - 10
            ranks += _start(zygote, pair, 1)
            for stream in streams:
                stream.wait_for(num_tokens + 5)

        assert finish_all(streams) == expected
        assert _status(attn)["num_losses"] == losses + 2


@pytest.mark.slow
def test_a_rank_that_dies_during_a_prefill_costs_a_pause(zygote: Zygote, pair: AttnPair) -> None:
    attn = pair.attn[0]
    with _mlp(zygote, pair) as ranks:
        fleet.wait_ready(attn)
        undisturbed = finish_all(start_streams([attn.url], LONG, 8))
        fleet.forget_prefixes(attn)
        before = _prefill_rows(ranks[0])

        streams = start_streams([attn.url], LONG, 8)
        wait_until(lambda: _prefill_rows(ranks[0]) > before + 300, "some of the prefill")
        _kill([ranks[1]])
        num_without_tokens = sum(not stream.tokens for stream in streams)
        ranks += _start(zygote, pair, only_rank=1)

        assert finish_all(streams) == undisturbed
        assert num_without_tokens > 0


def _prefill_rows(rank: Server) -> int:
    text = rank.get("/metrics")[1]
    found = re.search(r"^sglang_afd_mlp_prefill_rows_total\{.*\} ([\d.e+]+)$", text, re.M)
    assert found, text
    return int(float(found[1]))


def test_a_stopped_mlp_server_is_a_pause_and_its_attention_server_attaches_again(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]]
) -> None:
    attn = pair.attn[0]
    with _mlp(zygote, pair) as ranks:
        fleet.wait_ready(attn)
        streams = _begin(attn)

        ranks[0].signal(signal.SIGSTOP)
        _wait_state(attn, "stalled")
        ranks[0].signal(signal.SIGCONT)

        assert finish_all(streams) == expected


@pytest.mark.slow
def test_another_model_is_refused_and_the_stall_goes_on_until_the_right_one_is_back(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]], tmp_path: Path
) -> None:
    attn = pair.attn[0]
    other = checkpoints.make_qwen3_moe(tmp_path / "other", seed=1)
    with _mlp(zygote, pair, 1) as ranks:
        fleet.wait_ready(attn)
        streams = _begin(attn)

        _kill(ranks)
        ranks += _start(zygote, pair, 1, model=other)
        _wait_state(attn, "stalled", "fingerprint")
        assert "fingerprint" in attn.text().rsplit("lost the MLP servers", 1)[1]
        _kill(ranks)
        ranks += _start(zygote, pair, 1)

        assert finish_all(streams) == expected


def test_a_network_that_loses_every_packet_for_a_while_costs_a_pause(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]]
) -> None:
    attn, port = pair.attn[0], free_ports(1)[0]
    with forwarding(port) as network:
        published = {"TEST_PUBLISHED_ADDRESS": f"tcp://127.0.0.1:{network.port}"}
        listen = ("--afd-listen", f"tcp://127.0.0.1:{port}")
        plant = "publish_another_address"
        with _mlp(zygote, pair, 1, *listen, plant=plant, env=published) as ranks:
            fleet.wait_ready(attn)
            streams = _begin(attn)

            network.cut()
            _wait_state(attn, "stalled")
            ranks[0].wait("/afd/v1/status", lambda body: body["attached_peers"] == 0)
            network.mend()

            assert finish_all(streams) == expected


def test_a_step_that_is_given_up_goes_on_with_the_same_tokens_when_the_mlp_servers_are_back(
    zygote: Zygote, pair: AttnPair, expected: list[list[int]], hasty: Server, long_hold: None
) -> None:
    with _mlp(zygote, pair) as ranks:
        fleet.wait_ready(hasty)
        undisturbed = _begin(hasty, return_logprob=True)
        finish_all(undisturbed)
        earlier = _status(hasty)
        streams = _begin(hasty, return_logprob=True)
        queued = start_streams([hasty.url], [*MANY[:3], LONG[0]], NUM_TOKENS)

        ranks[0].signal(signal.SIGSTOP)
        enough = earlier["num_retracted_requests"] + len(MANY)
        hasty.wait("/afd/v1/status", lambda body: body["num_retracted_requests"] >= enough)
        assert _status(hasty)["state"] == "stalled"
        ranks[0].signal(signal.SIGCONT)

        assert finish_all(streams) == expected
        assert finish_all(queued)[:3] == expected[:3]
        for stream, before in zip(streams, undisturbed, strict=True):
            assert stream.text == before.text
            assert stream.logprobs == pytest.approx(before.logprobs, abs=1e-4)
        assert _status(hasty)["num_failed_requests"] == earlier["num_failed_requests"]


def test_requests_end_with_503_when_nobody_comes_back_and_the_server_serves_again_later(
    zygote: Zygote, pair: AttnPair, hasty: Server
) -> None:
    with _mlp(zygote, pair, 1) as ranks:
        fleet.wait_ready(hasty)
        streams = _begin(hasty)
        _kill(ranks)
        left = Stream(hasty.url, MANY[0], NUM_TOKENS)  # comes during the stall

        for stream in [*streams, left]:
            stream.finish()

        errors = [stream.error or "" for stream in [*streams, left]]
        assert all("503" in error and "MLP servers are away" in error for error in errors), errors
        _wait_state(hasty, "detached")
        assert hasty.get("/health")[0] == 200
        status, answer = fetch(f"{hasty.url}/generate", {"text": "experts"})
        assert (status, answer["error"]["code"]) == (503, 503)
        ranks += _start(zygote, pair, 1)
        fleet.wait_ready(hasty)
        got = ask_one_by_one(hasty.url)

    assert differences(pair.oracle.one_by_one, got) == []


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["send_zeros_again", "change_a_token"])
def test_other_rows_or_tokens_after_a_stall_would_be_noticed(
    zygote: Zygote,
    pair: AttnPair,
    expected: list[list[int]],
    plant: str,
    hold_file: Path,
    long_hold: None,
) -> None:
    model, port = pair.oracle.model, pair.mlp_ports[0]
    timeout = {"send_zeros_again": f"{STALL_TIMEOUT_S:g}", "change_a_token": "2"}[plant]
    flags, env = ("--afd-stall-timeout", timeout, *ROOM), {"TEST_HOLD_FILE": str(hold_file)}
    plants = f"{plant}+hold_while_told"
    faulty = fleet.start_attn(zygote, model, port, *flags, plant=plants, env=env)
    with running([faulty]), _mlp(zygote, pair) as ranks:
        fleet.wait_ready(faulty)
        streams = _begin(faulty)

        ranks[0].signal(signal.SIGSTOP)
        _wait_state(faulty, "stalled")
        if plant == "change_a_token":
            faulty.wait("/afd/v1/status", lambda body: body["num_retracted_requests"] > 0)
        ranks[0].signal(signal.SIGCONT)

        tokens = [stream.finish() for stream in streams]
        errors = [stream.error for stream in streams if stream.error is not None]
        assert all("tokens were taken back" in error for error in errors), errors
        assert tokens != expected or errors
