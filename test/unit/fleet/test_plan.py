from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.config import LaunchConfig, parse_args
from sglang_afd.fleet.on_gpus import OnGpus
from sglang_afd.fleet.plan import Plan, router_url
from sglang_afd.fleet.probe import missing_from
from sglang_afd.fleet.spec import ServerSpec
from sglang_afd.launch import what_next

CPU = OnGpus()


def plan(config: LaunchConfig, on_gpus: OnGpus = CPU) -> dict[str, list[str]]:
    """Arguments of each server by name, on ports 20000 and up."""
    return {server.name: list(server.argv) for server in servers_of(config, on_gpus)}


def servers_of(config: LaunchConfig, on_gpus: OnGpus = CPU) -> list[ServerSpec]:
    return Plan(
        config=config,
        model_path=Path("/model"),
        ports=range(20000, 20000 + config.mlp + config.attn + config.spares),
        on_gpus=on_gpus,
        python="python",
    ).servers()


def value_of(flag: str, argv: list[str]) -> str:
    return argv[argv.index(flag) + 1]


def _places(flag: str, argv: list[str]) -> list[int]:
    return [at for at, word in enumerate(argv) if word == flag]


def test_every_server_gets_its_own_port_and_the_addresses_of_those_it_needs() -> None:
    servers = plan(LaunchConfig(attn=2, mlp=2))

    assert list(servers) == ["mlp-0", "mlp-1", "attn-0", "attn-1", "router"]
    assert [value_of("--port", argv) for argv in servers.values()] == [
        "20000",
        "20001",
        "20002",
        "20003",
        "30000",
    ]
    assert "--afd-leader" not in servers["mlp-0"]
    assert value_of("--afd-leader", servers["mlp-1"]) == "http://127.0.0.1:20000"
    assert value_of("--afd-ep-rank", servers["mlp-1"]) == "1"
    assert value_of("--ep-size", servers["mlp-1"]) == "2"
    assert value_of("--afd-mlp", servers["attn-1"]) == "http://127.0.0.1:20000"
    first_url = servers["router"].index("--attn") + 1
    assert servers["router"][first_url : first_url + 2] == [
        "http://127.0.0.1:20002",
        "http://127.0.0.1:20003",
    ]


def test_spares_and_everybody_who_has_to_find_rank_0_get_one_list_of_addresses() -> None:
    servers = plan(LaunchConfig(attn=1, mlp=2, spares=2))

    leaders = "http://127.0.0.1:20000,http://127.0.0.1:20003,http://127.0.0.1:20004"
    assert list(servers) == ["mlp-0", "mlp-1", "mlp-2", "mlp-3", "attn-0", "router"]
    for name in ("mlp-0", "mlp-1", "mlp-2", "mlp-3"):
        assert value_of("--afd-leader", servers[name]) == leaders
        assert value_of("--ep-size", servers[name]) == "2"
        assert ("--afd-spare" in servers[name]) == (name in ("mlp-2", "mlp-3"))
    assert "--afd-ep-rank" not in servers["mlp-2"]
    assert value_of("--afd-mlp", servers["attn-0"]) == leaders
    assert [value_of("--port", servers[name]) for name in ("mlp-2", "mlp-3")] == ["20003", "20004"]
    assert servers["router"][servers["router"].index("--attn") + 1] == "http://127.0.0.1:20002"


def test_a_users_flags_come_last_so_that_they_win() -> None:
    config = parse_args(
        ["--attn", "1", "--attn-args=--port 1", "--mlp-args", "--b 'two words'"]
        + ["--router-args=--policy x", "--", "--dtype", "float32"]
    )

    servers = plan(config)

    assert servers["attn-0"][-2:] == ["--port", "1"]
    assert servers["mlp-0"][-2:] == ["--b", "two words"]
    assert servers["router"][-2:] == ["--policy", "x"]
    assert value_of("--dtype", servers["attn-0"]) == "float32"
    assert value_of("--dtype", servers["mlp-0"]) == "float32"
    assert "--dtype" not in servers["router"]


def test_idle_attention_servers_sleep_on_a_machine_without_a_gpu() -> None:
    on_gpus = OnGpus(flags={"mlp-0": ["--base-gpu-id", "0"], "attn-0": ["--base-gpu-id", "0"]})

    assert "--sleep-on-idle" in plan(LaunchConfig())["attn-0"]
    assert "--sleep-on-idle" not in plan(LaunchConfig(), on_gpus)["attn-0"]


