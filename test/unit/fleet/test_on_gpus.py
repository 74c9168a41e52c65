"""What the servers get and what the user is told, with and without MPS."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from model_configs import QWEN3_30B

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.config import LaunchConfig, parse_args
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.gpus import MIB, Gpu, Gpus
from sglang_afd.fleet.on_gpus import OnGpus, on_gpus


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    return tmp_path


def h200s(number: int) -> Gpus:
    return Gpus(
        list=[
            Gpu(
                id=f"GPU-{index}",
                model="NVIDIA H200",
                total_bytes=143771 * MIB,
                free_bytes=143160 * MIB,
            )
            for index in range(number)
        ]
    )


def launch(model: Path, visible: Gpus, *argv: str) -> tuple[OnGpus, list[str]]:
    """What the servers get, and every line that the user sees."""
    config = parse_args([*argv, "--", "--load-format", "dummy"])
    log = io.StringIO()
    with on_gpus(config, model, visible, Console(quiet=True, log=log)) as given:
        pass
    return given, log.getvalue().splitlines()


def test_servers_that_share_a_gpu_get_mps_and_poll(control: Path, model: Path) -> None:
    given, lines = launch(model, h200s(1), "--attn", "1", "--sm-share", "attn=50")

    assert set(given.flags) == {"mlp-0", "attn-0"}
    for flags in given.flags.values():
        assert list(flags)[:4] == ["--base-gpu-id", "0", "--afd-wait-policy", "poll"]
    mlp, attn = given.environment["mlp-0"], given.environment["attn-0"]
    assert mlp["CUDA_VISIBLE_DEVICES"] == attn["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert mlp["CUDA_MPS_PIPE_DIRECTORY"] == attn["CUDA_MPS_PIPE_DIRECTORY"]
    assert attn["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in mlp
    assert lines[0] == "mlp-0 on GPU 0 (NVIDIA H200), shared with attn-0"
    assert any(line.startswith("started an MPS daemon for this launch in /") for line in lines)
    assert lines[-1] == "stopped the MPS daemon"
    assert any(line.startswith("planned memory: attn-0 ") for line in lines)


@pytest.mark.parametrize("is_refused", [True, False])
def test_without_mps_streams_wait_and_the_cost_is_told(
    control: Path, model: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.setenv("FAKE_MPS", "refuses")

    given, lines = launch(model, h200s(1), *([] if is_refused else ["--no-mps"]))

    for name, flags in given.flags.items():
        assert list(flags)[2:4] == ["--afd-wait-policy", "memop"]
        assert given.environment[name]["CUDA_MPS_PIPE_DIRECTORY"] == "/dev/null"
    line = next(line for line in lines if line.startswith("no MPS ("))
    assert ("insufficient permission" if is_refused else "--no-mps") in line
    assert "takes about 9 us instead of 3" in line


def test_a_gpu_for_each_server_needs_no_mps(control: Path, model: Path) -> None:
    given, lines = launch(model, h200s(3), "--attn", "2", "--gpus", "2,1,0")

    assert [list(flags)[:2] for flags in given.flags.values()] == [
        ["--base-gpu-id", "0"],
        ["--base-gpu-id", "1"],
        ["--base-gpu-id", "2"],
    ]
    assert given.environment["attn-1"] == {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1,GPU-0"}
    assert not any("MPS" in line for line in lines)
    assert "--afd-wait-policy" not in given.flags["mlp-0"]


@pytest.mark.parametrize(
    ("number", "argv", "why"),
    [
        (0, [], "there is no GPU"),
        (3, [], "no two servers share a GPU"),
        (1, ["--no-mps"], "--no-mps is given"),
    ],
)
def test_shares_that_nothing_would_read_are_refused(
    control: Path, model: Path, number: int, argv: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"--sm-share has no effect here: {why}"):
        launch(model, h200s(number), "--sm-share", "mlp=50", *argv)


def test_too_little_memory_is_told_before_mps_starts(control: Path, model: Path) -> None:
    small = Gpus(list=[Gpu(id="GPU-0", total_bytes=40000 * MIB, free_bytes=40000 * MIB)])
    log = io.StringIO()

    with (
        pytest.raises(ConfigError, match="can be used"),
        on_gpus(
            parse_args(["--", "--load-format", "dummy"]), model, small, Console(quiet=True, log=log)
        ),
    ):
        pass

    assert "MPS" not in log.getvalue()


def test_memory_that_cannot_be_planned_is_told_and_caches_are_small(
    control: Path, model: Path
) -> None:
    given, lines = launch(model, Gpus(list=[Gpu(id="0")], problem="nvidia-smi does not run"))

    assert "GPU memory is not planned: nvidia-smi does not run" in lines
    flags = list(given.flags["attn-0"])
    assert flags[flags.index("--max-total-tokens") + 1] == "65536"
    assert "--max-total-tokens" not in given.flags["mlp-0"]
    assert "CUDA_VISIBLE_DEVICES" not in given.environment["attn-0"]


def test_more_ranks_than_slots_have_room_for_by_default_get_room(
    control: Path, model: Path
) -> None:
    given, _ = launch(model, h200s(8), "--attn", "1", "--mlp", "6")

    flags = list(given.flags["attn-0"])
    assert flags[flags.index("--afd-max-mlp-ranks") + 1] == "6"


def test_a_machine_without_gpus_changes_nothing(model: Path) -> None:
    with on_gpus(LaunchConfig(), model, Gpus(), Console(quiet=True)) as given:
        assert given == OnGpus()
