"""Fleets of other shapes behind the router: orders, several models, addresses, leases that flap."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from compare import NUM_TOKENS, PROMPTS, ask_at_once, ask_one_by_one, differences
from fleet import Oracle
from routed_fleet import RoutedFleet
from routed_streams import Load, RoutedStream
from servers import Zygote, fetch

pytestmark = pytest.mark.slow

Make = Callable[..., RoutedFleet]
NUM_STREAMED = 900


@pytest.fixture
def make(zygote: Zygote, qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes fleets without any server."""
    with ExitStack() as stack:

        def make(**options: Any) -> RoutedFleet:
            directory = tmp_path_factory.mktemp("routed")
            return stack.enter_context(RoutedFleet(zygote, qwen3, directory, **options))

        yield make


@pytest.mark.parametrize("order", ["router mlp attn", "mlp attn router", "attn router mlp"])
def test_servers_and_router_may_start_in_any_order(
    make: Make, qwen3_oracle: Oracle, order: str
) -> None:
    fleet = make()
    for kind in order.split():
        match kind:
            case "router":
                fleet.start_router()
                fleet.wait("the router listens", lambda: "router" in fleet.groups())
            case "mlp":
                for rank in (0, 1):
                    fleet.start_mlp(f"mlp-{rank}", rank=rank, num_ranks=2)
                    fleet.wait_told(f"mlp-{rank}")
            case "attn":
                fleet.start_attn("attn-0")
                fleet.wait_told("attn-0")

    fleet.wait_serving("attn-0", "mlp-0", "mlp-1")

    got = ask_one_by_one(fleet.url, PROMPTS[:4])
    assert differences(qwen3_oracle.one_by_one[:4], got) == []


@pytest.mark.parametrize("is_file_lost", [False, True])
def test_the_epoch_never_goes_back_over_restarts_of_the_router_and_of_servers(
    make: Make, tmp_path: Path, is_file_lost: bool
) -> None:
    path = tmp_path / "state.json"
    fleet = make(router_flags=("--state-file", str(path)))
    fleet.start_router()
    fleet.start_mlp("mlp-0")
    for name in ("attn-0", "attn-1"):
        fleet.start_attn(name)
    fleet.wait_serving("mlp-0", "attn-0", "attn-1")
    epochs = [fleet.group()["epoch"]]

    for _ in range(2):
        fleet.kill_router()
        if is_file_lost:
            path.unlink()
        fleet.servers["attn-1"].kill_tree()  # while no router sees it
        fleet.start_attn("attn-1")
        fleet.start_router()
        fleet.wait_serving("mlp-0", "attn-0", "attn-1")
        epochs.append(fleet.group()["epoch"])

    assert epochs == sorted(set(epochs))
    assert [group["name"] for group in fleet.groups()["groups"]] == ["group-1"]

    def have_all_heard() -> bool:  # each does when it renews its lease
        told = [server.get("/afd/v1/status")[1]["router"] for server in fleet.servers.values()]
        return {(one["group"], one["epoch"]) for one in told} == {("group-1", epochs[-1])}

    fleet.wait("all have heard of the last epoch", have_all_heard)


def test_several_models_are_behind_one_router_and_none_is_taken_for_another(
    make: Make, qwen2: Path, qwen3_oracle: Oracle, qwen2_oracle: Oracle
) -> None:
    fleet = make()
    fleet.start_router()
    fleet.start_mlp("mlp-three")
    fleet.start_attn("three", "--served-model-name", "three")
    fleet.start_mlp("mlp-two", model=qwen2)
    fleet.start_attn("two", "--served-model-name", "two", model=qwen2)
    fleet.wait_serving("three", "mlp-three", "two", "mlp-two")

    texts = {name: _completion(fleet.url, name)[1] for name in ("two", "three")}
    unknown = _completion(fleet.url, "four")
    unnamed = fetch(f"{fleet.url}/generate", {"text": "experts"})
    listed = fetch(f"{fleet.url}/v1/models")[1]["data"]

    for name, oracle in (("two", qwen2_oracle), ("three", qwen3_oracle)):
        own = fleet.servers[name].url
        assert differences(oracle.one_by_one[:4], ask_one_by_one(own, PROMPTS[:4])) == []
        assert texts[name] == _completion(own, name)[1]
    assert texts["two"] != texts["three"]
    assert (unknown[0], unknown[1]["error"]["code"]) == (404, "model_not_found")
    assert unnamed[0] == 400
    assert {card["id"] for card in listed} == {"two", "three"}

    with ThreadPoolExecutor(1) as pool:
        fleet.servers["two"].signal(signal.SIGTERM)
        fleet.servers["two"].wait_ended()
        held = pool.submit(_completion, fleet.url, "two")
        other = _completion(fleet.url, "three")
        fleet.start_attn("two", "--served-model-name", "two", model=qwen2)
        assert held.result() == (200, texts["two"])
    assert other == (200, texts["three"])


