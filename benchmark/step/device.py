"""What the device is, asked in a process of its own, so that nobody initialises CUDA by asking."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_ASK = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def checked(code):
    if code:
        raise SystemExit(f"CUDA driver error {code}")
checked(cuda.cuInit(0))
count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
checked(cuda.cuDeviceGetCount(ctypes.byref(count)))
checked(cuda.cuDeviceGet(ctypes.byref(device), 0))
def attribute(number):
    checked(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device))
    return value.value
name, total = ctypes.create_string_buffer(200), ctypes.c_size_t()
checked(cuda.cuDeviceGetName(name, 200, device))
checked(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
print(json.dumps({
    "name": name.value.decode(), "count": count.value, "total_memory": total.value,
    "major": attribute(75), "minor": attribute(76), "multi_processor_count": attribute(16),
    "L2_cache_size": attribute(38), "warp_size": attribute(10),
    "max_threads_per_multi_processor": attribute(39),
    "regs_per_multiprocessor": attribute(82),
    "shared_memory_per_block": attribute(8),
    "shared_memory_per_block_optin": attribute(97),
    "shared_memory_per_multiprocessor": attribute(81),
}))
"""


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """Of the first device, under PyTorch's names."""

    name: str
    count: int
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    warp_size: int
    max_threads_per_multi_processor: int
    regs_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int


def ask_device() -> DeviceProperties:
    """Raises RuntimeError where there is no usable GPU."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise RuntimeError(f"no usable GPU: {done.stderr.strip()[-300:]}")
    return DeviceProperties(**json.loads(done.stdout))


def driver_version() -> str:
    """As nvidia-smi says; "" without it."""
    return _smi("driver_version")


def used_mib() -> int | None:
    """Memory in use on the first device; None without nvidia-smi."""
    text = _smi("memory.used")
    return int(text) if text.isdigit() else None


def _smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done: Any = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
