from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_afd.config import (
    AfdConfig,
    Role,
    Transport,
    check_exchange_address,
    choose_transport,
)
from sglang_afd.errors import ConfigError

MLP_URL = "http://127.0.0.1:30010"


def attn(**settings: Any) -> AfdConfig:
    return AfdConfig(**{"role": Role.ATTN, "mlp_url": MLP_URL} | settings)


def mlp(**settings: Any) -> AfdConfig:
    return AfdConfig(role=Role.MLP, **settings)


RANGES = {
    "max_rows": ("--afd-max-rows", 1, 65536),
    "max_peers": ("--afd-max-peers", 1, 1024),
    "mlp_cuda_graph_max_bs": ("--afd-mlp-cuda-graph-max-bs", 1, 65536),
    "deep_gemm_sms": ("--afd-deep-gemm-sms", 0, 1024),
    "max_mlp_ranks": ("--afd-max-mlp-ranks", 1, 64),
    "stall_timeout_s": ("--afd-stall-timeout", 0.1, 300),
    "attach_timeout_s": ("--afd-attach-timeout", 1, 86400),
    "heartbeat_timeout_s": ("--afd-heartbeat-timeout", 0.1, 60),
    "drain_timeout_s": ("--afd-drain-timeout", 0, 86400),
}
OF_MLP = ("max_peers", "mlp_cuda_graph_max_bs", "deep_gemm_sms")


@pytest.mark.parametrize("rows", ["8,", "0", "8;16", "many", "-8", "8,70000"])
def test_a_list_of_rows_that_is_none_is_refused(rows: str) -> None:
    with pytest.raises(ConfigError, match="--afd-mlp-cuda-graph-bs"):
        mlp(mlp_cuda_graph_bs=rows)


def test_rows_beyond_the_largest_graph_are_refused_and_not_left_out() -> None:
    with pytest.raises(ConfigError, match="2048 rows, --afd-mlp-cuda-graph-max-bs allows 1024"):
        mlp(mlp_cuda_graph_bs="8,2048")

    assert mlp(mlp_cuda_graph_bs="8,2048", mlp_cuda_graph_max_bs=2048).mlp_cuda_graph_bs == "8,2048"


@pytest.mark.parametrize(
    ("flag", "is_cuda", "address", "expected"),
    [
        ("auto", True, "ipc:///x", Transport.CUDA_IPC),
        ("auto", True, "tcp://10.0.0.1:1", Transport.ZMQ),
        ("auto", False, "ipc:///x", Transport.ZMQ),
        ("zmq", True, "ipc:///x", Transport.ZMQ),
        ("cuda_ipc", True, "ipc:///x", Transport.CUDA_IPC),
    ],
)
def test_rows_travel_on_the_gpu_where_both_roles_can_reach_it(
    flag: str, is_cuda: bool, address: str, expected: Transport
) -> None:
    assert choose_transport(flag, is_cuda=is_cuda, address=address) is expected


@pytest.mark.parametrize(
    ("is_cuda", "address", "message"),
    [
        (False, "ipc:///x", "cuda_ipc needs --device cuda"),
        (True, "tcp://10.0.0.1:1", "cuda_ipc needs an exchange address on this host"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(is_cuda: bool, address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_transport("cuda_ipc", is_cuda=is_cuda, address=address)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "nccl"}, "--afd-transport nccl is not auto, zmq or cuda_ipc"),
        ({"dispatch_dtype": "int8"}, "--afd-dispatch-dtype int8 is neither auto nor fp8"),
        ({"wait_policy": "sleep"}, "--afd-wait-policy sleep is not auto, poll or memop"),
        ({"dispatch_dtype": "fp8", "transport": "zmq"}, "fp8 needs --afd-transport cuda_ipc"),
    ],
)
def test_an_unknown_way_to_send_rows_is_refused(settings: dict[str, str], message: str) -> None:
    for make in (attn, mlp):
        with pytest.raises(ConfigError, match=message):
            make(**settings)