def _completion(url: str, model: str) -> tuple[int, Any]:
    """Status, and the text or the whole error."""
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    status, answer = fetch(f"{url}/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer


def test_a_whole_fleet_works_on_ipv6(make: Make, qwen3_oracle: Oracle) -> None:
    fleet = make(host="::1")
    fleet.start_router()
    for rank in (1, 0):
        fleet.start_mlp(f"mlp-{rank}", rank=rank, num_ranks=2)
    fleet.start_attn("attn-0")
    fleet.wait_serving("attn-0", "mlp-0", "mlp-1")

    got = ask_one_by_one(fleet.url, PROMPTS[:4])

    assert differences(qwen3_oracle.one_by_one[:4], got) == []
    assert {row["url"] for row in fleet.rows()} == {s.url for s in fleet.servers.values()}
    assert all(row["url"].startswith("http://[::1]:") for row in fleet.rows())


def test_two_routers_and_their_servers_share_a_host(make: Make, qwen3_oracle: Oracle) -> None:
    fleets = [make(), make()]
    for fleet in fleets:
        fleet.start_attn("attn-0")
        fleet.start_router()
    for fleet in fleets:
        fleet.start_mlp("mlp-0")
    for fleet in fleets:
        fleet.wait_serving("attn-0", "mlp-0")

    got = ask_at_once([fleet.url for fleet in fleets])

    assert differences(qwen3_oracle.at_once, got) == []
    for fleet in fleets:
        assert {row["url"] for row in fleet.rows()} == {s.url for s in fleet.servers.values()}
        assert [row["num_served"] for row in fleet.group()["attn"]] == [len(PROMPTS) // 2]


def test_a_server_whose_lease_flaps_costs_no_request_and_is_trusted_later_each_time(
    make: Make, qwen3_oracle: Oracle
) -> None:
    fleet = make(router_flags=("--lease-s", "2"))
    fleet.start_router()
    fleet.start_mlp("mlp-0")
    for name in ("steady", "flaps"):
        fleet.start_attn(name)
    fleet.wait_serving("mlp-0", "steady", "flaps")
    name, epoch = fleet.group()["name"], fleet.group()["epoch"]

    reasons = []
    with Load(fleet.address, PROMPTS, NUM_TOKENS) as load:
        for _ in range(3):
            server = fleet.servers["flaps"]
            server.signal_tree(signal.SIGSTOP)
            fleet.wait("it is late", lambda: "lease ran out" in fleet.standing("flaps")[1], 4)
            server.signal_tree(signal.SIGCONT)
            fleet.wait("it is heard", lambda: "lease ran out" not in fleet.standing("flaps")[1], 4)
            reasons.append(fleet.standing("flaps")[1])
            fleet.wait_serving("flaps")

    assert load.errors == []
    assert load.answers == {
        prompt: {answer.token_ids}
        for prompt, answer in zip(PROMPTS, qwen3_oracle.one_by_one, strict=True)
    }
    probation = "late again and again"
    assert [probation in reason for reason in reasons] == [False, True, True]
    assert (fleet.group()["name"], fleet.group()["epoch"]) == (name, epoch)


def test_a_stream_goes_on_where_its_attention_server_moves_to_another_groups_experts(
    make: Make,
) -> None:
    fleet = make(router_flags=("--ratio", "1:1"))
    fleet.start_router()
    for attn, mlp in (("attn-0", "mlp-0"), ("attn-1", "mlp-1")):
        fleet.start_mlp(mlp)
        fleet.wait(f"{mlp} serves", lambda mlp=mlp: fleet.standing(mlp)[0] == "serving")  # type: ignore[misc]
        fleet.start_attn(attn)
        fleet.wait_serving(attn, mlp)
    assert [_names(group) for group in fleet.groups()["groups"]] == [
        ["attn-0", "mlp-0"],
        ["attn-1", "mlp-1"],
    ]
    address = ("127.0.0.1", fleet.servers["attn-0"].port)  # past the router, which knows better
    undisturbed = RoutedStream(address, PROMPTS[0], NUM_STREAMED)
    assert undisturbed.error() == ""
    stream = RoutedStream(address, PROMPTS[0], NUM_STREAMED)
    fleet.wait("a token", lambda: stream.has_begun)
    assert not stream.is_over

    fleet.servers["mlp-0"].kill_tree()  # for good

    fleet.wait_serving("attn-0", "attn-1", "mlp-1")
    assert (stream.error(), stream.tokens()) == ("", undisturbed.tokens())
    ready = [group for group in fleet.groups()["groups"] if group["state"] == "ready"]
    assert [_names(group) for group in ready] == [["attn-0", "attn-1", "mlp-1"]]


def _names(group: Any) -> list[str]:
    return [row["server_id"] for row in group["attn"] + group["mlp"]]
