"""Import SGLang for a GPU without initialising CUDA, so that children can be forked afterwards.

SGLang and its kernels ask PyTorch for the device while they are imported, and PyTorch initialises
CUDA to answer; a forked child could then not use the GPU. While `asked_elsewhere` is in force the
answers come from `device.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from step.device import DeviceProperties

_CUDA_ERROR_NOT_INITIALIZED = 3


@contextmanager
def asked_elsewhere(device: DeviceProperties) -> Iterator[None]:
    """In here the questions of an import are answered without CUDA."""
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": device.count,
        "current_device": 0,
        "get_device_capability": (device.major, device.minor),
        "get_device_name": device.name,
        "get_device_properties": device,
        "mem_get_info": (device.total_memory, device.total_memory),
    }
    originals = {name: getattr(torch.cuda, name) for name in answers}
    is_importing = [True]
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(originals[name], answer, is_importing))
    try:
        yield
    finally:
        is_importing[0] = False
        for name, original in originals.items():
            setattr(torch.cuda, name, original)


def _answering(
    original: Callable[..., Any], answer: Any, is_importing: list[bool]
) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        # NOTE: Triton keeps these functions for good when its driver is first asked for.
        return answer if is_importing[0] else original(*args, **kwargs)

    return ask


def is_initialised() -> bool:
    """Has this process initialised CUDA, in whatever way?"""
    if torch.cuda.is_initialized():
        return True
    count = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return bool(code != _CUDA_ERROR_NOT_INITIALIZED)