def test_every_number_has_a_range() -> None:
    numbers = {
        field.name for field in dataclasses.fields(AfdConfig) if field.type in ("int", "float")
    }

    assert numbers == set(RANGES) | {"ep_rank"}


@pytest.mark.parametrize("field", RANGES)
def test_both_ends_of_a_range_are_allowed(field: str) -> None:
    _, lowest, highest = RANGES[field]

    make = mlp if field in OF_MLP else attn
    others = {"router_url": MLP_URL} if field == "drain_timeout_s" else {}

    assert getattr(make(**{field: lowest}, **others), field) == lowest
    assert getattr(make(**{field: highest}, **others), field) == highest


@pytest.mark.parametrize("field", RANGES)
def test_a_value_out_of_its_range_is_refused_with_the_range(field: str) -> None:
    flag, lowest, highest = RANGES[field]

    for value in (lowest - 0.01, highest + 1, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError) as caught:
            attn(**{field: value})
        assert str(caught.value) == (
            f"{flag} {value:g} is out of range; {lowest:g} to {highest:g} are allowed"
        )


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        attn().max_rows = 1  # type: ignore[misc]


def test_the_attention_role_needs_the_address_of_the_experts() -> None:
    with pytest.raises(ConfigError, match=r"--role attn needs --afd-mlp URL"):
        attn(mlp_url="")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"listen": "ipc:///x"}, "--afd-listen"),
        ({"ep_rank": 0}, "--afd-ep-rank"),
        ({"leader_url": MLP_URL}, "--afd-leader"),
        ({"max_peers": 2}, "--afd-max-peers"),
        ({"is_spare": True}, "--afd-spare"),
    ],
)
def test_the_attention_role_refuses_flags_of_the_other(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} belongs to --role mlp"):
        attn(**settings)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"mlp_url": MLP_URL}, "--afd-mlp"),
        ({"stall_timeout_s": 5.0}, "--afd-stall-timeout"),
        ({"attach_timeout_s": 5.0}, "--afd-attach-timeout"),
    ],
)
def test_the_mlp_role_refuses_flags_of_the_other(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} belongs to --role attn"):
        mlp(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ep_rank": 0},
        {"ep_rank": 0, "leader_url": f"{MLP_URL},http://spare"},
        {"ep_rank": 3, "leader_url": "http://mlp-0"},
        {"is_spare": True, "leader_url": MLP_URL, "listen": "ipc:///x"},
    ],
)
def test_a_rank_is_complete_with_its_leader(settings: dict[str, Any]) -> None:
    assert mlp(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ep_rank": -2}, "--afd-ep-rank -2 is not a rank; ranks start at 0"),
        ({"ep_rank": 1}, "--afd-ep-rank 1 needs --afd-leader URL"),
        ({"ep_rank": 0, "leader_url": MLP_URL}, "--afd-ep-rank 0 is the leader"),
        ({"leader_url": MLP_URL}, "--afd-leader .* needs --afd-ep-rank R, or --afd-spare"),
        ({"ep_rank": 1, "leader_url": "nonsense"}, "--afd-leader nonsense is not an address"),
        ({"ep_rank": 1, "leader_url": f"{MLP_URL},x"}, "--afd-leader x is not an address"),
        ({"ep_rank": 1, "leader_url": f"{MLP_URL},"}, "--afd-leader  is not an address"),
        ({"ep_rank": 1, "leader_url": f"{MLP_URL}, {MLP_URL}/"}, f"names {MLP_URL} twice"),
        ({"is_spare": True}, "--afd-spare needs --afd-leader URL"),
        ({"is_spare": True, "leader_url": "x"}, "--afd-leader x is not an address"),
        (
            {"is_spare": True, "leader_url": MLP_URL, "ep_rank": 1},
            "--afd-spare with --afd-ep-rank 1: a spare takes whichever rank is missing",
        ),
        ({"is_spare": True, "leader_url": MLP_URL, "listen": "x"}, "--afd-listen x is neither"),
    ],
)
def test_a_rank_that_does_not_fit_its_leader_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        mlp(**settings)


