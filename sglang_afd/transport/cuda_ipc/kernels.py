"""The kernels of `exchange.cu`, compiled once for a device and a dtype."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from typing import Any

import torch

from sglang_afd.transport.cuda_ipc import driver
from sglang_afd.transport.cuda_ipc.layout import ITEMSIZES, PAGE_BYTES

VECTOR_BYTES = 16
WARP = 32
MAX_BLOCK = 256
_FP8_CAPABILITY = (8, 9)  # the first with instructions for e4m3
_BULK_CAPABILITY = (9, 0)  # the first that reads kilobytes into L2 with one instruction

POINTER, U32, U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


@functools.cache
def module(device: int, dtype: str) -> driver.Module:
    """Every kernel for rows of `dtype`, a key of ITEMSIZES."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream().synchronize()  # makes the context
    source = resources.files("sglang_afd.transport.cuda_ipc").joinpath("exchange.cu").read_text()
    definitions = {f"DTYPE_{name.upper()}": int(name == dtype) for name in ITEMSIZES}
    definitions |= {
        "WITH_FP8": int(torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY),
        "WITH_BULK_PREFETCH": int(torch.cuda.get_device_capability(device) >= _BULK_CAPABILITY),
        "CONTROL_WORDS": PAGE_BYTES // 4,
    }
    made = driver.Module(source, "exchange.cu", device, definitions)
    for name in ("stage_step", "dispatch", "wait", "sum", "set_link", "plan", "pull", "push"):
        made.function(f"afd_{name}")
    return made


def arguments(*pairs: tuple[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(value, ctype) pairs as `driver.launch` takes them."""
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


def block_of(vectors_per_row: int) -> int:
    """Threads that copy one row."""
    return min(MAX_BLOCK, -(-vectors_per_row // WARP) * WARP)


def has_fp8(device: int) -> bool:
    """Can this GPU quantise rows to e4m3?"""
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
