"""The printed command lines are accepted by the parsers that read them."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path

import pytest
from planner_cases import site

from sgl_router_afd.flags import parse_args as parse_router
from sglang_afd import cli
from sglang_afd.config import Role
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.gpu import GPUS
from sglang_afd.planner.launch_lines import SECRET_FILE, Launch, checkpoint, launch

SERVER = ["python", "-m", "sglang_afd.launch_server"]
ROUTER = ["python", "-m", "sgl_router_afd.launch_router"]
# SGLang's flags that the lines use; test/unit/upstream/test_planner_lines.py asks its own parser.
SGLANG = {
    "--model-path",
    "--base-gpu-id",
    "--port",
    "--host",
    "--ep-size",
    "--max-running-requests",
    "--cuda-graph-max-bs-decode",
    "--kv-cache-dtype",
}


def _afd(attn: int, mlp: int, m: int = 2, batch: int = 64) -> Deployment:
    return Deployment(
        mode=Mode.AFD,
        attn_gpus=attn,
        mlp_gpus=mlp,
        expert_parallel=mlp,
        micro_batches=m,
        batch_per_attn_gpu=batch,
        expert_kernels=ExpertKernels.GROUPED,
    )


@pytest.fixture(autouse=True)
def _secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    descriptor = os.open(SECRET_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, b"0123456789abcdef")
    os.close(descriptor)


def _parse(lines: Launch) -> tuple[list[object], list[list[str]]]:
    """Through a shell's eyes, then our parsers'."""
    configs, rests = [], []
    for line in lines.lines[1:]:
        argv = shlex.split(line.text)
        assert argv[:3] == SERVER
        config, rest = cli.parse(argv[3:])
        configs.append(config)
        rests.append(rest)
    return configs, rests


@pytest.mark.parametrize(
    ("attn", "mlp", "model", "gpu"),
    [
        (1, 1, "Qwen3-30B-A3B", "H200"),
        (6, 2, "Qwen3-30B-A3B", "H200"),
        (41, 8, "Qwen3-235B-A22B-FP8", "GB200"),
        (100, 16, "Qwen3-235B-A22B-FP8", "GB200"),
        (40, 32, "DeepSeek-V3", "H200"),
    ],
)
def test_our_parsers_take_every_line(attn: int, mlp: int, model: str, gpu: str) -> None:
    scenario = site(model, GPUS[gpu]).scenario

    lines = launch(scenario, _afd(attn, mlp), "/models/with a space")

    configs, rests = _parse(lines)
    roles = Counter(config.role for config in configs)
    assert roles == {Role.ATTN: attn, Role.MLP: mlp}
    for config in configs:
        if config.role is Role.MLP:
            assert config.max_peers >= attn
    router = parse_router(shlex.split(lines.router.text)[3:])
    assert router.ratio == f"{attn}:{mlp}"
    for rest in rests:
        flags = {word for word in rest if word.startswith("--")}
        assert flags <= SGLANG
        assert rest[rest.index("--model-path") + 1] == "/models/with a space"


def test_every_server_has_a_gpu_and_a_port_of_its_own_on_its_host() -> None:
    lines = launch(site("Qwen3-235B-A22B-FP8", GPUS["GB200"]).scenario, _afd(21, 4), "m")

    _, rests = _parse(lines)

    for flag in ("--base-gpu-id", "--port"):
        places = [
            (line.host, rest[rest.index(flag) + 1])
            for line, rest in zip(lines.lines[1:], rests, strict=True)
        ]
        assert len(set(places)) == 25
    assert len({line.host for line in lines.lines}) == 7
    gpus = {int(rest[rest.index("--base-gpu-id") + 1]) for rest in rests}
    assert gpus == {0, 1, 2, 3}


def test_ranks_batch_and_micro_batches_are_those_of_the_deployment() -> None:
    lines = launch(site().scenario, _afd(6, 2, m=3, batch=77), "m")

    configs, rests = _parse(lines)

    assert [config.ep_rank for config in configs[:2]] == [0, 1]
    assert all(rest[rest.index("--ep-size") + 1] == "2" for rest in rests[:2])
    assert {config.num_micro_batches for config in configs[2:]} == {"3"}
    for rest in rests[2:]:
        assert rest[rest.index("--max-running-requests") + 1] == "77"


def test_lines_of_one_host_need_no_secret_and_no_address(tmp_path: Path) -> None:
    lines = launch(site().scenario, _afd(6, 2), str(tmp_path))

    text = "\n".join(line.text for line in lines.lines)

    assert SECRET_FILE not in text
    assert "host-" not in text
    assert lines.notes == ()


def test_a_name_that_is_no_directory_has_to_be_replaced() -> None:
    lines = launch(site().scenario, _afd(6, 2), "Qwen3-30B-A3B")

    assert lines.notes == (
        "Give --model-path the directory of the checkpoint instead of Qwen3-30B-A3B.",
    )


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("/models/m", "/models/m"),
        ("/models/m/config.json", "/models/m"),
        ("Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B"),
        (None, "name"),
    ],
)
def test_servers_get_the_folder_of_the_model(model: str | None, wanted: str) -> None:
    assert checkpoint(model, "name") == wanted


def test_several_hosts_say_what_this_version_does_not_do_between_them() -> None:
    lines = launch(site("Qwen3-235B-A22B-FP8", GPUS["GB200"]).scenario, _afd(21, 4), "m")

    assert any("host memory" in note for note in lines.notes)


def test_speculation_fused_kernels_and_untested_models_are_told() -> None:
    scenario = site("DeepSeek-V3", verify_tokens=2, accepted_tokens=1.5).scenario
    fused = Deployment(
        mode=Mode.AFD,
        attn_gpus=4,
        mlp_gpus=4,
        expert_parallel=4,
        batch_per_attn_gpu=8,
        expert_kernels=ExpertKernels.FUSED,
    )

    lines = launch(scenario, fused, "m")

    notes = " ".join(lines.notes)
    assert "refuses speculative decoding" in notes
    assert "no fused ones" in notes
    assert "do not cover DeepSeek-V3" in notes
    assert all("--afd-allow-untested-model" in line.argv for line in lines.lines[1:])