@pytest.mark.parametrize("url", [MLP_URL, "http://mlp-0", "http://[::1]:80/", "http://a.b:65535"])
def test_an_http_address_is_accepted(url: str) -> None:
    assert attn(mlp_url=url).mlp_url == url


def test_rank_0_may_be_at_several_addresses() -> None:
    config = attn(mlp_url="http://main:1/, http://[::1]:2")

    assert config.mlp_urls == ("http://main:1", "http://[::1]:2")
    assert mlp(is_spare=True, leader_url="http://a,http://b").leader_urls == (
        "http://a",
        "http://b",
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://[",
        "127.0.0.1:30010",
        "https://host:1",
        "tcp://host:1",
        "http://",
        "http://:80",
        "http://host:0",
        "http://host:65536",
        "http://host:x",
    ],
)
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attn(mlp_url=url)

    assert str(caught.value) == f"--afd-mlp {url} is not an address like http://host:port"


LONGEST_IPC = "ipc:///" + "x" * 106


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/x",
        LONGEST_IPC,
        "tcp://0.0.0.0:0",
        "tcp://*:7000",
        "tcp://[::1]:7000",
        "tcp://h:1",
    ],
)
def test_an_exchange_address_is_accepted(address: str) -> None:
    check_exchange_address("--afd-listen", address)

    assert mlp(listen=address).listen == address


@pytest.mark.parametrize("address", ["ipc://", "ipc://relative", "ipc://@x", LONGEST_IPC + "x"])
def test_an_ipc_path_that_cannot_be_bound_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="needs an absolute path of at most 107 bytes"):
        mlp(listen=address)


@pytest.mark.parametrize(
    "address", ["/run/x", "tcp://host", "tcp://:1", "tcp://h:65536", "tcp://h:x", "udp://h:1", "x"]
)
def test_what_is_no_exchange_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mlp(listen=address)

    assert str(caught.value) == (
        f"--afd-listen {address} is neither ipc:///path nor tcp://host:port"
    )


ROUTER_URL = "http://127.0.0.1:30000"


def test_with_a_router_nobody_needs_to_know_where_rank_0_is() -> None:
    assert attn(mlp_url="", router_url=ROUTER_URL).router_urls == (ROUTER_URL,)
    assert mlp(ep_rank=3, router_url=f"{ROUTER_URL},http://[::1]:1").router_urls == (
        ROUTER_URL,
        "http://[::1]:1",
    )


def test_a_spare_needs_its_leader_with_a_router_too() -> None:
    with pytest.raises(ConfigError, match="--afd-spare needs --afd-leader"):
        mlp(is_spare=True, router_url=ROUTER_URL)


def test_without_a_router_an_attention_server_is_told_both_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"needs --afd-mlp URL, .* or --afd-router URL"):
        attn(mlp_url="")


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://h:1", f"{ROUTER_URL},", "http://h:0"])
def test_what_is_no_address_of_a_router_is_refused(url: str) -> None:
    for make in (attn, mlp):
        with pytest.raises(ConfigError, match="--afd-router .*is not an address like"):
            make(router_url=url)


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "https://gpu-7.example:443", "http://[::1]:30001/", "http://10.0.0.1:65535"],
)
def test_an_address_to_be_reached_at_is_accepted(url: str) -> None:
    assert attn(advertise_url=url).advertise_url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "h:1",
        "http://h:0",
        "http://h:65536",
        "http://h:1/path",
        "http://u@h:1",
        "ftp://h:1",
    ],
)
def test_an_address_that_nobody_could_reach_a_server_at_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--afd-advertise-url .* is not an address like"):
        mlp(advertise_url=url)


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 65, "a/b", "a\n"])
def test_a_name_that_no_registration_could_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--afd-server-id"):
        attn(server_id=name)


def test_a_drain_that_nobody_would_notice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--afd-drain-timeout needs --afd-router URL"):
        attn(drain_timeout_s=5.0)

    assert attn(drain_timeout_s=5.0, router_url=ROUTER_URL).drain_timeout_s == 5.0
