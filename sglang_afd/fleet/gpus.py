"""The GPUs that servers may use, without loading CUDA: nvidia-smi is asked, once."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_afd.errors import ConfigError

QUERY = ("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
TIMEOUT_S = 30.0  # a driver that is not held open takes seconds to answer
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as CUDA_VISIBLE_DEVICES names it."""

    id: str  # a UUID; an index where nvidia-smi does not tell it
    model: str = "GPU"  # "NVIDIA H200"
    total_bytes: int = 0  # 0 is unknown
    free_bytes: int = 0  # when it was asked; 0 is unknown


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What this process may see, in the order in which it may see it."""

    list: Sequence[Gpu] = ()
    problem: str = ""  # why their memory is unknown

    def choose(self, indices: Sequence[int]) -> Sequence[Gpu]:
        """Those of `--gpus`, all without it.

        Raises:
            ConfigError: One that is not there.
        """
        for index in indices:
            if index >= len(self.list):
                last = len(self.list) - 1
                there = f"GPUs 0 to {last} are visible" if self.list else "no GPU is visible"
                raise ConfigError(f"--gpus names GPU {index}; {there}")
        return [self.list[index] for index in indices] if indices else self.list


def visible_gpus(environment: Mapping[str, str] = os.environ) -> Gpus:
    """Every GPU of this host, or those that CUDA_VISIBLE_DEVICES names."""
    if environment.get("SGLANG_USE_CPU_ENGINE") == "1":
        return Gpus()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    rows, problem = _ask()
    if problem:
        return _counted(visible, problem)
    if visible is None:
        return Gpus(list=[gpu for _, gpu in rows])
    return Gpus(list=_named(visible, rows))


def read_rows(text: str) -> list[tuple[str, Gpu]]:
    """(index, GPU) of each line of nvidia-smi's answer."""
    rows = []
    for line in filter(str.strip, text.splitlines()):
        index, uuid, name, total, free = (part.strip() for part in line.split(","))
        gpu = Gpu(id=uuid, model=name, total_bytes=_bytes(total), free_bytes=_bytes(free))
        rows.append((index, gpu))
    return rows


def _ask() -> tuple[list[tuple[str, Gpu]], str]:
    """The rows, or why there are none."""
    try:
        result = subprocess.run(
            ["nvidia-smi", *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not run ({error})"
    if result.returncode != 0:
        said = (result.stdout + result.stderr).strip().splitlines()
        return [], f"nvidia-smi failed ({said[0] if said else f'exit code {result.returncode}'})"
    try:
        return read_rows(result.stdout), ""
    except ValueError:
        return [], f"nvidia-smi answered something else than asked ({result.stdout[:80]!r})"


def _counted(visible: str | None, problem: str) -> Gpus:
    """As many as there are device files, or names in CUDA_VISIBLE_DEVICES."""
    if visible is None:
        found = [path.name for path in Path("/dev").iterdir()]
        names = sorted(
            (match[1] for name in found if (match := re.fullmatch(r"nvidia(\d+)", name))), key=int
        )
    else:
        names = _names(visible)
    gpus = [Gpu(id=name) for name in names]
    return Gpus(list=gpus, problem=problem if gpus else "")


def _named(visible: str, rows: Sequence[tuple[str, Gpu]]) -> list[Gpu]:
    """As CUDA reads the variable: it ends at the first name that fits nothing."""
    found: list[Gpu] = []
    for name in _names(visible):
        if name.startswith("MIG-"):  # nvidia-smi's list of GPUs does not hold parts of them
            found.append(Gpu(id=name, model="MIG device"))
            continue
        fitting = [gpu for index, gpu in rows if name == index or _is_uuid_of(name, gpu)]
        if len(fitting) != 1:
            break
        found.append(fitting[0])
    return found


def _is_uuid_of(name: str, gpu: Gpu) -> bool:
    return name.startswith("GPU-") and gpu.id.startswith(name)


def _names(visible: str) -> list[str]:
    names: list[str] = []
    for name in visible.split(","):
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return names


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * MIB if mebibytes.isdigit() else 0  # "[N/A]" where memory is shared
