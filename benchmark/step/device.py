"""Facts of the device for the report, asked without initialising CUDA in this process."""

from __future__ import annotations

import subprocess
from typing import Any

from step.channel import Message

FIELDS = {"name": "gpu", "memory.total": "gpu_memory_mib", "driver_version": "driver"}


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
