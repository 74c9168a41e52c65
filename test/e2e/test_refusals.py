"""Servers that must not start, and say why."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import fleet
import pytest
from compare import PROMPTS, ask, differences
from fleet import Oracle
from servers import Server, Zygote, running

from sglang_afd.ports import free_ports

SECRET = "a secret that is long enough to be one"


def _secret_file(directory: Path, text: str) -> str:
    path = directory / "secret"
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def _last_words(server: Server) -> str:
    server.wait_ended()
    lines = [line for line in server.text().splitlines() if "sglang-afd: error:" in line]
    assert len(lines) == 1, server.text()[-3000:]
    return lines[0]


@pytest.fixture(scope="module")
def guarded(
    zygote: Zygote, qwen3_oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    """An MLP server on TCP with a secret, and its secret file."""
    secret = _secret_file(tmp_path_factory.mktemp("secret"), SECRET)
    flags = ("--afd-listen", "tcp://127.0.0.1:0", "--afd-secret-file", secret)
    servers = fleet.start_mlp(zygote, qwen3_oracle.model, free_ports(1), *flags)
    with running(servers):
        servers[0].wait("/health")
        yield servers[0], secret


def test_the_right_secret_serves_over_tcp_while_wrong_ones_are_refused(
    zygote: Zygote, qwen3_oracle: Oracle, guarded: tuple[Server, str], tmp_path: Path
) -> None:
    mlp, secret = guarded
    model = qwen3_oracle.model
    wrong = _secret_file(tmp_path, "another secret, just as long as that")
    right = fleet.start_attn(zygote, model, mlp.port, "--afd-secret-file", secret)
    wronged = fleet.start_attn(zygote, model, mlp.port, "--afd-secret-file", wrong)
    without = fleet.start_attn(zygote, model, mlp.port)
    with running([right, wronged, without]):
        assert "secret is not this attention server's" in _last_words(wronged)
        assert "MLP server requires a shared secret" in _last_words(without)
        fleet.wait_ready(right)

        got = [ask(right.url, prompt) for prompt in PROMPTS[:4]]

    assert mlp.get("/server_info")[1]["exchange_address"].startswith("tcp://127.0.0.1:")
    assert differences(qwen3_oracle.one_by_one[:4], got) == []


def test_other_models_and_dtypes_are_refused_by_name(
    zygote: Zygote, qwen2: Path, qwen3: Path, tmp_path: Path
) -> None:
    other_seed = checkpoints.make_qwen3_moe(tmp_path / "other", seed=7)
    mlp = fleet.start_mlp(zygote, qwen3, free_ports(1))[0]
    with running([mlp]):
        mlp.wait("/health")
        cases = {
            "model architecture differs": fleet.start_attn(zygote, qwen2, mlp.port),
            "model fingerprint differs": fleet.start_attn(zygote, other_seed, mlp.port),
            "dtype differs": fleet.start_attn(zygote, qwen3, mlp.port, "--dtype", "bfloat16"),
        }
        with running(list(cases.values())):
            for words, attn in cases.items():
                assert words in _last_words(attn)
        assert mlp.get("/health")[0] == 200


def test_an_attention_server_whose_hook_did_not_take_does_not_start(
    zygote: Zygote, qwen3: Path
) -> None:
    attn = fleet.start_attn(zygote, qwen3, free_ports(1)[0], plant="hook_fails")
    with running([attn]):
        words = _last_words(attn)

    assert "get_moe_impl_class did not take" in words


def test_an_attention_server_gives_up_on_mlp_servers_that_never_come(
    zygote: Zygote, qwen3: Path
) -> None:
    attn = fleet.start_attn(zygote, qwen3, free_ports(1)[0], "--afd-attach-timeout", "3")
    with running([attn]):
        words = _last_words(attn)

    assert "could not attach within --afd-attach-timeout 3 s" in words
    assert "no MLP server answers at http://127.0.0.1:" in words


def test_the_status_needs_no_api_key_and_generation_does(
    zygote: Zygote, qwen3_oracle: Oracle
) -> None:
    model, ports = qwen3_oracle.model, free_ports(1)
    attn = fleet.start_attn(zygote, model, ports[0], "--api-key", "open sesame")
    with running([*fleet.start_mlp(zygote, model, ports), attn]):
        fleet.wait_ready(attn)

        status, _ = attn.get("/v1/models")

    assert status == 401


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_attention_server_that_waits_for_mlp_servers_can_be_stopped(
    zygote: Zygote, qwen3: Path, number: signal.Signals
) -> None:
    attn = fleet.start_attn(zygote, qwen3, free_ports(1)[0])
    with running([attn]):
        attn.wait("/afd/v1/status", lambda body: body["state"] == "starting")

        attn.signal(number)

        attn.wait_ended()