def test_what_a_server_gets_on_a_gpu_stands_before_the_users_flags() -> None:
    config = parse_args(["--attn", "1", "--", "--max-total-tokens", "5"])
    on_gpus = OnGpus(
        flags={"attn-0": ["--base-gpu-id", "2", "--max-total-tokens", "100"]},
        environment={"attn-0": {"CUDA_MPS_PIPE_DIRECTORY": "/x"}},
    )

    server = {server.name: server for server in servers_of(config, on_gpus)}["attn-0"]

    argv = list(server.argv)
    assert value_of("--base-gpu-id", argv) == "2"
    tokens = [argv[at + 1] for at in _places("--max-total-tokens", argv)]
    assert tokens == ["100", "5"]
    assert server.environment == {"CUDA_MPS_PIPE_DIRECTORY": "/x"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attn", "0"], "--attn got 0"),
        (["--spares", "-1"], "--spares got -1"),
        (["--port", "70000"], "--port got 70000"),
        (["--gpus", "0,x"], "'0,x' is no list like 0,1,3"),
        (["--gpus", "0,-1"], "names a GPU below 0"),
        (["--gpus", "1,1"], "--gpus 1,1 names a GPU twice"),
        (["--sm-share", "attn=0"], "--sm-share attn got 0; choose a number from 1 to 100"),
        (["--sm-share", "mlp=101"], "--sm-share mlp got 101"),
        (["--sm-share", "router=5"], "is nothing like attn=50,mlp=100"),
        (["--sm-share", "attn=50,attn=60"], "is nothing like attn=50,mlp=100"),
        (["--prompt", "x", "--demo"], "--prompt and --demo both"),
        (["--model-path", "/nowhere"], "--model-path /nowhere is no directory"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_error(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_args(argv)

    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_are_checked_without_a_command_line_too() -> None:
    with pytest.raises(ConfigError, match="--mlp got 65"):
        LaunchConfig(mlp=65)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::1", "http://[::1]:30000"),
        ("::", "http://[::1]:30000"),
    ],
)
def test_the_router_is_reached_on_an_address_of_this_host(host: str, url: str) -> None:
    assert router_url(LaunchConfig(host=host)) == url


@pytest.mark.parametrize(
    ("status", "missing"),
    [
        ({"role": "attn", "state": "ready"}, ""),
        ({"role": "mlp", "state": "spare", "reason": "no rank is free"}, ""),
        ({"role": "mlp", "state": "loading", "reason": "rank 1"}, "loading (rank 1)"),
        ({"state": "starting"}, "starting"),
        ({"state": "detached", "reason": "no MLP server"}, "detached (no MLP server)"),
        ({"status": "ok", "num_ready": 1, "num_servers": 2}, "1 of 2 connected"),
        ({"status": "ok", "num_ready": 0, "num_servers": 0}, "0 of 0 connected"),
        ({"status": "ok", "num_ready": 2, "num_servers": 2}, ""),
        (None, "answering something else than a status"),
    ],
)
def test_a_status_says_what_is_missing(status: object, missing: str) -> None:
    assert missing_from(status) == missing


@pytest.mark.parametrize(
    ("args", "port"),
    [
        ("--policy prefix", 30000),
        ("--data-plane smg", 30001),
        ("--data-plane=smg --control-port 7 --lease-s 3", 7),
    ],
)
def test_the_router_is_asked_where_its_own_endpoints_are(args: str, port: int) -> None:
    config = parse_args([f"--router-args={args}", "--port", "30000"])

    router = servers_of(config)[-1]

    assert router.status_url == f"http://127.0.0.1:{port}/health"


def test_a_fleet_that_serves_says_where_to_look_and_what_to_try() -> None:
    config = parse_args(["--router-args=--data-plane smg", "--port", "30000"])

    said = what_next(config, "llama 3")

    assert said.startswith("serving at http://127.0.0.1:30000 until Ctrl-C")
    assert "see the servers at http://127.0.0.1:30001/ in a browser" in said
    assert "curl -N http://127.0.0.1:30000/v1/chat/completions" in said
    assert '"model": "llama 3"' in said
