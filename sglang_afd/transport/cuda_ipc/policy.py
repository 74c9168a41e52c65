"""How a GPU should wait for rows: what `--afd-wait-policy auto` means on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_afd.transport.cuda_ipc.layout import WaitPolicy

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # NVIDIA's, where the variable is not set
_PID_FILE = "nvidia-cuda-mps-control.pid"
_GPUS = Path("/proc/driver/nvidia/gpus")  # one entry each, whatever CUDA_VISIBLE_DEVICES says


def choose_wait_policy(setting: str) -> WaitPolicy:
    """What a server does that was started with this `--afd-wait-policy`.

    With one GPU in this host and no MPS, both roles share it by time slices, of which a kernel that
    polls would use up whole ones. With several GPUs it cannot be known here who shares one.

    Args:
        setting: auto, poll or memop.
    """
    if setting != "auto":
        return WaitPolicy(setting)
    return WaitPolicy.MEMOP if num_gpus() == 1 and not has_mps() else WaitPolicy.POLL


def num_gpus() -> int:
    """GPUs of this host; 0 where the driver does not tell."""
    return len(list(_GPUS.glob("*")))


def has_mps() -> bool:
    """Does a running MPS daemon serve this process?"""
    directory = Path(os.environ.get(PIPE_VARIABLE) or DEFAULT_PIPE_DIRECTORY)
    if not (directory / "control").exists():
        return False
    try:
        pid = int((directory / _PID_FILE).read_text())
    except (OSError, ValueError):
        return True  # a daemon of another user, whose files cannot be read
    return _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
