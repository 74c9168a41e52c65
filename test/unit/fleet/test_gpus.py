from __future__ import annotations

from pathlib import Path

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.gpus import Gpu, Gpus, visible_gpus

ANSWER = """\
0, GPU-aaaa1111-0000, NVIDIA H200, 143771, 143160
1, GPU-bbbb2222-0000, NVIDIA H200, 143771, 70000
2, GPU-bbbb3333-0000, NVIDIA GB10, [N/A], [N/A]
"""


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, f"cat <<'END'\n{ANSWER}END\n")


def tool(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_nvidia_smi_tells_every_gpu_and_its_memory(answer: None) -> None:
    gpus = visible_gpus({})

    assert [gpu.id for gpu in gpus.list] == [
        "GPU-aaaa1111-0000",
        "GPU-bbbb2222-0000",
        "GPU-bbbb3333-0000",
    ]
    assert gpus.list[0].total_bytes == 143771 << 20
    assert gpus.list[1].free_bytes == 70000 << 20
    assert gpus.list[2].total_bytes == 0  # unknown, not an error
    assert gpus.problem == ""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,0", ["GPU-bbbb3333-0000", "GPU-aaaa1111-0000"]),
        ("GPU-bbbb2", ["GPU-bbbb2222-0000"]),
        ("MIG-7,1", ["MIG-7", "GPU-bbbb2222-0000"]),
        ("1,9,0", ["GPU-bbbb2222-0000"]),  # CUDA stops at the first that it does not know
        ("1,-1,0", ["GPU-bbbb2222-0000"]),
        ("GPU-bbbb", []),  # two fit
        ("", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    answer: None, visible: str, names: list[str]
) -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": visible})

    assert [gpu.id for gpu in gpus.list] == names


def test_without_nvidia_smi_the_gpus_are_counted_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, monkeypatch, "echo no driver >&2; exit 9\n")

    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"})

    assert gpus.list == [Gpu(id="3"), Gpu(id="1")]
    assert gpus.problem == "nvidia-smi failed (no driver)"


def test_a_machine_told_to_use_its_cpu_has_no_gpus(answer: None) -> None:
    assert visible_gpus({"SGLANG_USE_CPU_ENGINE": "1"}).list == ()


def test_gpus_are_chosen_by_their_place_among_the_visible() -> None:
    gpus = Gpus(list=[Gpu(id="a"), Gpu(id="b"), Gpu(id="c")])

    assert [gpu.id for gpu in gpus.choose([2, 0])] == ["c", "a"]
    assert [gpu.id for gpu in gpus.choose([])] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="--gpus names GPU 3; GPUs 0 to 2 are visible"):
        gpus.choose([3])
