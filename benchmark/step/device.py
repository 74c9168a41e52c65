"""Facts of the first GPU of this machine, asked without initialising CUDA."""

from __future__ import annotations

import ctypes
import subprocess
import time
from typing import Any

from step.channel import Message

FIELDS = {"name": "gpu", "memory.total": "gpu_memory_mib", "driver_version": "driver"}
CLEAN_TIMEOUT_S = 30.0  # for memory of processes that have ended
SLACK_BYTES = 1 << 30


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def free_bytes() -> int | None:
    """Memory that nobody has; None where NVML does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return None if failed else int(memory.free)
    finally:
        nvml.nvmlShutdown()


def wait_until_free(wanted_bytes: int) -> int | None:
    """Until about so much is free, for a while; returns what is free then."""
    deadline_s = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        free = free_bytes()
        is_clean = free is None or free >= wanted_bytes - SLACK_BYTES
        if is_clean or time.monotonic() > deadline_s:
            return free
        time.sleep(0.1)


def facts() -> Message:
    """Of the first GPU; empty without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done: Any = subprocess.run(
            [*command, "--id=0"], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.split(",")]
    if done.returncode or len(values) != len(FIELDS):
        return {}
    return dict(zip(FIELDS.values(), values, strict=True))
