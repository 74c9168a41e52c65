"""SGLang's parser takes the command lines that the planner prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_configs import SMALL_QWEN3

from sglang_afd import cli
from sglang_afd.config import Role
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode, Workload
from sglang_afd.planner.gpu import known_gpu
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.launch_lines import launch
from sglang_afd.planner.scenario import Scenario
from sglang_afd.upstream.server_args import parse_server_args


@pytest.mark.parametrize("attn", [6, 12])
def test_sglang_takes_the_lines_of_one_host_and_of_two(attn: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_QWEN3), encoding="utf-8")
    scenario = Scenario(
        shape=known_shape("Qwen3-30B-A3B"),
        gpu=known_gpu("H200"),
        workload=Workload(context_tokens=4096),
    )
    deployment = Deployment(
        mode=Mode.AFD,
        attn_gpus=attn,
        mlp_gpus=2,
        expert_parallel=2,
        micro_batches=2,
        batch_per_attn_gpu=77,
        expert_kernels=ExpertKernels.GROUPED,
    )

    lines = launch(scenario, deployment, str(tmp_path))

    for line in (lines.mlp[1], lines.attn[-1]):
        config, rest = cli.parse(line.argv[3:])
        role_args = parse_server_args(rest, config)
        parsed = role_args.server_args
        assert parsed.base_gpu_id == int(line.argv[line.argv.index("--base-gpu-id") + 1])
        if config.role is Role.ATTN:
            assert parsed.max_running_requests == 77
        else:
            assert role_args.ep_size == 2
