"""Servers that register with the router: wired by their leases, killed and restarted under load.

One fleet for all of these tests, each of which leaves it whole.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from compare import NUM_TOKENS, PROMPTS, ask_at_once, ask_one_by_one, differences
from fleet import Oracle
from routed_fleet import RoutedFleet
from routed_streams import Load, RoutedStream
from servers import SUPPORT, Zygote, fetch

ATTN, MLP = ("attn-0", "attn-1"), ("mlp-0", "mlp-1")
RUNNING = 16  # at once on each attention server, so that half of 64 streams have no token yet
FEW = ("--max-running-requests", str(RUNNING))
HOLD = ("--hold-timeout", "150")  # a busy machine takes its time to start a server again
MANY = tuple(f"{prompt} {word}" for prompt in PROMPTS for word in ("a", "b", "c", "d"))  # 64
BENCH_SERVING = SUPPORT / "bench_serving.py"


@pytest.fixture(scope="module")
def routed(
    zygote: Zygote, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoutedFleet]:
    """Two attention servers and two MLP ranks; attention first, rank 0 last, then the router."""
    directory = tmp_path_factory.mktemp("routed")
    with RoutedFleet(zygote, qwen3, directory, router_flags=HOLD) as routed:
        for name in ATTN:
            routed.start_attn(name, *FEW)
        for rank in (1, 0):
            _start_rank(routed, rank)
        routed.start_router()
        yield routed


@pytest.fixture
def fleet(routed: RoutedFleet) -> RoutedFleet:
    """The same, all of which serve, whatever became of them in the test before."""
    for name in ATTN:
        if not routed.servers[name].is_alive():
            routed.start_attn(name, *FEW)
    for rank, name in enumerate(MLP):
        if not routed.servers[name].is_alive():
            _start_rank(routed, rank)
    routed.wait_serving(*ATTN, *MLP)
    return routed


def _start_rank(fleet: RoutedFleet, rank: int) -> None:
    fleet.start_mlp(MLP[rank], rank=rank, num_ranks=2)


def _errors(streams: list[RoutedStream]) -> list[str]:
    return [error for stream in streams if (error := stream.error())]


def _errors_without_a_token(streams: list[RoutedStream]) -> list[str]:
    """Judged at the end: of some a token is on its way when their server dies."""
    errors = zip(streams, [stream.error() for stream in streams], strict=True)
    return [error for stream, error in errors if error and not stream.has_begun]


def _num_replayed(fleet: RoutedFleet) -> int:
    text = fetch(f"{fleet.url}/metrics")[1]
    (found,) = re.findall(r"^sgl_router_afd_replayed_requests_total (\d+)", text, re.M)
    return int(found)


def _wait_until_begun(fleet: RoutedFleet, streams: list[RoutedStream], num: int) -> None:
    fleet.wait(f"{num} streams began", lambda: sum(s.has_begun for s in streams) >= num)


def _many_streams(fleet: RoutedFleet) -> list[RoutedStream]:
    """64, of which some have begun on each of the two servers, and many have not."""
    streams = [RoutedStream(fleet.address, prompt, 100) for prompt in MANY]
    _wait_until_begun(fleet, streams, RUNNING + 4)  # more than one server runs at once
    return streams


def _is_as_stock(load: Load, oracle: Oracle) -> bool:
    """Has every client got stock SGLang's tokens each time, and at all?"""
    expected = {
        prompt: {answer.token_ids}
        for prompt, answer in zip(PROMPTS, oracle.one_by_one, strict=True)
    }
    return load.answers == expected


def test_servers_that_know_the_router_alone_answer_as_stock_sglang_does(
    fleet: RoutedFleet, qwen3_oracle: Oracle
) -> None:
    one_by_one = ask_one_by_one(fleet.url, PROMPTS[:4])
    at_once = ask_at_once([fleet.url])

    assert differences(qwen3_oracle.one_by_one[:4], one_by_one) == []
    assert differences(qwen3_oracle.at_once, at_once) == []

    def have_both_served() -> bool:
        rows = fleet.group()["attn"]
        is_attached = {tuple(sorted(row["attached"])) for row in rows} == {MLP}
        return is_attached and [row["num_served"] > 0 for row in rows] == [True, True]

    fleet.wait("both are attached to both and have served", have_both_served)


