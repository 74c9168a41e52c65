"""What cannot be profiled is refused before anything is loaded, and says why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.planner.__main__ import COMMANDS
from sglang_afd.planner.known_models import CONFIGS
from sglang_afd.planner.profiling import cases, devices
from sglang_afd.planner.profiling.command import require_sglang
from sglang_afd.planner.profiling.devices import Device

IDLE = "NVIDIA H200, 580.159.04, 143771, 143000, 600, 0, 1980, 1980, 700.00, 35"


def put_nvidia_smi(directory: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """A driver tool that answers with this line."""
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{line}'\n" if line else "#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_PAUSE_S", 0.0)


def write_config(directory: Path, **changes: Any) -> Path:
    config = {**CONFIGS["Qwen3-30B-A3B"], **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def profile(*flags: str) -> int:
    command = COMMANDS["profile"]
    return command.run(command.parser("profile").parse_args(flags))


def test_an_environment_without_sglang_is_refused_and_another_one_named() -> None:
    with pytest.raises(ConfigError, match="SGLang, which is not installed; use the environment"):
        require_sglang("no_such_package")


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, "")

    with pytest.raises(ConfigError, match="no GPU here"):
        profile("--device", "cuda", "--model-path", str(write_config(tmp_path)))


def test_a_hidden_gpu_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, IDLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert not devices.has_gpu()


def test_an_idle_gpu_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, IDLE)

    device = devices.find("cuda")

    devices.require_idle(device)
    gpu = devices.describe_gpu(device, "")
    assert gpu.name == "H200"
    assert gpu.memory_bytes == 143771 * 2**20
    assert device.facts["driver"] == "580.159.04"


@pytest.mark.parametrize(
    "line",
    [
        IDLE.replace("600, 0,", "600, 40,"),
        IDLE.replace("143000, 600,", "80000, 60000,"),
    ],
)
def test_a_busy_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, line)

    with pytest.raises(ConfigError, match="is not idle"):
        profile("--device", "cuda", "--model-path", str(write_config(tmp_path)))


def test_a_gpu_of_an_unknown_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, IDLE.replace("H200", "GeForce RTX 4090"))

    with pytest.raises(ConfigError, match="not in the planner's list"):
        profile("--device", "cuda", "--model-path", str(write_config(tmp_path)))


def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, IDLE)
    path = write_config(tmp_path, num_hidden_layers=480)

    with pytest.raises(ConfigError, match=r"needs .* GiB and NVIDIA H200 has 139.6 GiB free"):
        profile("--device", "cuda", "--model-path", str(path))


@pytest.mark.parametrize("method", ["awq", "modelopt_fp4", "compressed-tensors"])
def test_a_quantization_that_is_not_covered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, IDLE)
    path = write_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})

    with pytest.raises(ConfigError, match=f"quantized by {method}; profile covers"):
        profile("--device", "cuda", "--model-path", str(path))


def test_fp8_is_refused_on_a_cpu(tmp_path: Path) -> None:
    path = write_config(tmp_path, quantization_config={"quant_method": "fp8"})

    with pytest.raises(ConfigError, match="needs a GPU"):
        profile("--device", "cpu", "--model-path", str(path))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable config.json"):
        profile("--device", "cpu", "--model-path", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--blocks", "1"], "1 blocks are too few samples"),
        (["--steps", "2"], "2 steps are too few samples"),
        (["--cases", "4x64"], "1 batches and 1 contexts are too few samples"),
        (["--cases", "4x64,8x64"], "2 batches and 1 contexts"),
        (["--cases", "4x64,4x64"], "twice"),
        (["--cases", "4by64"], "is no case"),
        (["--cases", "0x64"], "is no case"),
    ],
)
def test_too_few_samples_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile("--device", "cpu", *flags)


def test_a_flag_that_profile_sets_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, num_hidden_layers=1, num_experts=8)

    with pytest.raises(ConfigError, match="which profile sets itself"):
        profile("--device", "cpu", "--model-path", str(path), "--sglang-flags=--quantization=fp8")


def test_the_cache_is_sized_for_the_largest_case() -> None:
    plan = cases.Plan(cases=cases.parse_cases("8x64,4x256,2x100"), blocks=2, steps=3, warm_steps=1)

    assert plan.pool_tokens == 4 * (256 + plan.steps_of_case)
    assert plan.widest == cases.Case(batch=8, context=64)


def test_a_processor_counts_its_memory() -> None:
    device = devices.find("cpu")

    assert isinstance(device, Device)
    assert 0 < device.free_bytes <= device.total_bytes
