"""What the device is, whether it is idle, and what it can do; asked before a model is loaded."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner.gpu import Gpu, known_gpu

_MIB = 2**20
_MOST_BUSY_PERCENT = 5.0
_LOOKS, _PAUSE_S = 4, 0.2
# Of this much in use before we start, drivers and displays are the reason; of more, a program.
_MOST_USED_BYTES = 2 * 2**30

_FIELDS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "total_mib",
    "memory.free": "free_mib",
    "memory.used": "used_mib",
    "utilization.gpu": "busy_percent",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """Before anything is loaded."""

    kind: str  # cuda or cpu
    name: str
    total_bytes: float
    free_bytes: float
    busy_percent: float
    used_bytes: float
    facts: dict[str, str]


def find(kind: str) -> Device:
    """The first GPU, or this machine's processor.

    Raises: ConfigError, when there is no GPU.
    """
    return _gpu() if kind == "cuda" else _cpu()


def has_gpu() -> bool:
    """Does nvidia-smi list one?"""
    return _ask_nvidia_smi() is not None


def require_idle(device: Device) -> None:
    """Refuse a GPU that somebody uses: its times would be somebody else's, too.

    Raises: ConfigError.
    """
    if device.kind == "cpu":
        return  # other processes always run there; the share is written into the profile
    if device.busy_percent > _MOST_BUSY_PERCENT or device.used_bytes > _MOST_USED_BYTES:
        raise ConfigError(
            f"{device.name} is not idle: {device.busy_percent:.0f} % busy and "
            f"{device.used_bytes / 2**30:.1f} GiB taken before anything is loaded; wanted at most "
            f"{_MOST_BUSY_PERCENT:.0f} % and {_MOST_USED_BYTES / 2**30:.0f} GiB. End what runs "
            "there, or give --allow-busy for a profile that is marked so"
        )


def require_room(device: Device, needed_bytes: float, what: str) -> None:
    """Raises: ConfigError, when this does not fit."""
    if needed_bytes > device.free_bytes:
        raise ConfigError(
            f"{what} needs {needed_bytes / 2**30:.1f} GiB and {device.name} has "
            f"{device.free_bytes / 2**30:.1f} GiB free; give smaller --cases, or a config.json "
            "with fewer layers and --load-format dummy: times are per layer"
        )


def describe_gpu(device: Device, name: str) -> Gpu:
    """The planner's description, with the memory that was found.

    Args:
        device: A GPU.
        name: Of the planner's list, instead of the device's own; "" takes the device's.
    """
    own = device.name.removeprefix("NVIDIA").strip()
    return replace(known_gpu(name or own), memory_bytes=device.total_bytes)


def clock_facts() -> dict[str, str]:
    """Clocks and temperature at this moment; empty without nvidia-smi."""
    values = _ask_nvidia_smi()
    if values is None:
        return {}
    wanted = ("sm_clock_mhz", "max_sm_clock_mhz", "power_limit_w", "temperature_c")
    return {name: values[name] for name in wanted}


def _gpu() -> Device:
    values = _ask_nvidia_smi()
    if values is None:
        raise ConfigError(
            "no GPU here: nvidia-smi lists none; wanted one NVIDIA GPU, or --device cpu"
        )
    looks = [_number(values["busy_percent"])]
    for _ in range(_LOOKS - 1):
        time.sleep(_PAUSE_S)
        again = _ask_nvidia_smi()
        looks.append(_number(again["busy_percent"]) if again else 0.0)
    facts = ("driver", "sm_clock_mhz", "max_sm_clock_mhz", "power_limit_w", "temperature_c")
    return Device(
        kind="cuda",
        name=values["name"],
        total_bytes=_number(values["total_mib"]) * _MIB,
        free_bytes=_number(values["free_mib"]) * _MIB,
        busy_percent=max(looks),
        used_bytes=_number(values["used_mib"]) * _MIB,
        facts={name: values[name] for name in facts},
    )


def _ask_nvidia_smi() -> dict[str, str] | None:
    """Of the first visible GPU; None when there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "-1"
    if visible == "-1":
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, f"--id={visible}"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    if done.returncode or len(values) != len(_FIELDS):
        return None
    return dict(zip(_FIELDS.values(), values, strict=True))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A], as virtual machines say
        return 0.0


def _cpu() -> Device:
    memory = _memory_bytes()
    return Device(
        kind="cpu",
        name=f"CPU {_cpu_model()}",
        total_bytes=memory["MemTotal"],
        free_bytes=memory["MemAvailable"],
        busy_percent=_cpu_busy_percent(),
        used_bytes=memory["MemTotal"] - memory["MemAvailable"],
        facts={"cores": str(os.cpu_count())},
    )


def _memory_bytes() -> dict[str, float]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    pairs = (line.split(":") for line in lines)
    return {name: float(value.split()[0]) * 1024 for name, value in pairs}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cpu_busy_percent() -> float:
    before = _cpu_ticks()
    time.sleep(_PAUSE_S)
    after = _cpu_ticks()
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    idle = spent[3] + spent[4]  # idle and waiting for a disk
    return 100 * (1 - idle / sum(spent)) if sum(spent) else 0.0


def _cpu_ticks() -> list[int]:
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    return [int(ticks) for ticks in first.split()[1:]]