def test_the_openai_client_is_served_by_registered_servers(fleet: RoutedFleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        ask = {
            "model": model.id,
            "messages": [{"role": "user", "content": "tell me of the experts"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        whole = client.chat.completions.create(**ask)
        pieces = list(client.chat.completions.create(**ask, stream=True))
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(**ask | {"model": "another"})

    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert streamed == whole.choices[0].message.content != ""
    assert unknown.value.code == "model_not_found" and model.id in unknown.value.message


def test_a_killed_attention_server_costs_no_request_that_had_no_token(fleet: RoutedFleet) -> None:
    epoch = fleet.group()["epoch"]
    streams = _many_streams(fleet)

    fleet.servers["attn-0"].kill_tree()
    num_waiting = sum(not stream.has_begun for stream in streams)
    fleet.start_attn("attn-0", *FEW)

    assert num_waiting >= RUNNING, "most of the streams had begun, so that this shows nothing"
    assert _errors_without_a_token(streams) == [] and _num_replayed(fleet) > 0
    broken = [stream for stream in streams if stream.error()]
    assert 0 < len(broken) <= RUNNING
    assert all(stream.ended_broken() for stream in broken)
    fleet.wait_serving("attn-0")
    assert fleet.group()["epoch"] > epoch


def test_a_killed_mlp_server_that_comes_back_costs_a_pause(
    fleet: RoutedFleet, qwen3_oracle: Oracle
) -> None:
    epoch = fleet.group()["epoch"]
    streams = [RoutedStream(fleet.address, prompt, 100) for prompt in PROMPTS]
    _wait_until_begun(fleet, streams, len(streams))

    fleet.servers["mlp-1"].kill_tree()
    fleet.wait("the group is degraded by a stall", lambda: _is_stalled(fleet.group()))
    held = [RoutedStream(fleet.address, prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
    _start_rank(fleet, 1)

    assert _errors([*streams, *held]) == []
    tokens = [tuple(stream.tokens()) for stream in (*streams, *held)]
    expected = [answer.token_ids for answer in qwen3_oracle.one_by_one]
    assert [one[:NUM_TOKENS] for one in tokens] == [*expected, *expected[:4]]
    fleet.wait_serving(*ATTN, *MLP)
    assert fleet.group()["epoch"] > epoch


def _is_stalled(group: Any) -> bool:
    return group["state"] == "degraded" and "stalled" in group["reason"]


def test_a_restarted_router_serves_again_and_knows_the_epoch(
    fleet: RoutedFleet, qwen3_oracle: Oracle
) -> None:
    before = fleet.group()
    with Load(fleet.address, PROMPTS, NUM_TOKENS) as load:
        fleet.wait("some answers", lambda: load.num_answers >= 4)

        fleet.kill_router()
        fleet.start_router()
        fleet.wait_serving(*ATTN, *MLP)
        num_begun, num_answers = load.num_begun, load.num_answers
        fleet.wait("all have asked again", lambda: load.num_answers > num_answers + 32)

    assert load.errors_since(num_begun) == []
    assert _is_as_stock(load, qwen3_oracle)
    after = fleet.group()
    assert (after["name"], after["epoch"]) == (before["name"], before["epoch"])


@pytest.mark.slow
def test_every_server_is_restarted_under_load_and_no_request_is_lost(
    fleet: RoutedFleet, qwen3_oracle: Oracle
) -> None:
    with Load(fleet.address, PROMPTS, NUM_TOKENS) as load:
        for rank in (0, 1):
            fleet.servers[MLP[rank]].signal(signal.SIGTERM)
            fleet.servers[MLP[rank]].wait_ended()
            _start_rank(fleet, rank)
            fleet.wait_serving(*ATTN, *MLP)
        fleet.servers["attn-0"].signal(signal.SIGTERM)
        fleet.servers["attn-0"].wait_ended()
        fleet.start_attn("attn-0", *FEW)
        fleet.wait_serving(*ATTN)
        fleet.ask("POST", "/afd/v1/servers/attn-1/drain", {"reason": "a new version"})
        fleet.wait("it may stop", lambda: _may_stop(fleet, "attn-1"))
        assert fleet.standing("attn-1") == ("draining", "a new version")
        fleet.servers["attn-1"].kill_tree()
        fleet.start_attn("attn-1", *FEW)
        fleet.wait_serving(*ATTN)

    assert load.errors == []
    assert _is_as_stock(load, qwen3_oracle)


def _may_stop(fleet: RoutedFleet, name: str) -> bool:
    status, body = fleet.servers[name].get("/afd/v1/status")
    return status == 200 and body["router"]["may_stop"]


@pytest.mark.slow
def test_a_router_that_neither_replays_nor_holds_would_be_noticed(fleet: RoutedFleet) -> None:
    fleet.kill_router()
    fleet.start_router("--retry-budget", "0", "--hold-timeout", "0")
    fleet.wait_serving(*ATTN, *MLP)
    streams = _many_streams(fleet)

    fleet.servers["attn-0"].kill_tree()
    num_waiting = sum(not stream.has_begun for stream in streams)
    lost = _errors_without_a_token(streams)
    fleet.start_attn("attn-0", *FEW)
    fleet.wait_serving(*ATTN)
    with Load(fleet.address, PROMPTS, NUM_TOKENS) as load:
        fleet.servers["mlp-1"].signal(signal.SIGTERM)
        fleet.servers["mlp-1"].wait_ended()
        _start_rank(fleet, 1)
        fleet.wait_serving(*ATTN, *MLP)

    fleet.kill_router()
    fleet.start_router()
    assert num_waiting >= RUNNING, "most of the streams had begun, so that this shows nothing"
    assert lost and all("--retry-budget is spent" in error for error in lost)
    assert any(error.startswith("503") for error in load.errors)


@pytest.mark.slow
def test_bench_serving_of_sglang_measures_the_router(fleet: RoutedFleet, tmp_path: Path) -> None:
    num_prompts, result = 24, tmp_path / "result.jsonl"
    command = [
        *(sys.executable, "-W", "ignore", str(BENCH_SERVING)),
        *("--backend", "sglang", "--base-url", fleet.url, "--model", str(fleet.model)),
        *("--dataset-name", "random-ids", "--random-input-len", "24", "--random-output-len", "16"),
        *("--random-range-ratio", "1.0", "--num-prompts", str(num_prompts)),
        *("--request-rate", "20", "--max-concurrency", "12", "--output-file", str(result)),
    ]

    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(SUPPORT.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (measured,) = map(json.loads, result.read_text().splitlines())
    assert measured["completed"] == num_prompts
    assert measured["total_output_tokens"] == 16 * num_prompts
    assert measured["mean_ttft_ms"] > 0 and measured["mean_itl_ms"] > 0
    assert re.search(rf"Successful requests: +{num_prompts}\b", done.stdout)


def test_no_log_of_this_fleet_holds_a_traceback(fleet: RoutedFleet) -> None:
    logs = fleet.logs()

    assert [log.name for log in logs if "Traceback" in log.read_text(errors="replace")] == []
