"""A launch on one GPU: what was planned is what the servers hold, and no MPS daemon is left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_qwen3_moe
from model_configs import QWEN3_30B

from sglang_afd.fleet import mps_keeper

LINE = re.compile(r"memory of (\S+): ([\d.]+) GiB, planned ([\d.]+) GiB")
TIMEOUT_S = 240
NUM_LAYERS = 12  # of the shape of Qwen3-30B-A3B: a quarter of its experts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The large model's shape, with dummy weights and a small tokenizer."""
    path = make_qwen3_moe(tmp_path / "model")
    for shard in path.glob("*.safetensors*"):
        shard.unlink()
    config = QWEN3_30B | {"num_hidden_layers": NUM_LAYERS, "eos_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_servers_that_share_a_gpu_hold_what_was_planned_within_a_tenth(model: Path) -> None:
    if shutil.which(mps_keeper.CONTROL) is None:
        pytest.skip(f"{mps_keeper.CONTROL} is not installed")
    argv = [sys.executable, "-m", "sglang_afd.launch", "--attn", "2", "--mlp", "1"]
    argv += ["--gpus", "0", "--port", "30871", "--model-path", str(model)]
    argv += ["--prompt", "say hello", "--max-tokens", "4"]
    argv += ["--attn-args=--attention-backend fa3 --sampling-backend pytorch"]
    argv += ["--", "--load-format", "dummy", "--dtype", "bfloat16"]

    result = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    print(result.stderr[-20000:])  # noqa: T201 - the figures, for overheads.py
    assert result.returncode == 0
    memory = {
        name: (float(actual), float(planned))
        for name, actual, planned in LINE.findall(result.stderr)
    }
    assert set(memory) == {"mlp-0", "attn-0", "attn-1"}
    for name, (actual, planned) in memory.items():
        assert abs(actual / planned - 1) <= 0.1, f"{name}: {actual} GiB, planned {planned} GiB"
    assert "warning: memory of" not in result.stderr
    assert "is larger than the profiled value" not in result.stderr
    assert "stopped the MPS daemon" in result.stderr
    started = re.search(r"started an MPS daemon for this launch in (\S+)", result.stderr)
    assert started is not None
    assert mps_keeper.running_in(Path(started[1])) == []
